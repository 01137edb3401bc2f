"""Translation: the search of `transformers`, batches, long and strange sources, attention."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models import copyist, lively_seq2seq

import nanolm
from nanolm.errors import ModelError, UsageError
from nanolm.model.huggingface import save_seq2seq
from nanolm.pairs import translator as module
from nanolm.pairs.translator import TranslateParams, Translator
from nanolm.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([], "byte")
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("encoder-decoder", {"norm_place": "post"}),
    ("modern-encoder-decoder", {}),
    ("seq2seq-rnn", {"attention": "additive"}),
    ("seq2seq-lstm", {"attention": "none"}),
    ("seq2seq-gru", {"attention": "dot"}),
]


def sources(count: int, longest: int = 20) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices("abcdefgh", k=1 + n % longest)) for n in range(count)]


def post_norm() -> Translator:
    return copyist("encoder-decoder", norm_place="post")


def with_context(context: int) -> Translator:
    shape = {"vocab_size": TOKENIZER.vocab_size, "context": context}
    return Translator(lively_seq2seq("encoder-decoder", **shape), TOKENIZER)


@pytest.mark.parametrize("place", ["post", "pre"])
def test_as_transformers(place: str, tmp_path: Path) -> None:
    """Marian and Pegasus: greedy and beam search give the same tokens for 200 sources."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    save_seq2seq(copyist("encoder-decoder", norm_place=place).model, tmp_path, TOKENIZER)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    texts = sources(200)
    batch = AutoTokenizer.from_pretrained(tmp_path)(texts, padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ours = nanolm.load(tmp_path)
    for beams, length_penalty in ((1, 1.0), (4, 1.0), (3, 0.3), (4, 2.0)):
        search: dict[str, Any] = {"num_beams": beams, "do_sample": False, "max_new_tokens": 24}
        search |= {"length_penalty": length_penalty} if beams > 1 else {}
        expected = theirs.generate(
            **inputs, **search, return_dict_in_generate=True, output_scores=True
        )
        found = ours.translate(texts, beams=beams, length_penalty=length_penalty, max_tokens=24)
        for each, (start, *ids) in zip(found, expected.sequences.tolist(), strict=True):
            size = len(each.tokens)
            assert start == TOKENIZER.end_of_text
            assert each.tokens == ids[:size]
            assert set(ids[size:]) <= {TOKENIZER.padding}
        if beams > 1:
            scores = torch.tensor([each.score for each in found])
            torch.testing.assert_close(scores, expected.sequences_scores, atol=1e-4, rtol=0)
        assert len({len(each.tokens) for each in found}) > 8  # or little was tested


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_no_source_influences_another(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator, texts = copyist(family, **changes), sources(8)
    for params in (
        TranslateParams(max_tokens=6),
        TranslateParams(temperature=0.9, top_k=20, top_p=0.95, seed=3, max_tokens=6),
    ):
        together = translator.translate(texts, params)
        alone = [translator.translate(text, params) for text in texts]
        assert [each.tokens for each in together] == [each.tokens for each in alone]
        assert [each.source for each in together] == texts
        assert [each.score for each in together] == pytest.approx(
            [each.score for each in alone], abs=1e-4
        )
        monkeypatch.setattr(module, "BATCH_TOKENS", {"cpu": 30})
        assert [each.tokens for each in translator.translate(texts, params)] == [
            each.tokens for each in together
        ]
        monkeypatch.undo()


def test_the_cache_changes_nothing() -> None:
    """Greedy decoding, as on the slides: the whole target again for each token."""
    translator = copyist("modern-encoder-decoder")
    for text in sources(12, longest=9):
        source = torch.tensor([translator.source_ids(text)])
        ids = [TOKENIZER.end_of_text]
        while len(ids) < 11 and (len(ids) == 1 or ids[-1] != TOKENIZER.end_of_text):
            mask = torch.ones_like(source, dtype=torch.bool)
            ids.append(int(translator.model(source, mask, torch.tensor([ids]))[0, -1].argmax()))
        assert translator.translate(text, beams=1, max_tokens=10).tokens == ids[1:]


def test_sampling_repeats_with_its_seed() -> None:
    translator, texts = post_norm(), sources(20)
    drawn = [
        [each.tokens for each in translator.translate(texts, temperature=1.5, seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    cold = translator.translate(texts, temperature=0)
    assert [each.tokens for each in cold] == [
        each.tokens for each in translator.translate(texts, beams=1)
    ]


def test_blank_and_strange_sources() -> None:
    texts = ["", "Ünsëen 日本 👍", " \t", "a\ud800b", "<|endoftext|>", "\0\x1b", "x" * 3000, "\n"]
    found = post_norm().translate(texts, max_tokens=5)
    assert [each.source for each in found] == texts
    for each in found:
        blank = not each.source.strip()
        assert bool(each.tokens) != blank
        assert (each.text, each.score) == ("", 0.0) or not blank
    assert post_norm().translate([]) == []


def test_a_long_source_is_cut_at_sentences() -> None:
    translator = with_context(32)
    text = "One two three. Four five six?  Seven eight nine ten eleven twelve thirteen! End."
    parts = translator.cut(text)
    assert parts == [
        "One two three. Four five six?  ",
        "Seven eight nine ten eleven ",
        "twelve thirteen! End.",
    ]
    whole = translator.translate(text, max_tokens=6)
    separate = translator.translate([part.strip() for part in parts], max_tokens=6)
    assert whole.text == " ".join(each.text for each in separate)
    assert whole.tokens == [id for each in separate for id in each.tokens]
    assert "context of 32 tokens; translated in 3 parts" in whole.notes[0]
    for strange in ("日本語。" * 40, "👍" * 100, "a" * 500, "a. " * 200, " b" * 2000 + "."):
        parts = translator.cut(strange)
        assert "".join("".join(parts).split()) == "".join(strange.split())
        assert all(len(TOKENIZER.encode(part.strip())) < 32 for part in parts)
    assert translator.cut("日本語。" * 4) == ["日本語。日本語。", "日本語。日本語。"]


def test_a_target_without_an_end_is_noted() -> None:
    found = post_norm().translate(sources(30), max_tokens=5)
    ended = [each.tokens[-1] == TOKENIZER.end_of_text for each in found]
    assert True in ended and False in ended
    assert [not each.notes for each in found] == ended
    longest = with_context(8).translate(["a"], beams=1, max_tokens=100)
    assert len(longest[0].tokens) <= 7  # with the start token, the context


def test_results_come_in_order_and_early() -> None:
    translator, texts = post_norm(), ["", *sources(10), ""]
    asked = []

    def parts() -> Any:
        for first in range(0, len(texts), 3):
            asked.append(first)
            yield texts[first : first + 3]

    stream = translator.stream(parts(), TranslateParams(max_tokens=4))
    assert next(stream).source == ""
    assert asked == [0]
    assert [each.source for each in stream] == texts[1:]


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_alignment(family: str, changes: dict[str, Any]) -> None:
    translator = copyist(family, **changes)
    found = translator.alignment("ab", "xyz")
    assert found.source_tokens == ["a", "b", "<|endoftext|>"]
    assert found.target_tokens == ["x", "y", "z", "<|endoftext|>"]
    if changes == {"attention": "none"}:
        assert found.weights == []
        return
    heads, layers = (2, 1) if "encoder-decoder" in family else (1, 1)
    assert [tuple(layer.shape) for layer in found.weights] == [(heads, 4, 3)] * layers
    for layer in found.weights:
        torch.testing.assert_close(layer.sum(dim=-1), torch.ones(heads, 4))
    mean = torch.tensor(found.mean())
    torch.testing.assert_close(mean, torch.stack(found.weights).mean(dim=(0, 1)))
    ids = [*TOKENIZER.encode("xyz"), TOKENIZER.end_of_text]
    assert translator.alignment("ab", ids).mean() == found.mean()


def test_separate_vocabularies(tmp_path: Path) -> None:
    source = train_tokenizer(["ein hund bellt"], "char")
    vocabularies = {"vocab_size": 258, "source_vocab_size": source.vocab_size}
    model = lively_seq2seq("seq2seq-gru", **vocabularies)
    save_seq2seq(model, tmp_path, TOKENIZER, source)
    loaded = nanolm.load(tmp_path)
    assert loaded.alignment("hund", "dog").source_tokens[:4] == list("hund")
    expected = Translator(model, TOKENIZER, source).translate("ein hund", max_tokens=9)
    assert loaded.translate("ein hund", max_tokens=9) == expected
    assert str(expected) == expected.text


def test_problems() -> None:
    for wrong in (
        {"beams": 0},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 2.0, "beams": 1},
        {"length_penalty": float("nan")},
        {"batch": 0},
    ):
        option = f"--{next(iter(wrong)).replace('_', '-')}"
        with pytest.raises(UsageError, match=option):
            post_norm().translate("a", TranslateParams(**wrong))


def test_a_model_that_is_not_finite() -> None:
    translator = with_context(16)
    with torch.no_grad():
        translator.model.head.weight.fill_(torch.nan)
    for beams in (1, 4):
        with pytest.raises(ModelError, match="not finite"):
            translator.translate("a", beams=beams, max_tokens=3)
