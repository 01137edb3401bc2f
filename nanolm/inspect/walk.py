"""One forward pass as a sequence of small operations, for `nanolm inspect --walk`.

    >>> walk = walk_through(model, [0, 17, 4])
    >>> [stage.role for stage in walk.stages][:4], walk.stages[-1].values.shape
    (['token', 'norm', 'query', 'key'], torch.Size([3, 512]))

Each stage is computed from earlier ones by one of OPERATIONS. The page repeats the computation in
`walk.js`, so that each number can be traced to its inputs. Tests compare both with the model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.errors import NOT_FINITE, ModelError, UsageError
from nanolm.model.base import Network
from nanolm.model.encoder_decoder import CrossAttention, DecoderBlock, EncoderDecoder
from nanolm.model.fast.quantized import QuantizedLinear
from nanolm.model.gpt import GPT, NONLINEARITIES, Attention, Block, FeedForward
from nanolm.model.positions import alibi_slopes, rotate
from nanolm.model.rnn import Cell, Recurrent

MOST_TOKENS = 32  # of a text
MOST_POSITIONS = 64  # of tables: the page can append tokens
LARGE = 1_000_000  # parameters
PARTS = {
    "rnn": ["state"],
    "lstm": ["input_gate", "forget_gate", "new", "output_gate", "cell", "state"],
}


@dataclass(frozen=True)
class Stage:
    role: str  # "query"; `walk_page` describes it
    side: str  # "encoder", "decoder" or ""
    layer: int  # from 1; 0 outside the layers
    op: str
    inputs: tuple[int, ...]  # stages
    weights: dict[str, str]  # names in `Walk.weights`, by argument of the operation
    options: dict[str, Any]
    values: Tensor  # (time, width), or (heads, queries, keys)


@dataclass
class Walk:
    """The stages of one pass; the last ones are the logits."""

    ids: list[int]
    limit: int  # tokens that the tables of positions are for
    source: list[int] = field(default_factory=list)  # of a sequence-to-sequence model
    stages: list[Stage] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@torch.inference_mode()
def walk_through(model: Network, ids: list[int], source: list[int] | None = None) -> Walk:
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise UsageError("a walk needs the original weights; omit --int8 or --int4")
    walker = Walker(model, Walk(ids, walk_limit(model), source or []))
    if isinstance(model, GPT):
        walker.gpt(model)
    elif isinstance(model, Recurrent):
        walker.recurrent(model)
    elif isinstance(model, EncoderDecoder):
        walker.encoder_decoder(model)
    else:
        raise UsageError("--walk: recurrent sequence-to-sequence models are not supported")
    if not walker.walk.stages[-1].values.isfinite().all():
        raise ModelError(NOT_FINITE)
    return walker.walk


def walk_window(model: Network) -> int:
    """How many tokens of a text are shown."""
    return min(MOST_TOKENS, walk_limit(model))


def walk_limit(model: Network) -> int:
    """The most tokens there can be, with those that are appended."""
    window = None if isinstance(model, Recurrent) else model.config.context
    return min(MOST_POSITIONS, window or MOST_POSITIONS)


class Walker:
    """Computes the stages of a model; of a small one, in double precision."""

    def __init__(self, model: Network, walk: Walk) -> None:
        self.walk, self.side, self.layer = walk, "", 0
        self.dtype = torch.float64 if model.parameter_count() < LARGE else torch.float32
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    def add(
        self,
        role: str,
        op: str,
        *inputs: int,
        weights: dict[str, str] | None = None,
        **options: Any,
    ) -> int:
        """Compute a stage; returns its number."""
        stages, weights = self.walk.stages, weights or {}
        given = {name: self.walk.weights[each] for name, each in weights.items()}
        if op == "lookup":  # of a large table, only a few rows are needed
            given["table"] = given["table"][self.rows(options["by"])]
        given = {name: weight.to("cpu", self.dtype) for name, weight in given.items()}
        values = OPERATIONS[op](*(stages[n].values for n in inputs), **given, **options)
        where = (role, self.side, self.layer, op, inputs, weights, options)
        stages.append(Stage(*where, values))
        return len(stages) - 1

    def rows(self, by: str) -> list[int]:
        length = len(self.walk.source if self.side == "encoder" else self.walk.ids)
        return {"ids": self.walk.ids, "source": self.walk.source}.get(by, [*range(length)])

    def weight(self, parameter: Tensor, name: str = "", first: int = 0, rows: int = 0) -> str:
        """The name of a weight, or of some of its rows."""
        name = name or self.names[id(parameter)]
        if rows and rows < len(parameter):
            parameter = parameter[first : first + rows]
            name += f"[{first}:{first + rows}]"
        self.walk.weights[name] = parameter.detach()
        return name

    def linear(self, role: str, layer: nn.Linear, x: int, first: int = 0, rows: int = 0) -> int:
        """A linear layer, or some rows of one that computes several at once."""
        weights = {"weight": self.weight(layer.weight, first=first, rows=rows)}
        if layer.bias is not None:
            weights["bias"] = self.weight(layer.bias, first=first, rows=rows)
        return self.add(role, "linear", x, weights=weights)

    def norm(self, role: str, norm: Any, x: int, groups: int = 1) -> int:
        if isinstance(norm, nn.Identity):
            return x
        weights = {"weight": self.weight(norm.weight)}
        if getattr(norm, "bias", None) is not None:
            weights["bias"] = self.weight(norm.bias)
        centered = isinstance(norm, nn.LayerNorm)
        how: dict[str, Any] = {"centered": centered, "epsilon": norm.eps, "groups": groups}
        return self.add(role, "norm", x, weights=weights, **how)

    def gpt(self, model: GPT) -> None:
        x = self.embed(model, model.token_embedding, "ids")
        for self.layer, block in enumerate(model.blocks, start=1):
            assert isinstance(block, Block)
            x = self.block(model, block, x, causal=True)
        self.finish(model, self.end_layers(model.norm, x))

    def encoder_decoder(self, model: EncoderDecoder) -> None:
        self.side = "encoder"
        shared = model.config.source_vocab_size is None
        embedding = model.token_embedding if shared else model.source_embedding
        x = self.embed(model, embedding, "source")
        for self.layer, block in enumerate(model.encoder, start=1):
            assert isinstance(block, Block)
            x = self.block(model, block, x, causal=False)
        memory = self.end_layers(model.encoder_norm, x)
        self.side = "decoder"
        x = self.embed(model, model.token_embedding, "ids")
        for self.layer, block in enumerate(model.decoder, start=1):
            assert isinstance(block, Block)
            x = self.block(model, block, x, causal=True, memory=memory)
        self.finish(model, self.end_layers(model.norm, x))

    def recurrent(self, model: Recurrent) -> None:
        table = {"table": self.weight(model.token_embedding.weight)}
        x = self.add("token", "lookup", weights=table, by="ids")
        cell = model.config.cell
        for self.layer, layer in enumerate(model.layers, start=1):
            assert isinstance(layer, Cell)
            given = {"weight": self.weight(layer.input_weight), "bias": self.weight(layer.bias)}
            y = self.add("input", "linear", x, weights=given)
            y = self.add("gates", cell, y, weights={"weight": self.weight(layer.state_weight)})
            width = model.config.dim
            for number, part in enumerate(PARTS[cell]):
                first = number * width
                state = self.add(part, "part", y, first=first, last=first + width)
            x = self.add("residual", "add", x, state) if self.layer > 1 else state
        self.layer = 0
        self.finish(model, x)

    def embed(self, model: Any, embedding: nn.Embedding, by: str) -> int:
        x = self.add("token", "lookup", weights={"table": self.weight(embedding.weight)}, by=by)
        config = model.config
        if config.positions == "learned":
            positions = model.position_embedding.weight
            table = {"table": self.weight(positions, rows=self.walk.limit)}
        elif config.positions == "sinusoidal":
            x = self.add("scaled", "scale", x, by=math.sqrt(config.dim))
            (waves,) = model.tables.at_least(self.walk.limit, model.device)
            table = {"table": self.weight(waves, "waves", rows=self.walk.limit)}
        else:
            return x
        places = self.add("position", "lookup", weights=table, by="positions")
        return self.add("embedded", "add", x, places)

    def block(
        self, model: Any, block: Block, x: int, causal: bool, memory: int | None = None
    ) -> int:
        """Attention and feed-forward with their norms and residual connections."""
        parts: list[tuple[Any, Callable[[int], int]]] = [
            (block.attention_norm, lambda x: self.attention(model, block.attention, x, causal))
        ]
        if isinstance(block, DecoderBlock):
            assert memory is not None
            cross = block.cross_attention
            parts += [(block.cross_attention_norm, lambda x: self.cross(cross, x, memory))]
        parts += [(block.feed_forward_norm, lambda x: self.feed_forward(block.feed_forward, x))]
        if block.parallel:
            return self.add("residual", "add", x, *(f(self.norm("norm", n, x)) for n, f in parts))
        for norm, layer in parts:
            match block.norm_place:
                case "pre":
                    x = self.add("residual", "add", x, layer(self.norm("norm", norm, x)))
                case "post":
                    x = self.norm("norm", norm, self.add("residual", "add", x, layer(x)))
                case _:
                    x = self.add("residual", "add", x, self.norm("norm", norm, layer(x)))
        return x

    def attention(self, model: Any, layer: Attention, x: int, causal: bool) -> int:
        config, (queries, keys, _) = model.config, layer.rows
        q = self.linear("query", layer.qkv, x, 0, queries)
        k = self.linear("key", layer.qkv, x, queries, keys)
        v = self.linear("value", layer.qkv, x, queries + keys, keys)
        if layer.qk_norm:
            groups = (1, 1) if layer.whole else (layer.heads, layer.kv_heads)
            q = self.norm("query_norm", layer.query_norm, q, groups[0])
            k = self.norm("key_norm", layer.key_norm, k, groups[1])
        if config.positions == "rope" and layer.rotated:
            rows = model.tables.at_least(self.walk.limit, model.device)
            named = zip(("cosines", "sines"), rows, strict=True)
            tables = {name: self.weight(t, name, rows=self.walk.limit) for name, t in named}
            q = self.add("query_rope", "rope", q, weights=tables, heads=layer.heads)
            k = self.add("key_rope", "rope", k, weights=tables, heads=layer.kv_heads)
        how: dict[str, Any] = {"causal": causal}
        if config.positions == "alibi":
            how["slopes"] = alibi_slopes(layer.heads).tolist()
        if getattr(config, "sliding_window", None):
            how["window"] = config.sliding_window
        return self.linear("output", layer.out, self.attend(layer, q, k, v, **how))

    def cross(self, layer: CrossAttention, x: int, memory: int) -> int:
        rows = layer.kv_heads * layer.head_dim
        q = self.linear("cross_query", layer.query, x)
        k = self.linear("cross_key", layer.key_value, memory, 0, rows)
        v = self.linear("cross_value", layer.key_value, memory, rows, rows)
        if layer.qk_norm:
            q = self.norm("query_norm", layer.query_norm, q, layer.heads)
            k = self.norm("key_norm", layer.key_norm, k, layer.kv_heads)
        return self.linear("cross_output", layer.out, self.attend(layer, q, k, v, causal=False))

    def attend(self, layer: Attention | CrossAttention, q: int, k: int, v: int, **how: Any) -> int:
        """Each head's mean of the values, weighted by attention."""
        heads: dict[str, Any] = {"heads": layer.heads, "kv_heads": layer.kv_heads}
        scores = self.add("scores", "scores", q, k, **heads, **how)
        weights = self.add("weights", "softmax", scores)
        return self.add("mixed", "mix", weights, v, **heads)

    def feed_forward(self, layer: FeedForward, x: int) -> int:
        hidden, roles = layer.up.rows[0], ("gate", "up")[-len(layer.up.rows) :]
        spans = ((role, number * hidden) for number, role in enumerate(roles))
        inner = [self.linear(role, layer.up, x, first, hidden) for role, first in spans]
        active = self.add("activation", "activation", *inner, kind=layer.kind)
        return self.linear("down", layer.out, active)

    def end_layers(self, norm: nn.Module, x: int) -> int:
        self.layer = 0
        return self.norm("final_norm", norm, x)

    def finish(self, model: Network, x: int) -> None:
        self.linear("logits", model.head, x)


def norm(
    x: Tensor,
    weight: Tensor,
    centered: bool,
    epsilon: float,
    groups: int,
    bias: Tensor | None = None,
) -> Tensor:
    x = x.unflatten(1, (groups, -1))  # (time, groups, width)
    if centered:
        x = x - x.mean(dim=-1, keepdim=True)
    y = x / (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt() * weight
    return (y if bias is None else y + bias).flatten(1)


def apply_rope(x: Tensor, cosines: Tensor, sines: Tensor, heads: int) -> Tensor:
    x = x.unflatten(1, (heads, -1)).transpose(0, 1)  # (heads, time, head_dim)
    rotated = rotate(x, (cosines[: x.shape[1]], sines[: x.shape[1]]))
    return rotated.transpose(0, 1).flatten(1)


def scores(
    q: Tensor,
    k: Tensor,
    heads: int,
    kv_heads: int,
    causal: bool,
    slopes: list[float] | None = None,
    window: int | None = None,
) -> Tensor:
    q = q.unflatten(1, (heads, -1)).transpose(0, 1)  # (heads, queries, head_dim)
    k = k.unflatten(1, (kv_heads, -1)).transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
    found = q @ k.mT / math.sqrt(q.shape[2])
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    if slopes:
        found = found - torch.tensor(slopes)[:, None, None] * behind
    if causal:
        found = found.masked_fill((behind < 0) | (behind >= (window or math.inf)), -torch.inf)
    return found


def mix(weights: Tensor, v: Tensor, heads: int, kv_heads: int) -> Tensor:
    v = v.unflatten(1, (kv_heads, -1)).transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
    return (weights @ v).transpose(0, 1).flatten(1)


def activation(*x: Tensor, kind: str) -> Tensor:
    return NONLINEARITIES[kind](torch.cat(x, dim=1))


def rnn(x: Tensor, weight: Tensor) -> Tensor:
    h, rows = x.new_zeros(weight.shape[1]), []
    for now in x:
        rows.append(h := torch.tanh(now + weight @ h))
    return torch.stack(rows)


def lstm(x: Tensor, weight: Tensor) -> Tensor:
    """The gates and both states of each token, side by side: (time, 6 * dim)."""
    h = c = x.new_zeros(weight.shape[1])
    rows = []
    for now in x:
        take, keep, new, show = (now + weight @ h).chunk(4)
        take, keep, new, show = take.sigmoid(), keep.sigmoid(), new.tanh(), show.sigmoid()
        c = keep * c + take * new
        h = show * c.tanh()
        rows.append(torch.cat([take, keep, new, show, c, h]))
    return torch.stack(rows)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "lookup": lambda table, by: table,
    "add": lambda *x: torch.stack(x).sum(dim=0),
    "scale": lambda x, by: by * x,
    "linear": F.linear,
    "norm": norm,
    "rope": apply_rope,
    "scores": scores,
    "softmax": lambda x: x.softmax(dim=-1),
    "mix": mix,
    "activation": activation,
    "part": lambda x, first, last: x[:, first:last],
    "rnn": rnn,
    "lstm": lstm,
}
