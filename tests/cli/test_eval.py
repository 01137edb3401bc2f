import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Cli

import nanolm


@pytest.mark.parametrize("family", ["modern", "lstm"])
def test_a_text_is_scored(family: str, cli: Cli, corpus: Path, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"layers": 1, "dim": 16, "context": 16, "batch": 4}
    if family == "modern":
        shape["heads"] = 2
    nanolm.train(corpus, out=tmp_path / "run", family=family, steps=20, **shape)
    text = "The 7 cats sat on 8 mats.\n"
    (tmp_path / "other.txt").write_text(text)
    shown = cli("eval", "run", "other.txt", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert set(found) == {"loss", "perplexity", "bits_per_byte", "tokens", "bytes"}

    writer = nanolm.load(tmp_path / "run")
    ids = torch.tensor([writer.tokenizer.end_of_text, *writer.tokenizer.encode(text)])
    assert len(ids) <= 17  # one window
    with torch.no_grad():
        loss = F.cross_entropy(writer.model(ids[None, :-1])[0], ids[1:]).item()
    assert found["tokens"] == len(ids) - 1
    assert found["bytes"] == len(text)
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss * (len(ids) - 1) / math.log(2) / len(text)
    assert found["bits_per_byte"] == pytest.approx(bits, abs=1e-5)
    assert f"{bits:.4f} bits per byte" in cli("eval", "run", "other.txt").stdout


def test_what_cannot_be_scored(cli: Cli, corpus: Path, trained: Path) -> None:
    wrong: dict[str, list[object]] = {
        "nothing.txt": [trained, "nothing.txt"],
        "does not exist": ["nothing", corpus],
        "looks back on 16 tokens at most": [trained, corpus, "--context", 17],
        "FILE": [trained],
    }
    for part, words in wrong.items():
        shown = cli("eval", *words)
        assert (shown.returncode, part in shown.stderr) == (2, True), shown.stderr
