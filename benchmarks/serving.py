"""Speed of `nanolm serve`, compared with generation without a server (GPT-2 size).

    python benchmarks/serving.py

The weights are random, and the prompt has 16 tokens. The server runs in a separate process. This
process is its client and uses plain sockets to keep its own overhead small. It compares 64
concurrent streams with a batch of 64 texts and one stream with one text, and measures the time to
the first token of an idle server. Runs alternate. Results are medians after one warmup round.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from results import save

from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.model.device import use_fitting_threads
from nanolm.model.huggingface import load_model, save_model
from nanolm.text.tokenizer import ByteLevel

PROMPT = "ab" * 16


class Client:
    """Sends requests to the server on a port."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def stream(self, tokens: int, seed: int) -> tuple[float, float]:
        """Seconds to the first and to the last token."""
        asked = {"prompt": PROMPT, "max_tokens": tokens, "min_tokens": tokens, "seed": seed}
        body = json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}})
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        start = time.perf_counter()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body.encode()
        )
        data, first = b"", 0.0
        while part := await reader.read(1 << 20):
            data += part
            if not first and b"data:" in data:
                first = time.perf_counter() - start
        whole = time.perf_counter() - start
        writer.close()
        assert data.startswith(b"HTTP/1.1 200"), data[:300]
        assert b'"completion_tokens":%d' % tokens in data and b"[DONE]" in data, data[-300:]
        return first, whole

    async def streams(self, count: int, tokens: int) -> float:
        """Tokens per second of this number of concurrent streams."""
        start = time.perf_counter()
        await asyncio.gather(*(self.stream(tokens, seed) for seed in range(count)))
        return count * tokens / (time.perf_counter() - start)

    async def first(self) -> float:
        await asyncio.sleep(0.05)
        return (await self.stream(8, 0))[0]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--new", type=int, default=512)
    arguments.add_argument("--streams", type=int, default=64)
    asked = arguments.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    merges = [(left, right) for left in range(256) for right in range(256)][: 50_257 - 258]
    tokenizer = ByteLevel(merges)
    torch.manual_seed(0)
    shape = {"vocab_size": 50_257, "layers": 12, "heads": 12, "dim": 768, "context": 1024}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(build_model(configure("gpt2", **shape)), folder, tokenizer)
        ours = LanguageModel(load_model(folder).to(device, dtype), tokenizer)
        if not cuda:
            use_fitting_threads(ours.model)
        command = [sys.executable, "-m", "nanolm", "serve", name, "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ})
        try:
            assert server.stdout is not None
            address = server.stdout.readline().decode()
            client = Client(int(address.rsplit(":", 1)[1].strip("/\n")))
            save("serving", measured(ours, client, asked.rounds, asked.new, asked.streams))
        finally:
            server.terminate()
            server.wait(30)


def measured(
    ours: LanguageModel, client: Client, rounds: int, new: int, streams: int
) -> list[dict[str, Any]]:
    params = SamplingParams(tokens=new, min_tokens=new)

    def offline(rows: int) -> float:
        samples = [Sample(PROMPT, number) for number in range(rows)]
        start = time.perf_counter()
        for _ in ours.stream(samples, params):
            pass
        return rows * new / (time.perf_counter() - start)

    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, value in (
            (f"{streams} texts, no server", offline(streams)),
            (f"{streams} streams", asyncio.run(client.streams(streams, new))),
            ("1 text, no server", offline(1)),
            ("1 stream", asyncio.run(client.streams(1, new))),
            ("first token, milliseconds", 1000 * asyncio.run(client.first())),
        ):
            if turn:
                found.setdefault(name, []).append(value)
    middle = {name: statistics.median(values) for name, values in found.items()}
    lines: list[dict[str, Any]] = [
        {"what": name, "median": round(value, 1), "worst": round(worst(name, found[name]), 1)}
        for name, value in middle.items()
    ]
    for many in (streams, 1):
        texts = "texts" if many > 1 else "text"
        share = middle[f"{many} stream{'s' * (many > 1)}"] / middle[f"{many} {texts}, no server"]
        lines.append({"what": f"{many} {texts}, server/no server", "ratio": round(share, 3)})
    return lines


def worst(name: str, values: list[float]) -> float:
    return max(values) if "milliseconds" in name else min(values)


if __name__ == "__main__":
    main()
