import math

import numpy as np
import pytest
import torch

from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.text.tokens import Store
from nanolm.training.metrics import evaluate

DOCUMENTS = ("the cat sat on the mät. " * 5, "the dog ran. " * 3, "日本")


def encoded(tokenizer: Tokenizer) -> Store:
    rows = [[tokenizer.end_of_text, *tokenizer.encode(document)] for document in DOCUMENTS]
    return np.array([id for row in rows for id in row], dtype=np.uint16)


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_bits_per_byte_by_hand(kind: str) -> None:
    tokenizer = train_tokenizer(DOCUMENTS[:2], kind)
    torch.manual_seed(0)
    size = tokenizer.vocab_size
    model = build_model(configure("modern", vocab_size=size, layers=1, heads=2, dim=16, context=8))
    torch.nn.init.normal_(model.head.weight)
    ids = encoded(tokenizer)
    score = evaluate(model, tokenizer, ids, 8)

    nats = 0.0  # token by token, each window from its start
    counted = 0
    for position in range(1, len(ids)):
        start = (position - 1) // 8 * 8
        window = torch.tensor(ids[start:position].astype("int64"))[None]
        if ids[position] != tokenizer.end_of_text:
            with torch.no_grad():
                nats -= model(window)[0, -1].log_softmax(-1)[int(ids[position])].item()
            counted += 1
    size = sum(len(document.encode()) for document in DOCUMENTS)
    assert (score.tokens, score.bytes) == (counted, size)
    assert score.loss == pytest.approx(nats / counted, abs=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / size, abs=1e-5)


def test_a_limit_looks_at_the_beginning_only() -> None:
    tokenizer = train_tokenizer([], "byte")
    model = build_model(configure("gpt2", vocab_size=258, layers=1, heads=2, dim=16, context=8))
    ids = encoded(tokenizer)
    assert evaluate(model, tokenizer, ids, 8, 20) == evaluate(model, tokenizer, ids[:21], 8)
