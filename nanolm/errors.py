"""What can go wrong for a user, each with the exit code that scripts rely on.

A message says what was wrong, where, and what to type instead; `nanolm.cli` prints it and
nothing else. Anything that is not one of these is a bug of ours (exit code 1).
"""

from difflib import get_close_matches

from nanolm.formats import abridged

LONGEST_MESSAGE = 4_000  # characters; what is quoted may come from a file, and be of any length
LONGEST_WORD, MOST_KNOWN = 100, 1_000  # to look for what was meant; it takes the square of that


class NanolmError(Exception):
    exit_code = 1  # base of every error that is the user's to mend

    def __init__(self, message: str = "") -> None:
        super().__init__(abridged(message, LONGEST_MESSAGE))


class UsageError(NanolmError):
    exit_code = 2  # a wrong argument, or a path that does not exist


class DataError(NanolmError):
    exit_code = 3  # bad text or configuration, or a run that is in use or finished


class ModelError(NanolmError):
    exit_code = 4  # no valid model or checkpoint where one was expected


class Diverged(NanolmError):
    exit_code = 5  # the loss left the finite numbers and did not come back


class OutOfMemory(NanolmError):
    exit_code = 6  # the model or batch does not fit into memory


class DiskFull(NanolmError):
    exit_code = 7  # a file could not be written; what was there before is intact


class TooLittleTime(NanolmError):
    exit_code = 8  # the time was over before a model could learn anything
    stopped = "too little time"  # as the result of such a run has it


class PeerLost(NanolmError):
    exit_code = 75  # another process of a training that has many is gone; all can begin again


class Interrupted(NanolmError):
    exit_code = 130  # Ctrl-C, where there was nothing to save or to go on with


def out_of_memory(error: Exception) -> bool:
    """Python's, CUDA's, and torch's on a CPU, which is a RuntimeError like any other."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


class ToldElsewhere(NanolmError):
    """Another process has told what is wrong."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


# A ModelError, where the weights are finite and what comes of them is not.
NOT_FINITE = "the model's outputs are not finite: its weights are damaged, or too large"


def refuse(problems: list[str]) -> None:
    """Raise one UsageError that lists all `problems`, if there are any."""
    if problems:
        raise UsageError("\n".join(problems))


def did_you_mean(word: str, known: list[str]) -> str:
    """A question to end a message with, where something close to `word` is known."""
    some = [name for name in known[:MOST_KNOWN] if len(name) <= LONGEST_WORD]
    close = get_close_matches(str(word)[:LONGEST_WORD], some, n=1)
    return f"; did you mean {close[0]}?" if close else ""
