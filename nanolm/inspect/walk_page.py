"""The page of `nanolm inspect --walk`: one forward pass, step by step.

>>> Path("walk.html").write_text(walk_page(tokenizer, walk_through(model, ids), {"model": "x"}))
"""

import inspect
import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nanolm
from nanolm import webpage
from nanolm.inspect.page import DRAWING, STYLE_SHEET, compressed, filled
from nanolm.inspect.walk import PARTS, Stage, Walk
from nanolm.model import gpt, positions, rnn
from nanolm.model.encoder_decoder import CrossAttention, EncoderDecoder
from nanolm.text import spelled
from nanolm.text.page import SIGNS
from nanolm.text.tokenizer import Tokenizer

MOST_WEIGHTS = 250_000  # numbers; with more, the page shows means of neighboring numbers
MOST_COLUMNS = 48  # of such a summary
CANDIDATES = 100  # next tokens in a summary
STYLE = STYLE_SHEET + webpage.beside(__file__, "walk.css")
SCRIPT = DRAWING + webpage.beside(__file__, "walk.js")

# For each role: its name and what it does.
ROLES = {
    "token": ("Token embedding", "Each token id selects one row of a table."),
    "scaled": ("Scaled embedding", "The embedding times the square root of its width."),
    "position": ("Position embedding", "Each position selects one row of a table."),
    "embedded": ("Embedding + position", "The sum of both rows."),
    "norm": (
        "Norm",
        "Scales each token's vector to a standard size, then each number by a learned weight.",
    ),
    "query": ("Queries", "What each token looks for: a product with learned weights."),
    "key": ("Keys", "What each token offers to those that look for it."),
    "value": ("Values", "What each token passes on to those that attend to it."),
    "cross_query": ("Queries to the source", "What each target token looks for in the source."),
    "cross_key": ("Keys of the source", "What each source token offers."),
    "cross_value": ("Values of the source", "What each source token passes on."),
    "query_norm": ("Normalized queries", "Norms keep the scores small."),
    "key_norm": ("Normalized keys", "Norms keep the scores small."),
    "query_rope": (
        "Rotated queries (RoPE)",
        "Pairs of numbers are rotated by angles that grow with the position. So the product of a "
        "query and a key depends on the distance of their tokens.",
    ),
    "key_rope": ("Rotated keys (RoPE)", "Rotated in the same way as the queries."),
    "scores": (
        "Attention scores",
        "The dot product of each query with each key, divided by the square root of the head "
        "dimension. In a language model, tokens cannot attend to later ones: their scores are "
        "masked.",
    ),
    "weights": ("Attention weights", "The softmax of each row of scores: shares that sum to 1."),
    "mixed": (
        "Weighted values",
        "The mean of the values, weighted by attention. The heads are concatenated.",
    ),
    "output": ("Attention output", "Combines the heads: a product with learned weights."),
    "cross_output": ("Output", "Combines the heads: a product with learned weights."),
    "residual": ("Residual stream", "The output of the layer is added to its input."),
    "gate": ("Feed-forward: gate", "Scales the numbers of the up projection."),
    "up": ("Feed-forward: up", "A product with learned weights, wider than the residual stream."),
    "activation": ("Feed-forward: activation", "A nonlinear function of each number."),
    "down": ("Feed-forward: down", "Back to the width of the residual stream."),
    "final_norm": ("Final norm", "The last norm, before the logits."),
    "logits": ("Logits", "A score for each token of the vocabulary."),
    "input": ("Input product", "What the input contributes to each gate: W_x x + b."),
    "gates": (
        "Recurrence",
        "One token after the other: each state depends on the previous one. All gates and states "
        "are concatenated.",
    ),
    "input_gate": ("Input gate", "How much of the new value the cell takes in."),
    "forget_gate": ("Forget gate", "How much of its value the cell keeps."),
    "new": ("New value", "What the cell can take in."),
    "output_gate": ("Output gate", "How much of the cell becomes the state h."),
    "cell": ("Cell c", "What is kept, plus what is taken in."),
    "state": ("State h", "What the next layer and the next token see."),
}
# The code that computes them, and the idea's name in docs/course.md.
EMBEDDING = gpt.GPT.embed, "word vectors from a lookup table"
QUERIES = gpt.Attention.forward, "queries, keys and values have learned matrices"
CROSS = CrossAttention.forward, QUERIES[1]
POSITIONS = (
    gpt.GPT.embed,
    "neither layer sees word order, so a learned vector per position is added",
)
SOFTMAX = gpt.naive_attention, "attention: softmax of dot products, then a weighted average"
NORM = gpt.RMSNorm, "normalization"
FEED_FORWARD = gpt.FeedForward.forward, "the feed-forward layer treats each position separately"
GATES = rnn.LSTM.step, "LSTM and its gates"
SOURCES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("token", "scaled"), EMBEDDING),
    **dict.fromkeys(("position", "embedded"), POSITIONS),
    **dict.fromkeys(("norm", "query_norm", "key_norm", "final_norm"), NORM),
    **dict.fromkeys(("query", "key", "value"), QUERIES),
    **dict.fromkeys(("cross_query", "cross_key", "cross_value", "cross_output"), CROSS),
    **dict.fromkeys(("query_rope", "key_rope"), (positions.rotate, "fixed positions")),
    "scores": (
        gpt.naive_attention,
        "division by √d_attn, without which the softmax saturates at 0 and 1",
    ),
    **dict.fromkeys(("weights", "mixed"), SOFTMAX),
    "output": (gpt.Attention.forward, "W^O projects the heads back to d"),
    "residual": (gpt.Block.residual, "residual connections"),
    **dict.fromkeys(("gate", "up", "down"), FEED_FORWARD),
    "activation": (gpt.swiglu, "ReLU and its variants"),
    "logits": (gpt.GPT.forward, "a language model predicts the probability of every next token"),
    "input": (rnn.Cell.written_out, "an RNN is sequential, a Transformer parallel but quadratic"),
    **dict.fromkeys((*PARTS["lstm"], "gates"), GATES),
}
LAYER_NORM = gpt.make_norm, "layer norm"
NO_GATE = gpt.FeedForward.forward, SOURCES["activation"][1]
ELMAN = rnn.Elman.step, "Elman RNN, h_t = tanh(W_h h_{t-1} + W_x x_t + b)"


def walk_page(
    tokenizer: Tokenizer, walk: Walk, facts: dict[str, str], encoder: Tokenizer | None = None
) -> str:
    """`encoder` is the tokenizer of the source, if it has its own."""
    data = json.dumps(walk_data(tokenizer, walk, encoder)).replace("<", r"\u003c")
    body = filled("walk", data=data)
    return webpage.page("A walk through the model", facts, body, STYLE, SCRIPT)


def walk_data(tokenizer: Tokenizer, walk: Walk, encoder: Tokenizer | None = None) -> dict[str, Any]:
    """What the page needs: all weights if they are few, or else a summary of each stage."""
    exact = sum(weight.numel() for weight in walk.weights.values()) <= MOST_WEIGHTS
    *stages, last = walk.stages
    logits = last.values[:, : tokenizer.vocab_size]  # some models pad their vocabulary
    unseen = sorted(tokenizer.unseen)  # never generated
    logits = logits.index_fill(1, torch.tensor(unseen, dtype=torch.long), -torch.inf)
    data: dict[str, Any] = {
        "exact": exact,
        "ids": walk.ids,
        "source": walk.source,
        "source_names": [visible(encoder or tokenizer, id) for id in walk.source],
        "limit": walk.limit,
        "unseen": unseen,
        "roles": {},
        "stages": [as_object(stage) for stage in walk.stages],
    }
    for stage in walk.stages:
        if stage.role not in data["roles"]:
            data["roles"][stage.role] = described(stage)
    if exact:
        ids = [*range(logits.shape[1])]
        arrays = list(walk.weights.values())
        data["weights"] = [(name, *array.shape) for name, array in walk.weights.items()]
    else:
        best = logits.topk(min(CANDIDATES, logits.shape[1]))
        rest = logits.scatter(1, best.indices, -torch.inf).logsumexp(dim=1)
        data["best"] = best.indices.tolist()
        ids = sorted({*walk.ids, *best.indices.flatten().tolist()})
        arrays = [*(summary(stage.values) for stage in stages), best.values, rest]
        data["shapes"] = [array.shape for array in arrays]
    data["names"] = {id: visible(tokenizer, id) for id in ids}
    numbers = torch.cat([array.flatten().float().cpu() for array in arrays]).numpy()
    return data | {"packed": compressed(numbers.astype("<f4"))}


def as_object(stage: Stage) -> dict[str, Any]:
    shown = {key: value for key, value in vars(stage).items() if key != "values"}
    return shown | {"width": stage.values.shape[-1]}


def summary(values: Tensor) -> Tensor:
    """Means of neighboring numbers of each token; attention is kept as it is."""
    if values.dim() == 3:
        return values
    return F.adaptive_avg_pool1d(values, min(MOST_COLUMNS, values.shape[1]))


def visible(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.special.get(id) or spelled(tokenizer.tokens[id]).translate(SIGNS)


def described(stage: Stage) -> dict[str, str]:
    """What the page says about a stage, with the code that computes it."""
    name, about = ROLES[stage.role]
    code, idea = SOURCES[stage.role]
    if stage.op == "norm" and stage.options["centered"]:
        code, idea = LAYER_NORM
    elif stage.op == "activation" and stage.options["kind"] != "swiglu":
        code, idea = NO_GATE
    elif stage.side and not stage.layer and code == gpt.GPT.embed:
        code = EncoderDecoder.with_positions
    elif stage.op == "rnn" or (stage.options.get("first") == 0 and stage.role == "state"):
        code, idea = ELMAN
    if any(name.startswith("waves") for name in stage.weights.values()):
        idea = "sinusoidal positions"
    lines, first = inspect.getsourcelines(code)
    file = Path(inspect.getfile(code)).relative_to(Path(nanolm.__file__).parents[1])
    where = f"{file.as_posix()}, line {first}"
    return {
        "name": name,
        "about": about,
        "idea": idea,
        "where": where,
        "code": dedent("".join(lines)),
    }
