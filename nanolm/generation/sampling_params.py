"""The params of sampling. No torch here, so the command line can use them for its help."""

import secrets
from dataclasses import dataclass

MAX_BANNED_BYTES = 200  # bytes: each takes a row of all tokens


@dataclass(frozen=True)
class SamplingParams:
    """How to choose among the tokens that could come next.

    They work in the order in which they stand here, which is that of `transformers`.
    """

    tokens: int = 200  # at most this many new tokens
    stop: tuple[str, ...] = ()  # end where one of these would be written
    # What the scores of tokens are changed by:
    repetition_penalty: float = 1.0  # above 1: what is in the prompt or text is less likely
    frequency_penalty: float = 0.0  # less likely for every time it has been written
    presence_penalty: float = 0.0  # less likely once it has been written
    ban: tuple[str, ...] = ()  # never to be written
    min_tokens: int = 0  # no end before so many
    # How one is drawn:
    temperature: float = 0.8  # a little below 1: fewer slips, still varied; 0 is greedy
    top_k: int | None = None  # keep the k likeliest
    top_p: float | None = None  # keep the likeliest that together reach p
    min_p: float | None = None  # keep those at least so likely, measured by the likeliest
    greedy: bool = False  # always the likeliest
    beams: int = 1  # above 1: the likeliest whole text among so many followed at once
    seed: int = 0

    def __post_init__(self) -> None:
        """From Python a text may come alone, and no seed is any."""
        for name in ("stop", "ban"):
            texts = getattr(self, name)
            texts = (texts,) if isinstance(texts, str) else tuple(texts or ())
            object.__setattr__(self, name, texts)
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbelow(1_000_000))

    def problems(self) -> list[str]:
        """Every value out of its range, with what it may be."""
        whole = ("tokens", "min_tokens", "top_k", "beams", "seed")
        wrong = [
            f"--{name.replace('_', '-')} {getattr(self, name)}: must be a whole number"
            for name in whole
            if not isinstance(getattr(self, name), int | None)
        ]
        if wrong:
            return wrong
        rows = (
            ("tokens", 1 <= self.tokens <= 1_000_000, "from 1 to 1000000"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 100, "from -100 to 100"),
            ("presence_penalty", abs(self.presence_penalty) <= 100, "from -100 to 100"),
            ("min_tokens", 0 <= self.min_tokens <= self.tokens, "from 0 to --tokens"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
            ("beams", 1 <= self.beams <= 100, "from 1 to 100"),
            ("seed", self.seed >= 0, "0 or more"),
        )
        found = [
            f"--{name.replace('_', '-')} {getattr(self, name)}: must be {allowed}"
            for name, fine, allowed in rows
            if not fine
        ]
        for name in ("stop", "ban"):
            for text in getattr(self, name):
                if text == "" or not isinstance(text, str):
                    found.append(f"--{name} {text!r}: say which text")
                elif any("\ud800" <= char <= "\udfff" for char in text):
                    found.append(f"--{name} {text!r}: not valid Unicode")
        if not found and len("".join(self.ban).encode()) > MAX_BANNED_BYTES:
            found.append(f"--ban: together at most {MAX_BANNED_BYTES} bytes")
        return found

    def likeliest_only(self) -> bool:
        """So cold that only the likeliest token is left; dividing by less would overflow."""
        return self.greedy or self.temperature < 1e-4
