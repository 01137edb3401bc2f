"""Folders of encoder-decoders, compared with `transformers`' MarianMT and Pegasus."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SHAPE, lively_seq2seq

from nanolm.model.config import EncoderDecoderConfig
from nanolm.model.huggingface import load_seq2seq, save_seq2seq
from nanolm.model.seq2seq import Seq2Seq
from nanolm.model.stored import load_any_config
from nanolm.runs.folder import model_tokenizers
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


@pytest.mark.parametrize("case", THEIRS)
def test_what_transformers_writes_is_read(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    kind, values = THEIRS[case]
    config = AutoConfig.for_model(kind, **SMALL | values)
    torch.manual_seed(0)
    theirs = AutoModelForSeq2SeqLM.from_config(config)
    for parameter in theirs.parameters():
        if parameter.requires_grad:  # all but the positions
            torch.nn.init.normal_(parameter, std=0.15)
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
