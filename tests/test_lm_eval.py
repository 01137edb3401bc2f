"""lm-evaluation-harness measures the same as `nanolm eval`, from folders and through the server."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from models import lively
from servers import Served, Start

from nanolm.generation.language_model import load
from nanolm.model.config import configure
from nanolm.model.huggingface import save_model
from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.text.tokenizer_files import load_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval")

TEXT = "".join(f"The {n} cats sät on {n * 7 % 13} mats, and the dog ran.\n" for n in range(30))
TASK = {"dataset_path": "json", "num_fewshot": 0, "validation_split": "train"}
CHOICES = {"output_type": "multiple_choice", "doc_to_target": 0}
ACCURACY = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}


def pairs(count: int) -> list[dict[str, str]]:
    dice = random.Random(0)
    words = ["the", "cat", "cats", "dog", "sat", "sits", "on", "mats", "and", "ran", "tree", "a"]
    rows = [[dice.choice(words) for _ in range(dice.randint(2, 9))] for _ in range(count)]
    return [
        {"sentence_good": " ".join(row), "sentence_bad": " ".join(dice.sample(row, len(row)))}
        for row in rows
    ]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks as one writes them: BLiMP's, questions with a context, and the perplexity of a text."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = pairs(200)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "text.jsonl").write_text(json.dumps({"text": TEXT}))
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    both = "{{[sentence_good, sentence_bad]}}"
    blimp = {**CHOICES, "doc_to_text": "", "doc_to_choice": both, **ACCURACY}
    questions = {**blimp, "doc_to_text": "The dog ran. {{sentence_bad}}"}
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
    }
    rolling["metric_list"] = [{"metric": "bits_per_byte"}]  # type: ignore[assignment]
    for name, file, about in (
        ("pairs", "pairs", blimp),
        ("questions", "pairs", questions),
        ("rolling", "text", rolling),
    ):
        data = {"dataset_kwargs": {"data_files": str(folder / f"{file}.jsonl")}}
        task = {"task": f"our_{name}", **TASK, **data, **about}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def lm_eval(tasks: Path, out: Path, kind: str, /, **arguments: object) -> dict[str, Any]:
    """The results of the command."""
    words = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args"]
    words += [",".join(f"{name}={value}" for name, value in arguments.items())]
    words += ["--tasks", "our_pairs,our_questions,our_rolling", "--include_path", str(tasks)]
    words += ["--output_path", str(out), "--batch_size", "8", "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hf"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env={**os.environ, **offline}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (file,) = out.rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


def check(results: dict[str, Any], model: Path, context: int, tasks: Path, cli: Cli) -> None:
    """Against `nanolm eval`, to four digits."""
    found = json.loads(
        cli("eval", model, "--minimal-pairs", tasks / "pairs.jsonl", "--json").stdout
    )
    assert results["our_pairs"]["acc,none"] == pytest.approx(found["accuracy"], abs=1e-9)
    assert 0.1 < found["accuracy"] < 0.9  # or it would show little
    words = ("eval", model, tasks / "text.txt", "--context", context, "--full-windows", "--json")
    bits = json.loads(cli(*words).stdout)["bits_per_byte"]
    assert results["our_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=5e-5)


def tokenizer_of(kind: str) -> Tokenizer:
    if kind != "gpt2":
        return train_tokenizer([TEXT], kind)
    place = Path(os.environ.get("NANOLM_TEST_DATA") or "no such folder") / "gpt2/r50k_base.tiktoken"
    if not place.exists():
        pytest.skip("NANOLM_TEST_DATA has no gpt2/r50k_base.tiktoken")
    return load_tokenizer(place)


@pytest.mark.parametrize(
    ("kind", "family"), [("char", "modern"), ("byte", "llama"), ("bpe", "gpt2"), ("gpt2", "gpt2")]
)
def test_a_folder(kind: str, family: str, tasks: Path, cli: Cli, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    shape = {"vocab_size": tokenizer.vocab_size, "layers": 2, "heads": 2, "dim": 16, "context": 64}
    (tmp_path / "model").mkdir()
    save_model(lively(configure(family, **shape)), tmp_path / "model", tokenizer)
    results = lm_eval(tasks, tmp_path / "out", "hf", pretrained=tmp_path / "model")
    check(results, tmp_path / "model", 64, tasks, cli)


@pytest.mark.parametrize("name", ["writer", "other"])
def test_the_server(name: str, start: Start, tasks: Path, cli: Cli, tmp_path: Path) -> None:
    """A Transformer, and an LSTM, which `transformers` cannot load."""
    pytest.importorskip("tenacity")  # of lm_eval[api]
    server: Served = start(names=(name,))
    model = server.folder / name
    context = load(model, print).model.config.context
    results = lm_eval(
        tasks,
        tmp_path / "out",
        "local-completions",
        model=name,
        tokenizer=model,
        base_url=f"{server.url}/v1/completions",
        max_length=context + 2,
    )
    if name == "writer":
        check(results, model, context, tasks, cli)
        folder = lm_eval(tasks, tmp_path / "hf", "hf", pretrained=model)
        for task, metric in (("our_questions", "acc,none"), ("our_questions", "acc_norm,none")):
            assert results[task][metric] == folder[task][metric]
    else:
        found = cli("eval", model, "--minimal-pairs", tasks / "pairs.jsonl", "--json").stdout
        assert results["our_pairs"]["acc,none"] == json.loads(found)["accuracy"]
