"""Folders of encoder-decoders, compared with `transformers`' MarianMT and Pegasus."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import SHAPE, lively_seq2seq

from nanolm.errors import ModelError
from nanolm.model.config import EncoderDecoderConfig
from nanolm.model.huggingface import load_seq2seq, save_seq2seq
from nanolm.model.seq2seq import Seq2Seq
from nanolm.model.stored import load_any_config
from nanolm.pairs.data import encode_pairs
from nanolm.pairs.translator import Translator
from nanolm.runs.folder import model_tokenizers
from nanolm.text.pairs import Pairs
from nanolm.text.tokenizer import train_tokenizer

TEXT = "the cat sat on the mat. the dog sat on the log. " * 3
SMALL = {
    "vocab_size": 300,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 100,
    "decoder_ffn_dim": 100,
    "max_position_embeddings": 64,
    "scale_embedding": True,
    "pad_token_id": 257,
    "eos_token_id": 256,
    "decoder_start_token_id": 256,
    "forced_eos_token_id": None,
}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 280}
UNTIED = {"tie_word_embeddings": False}
# Model types and configs that transformers might write.
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("marian", {"activation_function": "relu"}),
    "marian, untied": ("marian", UNTIED),
    "marian, separate": ("marian", {**SEPARATE, "encoder_layers": 1, "d_model": 24}),
    "marian, separate, untied": ("marian", {**SEPARATE, **UNTIED, "activation_function": "relu"}),
    "pegasus": ("pegasus", {"activation_function": "relu", "decoder_layers": 3}),
    "pegasus, untied": ("pegasus", {**UNTIED, "activation_function": "gelu_new"}),
}


def batch(config: EncoderDecoderConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources of different lengths, and targets."""
    lengths = torch.tensor([9, 1, 64, 30])
    source = torch.randint(config.source_vocab_size or config.vocab_size, (4, 64))
    return source, torch.arange(64) < lengths[:, None], torch.randint(config.vocab_size, (4, 17))


def check_parity(ours: Seq2Seq, theirs: Any) -> None:
    assert isinstance(ours.config, EncoderDecoderConfig)
    source, mask, target = batch(ours.config)
    with torch.no_grad():
        expected = theirs.eval()(source, mask.long(), decoder_input_ids=target).logits
        torch.testing.assert_close(ours(source, mask, target), expected, atol=1e-4, rtol=0)


def random_model(kind: str, values: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    theirs = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **SMALL | values))
    for parameter in theirs.parameters():
        if parameter.requires_grad:  # all but the positions
            torch.nn.init.normal_(parameter, std=0.15)
    return theirs.eval()


@pytest.mark.parametrize("case", THEIRS)
def test_what_transformers_writes_is_read(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    theirs = random_model(*THEIRS[case])
    theirs.save_pretrained(tmp_path)
    ours = load_seq2seq(tmp_path)
    check_parity(ours, theirs)

    again = tmp_path / "again"  # and back, in several files
    again.mkdir()
    save_seq2seq(ours, again, train_tokenizer([], "byte"), shard=30_000)
    assert len(list(again.glob("model-*.safetensors"))) > 2
    assert load_any_config(again) == ours.config
    check_parity(load_seq2seq(again), AutoModelForSeq2SeqLM.from_pretrained(again))


OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("marian", {}),
    "untied": ("marian", {"tied": False}),
    "separate": ("marian", {"source_vocab_size": 270}),
    "separate, untied": ("marian", {"source_vocab_size": 500, "tied": False}),
    "pre-norm": ("pegasus", {"norm_place": "pre", "feed_forward": "gelu"}),
    "pre-norm, untied": ("pegasus", {"norm_place": "pre", "tied": False, "encoder_layers": 1}),
}


@pytest.mark.parametrize("case", OURS)
def test_transformers_reads_what_nanolm_writes(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    family, changes = OURS[case]
    target = train_tokenizer([TEXT], "bpe", 290)
    source = train_tokenizer([], "byte") if "source_vocab_size" in changes else None
    shape = {"vocab_size": target.vocab_size, "layers": 2, "heads": 3, "dim": 48, "context": 64}
    model = lively_seq2seq("encoder-decoder", **shape | changes)
    save_seq2seq(model, tmp_path, target, source)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    loaded = load_seq2seq(tmp_path)
    assert loaded.config == model.config
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert "MISSING" not in (shown := capfd.readouterr().err)
    assert "UNEXPECTED" not in shown
    assert theirs.generation_config.num_beams == 4
    assert theirs.generation_config.forced_eos_token_id is None
    check_parity(loaded, theirs)
    if source is None:
        texts = AutoTokenizer.from_pretrained(tmp_path)(["the cat", "a"], padding=True)
        written = theirs.generate(**texts.convert_to_tensors("pt"), max_length=5)
        assert written[:, 0].tolist() == [target.end_of_text] * 2


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_the_ids_are_those_of_auto_tokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

    target = train_tokenizer([TEXT], kind, 290)
    source = train_tokenizer(["другой текст"], kind, 280)
    shape = {**SHAPE, "vocab_size": target.vocab_size, "context": 64}
    model = lively_seq2seq("encoder-decoder", **shape, source_vocab_size=source.vocab_size)
    save_seq2seq(model, tmp_path, target, source)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "source_tokenizer.json"))
    for text in ["the cat", " <|endoftext|> Łódź 12345\r\n\n", "a" * 50, "другой", ""]:
        expected = [*target.encode(text), target.end_of_text]
        assert theirs(text)["input_ids"] == expected
        assert theirs.decode(expected, skip_special_tokens=True) == text
        if "<" not in text:  # a bare file has no setting that special tokens are text
            assert other(text)["input_ids"] == [*source.encode(text), source.end_of_text]
    both = theirs(["the cat", "a"], padding=True, return_tensors="pt")
    assert both["input_ids"][1, 2:].eq(target.padding).all()
    written = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generate(
        other("другой", return_tensors="pt")["input_ids"], max_new_tokens=3
    )
    assert written[0, 0] == target.end_of_text
    ours = model_tokenizers(tmp_path)
    assert [each.fingerprint() for each in ours] == [target.fingerprint(), source.fingerprint()]
    assert [type(each) for each in ours] == [type(target), type(source)]
    assert [each.padding for each in ours] == [target.padding, source.padding]


def check_translations(folder: Path, theirs: Any, tokenizer: Any, texts: list[str]) -> Translator:
    """Greedy and beam search give the tokens of `transformers`."""
    ours = Translator.load_folder(folder)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    both = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for beams in (1, 4):
        rows = theirs.generate(**both, num_beams=beams, do_sample=False, max_new_tokens=12)
        found = ours.translate(texts, beams=beams, length_penalty=1.0, max_tokens=12)
        for each, (start, *ids) in zip(found, rows.tolist(), strict=True):
            assert start == theirs.config.decoder_start_token_id == ours.tokenizer.start_of_text
            assert each.tokens == ids[: len(each.tokens)]
            assert set(ids[len(each.tokens) :]) <= {tokenizer.pad_token_id}
    return ours


def test_a_model_like_opus_mt(tmp_path: Path) -> None:
    """Its decoder starts with padding, which is never generated, and its activation is swish."""
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer([], "byte")
    start = {"vocab_size": 258, "decoder_start_token_id": 257, "activation_function": "swish"}
    theirs = random_model("marian", start)
    source, weight = torch.tensor([[97, 98, 256]]), theirs.model.shared.weight
    with torch.no_grad():
        weight[257] = 3 * weight[int(theirs.generate(source, max_new_tokens=1)[0, 1])]
    assert theirs.generate(source, max_new_tokens=1)[0, 1] == 257  # the most likely token
    theirs.generation_config.bad_words_ids = [[257]]
    theirs.save_pretrained(tmp_path)
    tokenizer.save(tmp_path, 64, end=True)
    check_parity(load_seq2seq(tmp_path), theirs)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = check_translations(tmp_path, theirs, library, ["abc", "a cat", "the dog sat on it"])

    pairs = encode_pairs(Pairs(["a"], ["b"]), tokenizer, tokenizer, 8, 1, lambda *how_far: None)
    assert pairs.rows(np.array([0]))[1].tolist() == [[256, 98, 256]]
    pairs = encode_pairs(
        Pairs(["a"], ["b"]), ours.tokenizer, ours.encoder, 8, 1, lambda *how_far: None
    )
    assert pairs.rows(np.array([0]))[1].tolist() == [[257, 98, 256]]
    again = tmp_path / "again"
    again.mkdir()
    save_seq2seq(ours.model, again, ours.tokenizer)
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained(again)
    check_parity(load_seq2seq(again), back)
    check_translations(again, back, library, ["abc"])


def test_a_pegasus_with_its_own_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(letter, -3.0) for letter in "acdeghostn."] + [("\u2581the", -1.0), ("at", -1.5)]
    library = transformers.PegasusTokenizer(vocab=pieces)
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    values = {**special, "vocab_size": len(library), "activation_function": "relu"}
    theirs = random_model("pegasus", values)
    theirs.save_pretrained(tmp_path)
    library.save_pretrained(tmp_path)
    texts = ["the cat sat.", "a dog", "the goat \u65e5 sang"]
    ours = check_translations(tmp_path, theirs, library, texts)
    for text in texts:
        assert ours.source_ids(text) == library(text)["input_ids"]


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    """Such as a published model, with source.spm, target.spm and vocab.json."""
    save_seq2seq(lively_seq2seq("encoder-decoder"), tmp_path, train_tokenizer([], "byte"))
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json\. Its SentencePiece files"):
        model_tokenizers(tmp_path)
