"""What to measure. Imports no torch, so that mistakes are reported at once."""

from dataclasses import dataclass

from nanolm.errors import did_you_mean
from nanolm.training.settings import CHOICES, DEFAULT_FAMILY

LLAMA_CPP = "llama.cpp"
PEERS = ("transformers", "nanogpt", LLAMA_CPP)
SMALLEST = {"context": 32, "layers": 1, "vocab": 256, "batch": 1}  # of what can grow


@dataclass(frozen=True)
class BenchSettings:
    preset: tuple[str, ...] = ()  # if empty, those that suit the device
    family: str = DEFAULT_FAMILY
    device: str = "auto"
    seconds: float = 3.0  # per measurement
    against: str | None = None
    profile: bool = False
    grow: str | None = None  # a key of SMALLEST, to measure how the cost grows with it
    scale: str | None = None  # process counts to estimate; None to measure this machine
    bandwidth: float = 50.0  # between two processes, in GB/s

    def process_counts(self) -> list[int]:
        """The numbers in `scale`; 0 for anything that is not a number."""
        parts = [] if self.scale is None else map(str.strip, self.scale.split(","))
        return [int(part) if part.isdecimal() and len(part) < 9 else 0 for part in parts]

    def problems(self) -> list[str]:
        given: list[tuple[str, str | None]] = [("preset", name) for name in self.preset]
        given += [("family", self.family), ("device", self.device)]
        given += [("against", self.against), ("grow", self.grow)]
        own = {"against": PEERS, "grow": tuple(SMALLEST)}
        problems = []
        for name, value in given:
            if value is not None and value not in (choices := own.get(name) or CHOICES[name]):
                guess = did_you_mean(value, list(choices))
                problems.append(f"--{name} {value}: choose from {', '.join(choices)}{guess}")
        if not all(1 <= count <= 100_000 for count in self.process_counts()):
            problems.append("--scale: use process counts, such as 1,8,64")
        alone = [f"--{name}" for name in ("scale", "grow") if getattr(self, name) is not None]
        others = [f"--{name}" for name in ("against", "profile") if getattr(self, name)]
        if alone and len(alone + others) > 1:
            problems.append(
                f"{alone[0]} cannot be combined with {' and '.join([*alone[1:], *others])}"
            )
        if self.grow and len(self.preset) > 1:
            problems.append("--grow: choose one --preset")
        if not 0.001 <= self.bandwidth <= 100_000:
            problems.append(f"--bandwidth {self.bandwidth:g}: must be from 0.001 to 100000 GB/s")
        if not 0.01 <= self.seconds <= 3600:
            problems.append(f"--seconds {self.seconds:g}: must be from 0.01 to 3,600")
        return problems
