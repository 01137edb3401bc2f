"""What is to be measured. No torch here, so that a mistake is told at once."""

from dataclasses import dataclass

from nanolm.errors import did_you_mean
from nanolm.formats import readable
from nanolm.training.settings import CHOICES, DEFAULT_FAMILY

PEERS = ("transformers",)
SECONDS = (0.01, 3600.0)


@dataclass(frozen=True)
class Request:
    """What `nanolm bench` was asked for."""

    presets: tuple[str, ...] = ()  # none: those that fit the device
    family: str = DEFAULT_FAMILY
    device: str = "auto"
    seconds: float = 3.0  # for each number
    against: str | None = None
    profile: bool = False
    scale: tuple[int, ...] = ()  # numbers of processes to reckon with; none: measure this machine
    bandwidth: float = 50.0  # between two of them, in GB/s

    def problems(self) -> list[str]:
        """Everything that is wrong, each with what there is."""
        asked = [("--preset", preset, CHOICES["preset"]) for preset in self.presets]
        asked += [
            ("--family", self.family, CHOICES["family"]),
            ("--device", self.device, CHOICES["device"]),
        ]
        if self.against is not None:
            asked.append(("--against", self.against, PEERS))
        found = [
            f"{flag} {word}: there is {', '.join(known)}{did_you_mean(word, list(known))}"
            for flag, word, known in asked
            if word not in known
        ]
        if not all(1 <= count <= 100_000 for count in self.scale):
            found.append("--scale: give numbers of processes, such as 1,8,64")
        if self.scale and (self.against or self.profile):
            found.append("--scale cannot be with --against or --profile: leave out one")
        if not 0.001 <= self.bandwidth <= 100_000:
            found.append(f"--bandwidth {self.bandwidth:g}: must be from 0.001 to 100000, in GB/s")
        least, most = SECONDS
        if not least <= self.seconds <= most:
            found.append(
                f"--seconds {self.seconds:g}: must be from {readable(least)} to {readable(most)}"
            )
        return found
