"""Options that several commands share, most of them made from a dataclass of settings."""

import tomllib
from collections.abc import Callable
from dataclasses import fields
from functools import partial, reduce
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click

from nanolm.errors import UsageError, did_you_mean
from nanolm.text import NAMED, TRAINABLE
from nanolm.training.settings import CHOICES, DEVICES, DTYPES, Settings, option
from nanolm.training.trackers import TRACKERS, known

Rows = dict[str, str | tuple[str, str]]  # field -> help, or (metavar, help) if not as in METAVARS
Table = dict[str, Rows]  # by heading

METAVARS = {  # of settings that are not just numbers
    **{name: "|".join(choices) for name, choices in CHOICES.items()},
    **dict.fromkeys(("encoding", "text_field", "text_column", "label_column"), "NAME"),
    **dict.fromkeys(("val", "test", "label_file"), "FILE"),
    **{"document_separator": "TEXT", "limit": "ROWS", "save_every": "STEPS", "start_from": "RUN"},
    "tokenizer": "|".join([*TRAINABLE, *NAMED, "PATH"]),
}
ENCODING: Rows = {"encoding": "Of files that are not UTF-8: cp1252, shift_jis, utf-16, ..."}
READING: Rows = {
    "document_separator": "A line that is just TEXT parts documents within a file.",
    **ENCODING,
    "text_field": "Where .jsonl has its text; a.b is b within a.  [default: text]",
    "text_column": "Which column of a table; a number if it has no header.  [default: text]",
}
LABEL_COLUMNS: Rows = {
    "label_column": "Where the label is, the same way.  [default: both found]",
    "label_file": "Labels in a file of their own, a line for each line of the texts.",
}
LABELLED: Rows = {
    "text_column": "Where the text is: a name, a.b in .jsonl, or a number from 1.",
    **LABEL_COLUMNS,
    **ENCODING,
}
AVERAGE = "Decay of the moving average of the weights that is evaluated and saved."
MACHINE: Rows = {
    "device": "Where to train.",
    "dtype": "Numbers of the large products.",
    "threads": "CPU threads.  [default: as many as help]",
    "deterministic": "The same to the last bit on a GPU too; twice as slow there.",
}


class Option(click.Option):
    def __init__(self, *args: Any, heading: str = "Options", **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.heading = heading


class Command(click.Command):
    """Its help has headings; in the environment, options are named as on the command line."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        for parameter in self.params:
            if isinstance(parameter, click.Option) and context.auto_envvar_prefix:
                name = max(parameter.opts, key=len).lstrip("-").replace("-", "_").upper()
                parameter.envvar = f"{context.auto_envvar_prefix}_{name}"
        return super().parse_args(context, args)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            row = parameter.get_help_record(context)
            if row is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "heading", "Options"), []).append(row)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class CommandGroup(click.Group):
    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(context)
        if not args[0].startswith("-") and args[0] not in known:
            guess = did_you_mean(args[0], known)
            raise click.UsageError(f"there is no command {args[0]!r}{guess}", context)
        return super().resolve_command(context, args)


def combined(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """All of them as one decorator; the help lists them in this order."""
    return lambda function: reduce(lambda inner, add: add(inner), reversed(decorators), function)


def options_of(kind: type, table: Table) -> Callable[[Any], Any]:
    """A decorator: one option for each field in `table`, with the type and default it has."""
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)}

    def option_of(heading: str, name: str, row: str | tuple[str, str]) -> Callable[[Any], Any]:
        metavar, text = row if isinstance(row, tuple) else (METAVARS.get(name), row)
        plain = next(part for part in get_args(hints[name]) or [hints[name]] if part is not None)
        default, flag = defaults[name], option(name)
        if plain is bool and default is None:  # yes, no, or chosen automatically
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
            help=text,
        )

    return combined(*(option_of(head, *row) for head in table for row in table[head].items()))


json_option = partial(click.option, "--json", "as_json", is_flag=True)
device_option = partial(
    click.option, "--device", metavar="|".join(DEVICES), default="auto", help="Where to run it."
)
dtype_option = partial(click.option, "--dtype", metavar="|".join(DTYPES), default="auto")
run_option = partial(click.option, cls=Option, heading="Run")


def run_options(kind: type[Settings], table: Table) -> Callable[[Any], Any]:
    """A decorator: the settings in `table`, and what every command that trains takes besides."""
    folder = f"runs/NAME-OF-{kind.texts.upper()}"
    return combined(
        options_of(kind, table),
        run_option("--out", metavar="RUN", help=f"The run folder.  [default: {folder}]"),
        run_option("--resume", is_flag=True, help="Fail if there is no unfinished run to resume."),
        run_option(
            "--config",
            metavar="FILE.toml",
            is_eager=True,
            expose_value=False,
            callback=partial(read_config, kind),
            help="Settings from a file, such as runs/x/config.toml; options override it.",
        ),
        run_option(
            "--report-to",
            metavar=",".join(TRACKERS),
            default="",
            callback=lambda context, parameter, names: known(names),
            help="Send the metrics there too, while training.",
        ),
        json_option(cls=Option, heading="Run", help="Print the result as JSON."),
    )


def read_config(
    kind: type[Settings], context: click.Context, parameter: click.Parameter, file: str | None
) -> None:
    """Take the settings in a TOML file as defaults; options and the environment override them."""
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
    return [] if value in choices else [f"{flag} {value}: there is {', '.join(choices)}"]


def unwritable(option: str, file: str | None) -> list[str]:
    """What is wrong with a file that is to be written, found before any work is done."""
    if file is None or (Path(file).parent.is_dir() and not Path(file).is_dir()):
        return []
    return [f"{option} {file}: give a file in a folder that is there"]
