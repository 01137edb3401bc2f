"""The knobs of sampling. No torch here, so the command line can use them for its help."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Knobs:
    """How to choose among the tokens that could come next."""

    tokens: int = 200  # at most this many new tokens
    temperature: float = 0.8  # a little below 1: fewer slips, still varied; 0 is greedy
    top_k: int | None = None  # keep the k likeliest
    top_p: float | None = None  # keep the likeliest that together reach p
    greedy: bool = False  # always the likeliest
    seed: int = 0

    def problems(self) -> list[str]:
        """Every value out of its range, with what it may be."""
        found = []
        if not 1 <= self.tokens <= 1_000_000:
            found.append(f"--tokens {self.tokens}: must be from 1 to 1000000")
        if not 0 <= self.temperature < float("inf"):
            found.append(f"--temperature {self.temperature}: must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            found.append(f"--top-k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(f"--top-p {self.top_p}: must be above 0 and at most 1")
        return found

    def likeliest_only(self) -> bool:
        """So cold that only the likeliest token is left; dividing by less would overflow."""
        return self.greedy or self.temperature < 1e-4
