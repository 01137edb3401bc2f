"""Options made from a dataclass, listed under headings."""

import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click

from nanolm.errors import UsageError, did_you_mean
from nanolm.training.settings import CHOICES, Settings, option
from nanolm.training.trackers import TRACKERS, known

# heading -> field -> (metavar, help); an empty metavar is click's own for the type
Table = dict[str, dict[str, tuple[str, str]]]

READING = {
    "document_separator": ("TEXT", "A line that is just TEXT parts documents within a file."),
    "encoding": ("NAME", "Of files that are not UTF-8: cp1252, shift_jis, utf-16, ..."),
    "text_field": ("NAME", "Where .jsonl has its text; a.b is b within a.  [default: text]"),
    "text_column": (
        "NAME",
        "Which column of a table; a number if it has no header.  [default: text]",
    ),
}


LABELLED = {
    "text_column": ("NAME", "Where the text is: a name, a.b in .jsonl, or a number from 1."),
    "label_column": ("NAME", "Where the label is, the same way.  [default: both found]"),
    "label_file": ("FILE", "Labels in a file of their own, a line for each line of the texts."),
}


MACHINE = {
    "device": ("|".join(CHOICES["device"]), "Where to train."),
    "dtype": ("|".join(CHOICES["dtype"]), "Numbers of the large products."),
    "threads": ("", "CPU threads.  [default: as many as help]"),
    "deterministic": ("", "The same to the last bit on a GPU too; twice as slow there."),
}


class Option(click.Option):
    """An option that knows under which heading of the help it stands."""

    def __init__(self, *args: Any, heading: str = "Options", **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.heading = heading


class Command(click.Command):
    """A command whose help lists its options under their headings.

    In the environment an option has the name it has on the command line.
    """

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


class Group(click.Group):
    """A group that guesses which of its commands was meant."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(context)
        if args and not args[0].startswith("-") and args[0] not in known:
            raise click.UsageError(
                f"there is no command {args[0]!r}{did_you_mean(args[0], known)}", context
            )
        return super().resolve_command(context, args)


def options_of(kind: type, table: Table) -> Callable[[Any], Any]:
    """A decorator: one option for each field in `table`, with the type and default it has."""
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)}

    def decorate(function: Any) -> Any:
        rows = [(heading, *row) for heading, part in table.items() for row in part.items()]
        for heading, name, (metavar, text) in reversed(rows):
            types = [part for part in get_args(hints[name]) or [hints[name]] if part is not None]
            several = get_origin(hints[name]) is tuple
            default = defaults[name]
            flag = option(name)
            if types[0] is bool and default is None:  # yes, no, or as it comes
                flag += f"/--no-{flag.removeprefix('--')}"
            function = click.option(
                name,
                flag,
                cls=Option,
                heading=heading,
                type=types[0],
                is_flag=types[0] is bool,
                default=default,
                multiple=several,
                show_default=default not in (None, False, "auto", ()),
                metavar=metavar or None,
                help=text,
            )(function)
        return function

    return decorate


def run_options(kind: type[Settings]) -> Callable[[Any], Any]:
    """A decorator: what every command that trains takes besides its settings."""
    about: dict[str, dict[str, Any]] = {
        "--out": {
            "metavar": "RUN",
            "help": f"The run folder.  [default: runs/NAME-OF-{kind.texts.upper()}]",
        },
        "--resume": {
            "is_flag": True,
            "help": "Go on with the unfinished run of these settings (as without it), or say there "
            "is none.",
        },
        "--config": {
            "metavar": "FILE.toml",
            "is_eager": True,
            "expose_value": False,
            "callback": config_of(kind),
            "help": "Settings from a file, such as runs/x/config.toml; options go on top.",
        },
        "--report-to": {
            "metavar": ",".join(TRACKERS),
            "default": "",
            "callback": lambda context, parameter, names: known(names),
            "help": "Send the metrics there too, while training.",
        },
        "--json": {"is_flag": True, "help": "Print the result as JSON."},
    }

    def decorate(function: Any) -> Any:
        for flag, rest in reversed(about.items()):
            names = ("as_json",) if flag == "--json" else ()
            function = click.option(flag, *names, cls=Option, heading="Run", **rest)(function)
        return function

    return decorate


def config_of(kind: type[Settings]) -> Callable[..., None]:
    """What --config does: it takes the settings of a TOML file as defaults; options and the
    environment go on top."""

    def read(context: click.Context, parameter: click.Parameter, file: str | None) -> None:
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

    return read


def unwritable(option: str, file: str | None) -> list[str]:
    """What is wrong with a file that is to be written, told before any work is done."""
    if file is None or (Path(file).parent.is_dir() and not Path(file).is_dir()):
        return []
    return [f"{option} {file}: give a file in a folder that is there"]
