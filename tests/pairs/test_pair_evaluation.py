"""`nanolm eval` and `nanolm inspect` on models trained on pairs. The weights are random: what such
a model writes is the right target, or a wrong one on purpose."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Cli
from models import lively_seq2seq

from nanolm.errors import ModelError
from nanolm.model.huggingface import save_seq2seq
from nanolm.pairs import evaluation
from nanolm.pairs.data import encode_pairs
from nanolm.pairs.evaluation import PairEvaluation, evaluate_pairs
from nanolm.pairs.metrics import score_pairs
from nanolm.pairs.translator import Translator
from nanolm.text.pairs import Pairs
from nanolm.text.tokenizer import train_tokenizer

LETTERS = "abcdefghij"
SOURCES = [LETTERS[:n] + LETTERS[n - 3 : n] for n in range(3, 11)]
FAMILIES = ("encoder-decoder", "modern-encoder-decoder", "seq2seq-gru")


def translator(family: str) -> Translator:
    tokenizer = train_tokenizer([LETTERS], "char")
    model = lively_seq2seq(family, 0.6, vocab_size=tokenizer.vocab_size, context=16, tied=False)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):  # a bias would outweigh the source
            module.reset_parameters()
    return Translator(model, tokenizer)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = translator("encoder-decoder")
    (tmp_path / "model").mkdir()
    save_seq2seq(model.model, tmp_path / "model", model.tokenizer)
    return tmp_path / "model"


def own_targets(model: Translator) -> list[str]:
    return [each.text for each in model.translate(SOURCES)]


def evaluate(model: Translator, targets: list[str]) -> PairEvaluation:
    return evaluate_pairs(model, Pairs(SOURCES, targets))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_known_targets(family: str) -> None:
    model = translator(family)
    targets = own_targets(model)
    assert len(set(targets)) > 1
    result = evaluate(model, targets)
    assert (result.scores.exact, result.scores.edit_distance, result.mistakes) == (1, 0, [])
    wrong = [*targets[:-2], "a" + targets[-2], "cab" + targets[-1]]
    result = evaluate(model, wrong)
    assert result.scores == score_pairs(targets, wrong)
    assert result.scores.exact == 6 / 8
    assert [each.edit_distance for each in result.mistakes] == [3, 1]
    assert result.mistakes[0].source == SOURCES[-1]
    assert [each.count for each in result.by_length] == [1, 2, 1, 2, 2]
    assert [each.exact for each in result.by_length] == [1, 1, 1, 1, 0]
    assert result.by_length[-1].longest == len(SOURCES[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_that_of_each_pair_alone(family: str) -> None:
    model = translator(family)
    targets = [source[::-1] for source in SOURCES]
    encode, end = model.tokenizer.encode, model.tokenizer.end_of_text
    nats, tokens = 0.0, 0
    for source, target in zip(SOURCES, targets, strict=True):
        ids = torch.tensor([[*encode(source), end]])
        labels = [*encode(target), end]
        with torch.inference_mode():
            mask = torch.ones_like(ids, dtype=torch.bool)
            logits = model.model(ids, mask, torch.tensor([[end, *labels[:-1]]]))[0]
        nats -= logits.log_softmax(dim=1)[range(len(labels)), labels].sum().item()
        tokens += len(labels)
    assert evaluate(model, targets).loss == pytest.approx(nats / tokens, rel=1e-5)


def test_few_logits_at_a_time_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = translator("encoder-decoder"), list[int]()
    whole = evaluate(model, SOURCES).loss
    model.model.head.register_forward_hook(lambda head, x, y: rows.append(len(y)))
    monkeypatch.setattr(evaluation, "MOST_LOGITS", 5 * model.tokenizer.vocab_size)
    pairs = encode_pairs(Pairs(SOURCES, SOURCES), model.tokenizer, model.tokenizer, 16, 1, print)
    assert evaluation.pair_loss(model.model, pairs) == pytest.approx(whole, rel=1e-6)
    assert max(rows) == 5 and sum(rows) == pairs.target_lengths.sum()


def test_any_target_of_a_source_is_right() -> None:
    model = translator("seq2seq-gru")
    targets = own_targets(model)
    pairs = Pairs([*SOURCES, *SOURCES], ["wrong"] * 8 + targets)
    result = evaluate_pairs(model, pairs)
    assert result.scores.exact == 1
    assert result.scores.bleu < 100
    assert result.mistakes == []


def test_a_broken_model_is_refused() -> None:
    model = translator("encoder-decoder")
    with torch.no_grad():
        model.model.token_embedding.weight.fill_(math.nan)
    with pytest.raises(ModelError, match="not finite"):
        evaluate(model, SOURCES)


def write_pairs(folder: Path, targets: list[str]) -> None:
    for name, lines in (("x.src", SOURCES), ("x.tgt", targets)):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [f"{target}\t{source}" for source, target in zip(SOURCES, targets, strict=True)]
    (folder / "x.tsv").write_text("target\tsource\n" + "\n".join(rows) + "\n", encoding="utf-8")


def test_eval_on_the_command_line(cli: Cli, run: Path, tmp_path: Path) -> None:
    targets = [source[::-1] for source in SOURCES]
    write_pairs(tmp_path, targets)
    shown = cli("eval", run, "x.tsv", "--json", "--html", "x.html", "--mistakes", "x.csv")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    expected = evaluate(Translator.load(run, note=lambda text: None), targets)
    assert {name: found[name] for name in vars(expected.scores)} == vars(expected.scores)
    assert found["loss"] == pytest.approx(expected.loss)
    assert [group["count"] for group in found["by_length"]] == [1, 2, 1, 2, 2]
    with (tmp_path / "x.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["source"] for row in rows] == [each.source for each in expected.mistakes]
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "exact match (%)" in page
    assert page.count("<svg") == 1
    two_files = cli("eval", run, "x.src", "x.tgt")
    assert two_files.stdout.startswith(f"BLEU {expected.scores.bleu:.2f}, chrF ")
    assert "source tokens  pairs" in two_files.stdout
    options = ("--source-column", 2, "--target-column", 1, "--beams", 1, "--json")
    assert json.loads(cli("eval", run, "x.tsv", *options).stdout)["count"] == 8
    swapped = cli("eval", run, "x.tsv", "--reverse", "--json")
    assert json.loads(swapped.stdout)["loss"] != pytest.approx(expected.loss)


def test_eval_of_a_model_on_the_hub(cli: Cli, run: Path, tmp_path: Path) -> None:
    write_pairs(tmp_path, SOURCES)
    repository = tmp_path / "hub" / "models--o--n"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(run, repository / "snapshots" / "abc")
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    shown = cli("eval", "hf://o/n", "x.tsv", "--beams", 1, "--json", environment=cache)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["run"] == "hf://o/n"
    assert json.loads(shown.stdout)["count"] == 8


def test_options_that_do_not_fit(cli: Cli, run: Path, trained: Path, tmp_path: Path) -> None:
    write_pairs(tmp_path, SOURCES)
    for options in (["--stride", 2], ["--per-token"], ["--against", trained]):
        shown = cli("eval", run, "x.tsv", *options)
        assert shown.returncode == 2
        assert "was trained on pairs" in shown.stderr
    assert "--beams 0" in cli("eval", run, "x.tsv", "--beams", 0).stderr
    shown = cli("eval", trained, "x.src", "--beams", 2)
    assert (shown.returncode, "need a model trained on pairs" in shown.stderr) == (2, True)
    shown = cli("inspect", run, "--positions")
    assert (shown.returncode, "needs a language model" in shown.stderr) == (2, True)
    assert "the last head is 2.4" in cli("inspect", run, "abc", "--head", "3.1").stderr


def test_alignment_on_the_command_line(cli: Cli, run: Path, tmp_path: Path) -> None:
    shown = cli("inspect", run, "abcdef", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    model = Translator.load(run, note=lambda text: None)
    translation = model.translate("abcdef")
    assert found["translation"] == translation.text
    assert found["source_tokens"] == [*"abcdef", "<|endoftext|>"]
    alignment = model.alignment("abcdef", translation.tokens)
    assert found["target_tokens"] == alignment.target_tokens
    weights = torch.tensor(found["attention"])  # (layers, heads, target, source)
    assert weights.shape == (2, 4, len(alignment.target_tokens), 7)
    assert torch.allclose(weights, torch.stack(alignment.weights), atol=1e-5)
    assert torch.allclose(weights.sum(dim=3), torch.ones(()), atol=1e-5)
    assert torch.allclose(torch.tensor(found["mean"]), weights.mean(dim=(0, 1)), atol=1e-5)
    shown = cli("inspect", run, "abcdef", "--head", "2.3")
    assert "wrote inspect.html" in shown.stderr
    page = (tmp_path / "inspect.html").read_text(encoding="utf-8")
    assert page.count("data-layer=") == 1 + 2 * 5
    assert '"source": 7' in page


def test_a_model_without_attention_has_no_alignment(cli: Cli, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([LETTERS], "char")
    size = tokenizer.vocab_size
    model = lively_seq2seq("seq2seq-gru", vocab_size=size, attention="none")
    (tmp_path / "model").mkdir()
    save_seq2seq(model, tmp_path / "model", tokenizer)
    shown = cli("inspect", "model", "abc")
    assert (shown.returncode, "has no attention over its source" in shown.stderr) == (2, True)
