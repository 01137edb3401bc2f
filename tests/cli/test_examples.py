"""The help of each command fits a screen, and its examples work as they are."""

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from nanolm.cli.main import cli


def commands(group: click.Group, path: str = "nanolm") -> Iterator[tuple[str, click.Command]]:
    yield path, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


COMMANDS = dict(commands(cli))
EXAMPLES = [
    (where, line.strip())
    for where, command in COMMANDS.items()
    for line in (command.help or "").splitlines()
    if re.match(r" *(nanolm|torchrun .*-m nanolm) ", line)
]


def test_every_command_has_one() -> None:
    without = set(COMMANDS) - {where for where, _ in EXAMPLES}
    assert without <= {"nanolm tokenizer", "nanolm data", "nanolm doctor"}


@pytest.mark.parametrize(("where", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example(where: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arguments and options exist, and none is missing."""
    typed = re.split(r"  +", line)[0]  # without its explanation
    for part in typed.split(" | "):
        words = shlex.split(part.partition(" > ")[0])
        parse(words[words.index("nanolm") + 1 :], monkeypatch)


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command: click.Command = cli
    context: click.Context | None = None
    while True:
        for option in command.params:
            if option.name == "config":  # its callback would read the file
                monkeypatch.setattr(option, "callback", None)
        context = command.make_context(command.name, words, parent=context)
        if not isinstance(command, click.Group) or not context._protected_args:
            return
        rest = [*context._protected_args, *context.args]
        _, found, words = command.resolve_command(context, rest)
        assert found
        command = found


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("where", COMMANDS)
def test_help_fits_a_screen(where: str, width: int) -> None:
    words = where.split()[1:]
    runner = CliRunner(env={"COLUMNS": str(width)})
    shown = runner.invoke(cli, [*words, "--help"], prog_name="nanolm").output.splitlines()
    assert shown[0].startswith(f"Usage: {where} ")
    assert len(shown) <= (60 if where == "nanolm train" else 80)
    command = COMMANDS[where]
    if not getattr(command, "common", ()):
        return
    everything = runner.invoke(cli, [*words, "--help-all"], prog_name="nanolm").output
    names = {each.name: f"  {max(each.opts, key=len)}" for each in options(command)}
    assert command.common <= set(names)  # type: ignore[attr-defined]
    assert all(name in everything for name in names.values())
    hidden = [
        name for name in names.values() if not any(map(re.compile(rf"{name}\b").match, shown))
    ]
    assert len(hidden) > 10


def options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
