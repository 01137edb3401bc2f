"""Tab completion in the shell, as click provides it."""

import subprocess
from pathlib import Path

import pytest
from conftest import Cli, program

COMPLETED = {  # the words before the cursor, and what may follow
    "nanolm tr": ["plain,train", "plain,train-pairs", "plain,translate"],
    "nanolm tokenizer c": ["plain,compare"],
    "nanolm train --drop": ["plain,--dropout"],  # not on the short help
    "nanolm train --preset mi": ["plain,micro", "plain,mini"],
    "nanolm train x.txt --device c": ["plain,cpu", "plain,cuda"],
    "nanolm tokenizer train --tokenizer b": ["plain,bpe", "plain,byte"],
    "nanolm train nov": ["file,nov"],
    "nanolm train x.txt --val v": ["file,v"],
    "nanolm data check t": ["file,t"],
    "nanolm sample ru": ["dir,ru"],
    "nanolm train --config none.toml --pl": ["plain,--plan"],
    "nanolm train --resu": [],  # accepted, but no longer shown
    "nanolm nothing --x": [],
}


@pytest.mark.parametrize(("typed", "expected"), COMPLETED.items(), ids=COMPLETED)
def test_words(typed: str, expected: list[str], cli: Cli) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    shown = cli(environment={"_NANOLM_COMPLETE": "bash_complete", **words})
    assert (shown.returncode, shown.stdout.split(), shown.stderr) == (0, expected, "")


@pytest.mark.parametrize(
    ("shell", "cursor", "expected"),
    [("zsh", "1", "plain\ntrain\nTrain a "), ("fish", "tr", "plain,train\tTrain a ")],
)
def test_other_shells(shell: str, cursor: str, expected: str, cli: Cli) -> None:
    words = {"COMP_WORDS": "nanolm tr", "COMP_CWORD": cursor}
    assert cli(environment={"_NANOLM_COMPLETE": f"{shell}_complete", **words}).stdout.startswith(
        expected
    )
    source = cli(environment={"_NANOLM_COMPLETE": f"{shell}_source"}).stdout
    assert f"_NANOLM_COMPLETE={shell}_complete" in source


def test_in_bash(tmp_path: Path) -> None:
    """The script that users put into ~/.bashrc, run by bash."""
    nanolm = tmp_path / "nanolm"
    nanolm.write_text(f'#!/bin/sh\nexec {subprocess.list2cmdline(program())} "$@"\n')
    nanolm.chmod(0o755)
    script = f"""
        eval "$(_NANOLM_COMPLETE=bash_source {nanolm})"
        COMP_WORDS=(nanolm fine) COMP_CWORD=1
        _nanolm_completion {nanolm}
        echo "${{COMPREPLY[@]}}"
    """
    shown = subprocess.run(["bash", "-c", script], capture_output=True, encoding="utf-8")
    assert shown.stdout == "finetune-sentiment finetune\n", shown.stderr
