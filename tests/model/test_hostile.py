"""An untrusted folder cannot run code or allocate much, and every fault is reported.

Run as a program, this file loads hostile folders and watches itself do it.
"""

import contextlib
import json
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hostile_gguf
import pytest
import torch
from conftest import Cli, Tally
from hostile import (
    CASES,
    CONFIG,
    EVERY,
    EVIL,
    GOOD_SEQ2SEQ,
    HARMLESS,
    Payload,
    config,
    rewrite,
    save_good,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import nanolm
from nanolm.errors import ModelError
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, configure
from nanolm.model.huggingface import load_seq2seq, save_model
from nanolm.model.stored import WEIGHTS
from nanolm.runs.folder import model_tokenizers
from nanolm.text.tokenizer import train_tokenizer

SPARE = 64_000_000  # bytes that a load may use besides twice the size on disk, for small JSON
ROOM = 1 << 30  # bytes of address space; larger allocations fail
PATIENCE = 20  # seconds


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in EVERY}
    for name, folder in folders.items():
        save_good(name, folder)
    return folders


@pytest.fixture(scope="module")
def root(good: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them, and the file that an escape would reach."""
    root = tmp_path_factory.mktemp("hostile")
    shutil.copy(good["qwen3"] / WEIGHTS, root / "outside.safetensors")
    for name, damage in [*HARMLESS.items(), *((name, case[0]) for name, case in CASES.items())]:
        damage(shutil.copytree(good[family_of(name)], root / name))
    return root


def family_of(name: str) -> str:
    """The family that the name of a case begins with."""
    family = name.split()[0].rstrip(",")
    return family if family in EVERY else "qwen3"


def load(folder: Path, family: str) -> object:
    if (folder / hostile_gguf.FILE).exists():
        return nanolm.load(folder / hostile_gguf.FILE)
    if family in GOOD_SEQ2SEQ:
        return load_seq2seq(folder), model_tokenizers(folder)
    return nanolm.load(folder)


# Watched ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of loading a folder."""

    kind: str  # of the error, if any
    message: str
    seen: list[str]  # events that must never happen
    grown: int  # peak memory in bytes
    seconds: float


class Hung(BaseException):
    """Not caught anywhere in nanolm."""


def peak() -> int:
    """Peak memory since the last reset. (`getrusage` starts with that of the parent process.)"""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+)", status)[0]) * 1024


def watch(root: Path) -> None:
    """Load each folder in `root`, then do what is forbidden; print each result."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        ran = event in ("pickle.find_class", "os.system", "os.exec", "subprocess.Popen")
        if event in ("exec", "compile", "import"):  # from a folder or a string
            foreign = f"{re.escape(str(root))}|{EVIL}|<string>"
            ran = re.search(foreign, str(arguments[:2])) is not None
        if ran or (event == "open" and "outside" in str(arguments[0])):
            seen.append(event)

    def hang(*_: object) -> None:
        raise Hung

    def watched(name: str, action: Callable[[], object]) -> None:
        seen.clear()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, started = peak(), time.monotonic()
        signal.alarm(PATIENCE)
        kind, message = "", ""
        try:
            action()
        except BaseException as error:
            kind, message = type(error).__name__, str(error)
        signal.alarm(0)
        seen.extend(["executed"] * (root / "executed").exists())
        outcome = Outcome(kind, message, seen, peak() - before, time.monotonic() - started)
        print(json.dumps({name: asdict(outcome)}), flush=True)  # noqa: T201

    for name in ("good", "a tokenizer that panics"):  # which needs another library
        with contextlib.suppress(BaseException):
            nanolm.load(root / name)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, hang)
    sys.addaudithook(hook)
    for name in (*HARMLESS, *CASES):
        watched(name, partial(load, root / name, family_of(name)))
    forbidden: dict[str, Callable[[], object]] = {
        "unpickle": lambda: pickle.loads(pickle.dumps(Payload(root / "good"))),  # noqa: S301
        "run": lambda: runpy.run_path(str(root / "with code" / f"{EVIL}.py")),
        "open": lambda: (root / "outside.safetensors").read_bytes(),
        "allocate": lambda: b"x" * (2 * SPARE),
        "reserve": lambda: torch.empty(ROOM),
    }
    for name, action in forbidden.items():
        watched(name, action)


@pytest.fixture(scope="module")
def outcomes(root: Path) -> dict[str, Outcome]:
    if sys.platform != "linux":
        pytest.skip("memory is read from /proc")
    process = subprocess.run(
        [sys.executable, __file__, str(root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    lines = map(json.loads, process.stdout.splitlines())  # up to the failure
    return {name: Outcome(**values) for line in lines for name, values in line.items()}


@pytest.mark.parametrize("name", [*HARMLESS, *CASES])
def test_a_hostile_folder_is_refused(name: str, root: Path, outcomes: dict[str, Outcome]) -> None:
    if name == "weights that nobody may read" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    outcome = outcomes[name]
    assert outcome.kind == ("ModelError" if name in CASES else ""), outcome.message
    for word in (str(root / name), *CASES[name][1]) if name in CASES else ():
        assert word in outcome.message
    assert len(outcome.message) < 6000
    assert outcome.seen == []
    assert outcome.seconds < PATIENCE / 2
    on_disk = sum(file.lstat().st_blocks * 512 for file in (root / name).iterdir())
    assert outcome.grown < 2 * on_disk + SPARE


def test_the_number_of_hostile_folders(outcomes: dict[str, Outcome], tally: Tally) -> None:
    tried = [outcome for name, outcome in outcomes.items() if name in CASES]
    refused = [each for each in tried if each.kind == "ModelError" and not each.seen]
    readable = os.geteuid() == 0  # by root: one of them is not hostile then
    tally("hostile model folders", len(tried) - readable, len(refused))


def test_the_watch_sees_what_is_forbidden(outcomes: dict[str, Outcome]) -> None:
    assert {"pickle.find_class", "executed"} <= {*outcomes["unpickle"].seen}
    assert {"compile", "exec"} <= {*outcomes["run"].seen}
    assert "open" in outcomes["open"].seen
    assert outcomes["allocate"].grown > SPARE
    assert outcomes["reserve"].kind == "RuntimeError"


@pytest.mark.parametrize("verb", ["sample", "info"])
@pytest.mark.parametrize(
    "name", ["a pickle as weights", "a tensor too few", "a link to itself as config.json"]
)
def test_the_command_line_reports_it_once(name: str, verb: str, root: Path, cli: Cli) -> None:
    done = cli(verb, root / name)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"error: {root / name}")
    assert all(line.startswith("  ") for line in done.stderr.splitlines()[1:])


# Any damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(good: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies to be damaged repeatedly."""
    place = tmp_path_factory.mktemp("scratch")
    return {name: shutil.copytree(folder, place / name) for name, folder in good.items()}


def refusal(folder: Path) -> str:
    """The reason why a folder does not load, or "" if it loads and generates text."""
    try:
        if folder.name in GOOD_SEQ2SEQ:
            ids, tokenizers = torch.tensor([[97, 98]]), model_tokenizers(folder)
            load_seq2seq(folder)(ids, torch.ones(1, 2, dtype=torch.bool), ids)
            assert all(each.encode("ab") == [97, 98] for each in tokenizers)
        else:
            nanolm.load(folder).generate("a", tokens=2, greedy=True)
    except ModelError as error:
        return str(error)
    return ""


UNREAD = {"dtype", "attn_pdrop", "embd_pdrop", "attention_dropout"}
UNREAD |= {f"{name}_token_id" for name in ("bos", "eos", "pad", "forced_eos")}
WRONG = (float("nan"), float("inf"), "1e400", -1, 10**30, "what", {"a": 1})


@pytest.mark.parametrize("family", EVERY)
def test_no_field_takes_a_wrong_value(
    family: str, good: dict[str, Path], scratch: dict[str, Path]
) -> None:
    values = json.loads((good[family] / CONFIG).read_text())
    for name in values.keys() - UNREAD:
        for wrong in (*WRONG, 0, 1.5, True) if type(values[name]) is int else WRONG:
            shutil.copy(good[family] / CONFIG, scratch[family])
            config(**{name: wrong})(scratch[family])
            # Our names are those of the options; both RoPE formats count as one.
            named = "rope" if "rope" in name else name.split("_")[-1]
            assert re.search(f"config.json: .*{named}", refusal(scratch[family])), (name, wrong)


WORDS = ["rope_type", "factor", "yarn", "linear", "llama3", "beta_slow", "layer_types", "head_dim"]
WORDS += ["rope_scaling", "rope_parameters", "n_inner", "head_width", "full_attention", "type"]
NUMBERS = st.integers(0, 40) | st.integers() | st.sampled_from([10**12, 1 << 40, 2.0, 1e-300])
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats() | st.text() | st.sampled_from(WORDS)
KEYS = st.sampled_from(WORDS) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(family=st.sampled_from(list(EVERY)), data=st.data())
def test_any_config_loads_or_is_refused(
    family: str, data: st.DataObject, good: dict[str, Path], scratch: dict[str, Path]
) -> None:
    shutil.copy(good[family] / CONFIG, scratch[family])
    shutil.copy(good[family] / WEIGHTS, scratch[family])
    known = json.loads((good[family] / CONFIG).read_text()).keys() - UNREAD
    names = st.sampled_from([*sorted(known), *WORDS, "other"])
    changes = st.dictionaries(names, VALUES | st.just(...), min_size=1, max_size=3)
    rewrite(CONFIG, **data.draw(changes))(scratch[family])
    why = refusal(scratch[family])
    assert not why or str(scratch[family]) in why


LABELS = ["id2label", "label2id", "problem_type", "window", "long_texts", "num_labels", "score"]
LABELS += ["labels", "pool", "base", "kind", "architectures", "hidden_size", "n_embd", "vocab_size"]
NAMED = st.dictionaries(st.integers(-1, 3).map(str) | KEYS, SCALARS, max_size=4)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("gpt2", "modern", "lstm")}
    for name, folder in folders.items():
        base = configure(name, vocab_size=258, layers=1, heads=2, dim=16, context=32)
        labeled = ClassifierConfig(base=base, labels=("bad", "good"), window=32)
        save_model(Classifier(labeled), folder, train_tokenizer([], "byte"))
        shutil.copy(folder / CONFIG, folder / "good")
    return folders


@settings(max_examples=300, deadline=None, derandomize=True)
@given(family=st.sampled_from(["gpt2", "modern", "lstm"]), data=st.data())
def test_any_config_of_a_classifier_loads_or_is_refused(
    family: str, data: st.DataObject, classifiers: dict[str, Path]
) -> None:
    folder = classifiers[family]
    shutil.copy(folder / "good", folder / CONFIG)
    changes = st.dictionaries(st.sampled_from(LABELS), VALUES | NAMED, min_size=1, max_size=3)
    rewrite(CONFIG, **data.draw(changes))(folder)
    try:
        nanolm.load_classifier(folder).classify("a cat")
    except ModelError as error:
        assert str(folder) in str(error)  # noqa: PT017


@settings(max_examples=300, deadline=None, derandomize=True)
@given(family=st.sampled_from(list(EVERY)), data=st.data())
def test_any_weights_load_or_are_refused(
    family: str, data: st.DataObject, good: dict[str, Path], scratch: dict[str, Path]
) -> None:
    shutil.copy(good[family] / CONFIG, scratch[family])
    contents = bytearray((good[family] / WEIGHTS).read_bytes())
    end = 8 + int.from_bytes(contents[:8], "little")
    places = st.integers(0, 7) | st.integers(8, end - 1) | st.integers(end, len(contents) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        contents[place] ^= data.draw(st.integers(1, 255))
    kept = data.draw(st.just(len(contents)) | st.integers(0, len(contents)))
    (scratch[family] / WEIGHTS).write_bytes(contents[:kept])
    why = refusal(scratch[family])
    assert not why or str(scratch[family]) in why


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_gguf_file_loads_or_is_refused(data: st.DataObject, scratch: dict[str, Path]) -> None:
    file, contents = scratch["qwen3"] / hostile_gguf.FILE, bytearray(hostile_gguf.good().bytes())
    end = len(contents) - len(hostile_gguf.good().data)
    places = st.integers(0, 200) | st.integers(0, end - 1) | st.integers(end, len(contents) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        contents[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(contents[: data.draw(st.just(len(contents)) | st.integers(0, len(contents)))])
    why = refusal(file)
    assert not why or str(file) in why


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
