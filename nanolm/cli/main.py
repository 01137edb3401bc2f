"""The `nanolm` command: imports a subcommand, runs it, and turns errors into exit codes.

Subcommands are imported when needed, and torch only when one does its work: help must be fast.
"""

import atexit
import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from types import FrameType
from typing import NoReturn

import click

from nanolm import __version__, errors
from nanolm.cli.console import INTERRUPTED, Output, complain
from nanolm.cli.options import HELP_ALL, CommandGroup
from nanolm.files import disk_problem
from nanolm.formats import joined
from nanolm.machine import process
from nanolm.training.interrupt import StopRequest, interrupt

ERROR_GRACE = 3.0  # seconds for the first process to report the error
VERBS = (  # modules with a `command`, or the attribute named after the dash
    *("train", "train-pairs", "sweep", "sample", "translate", "finetune-sentiment", "finetune"),
    *("compare", "classify", "eval", "inspect", "serve", "report", "runs", "tokenizer", "data"),
    *("info", "export", "bench", "doctor"),
)
TRAINING = ("train", "train-pairs", "sweep", "finetune", "finetune-sentiment", "compare")
MEMORY = ("--batch", "--context", "--dim", "--preset", "--beams", "-n")  # smaller values need less
NOTHING_TRAINED = (
    "stopped before the first step; nothing was trained. Downloads and prepared text stay cached; "
    "run the same command again"
)


class ClosedPipe(Exception):
    """The reader of the output has closed it."""


class Verbs(CommandGroup):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module, _, attribute = name.partition("-")
        if name == "train-pairs":
            module, attribute = "train_pairs", ""
        verb = importlib.import_module(f"nanolm.cli.{module}")
        command: click.Command = getattr(verb, attribute or "command")
        return command

    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except BrokenPipeError:
            raise ClosedPipe from None  # click would make it exit code 1
        except (KeyboardInterrupt, Exception) as error:
            stopped = isinstance(error, KeyboardInterrupt | click.Abort)
            known = isinstance(error, errors.NanolmError | click.ClickException)
            verb = context.invoked_subcommand or ""
            if isinstance(error, Exception) and not known and errors.out_of_memory(error):
                raise errors.OutOfMemory(less_memory(self.get_command(context, verb))) from None
            # A library may have turned Ctrl-C into an error.
            if not stopped and (known or not StopRequest.missed):
                raise
            unsaved = verb in TRAINING and not StopRequest.used
            raise errors.Interrupted(NOTHING_TRAINED if unsaved else "stopped") from None


def less_memory(command: click.Command | None) -> str:
    """The message about too little memory, with the options of `command` that need less of it."""
    known = {flag for parameter in command.params for flag in parameter.opts} if command else set()
    flags = [flag for flag in MEMORY if flag in known]
    return f"out of memory; try a smaller {joined(flags, 'or')}" if flags else "out of memory"


@click.group(
    cls=Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "NANOLM",
        "max_content_width": 100,
    },
    epilog="Options can also be set with environment variables: NANOLM_TRAIN_STEPS=500 is the same "
    "as `nanolm train --steps 500`.",
)
@click.version_option(__version__, prog_name="nanolm")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train your own language model from a text file.

    \b
    nanolm train corpus.txt                 train a model on any text
    nanolm sample --prompt "Once upon"      generate text with it
    nanolm finetune-sentiment reviews.tsv   fine-tune it into a classifier
    nanolm classify RUN "A lovely film."    classify text with it
    nanolm serve runs/corpus                playground in the browser and an API
    """
    if (output := stdout()) and context.invoked_subcommand in TRAINING:
        output.raises = False  # finish training even if the output is closed
    _, count = process()
    if count > 1 and (verb := context.invoked_subcommand) not in (None, "train", "train-pairs"):
        only = "torchrun is only for `nanolm train` and `nanolm train-pairs`"
        raise errors.UsageError(f"{verb} runs in one process; {only}")


def main() -> None:
    # Waiting threads sleep instead of spinning. Next to another busy process on two cores, spinning
    # made a step of `micro` on two threads 13 times slower than on one. Sleeping avoids that, and
    # costs a fifth of the speed on an idle machine. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, Output(stream, raises=name == "stdout").as_text())
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, partial(terminate, os.getpid()))
    code = run()
    if process()[0] and code not in (0, INTERRUPTED):  # torchrun kills the others when one exits
        time.sleep(ERROR_GRACE)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit without destroying every object, which takes 0.5 s once torch is imported."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for other threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def terminate(pid: int, number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM as by default, but say so if training has not started. Forked workers have
    another `pid` and say nothing."""
    signal.signal(number, signal.SIG_DFL)
    context = click.get_current_context(silent=True)
    verb = context.find_root().invoked_subcommand if context else None
    with contextlib.suppress(RuntimeError):  # the signal interrupted another message
        if os.getpid() == pid and verb in TRAINING and not StopRequest.used:
            complain(NOTHING_TRAINED, common=True)
    os.kill(os.getpid(), number)


def stdout() -> Output | None:
    output = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return output if isinstance(output, Output) else None


def run() -> int:
    try:
        code = cli.main(prog_name="nanolm", standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        output = stdout()
        if output and output.error and not code:
            raise output.error
        return code if isinstance(code, int) else 0
    except errors.ReportedElsewhere as error:
        return error.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "nanolm"
        flag = "--help-all" if error.ctx and HELP_ALL in error.ctx.command.params else "--help"
        complain(f"{error.format_message()}\nsee `{where} {flag}`", common=True)
        return errors.UsageError.exit_code
    except (click.ClickException, errors.NanolmError) as error:
        complain(str(error), common=isinstance(error, errors.UsageError))
        return error.exit_code
    except (ClosedPipe, BrokenPipeError):
        return 0
    except OSError as error:
        name = error.filename or "a file"
        if problem := disk_problem(error):
            complain(f"{problem.what}: {name}. {problem.cure}, then run the same command again.")
            return errors.DiskFull.exit_code
        complain(f"{name}: {error.strerror or error}")
        return errors.DataError.exit_code
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, Exception) and errors.out_of_memory(error):
            complain(less_memory(None))
            return errors.OutOfMemory.exit_code
        # A library may have turned Ctrl-C into an error.
        if isinstance(error, KeyboardInterrupt | click.Abort) or StopRequest.missed:
            complain("stopped")
            return errors.Interrupted.exit_code
        traceback.print_exc()
        complain("this is a bug in nanolm; please report it with the traceback above")
        return 1
