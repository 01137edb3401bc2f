"""Errors that users can fix, each with the exit code that scripts rely on.

A message says what is wrong, where, and what to type instead. `nanolm.cli` prints the message and
no traceback. Any other exception is a bug in nanolm (exit code 1).
"""

from difflib import get_close_matches

from nanolm.formats import abridged

LONGEST_MESSAGE = 4_000  # characters; it may quote text of any length
LONGEST_WORD, MOST_KNOWN = 100, 1_000  # for suggestions, which take quadratic time


class NanolmError(Exception):
    exit_code = 1  # base class of all errors that users can fix

    def __init__(self, message: str = "") -> None:
        super().__init__(abridged(message, LONGEST_MESSAGE))


class UsageError(NanolmError):
    exit_code = 2  # a wrong argument, or a path that does not exist


class DataError(NanolmError):
    exit_code = 3  # bad text or configuration, or a run that is in use or finished


class ModelError(NanolmError):
    exit_code = 4  # no valid model or checkpoint where one was expected


class Diverged(NanolmError):
    exit_code = 5  # the loss became non-finite and did not recover


class OutOfMemory(NanolmError):
    exit_code = 6  # the model or batch does not fit in memory


class DiskFull(NanolmError):
    exit_code = 7  # a file could not be written; existing files are intact


class TooLittleTime(NanolmError):
    exit_code = 8  # time ran out before the model could learn anything
    stopped = "too little time"  # in the result of such a run


class PeerLost(NanolmError):
    exit_code = 75  # a process of a distributed run died; the run can be restarted


class Interrupted(NanolmError):
    exit_code = 130  # Ctrl-C, with nothing to save or resume


def out_of_memory(error: Exception) -> bool:
    """Whether it is Python's, CUDA's or, on a CPU, torch's error, which is a RuntimeError."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


class ReportedElsewhere(NanolmError):
    """Another process has already reported the error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


# A ModelError for finite weights that produce non-finite logits.
NOT_FINITE = "the model's outputs are not finite; its weights are damaged or too large"


def refuse(problems: list[str]) -> None:
    """Raise one UsageError that lists all `problems`, if there are any."""
    if problems:
        raise UsageError("\n".join(problems))


def did_you_mean(word: str, known: list[str]) -> str:
    """The end of a message that suggests the known name closest to `word`, if any."""
    some = [name for name in known[:MOST_KNOWN] if len(name) <= LONGEST_WORD]
    close = get_close_matches(str(word)[:LONGEST_WORD], some, n=1)
    return f"; did you mean {close[0]}?" if close else ""
