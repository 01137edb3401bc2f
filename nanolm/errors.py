"""What can go wrong for a user, each with the exit code that scripts rely on.

A message says what was wrong, where, and what to type instead; `nanolm.cli` prints it and
nothing else. Anything that is not one of these is a bug of ours (exit code 1).
"""

from difflib import get_close_matches


class NanolmError(Exception):
    """Base of every error that is the user's to mend."""

    exit_code = 1


class UsageError(NanolmError):
    """A wrong argument, or a path that does not exist."""

    exit_code = 2


class DataError(NanolmError):
    """Bad text or configuration, or a run that is in use or finished."""

    exit_code = 3


class ModelError(NanolmError):
    """No valid model or checkpoint where one was expected."""

    exit_code = 4


class Diverged(NanolmError):
    """The loss left the finite numbers and did not come back."""

    exit_code = 5


class OutOfMemory(NanolmError):
    """The model or batch does not fit into memory."""

    exit_code = 6


class DiskFull(NanolmError):
    """A file could not be written; what was there before is intact."""

    exit_code = 7


class TooLittleTime(NanolmError):
    """The time was over before a model could learn anything."""

    exit_code = 8
    stopped = "too little time"  # as the result of such a run has it


class PeerLost(NanolmError):
    """Another process of a training that has many is gone; all can be begun again."""

    exit_code = 75


class Interrupted(NanolmError):
    """Ctrl-C, where there was nothing to save or to go on with."""

    exit_code = 130


class ToldElsewhere(NanolmError):
    """Another process has told what is wrong."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def refuse(problems: list[str]) -> None:
    """Raise one UsageError that lists all `problems`, if there are any."""
    if problems:
        raise UsageError("\n".join(problems))


def did_you_mean(word: str, known: list[str]) -> str:
    """A question to end a message with, where something close to `word` is known."""
    close = get_close_matches(str(word), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
