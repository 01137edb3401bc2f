import gzip
import json
from pathlib import Path

import pytest
import torch
from conftest import Cli
from models import lively

from nanolm.errors import DataError
from nanolm.generation import scoring
from nanolm.generation.language_model import LanguageModel
from nanolm.generation.minimal_pairs import MinimalPair, evaluate_pairs, read_minimal_pairs
from nanolm.generation.scoring import ScoredText, score
from nanolm.model.base import Model
from nanolm.model.config import configure
from nanolm.model.huggingface import save_model
from nanolm.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["the cat sat on the mat. " * 9], "bpe")
SHAPE = {"vocab_size": TOKENIZER.vocab_size, "layers": 1, "dim": 16, "context": 8}
BLIMP = [("The cats sit.", "The cats sits."), ("A cat sits.", "A cat sit."), ("mats", "mats")]


def nothing(*progress: object) -> None:
    """Nobody watches."""


def model(family: str = "modern") -> Model:
    heads = {} if family == "lstm" else {"heads": 2}
    return lively(configure(family, **SHAPE, **heads))


@pytest.mark.parametrize("family", ["modern", "gpt2", "lstm"])
def test_log_probabilities_by_the_definition(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token after the other; beyond the context, windows follow each other."""
    writer, vocabulary = model(family), TOKENIZER.vocab_size
    lengths = (1, 2, 8, 9, 10, 17, 20)
    dice = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (n,), generator=dice).tolist() for n in lengths]
    for most in (1, 1 << 24):
        monkeypatch.setattr(scoring, "MOST_LOGITS", most)
        monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", 20 if most == 1 else 1000)
        texts = [ScoredText(ids, top) for top, ids in enumerate(rows)]
        assert list(score(writer, texts, vocabulary))[-1] == sum(lengths) - len(lengths)
        for text in texts:
            window = writer.window() or 1000
            for place in range(1, len(text.ids)):
                end = min(-(-place // window) * window, len(text.ids) - 1)
                begin = max(0, end - window)
                with torch.no_grad():
                    logits = writer(torch.tensor([text.ids[begin:place]]))[0, -1]
                expected = logits.log_softmax(-1)
                found = text.logprobs[place - 1].item()
                assert found == pytest.approx(expected[text.ids[place]].item(), abs=1e-4)
                likely = expected.topk(text.top)
                assert text.top_ids[place - 1].tolist() == likely.indices.tolist()
                assert torch.allclose(text.top_logprobs[place - 1], likely.values, atol=1e-4)


def test_the_more_likely_sentence_counts() -> None:
    """Each sentence after the start of a text and a space; a tie is correct."""
    writer = LanguageModel(model("lstm"), TOKENIZER)

    def likely(sentence: str) -> float:
        ids = torch.tensor([[TOKENIZER.end_of_text, *TOKENIZER.encode(f" {sentence}")]])
        with torch.no_grad():
            logprobs = writer.model(ids[:, :-1]).log_softmax(-1)
        return float(logprobs.gather(2, ids[:, 1:, None]).sum())

    pairs = [MinimalPair(*BLIMP[n % 3], "ab"[n % 2], "x" * (n > 2)) for n in range(6)]
    right = [likely(pair.good) >= likely(pair.bad) for pair in pairs]
    assert {True, False} == set(right[:2])  # or this would show nothing
    found = evaluate_pairs(writer, pairs, nothing)
    assert (found.accuracy, found.pairs) == (sum(right) / 6, 6)
    assert {name: each.accuracy for name, each in found.by_file.items()} == {
        "a": sum(right[::2]) / 3,
        "b": sum(right[1::2]) / 3,
    }
    assert found.by_phenomenon["x"].accuracy == sum(right[3:]) / 3
    assert list(found.by_phenomenon) == ["x"]  # not those without one


def test_every_form(tmp_path: Path) -> None:
    keys = ("sentence_good", "sentence_bad")
    about = {"linguistics_term": "agreement", "UID": "number", "pairID": "0"}
    lines = [json.dumps(dict(zip(keys, pair, strict=True)) | about) for pair in BLIMP]
    (tmp_path / "blimp").mkdir()
    with gzip.open(tmp_path / "blimp/some.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    (tmp_path / "own.csv").write_text('bad,good\n"A cat, sit.",cats\nsits,mats\n')
    (tmp_path / "own.tsv").write_text("Good\tBad\tphenomenon\ncats\tcat\tplural\n")
    found = read_minimal_pairs([str(tmp_path / "blimp")], nothing)
    assert found == [MinimalPair(*pair, "number", "agreement") for pair in BLIMP]
    assert read_minimal_pairs([str(tmp_path / "own.csv")], nothing) == [
        MinimalPair("cats", "A cat, sit.", "own", ""),
        MinimalPair("mats", "sits", "own", ""),
    ]
    plural = MinimalPair("cats", "cat", "own", "plural")
    assert read_minimal_pairs([str(tmp_path / "own.tsv")], nothing) == [plural]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "needs the columns sentence_good and sentence_bad (or good and bad); it has text"),
        ("good\tworse\na\tb\n", "it has good, worse"),
        ("good\tbad\na\t\n", "a sentence is empty"),
        ("good\tbad\n", "no minimal pairs"),
        ("good\tbad\tUID\na b\tc d\te\na\tb\n", "line 3 has 2 columns, not 3"),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "some.tsv").write_text(text)
    with pytest.raises(DataError, match=r"some\.tsv") as refused:
        read_minimal_pairs([str(tmp_path / "some.tsv")], nothing)
    assert said in str(refused.value)


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_model(model(), tmp_path / "model", TOKENIZER)
    for name, pairs in (("one", BLIMP), ("two", BLIMP[:1])):
        rows = "".join(f"{good}\t{bad}\n" for good, bad in pairs)
        (tmp_path / f"{name}.tsv").write_text(f"good\tbad\n{rows}")
    words = ("eval", "model", "--minimal-pairs", "one.tsv", "--minimal-pairs", "two.tsv")
    found = json.loads(cli(*words, "--json").stdout)
    assert (found["run"], found["pairs"], found["by_file"]["two"]["pairs"]) == ("model", 4, 1)
    shown = cli(*words, "--against", "model").stdout.splitlines()
    assert shown[0].split() == ["file", "model", "model", "pairs"]
    assert shown[-1] == f"model: accuracy {found['accuracy']:.1%} over 4 pairs"
    for more, said in (
        (("one.tsv",), "--minimal-pairs works only with"),
        (("--stride", "3"), "--minimal-pairs works only with"),
    ):
        refused = cli(*words, *more)
        assert refused.returncode == 2
        assert said in refused.stderr
    assert "pass the FILE" in cli("eval", "model").stderr
