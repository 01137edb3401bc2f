"""Tokenizer training, encoding and memory, compared with other libraries.

    python benchmarks/text.py corpus.txt

`corpus.txt` should contain at least 60 MB of real text. Every contestant runs in a separate process
and times itself, excluding imports. Contestants take turns, and the median of the rounds is
reported. rustbpe is included if it is installed.
"""

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZES = (512, 4096, 16_384)
ENCODED = 16_384  # vocabulary size for encoding
THREADS = 2

Answer = dict[str, Any]
RESULTS: list[Answer] = []


def blocks(file: str, size: int = 1 << 19) -> Iterator[str]:
    """The text in chunks of whole lines, the same for every contestant."""
    with open(file, encoding="utf-8", newline="") as stream:
        while part := "".join(stream.readlines(size)):
            yield part


def learn_nanolm(file: str, size: str, out: str) -> Answer:
    from nanolm.text.corpus import read_corpus
    from nanolm.text.decoding import Reading
    from nanolm.text.sources import find_sources
    from nanolm.text.vocabulary import make_tokenizer

    def quiet(*how_far: object) -> None:
        pass

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sources = find_sources([file], Path(folder), quiet)
        with read_corpus(sources, Reading(), Path(folder)) as corpus:
            # Two special tokens are added here. The peers have none.
            tokenizer, _ = make_tokenizer(corpus, "bpe", int(size) + 2, quiet)
    seconds = time.perf_counter() - started
    Path(out).write_text(tokenizer.to_json(), encoding="utf-8")
    return {"seconds": seconds}


def learn_tokenizers(file: str, size: str, out: str) -> Answer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from nanolm.text.words import SPLIT

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size), initial_alphabet=alphabet, show_progress=False
    )
    started = time.perf_counter()
    tokenizer.train_from_iterator(blocks(file), trainer)
    seconds = time.perf_counter() - started
    tokenizer.save(out)
    return {"seconds": seconds}


def learn_rustbpe(file: str, size: str, out: str) -> Answer:
    import rustbpe

    from nanolm.text.words import SPLIT

    tokenizer = rustbpe.Tokenizer()
    started = time.perf_counter()
    tokenizer.train_from_iterator(blocks(file), int(size), pattern=SPLIT)
    return {"seconds": time.perf_counter() - started}


def encode_nanolm(file: str, tokenizer_file: str) -> Answer:
    """The full path: inspect, read and encode the file, and write the tokens safely to disk."""
    from nanolm.text.store import TextRequest, prepare_tokens
    from nanolm.text.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(Path(tokenizer_file))
    tokenizer.encode("warm")
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        prepared = prepare_tokens(TextRequest((file,), tokenizer=tokenizer), cache=Path(folder))
        seconds = time.perf_counter() - started
        again = time.perf_counter()
        prepare_tokens(TextRequest((file,), tokenizer=tokenizer), cache=Path(folder))
        again = time.perf_counter() - again
        return {"seconds": seconds, "tokens": len(prepared.train), "again": again}


def encode_tiktoken(file: str, tokenizer_file: str) -> Answer:
    from nanolm.text.tokenizer import Tiktoken
    from nanolm.text.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(Path(tokenizer_file))
    assert isinstance(tokenizer, Tiktoken)
    texts = list(blocks(file))
    tokenizer.encoding.encode_ordinary("warm")
    started = time.perf_counter()
    tokenizer.encoding.encode_ordinary_batch(texts, num_threads=THREADS)
    return {"seconds": time.perf_counter() - started}


def encode_tokenizers(file: str, tokenizer_file: str) -> Answer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    texts = list(blocks(file))
    started = time.perf_counter()
    tokenizer.encode_batch(texts)
    return {"seconds": time.perf_counter() - started}


def prepare(file: str, held_out: str) -> Answer:
    """Everything before training, to measure peak memory.

    The validation text is a separate file, so that repeating the text does not change the distinct
    words in the training set. Memory grows with their number.
    """
    from nanolm.text.store import TextRequest, prepare_tokens

    request = TextRequest((file,), val=held_out, tokenizer="bpe", vocab_size=4096)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        prepare_tokens(request, cache=Path(folder))
        return {"seconds": time.perf_counter() - started}


def compression(file: str, tokenizer_file: str) -> Answer:
    """Bytes per token on the end of the text, encoded by `tokenizers` for all contestants."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    text = "".join(list(blocks(file))[-6:])
    pieces = text.splitlines(keepends=True)
    tokens = sum(len(coded.ids) for coded in tokenizer.encode_batch(pieces))
    return {"bytes_per_token": len(text.encode()) / tokens}


CONTESTANTS: dict[str, Callable[..., Answer]] = {
    function.__name__: function
    for function in (
        learn_nanolm,
        learn_tokenizers,
        learn_rustbpe,
        encode_nanolm,
        encode_tiktoken,
        encode_tokenizers,
        prepare,
        compression,
    )
}


def run(name: str, *arguments: object) -> Answer:
    command = [sys.executable, __file__, "--only", name, *map(str, arguments)]
    shown = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answer: Answer = json.loads(shown.stdout)
    return answer


def contest(title: str, rounds: int, entries: dict[str, tuple[object, ...]]) -> dict[str, float]:
    """The median seconds of each entry; entries alternate."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(rounds):
        for name, arguments in entries.items():
            times[name].append(run(name, *arguments)["seconds"])
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = next(value for name, value in medians.items() if name.endswith("nanolm"))
    for name, value in medians.items():
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        peer = name.partition("_")[2]
        ratio = f"nanolm/{peer} {ours / value:.2f}"
        print(f"{title:<24}{peer:<12}{value:8.2f} s  ({spread})  {ratio}", flush=True)
        RESULTS.append({"what": title, "who": peer, "seconds": value, "rounds": times[name]})
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contests", nargs="+", default=["learn", "encode", "memory"])
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        answer = CONTESTANTS[options.only[0]](*options.only[1:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000  # kB on Linux
        print(json.dumps({**answer, "peak": peak}))
        return
    if not options.file:
        parser.error("give a file with at least 60 MB of real text")
    file = Path(options.file).resolve()
    print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
    with tempfile.TemporaryDirectory() as name:
        if "learn" in options.contests:
            learn_contest(file, Path(name), options.rounds)
        if "encode" in options.contests:
            encode_contest(file, Path(name), options.rounds)
        if "memory" in options.contests:
            memory(file, Path(name))
    from results import save  # imported late: it loads torch, which the contestants must not

    save("text", RESULTS)


def learn_contest(file: Path, folder: Path, rounds: int) -> None:
    for size in SIZES:
        learners: dict[str, tuple[object, ...]] = {
            "learn_nanolm": (file, size, folder / f"nanolm-{size}.json"),
            "learn_tokenizers": (file, size, folder / f"tokenizers-{size}.json"),
        }
        if importlib.util.find_spec("rustbpe"):
            learners["learn_rustbpe"] = (file, size, folder / "unused")
        contest(f"train BPE, size {size:,}", rounds, learners)
        ours, theirs = (
            run("compression", file, folder / f"{kind}-{size}.json")["bytes_per_token"]
            for kind in ("nanolm", "tokenizers")
        )
        print(f"{'':<24}bytes per token {ours:.4f} and {theirs:.4f} ({ours / theirs - 1:+.2%})")
        RESULTS.append({"what": "bytes per token", "nanolm": ours, "tokenizers": theirs})


def encode_contest(file: Path, folder: Path, rounds: int) -> None:
    coder = folder / f"nanolm-{ENCODED}.json"
    if not coder.exists():
        run("learn_nanolm", file, ENCODED, coder)
    encoders = ("encode_nanolm", "encode_tiktoken", "encode_tokenizers")
    medians = contest("encode", rounds, dict.fromkeys(encoders, (file, coder)))
    for name, seconds in medians.items():
        speed = file.stat().st_size / 1e6 / seconds
        print(f"{'':<24}{name.partition('_')[2]:<12}{speed:8.1f} MB/s")
    print(f"{'':<24}cached: {run('encode_nanolm', file, coder)['again']:.2f} s")


def memory(file: Path, folder: Path) -> None:
    tenfold, held_out = folder / "tenfold.txt", folder / "held-out.txt"
    with tenfold.open("wb") as stream:
        for _ in range(10):
            stream.write(file.read_bytes())
    held_out.write_text(next(blocks(str(file))), encoding="utf-8")
    peaks = [run("prepare", path, held_out)["peak"] for path in (file, tenfold)]
    print(f"{'peak memory':<24}{peaks[0]:.0f} MB; with ten times the text, {peaks[1]:.0f} MB")
    RESULTS.append({"what": "peak memory", "megabytes": peaks[0], "ten_times": peaks[1]})


if __name__ == "__main__":
    main()
