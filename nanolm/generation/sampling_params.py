"""Sampling parameters, each declared once: type, default, range, help, effect on logits.

A declaration drives validation, the options of `nanolm sample`, `LanguageModel.generate`, the
fields of the server's requests, the OpenAPI document and the controls of the playground. To add a
filter, write its function and declare it in `SamplingParams`, at its place in the order.

Torch is not imported here, so that `--help` is fast.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

if TYPE_CHECKING:
    from torch import Tensor

MAX_BANNED_BYTES = 200  # each takes a row as long as the vocabulary


class SamplerState(NamedTuple):
    """Inputs of an effect besides the logits and its value in each row."""

    limit: int  # for integers: at least the largest value in the batch
    step: "Tensor"  # (rows, 1): tokens sampled so far
    stops: "Tensor"  # (vocabulary,): whether the token ends a text
    seen: "Tensor"  # (rows, vocabulary): whether the token is in the prompt or the text
    counts: "Tensor"  # (rows, vocabulary): its count in the text


# Maps logits (rows, vocabulary) and values (rows, 1) to new logits, without a device sync.
Effect = Callable[["Tensor", "Tensor", SamplerState], "Tensor"]


def penalize_repetition(logits: "Tensor", penalty: "Tensor", state: SamplerState) -> "Tensor":
    logits, penalty = logits.float(), penalty.float()
    return (logits * penalty).where(logits < 0, logits / penalty).where(state.seen, logits)


def keep_top_k(logits: "Tensor", k: "Tensor", state: SamplerState) -> "Tensor":
    largest = logits.topk(state.limit).values
    last = k.long() - 1  # -1 to keep all
    smallest = largest.gather(1, last.clamp(0, state.limit - 1))
    return logits.masked_fill((logits < smallest) & (last >= 0), -math.inf)


def keep_top_p(logits: "Tensor", p: "Tensor", _: SamplerState) -> "Tensor":
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1, dtype=p.dtype)
    before = probabilities.cumsum(dim=-1) - probabilities  # the sum without this token
    dropped = (before >= p) & (p < 1)
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -math.inf)


def keep_min_p(logits: "Tensor", p: "Tensor", _: SamplerState) -> "Tensor":
    probabilities = logits.softmax(dim=-1, dtype=p.dtype)
    least = p * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < least, -math.inf)


def keep_typical(logits: "Tensor", p: "Tensor", _: SamplerState) -> "Tensor":
    """Locally typical sampling (Meister et al. 2022, arXiv:2202.00666)."""
    logprobs = logits.log_softmax(dim=-1, dtype=p.dtype)
    probabilities = logprobs.exp()
    entropy = -(logprobs * probabilities).nansum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    nearest, order = distance.sort(dim=-1)
    reached = probabilities.gather(1, order).cumsum(dim=-1)
    last = (reached < p).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return logits.masked_fill((distance > nearest.gather(1, last)) & (p < 1), -math.inf)


@dataclass(frozen=True)
class Declaration:
    """Everything about a parameter except its name, type and default."""

    help: str
    group: str  # heading in the help
    range: tuple[float, float] = (0, math.inf)
    above: bool = False  # the lower end of the range is excluded
    off: float | None = None  # the value without any effect: such rows cost nothing
    penalty: Effect | None = None  # changes logits, also for greedy decoding and beam search
    filter: Effect | None = None  # changes the distribution that is sampled from
    tracks: str = ""  # the state that the penalty needs: "seen" or "counts"
    slider: tuple[float, float, float] | None = None  # in the playground: from, to, step
    served: bool = True  # a field of the server's requests

    def problem(self, value: float) -> str:
        """The problem with a value; empty if it is valid."""
        least, most = self.range
        if least <= value <= most and not (self.above and value == least):
            return ""
        if most == math.inf:
            return f"must be {least} or more"
        if self.above:
            return f"must be above {least} and at most {most}"
        return f"must be from {least} to {most}"


def declare(group: str, default: Any, help: str, **rest: Any) -> Any:
    return field(default=default, metadata={"about": Declaration(help, group, **rest)})


GROUPS = ("Length", "Sampling", "Penalties and bans")
length, sampling, penalty = (partial(declare, group) for group in GROUPS)


@dataclass(frozen=True)
class SamplingParams:
    """In the order in which they apply, as in `transformers`."""

    tokens: int = length(
        200, "Maximum number of new tokens.", range=(1, 1_000_000), slider=(1, 1000, 1)
    )
    stop: tuple[str, ...] = length((), "Stop before this text.")
    repetition_penalty: float = penalty(
        1.0,
        "Above 1, tokens that have already occurred become less likely.",
        range=(0.01, 100),
        off=1.0,
        penalty=penalize_repetition,
        tracks="seen",
        slider=(0.5, 2, 0.05),
    )
    frequency_penalty: float = penalty(
        0.0,
        "Above 0, a token becomes less likely each time it is generated.",
        range=(-100, 100),
        off=0.0,
        penalty=lambda logits, penalty, state: logits - penalty.float() * state.counts,
        tracks="counts",
        slider=(-2, 2, 0.1),
    )
    presence_penalty: float = penalty(
        0.0,
        "Above 0, a token becomes less likely once it has been generated.",
        range=(-100, 100),
        off=0.0,
        penalty=lambda logits, penalty, state: logits - penalty.float() * (state.counts > 0),
        tracks="counts",
        slider=(-2, 2, 0.1),
    )
    ban: tuple[str, ...] = penalty((), "Never generate this text, even within a word.")
    min_tokens: int = length(
        0,
        "Minimum number of new tokens before an end-of-text token or a stop text.",
        range=(0, 1_000_000),
        off=0,
        penalty=lambda logits, least, state: logits.masked_fill(
            state.stops & (state.step < least), -math.inf
        ),
        slider=(0, 1000, 1),
    )
    temperature: float = sampling(
        0.8,  # a little below 1: fewer slips, still varied
        "Sampling temperature. Text is more predictable below 1 and more varied above 1; 0 is "
        "greedy.",
        range=(0, 100),
        off=1.0,
        filter=lambda logits, temperature, _: logits / temperature.float(),
        slider=(0, 2, 0.05),
    )
    top_k: int | None = sampling(
        None,
        "Sample from the k most likely tokens only.",
        range=(1, 1_000_000),
        off=0,
        filter=keep_top_k,
        slider=(0, 200, 1),
    )
    top_p: float | None = sampling(
        None,
        "Sample from the most likely tokens whose total probability reaches p (nucleus sampling).",
        range=(0, 1),
        above=True,
        off=1.0,
        filter=keep_top_p,
        slider=(0.05, 1, 0.01),
    )
    min_p: float | None = sampling(
        None,
        "Drop tokens below this fraction of the top probability.",
        range=(0, 1),
        off=0.0,
        filter=keep_min_p,
        slider=(0, 0.5, 0.01),
    )
    typical_p: float | None = sampling(
        None,
        "Keep the tokens with the most typical surprisal whose total probability reaches p.",
        range=(0, 1),
        above=True,
        off=1.0,
        filter=keep_typical,
        slider=(0.05, 1, 0.01),
    )
    greedy: bool = sampling(False, "Always choose the most likely token.", served=False)
    beams: int = sampling(
        1,
        "Use beam search with this many beams to find the most likely text as a whole.",
        range=(1, 100),
        served=False,
    )
    seed: int = sampling(0, "Random seed; the same seed gives the same text.")

    def __post_init__(self) -> None:
        """Accept a single text for `stop` and `ban`, and None for a random seed."""
        for name in ("stop", "ban"):
            texts = getattr(self, name)
            texts = (texts,) if isinstance(texts, str) else tuple(texts or ())
            object.__setattr__(self, name, texts)
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbelow(1_000_000))

    def problems(self) -> list[str]:
        wrong, texts = [], []
        for name, about in DECLARATIONS.items():
            value, kind = getattr(self, name), TYPES[name]
            option = f"--{name.replace('_', '-')}"
            if kind is str:
                texts += text_problems(option, value)
            elif value is None or kind is bool:
                continue
            elif kind is int and not isinstance(value, int):
                wrong.append(f"{option} {value}: must be a whole number")
            elif problem := about.problem(value):
                wrong.append(f"{option} {value}: {problem}")
        lengths = [problem for problem in wrong if "tokens " in problem]
        if not lengths and self.min_tokens > self.tokens:
            wrong.append(f"--min-tokens {self.min_tokens}: must be at most --tokens {self.tokens}")
        if not texts and len("".join(self.ban).encode()) > MAX_BANNED_BYTES:
            texts.append(f"--ban: all texts together must be at most {MAX_BANNED_BYTES} bytes")
        return wrong + texts

    @cached_property
    def effectively_greedy(self) -> bool:
        """Greedy, or a temperature so low that dividing by it would overflow."""
        return self.greedy or self.temperature < 1e-4

    @cached_property
    def effects(self) -> dict[str, float]:
        """The parameters that have an effect. Filters have none on greedy decoding."""
        return {
            name: value
            for name, about in DECLARATIONS.items()
            if about.penalty or (about.filter and not self.effectively_greedy)
            if (value := getattr(self, name)) not in (None, about.off)
        }


def text_problems(option: str, texts: tuple[str, ...]) -> list[str]:
    wrong = []
    for text in texts:
        if text == "" or not isinstance(text, str):
            wrong.append(f"{option} {text!r}: must not be empty")
        elif any("\ud800" <= char <= "\udfff" for char in text):
            wrong.append(f"{option} {text!r}: not valid Unicode")
    return wrong


DECLARATIONS: dict[str, Declaration] = {
    field.name: field.metadata["about"] for field in fields(SamplingParams)
}
TYPES: dict[str, type] = {  # int, float, bool; str for a tuple of texts
    name: (get_args(kind) or (kind,))[0] for name, kind in get_type_hints(SamplingParams).items()
}
