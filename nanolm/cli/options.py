"""Options that several commands share, most of them made from a dataclass of settings."""

import re
import tomllib
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial, reduce
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from nanolm.errors import UsageError, did_you_mean
from nanolm.text import NAMED, TRAINABLE
from nanolm.training.settings import CHOICES, DEVICES, DTYPES, Settings, option
from nanolm.training.trackers import TRACKERS, known

Rows = dict[str, str | tuple[str, str]]  # field -> help, or (metavar, help) if not in METAVARS
Table = dict[str, Rows]  # by heading

METAVARS = {  # of settings that are not plain numbers
    **{name: "|".join(choices) for name, choices in CHOICES.items()},
    **dict.fromkeys(("encoding", "text_field", "text_column", "label_column"), "NAME"),
    **dict.fromkeys(("val", "test", "label_file"), "FILE"),
    **{"document_separator": "TEXT", "limit": "ROWS", "save_every": "STEPS", "start_from": "RUN"},
    **{"preset": "NAME", "tokenizer": "NAME|PATH"},
}
COMPLETIONS = {**CHOICES, "tokenizer": (*TRAINABLE, *NAMED)}  # where the metavar lists no choices
FORMER = {"text_field"}  # settings whose options are accepted, but no longer shown
ENCODING: Rows = {"encoding": "Encoding of files that are not UTF-8, such as cp1252 or utf-16."}
READING: Rows = {
    "document_separator": "A line containing only TEXT separates documents within a file.",
    **ENCODING,
    "text_column": "Column or field that holds the text: a name, a path such as a.b in .jsonl, or "
    "a number if a table has no header.  [default: text]",
    "text_field": "",
}
LABEL_COLUMNS: Rows = {
    "label_column": "Column or field that holds the label.  [default: detected]",
    "label_file": "Separate file with the labels, one line per text.",
}
LABELED: Rows = {
    "text_column": "Column or field that holds the text: a name, a path such as a.b in .jsonl, or "
    "a column number counted from 1.  [default: detected]",
    **LABEL_COLUMNS,
    **ENCODING,
}
PAIR_COLUMNS: Rows = {
    "source_column": ("NAME", "Column or field of the source.  [default: detected]"),
    "target_column": ("NAME", "Column or field of the target.  [default: detected]"),
    "reverse": "Swap source and target.",
}
ADAPTER = ("FOLDER", "LoRA adapter to merge into the model first, in PEFT's format.")
AVERAGE = "Decay of the exponential moving average (EMA) of weights that is evaluated and saved."
PRECISION = "Precision of matrix multiplications."
MACHINE: Rows = {
    "device": "Device to train on.",
    "dtype": ("|".join(DTYPES), PRECISION),
    "threads": "Number of CPU threads.  [default: chosen for the model]",
    "deterministic": "Make results bit-identical on a GPU too, at about half the speed.",
}


class Option(click.Option):
    def __init__(self, *args: Any, heading: str = "Options", **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.heading = heading


class Text(click.types.StringParamType):
    """Completes in the shell what the metavar of an argument or option asks for."""

    def shell_complete(
        self, context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        asked = parameter.metavar or (parameter.name or "").upper()
        words = [word for word in asked.split("|") if re.fullmatch(r"[a-z0-9_-]+", word)]
        words = words or [*COMPLETIONS.get(parameter.name or "", ())]
        items = [CompletionItem(word) for word in words if word.startswith(incomplete)]
        if items or not (kind := re.search("FILE|CORPUS|DATA|PATH|RUN|DIR|FOLDER", asked)):
            return items
        folder = kind.group() in ("RUN", "DIR", "FOLDER")
        return [CompletionItem(incomplete, type="dir" if folder else "file")]


def show_all_help(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        context.meta["help_all"] = True
        click.echo(context.get_help())
        context.exit()


HELP_ALL = Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_all_help,
    help="Show all options and exit.",
)


class Command(click.Command):
    """A command whose help has headings. If `common` names options, `--help` shows only those and
    `--help-all` shows the rest. The environment names options as the command line does."""

    def __init__(self, *args: Any, common: Collection[str] = (), **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.common = common
        for parameter in self.params:
            if parameter.type is click.STRING:
                parameter.type = Text()
        if common and HELP_ALL not in self.params:
            self.params.append(HELP_ALL)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        for parameter in self.params:
            if isinstance(parameter, click.Option) and context.auto_envvar_prefix:
                name = max(parameter.opts, key=len).lstrip("-").replace("-", "_").upper()
                parameter.envvar = f"{context.auto_envvar_prefix}_{name}"
        weighted = [arg for arg in args if arg.startswith("-:")]  # stdin with a weight, no option
        if weighted and "--" not in args:
            args = [*(arg for arg in args if arg not in weighted), "--", *weighted]
        return super().parse_args(context, args)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        shown = None if "help_all" in context.meta else self.common
        for parameter in self.get_params(context):
            row = parameter.get_help_record(context)
            general = parameter in (HELP_ALL, self.get_help_option(context))
            if row is None or not isinstance(parameter, click.Option):
                continue
            if general or not shown or parameter.name in shown:
                sections.setdefault(getattr(parameter, "heading", "Options"), []).append(row)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class CommandGroup(click.Group):
    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known, unsure = self.list_commands(context), context.resilient_parsing
        if not unsure and not args[0].startswith("-") and args[0] not in known:
            guess = did_you_mean(args[0], known)
            raise click.UsageError(f"there is no command {args[0]!r}{guess}", context)
        return super().resolve_command(context, args)


def combined(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator for all of them; the help lists them in this order."""
    return lambda function: reduce(lambda inner, add: add(inner), reversed(decorators), function)


def options_of(kind: type, table: Table) -> Callable[[Any], Any]:
    """A decorator: one option for each field in `table`, with the type and default of the field."""
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)}

    def option_of(heading: str, name: str, row: str | tuple[str, str]) -> Callable[[Any], Any]:
        metavar, text = row if isinstance(row, tuple) else (METAVARS.get(name), row)
        plain = next(part for part in get_args(hints[name]) or [hints[name]] if part is not None)
        default, flag = defaults[name], option(name)
        if plain is bool and default is None:  # on, off, or chosen automatically
            flag += f"/--no-{flag.removeprefix('--')}"
        return click.option(
            name,
            flag,
            cls=Option,
            heading=heading,
            type=plain,
            is_flag=plain is bool,
            default=default,
            multiple=get_origin(hints[name]) is tuple,
            show_default=default not in (None, False, "auto", ()),
            metavar=metavar or None,
            hidden=name in FORMER,
            help=text,
        )

    return combined(*(option_of(head, *row) for head in table for row in table[head].items()))


json_option = partial(click.option, "--json", "as_json", is_flag=True)
device_option = partial(
    click.option, "--device", metavar="|".join(DEVICES), default="auto", help="Device to run on."
)
dtype_option = partial(
    click.option, "--dtype", metavar="|".join(DTYPES), default="auto", help="Weight precision."
)
adapter_option = partial(
    click.option, "--adapter", metavar=ADAPTER[0], help="LoRA adapter to merge, in PEFT's format."
)
special_tokens_option = partial(
    click.option,
    "--special-tokens",
    is_flag=True,
    help="Recognize special tokens such as <|im_start|>, which are otherwise plain text.",
)
run_option = partial(click.option, cls=Option, heading="Run")


def quantization_options() -> Callable[[Any], Any]:
    """A decorator: the flags for `chosen_bits`."""
    texts = {"--int8": "8-bit weights; faster for large models on a CPU."}
    texts["--int4"] = "4-bit weights; faster still, but less accurate."
    return combined(*(click.option(flag, is_flag=True, help=texts[flag]) for flag in texts))


def chosen_bits(int8: bool, int4: bool, device: str) -> int | None:
    """Bits per weight; None if the weights are not quantized."""
    if int8 and int4:
        raise UsageError("--int8 and --int4: choose one")
    if (int8 or int4) and device != "cpu":
        flag = "--int8" if int8 else "--int4"
        raise UsageError(
            f"{flag} works only on a CPU, not on {device}; omit it or add --device cpu"
        )
    return 8 if int8 else 4 if int4 else None


def run_options(kind: type[Settings], table: Table) -> Callable[[Any], Any]:
    """A decorator: the settings in `table` and the options of every command that trains."""
    folder = f"runs/NAME-OF-{kind.texts.upper()}"
    return combined(
        options_of(kind, table),
        run_option("--out", metavar="RUN", help=f"Run folder.  [default: {folder}]"),
        run_option("--resume", is_flag=True, hidden=True, expose_value=False),  # always happens
        run_option(
            "--config",
            metavar="FILE.toml",
            is_eager=True,
            expose_value=False,
            callback=partial(read_config, kind),
            help="Read settings from a file such as runs/x/config.toml; options override it.",
        ),
        run_option(
            "--report-to",
            metavar=",".join(TRACKERS),
            default="",
            callback=lambda context, parameter, names: known(names),
            help="Also send metrics to these trackers during training.",
        ),
        json_option(cls=Option, heading="Run", help="Print the result as JSON."),
    )


def read_config(
    kind: type[Settings], context: click.Context, parameter: click.Parameter, file: str | None
) -> None:
    """Use the settings in a TOML file as defaults; options and the environment override them."""
    if file is None:
        return
    try:
        values = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        kind.from_dict(values)
    except FileNotFoundError:
        raise UsageError(f"--config {file} does not exist") from None
    except (OSError, ValueError, UsageError) as error:
        raise UsageError(f"--config {file} cannot be used:\n{error}") from None
    context.default_map = {**(context.default_map or {}), **values}


def unknown(flag: str, value: str, choices: tuple[str, ...]) -> list[str]:
    return [] if value in choices else [f"{flag} {value}: choose from {', '.join(choices)}"]


def unwritable(option: str, file: str | None) -> list[str]:
    """The problem with an output file, found before any work is done."""
    if file is None or (Path(file).parent.is_dir() and not Path(file).is_dir()):
        return []
    return [f"{option} {file}: name a file in an existing folder"]
