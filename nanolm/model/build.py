"""Builds a model with random weights from its config."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from nanolm.model.base import Model
from nanolm.model.config import (
    EncoderDecoderConfig,
    GPTConfig,
    ModelConfig,
    RecurrentConfig,
    RecurrentSeq2SeqConfig,
    Seq2SeqConfig,
)
from nanolm.model.encoder_decoder import EncoderDecoder
from nanolm.model.gpt import GPT
from nanolm.model.rnn import Recurrent
from nanolm.model.seq2seq import Seq2Seq
from nanolm.model.seq2seq_rnn import RecurrentSeq2Seq


def build_model(config: ModelConfig) -> Model:
    match config:
        case GPTConfig():
            return GPT(config)
        case RecurrentConfig():
            return Recurrent(config)
    raise TypeError(config)


def build_seq2seq(config: Seq2SeqConfig) -> Seq2Seq:
    match config:
        case EncoderDecoderConfig():
            return EncoderDecoder(config)
        case RecurrentSeq2SeqConfig():
            return RecurrentSeq2Seq(config)
    raise TypeError(config)


def with_vocabulary(model: Model, parts: Sequence[Sequence[int]]) -> Model:
    """The same model with another vocabulary. `parts` lists, for each new token, the old tokens it
    consists of; its embedding is initialized with the mean of theirs."""
    state = model.state_dict()
    for name in ("token_embedding.weight", "head.weight"):
        state[name] = torch.stack([state[name][list(ids)].mean(dim=0) for ids in parts])
    extended = build_model(replace(model.config, vocab_size=len(parts)))
    extended.load_state_dict(state)
    return extended
