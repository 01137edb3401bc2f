import hashlib
import json
import os
import re
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from commands import Commands
from conftest import TINY_MODEL, Cli, Terminal, program
from faults import wait_for_step
from loopback import Server, content, hub

import nanolm
from nanolm.text.tokenizer import train_tokenizer

SMALL = ["--layers", 1, "--heads", 2, "--dim", 16, "--context", 16, "--batch", 4]


def weights(run: Path) -> str:
    return hashlib.sha256((run / "last" / "model.safetensors").read_bytes()).hexdigest()


def test_json_is_the_last_line_and_the_only_one(cli: Cli, corpus: Path) -> None:
    shown = cli("train", corpus, *SMALL, "--steps", 12, "--json")
    assert shown.returncode == 0, shown.stderr
    result = json.loads(shown.stdout)
    assert set(result) == {
        "run",
        "steps",
        "tokens",
        "seconds",
        "setup_seconds",
        "train_loss",
        "val_loss",
        "val_bits_per_byte",
        "val_bits_per_byte_by_part",
        "best_step",
        "stopped",
    }
    assert (result["run"], result["steps"], result["tokens"]) == ("runs/mine", 12, 12 * 64)
    assert result["stopped"] == "steps"


def test_progress_goes_to_stderr_in_plain_lines(cli: Cli, corpus: Path) -> None:
    shown = cli("train", corpus, *SMALL, "--steps", 12)
    assert shown.stdout.startswith("runs/mine: ")
    assert shown.stdout.count("\n") == 1
    assert "\x1b" not in shown.stderr
    assert re.search(
        r"100%  step 12 \(epoch [0-9.]+\)  loss .*  val .* bits/byte  .* tokens/s  .* remaining",
        shown.stderr,
    )
    assert "device: cpu (" in shown.stderr


def test_a_saved_config_repeats_the_run(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    cli("train", corpus, *SMALL, "--steps", 12, "--tokenizer", "char", "--seed", 7)
    config = tmp_path / "runs/mine/config.toml"
    assert tomllib.loads(config.read_text())["seed"] == 7
    again = cli("train", "--config", config)
    assert again.returncode == 0, again.stderr
    assert weights(tmp_path / "runs/mine") == weights(tmp_path / "runs/mine-2")
    assert config.read_text() == (tmp_path / "runs/mine-2/config.toml").read_text()
    # Options override the file, and the settings that depend on them.
    changed = cli("train", "--config", config, "--epochs", 0.1, "--tokenizer", "bpe", "--json")
    assert changed.returncode == 0, changed.stderr
    settings = tomllib.loads((tmp_path / "runs/mine-3/config.toml").read_text())
    assert (settings["tokenizer"], settings["seed"]) == ("bpe", 7)
    assert settings["steps"] != 12


def test_the_early_context_of_a_saved_config_can_be_overridden(
    cli: Cli, corpus: Path, tmp_path: Path
) -> None:
    shape = ("--context", 32, "--early-context", 16, "--tokenizer", "char", "--steps", 2)
    assert cli("train", corpus, *SMALL, *shape).returncode == 0
    config = tmp_path / "runs/mine/config.toml"
    assert tomllib.loads(config.read_text())["early_context"] == 16
    for changed in (("--context", 20), ("--teachers", 1), ("--family", "lstm")):
        shown = cli("train", "--config", config, *changed, "--out", f"runs/{changed[0][2:]}")
        assert shown.returncode == 0, shown.stderr
        settings = tomllib.loads((tmp_path / f"runs/{changed[0][2:]}/config.toml").read_text())
        assert "early_context" not in settings


def test_a_config_with_an_unknown_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("stepz = 3\nlayres = 2\nseed = 'one'\n")
    shown = cli("train", "x.txt", "--config", "c.toml")
    assert shown.returncode == 2
    assert re.search(r"stepz: .*did you mean steps\?", shown.stderr)
    assert re.search(r"layres: .*did you mean layers\?", shown.stderr)
    assert re.search("seed = 'one': .*number", shown.stderr)


def test_settings_from_the_environment(cli: Cli, corpus: Path) -> None:
    shown = cli("train", corpus, *SMALL, "--json", environment={"NANOLM_TRAIN_STEPS": "3"})
    assert json.loads(shown.stdout)["steps"] == 3


def test_the_environment_overrides_a_file(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("minutes = 9\n")
    shown = cli(
        "train", corpus, *SMALL, "--config", "c.toml", "--json",
        environment={"NANOLM_TRAIN_STEPS": "3"},
    )  # fmt: skip
    assert json.loads(shown.stdout)["steps"] == 3
    shown = cli(
        "train", corpus, *SMALL, "--steps", 2, "--json", environment={"NANOLM_TRAIN_MINUTES": "9"}
    )
    assert json.loads(shown.stdout)["steps"] == 2


@pytest.mark.parametrize("flag", ["--no-distil", "--teachers=0"])
def test_without_distillation(flag: str, cli: Cli, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "three.toml").write_text("teachers = 3\nsteps = 5\n")
    words = ("train", corpus, *SMALL, "--config", "three.toml", "--plan", "--json")
    assert json.loads(cli(*words).stdout)["settings"]["teachers"] == 3
    assert json.loads(cli(*words, flag).stdout)["settings"]["teachers"] == 0


def test_a_closed_output_does_not_stop_the_run(corpus: Path, tmp_path: Path) -> None:
    command = subprocess.list2cmdline(program("train", corpus, *SMALL, "--steps", 60))
    subprocess.run(["bash", "-c", f"{command} 2>&1 | head -1"], cwd=tmp_path, check=True)
    assert "result" in json.loads((tmp_path / "runs/mine/run.json").read_text())


def test_options_of_earlier_versions_are_accepted(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    shown = cli("train", corpus, *SMALL, "--steps", 2, "--resume", "--out", "runs/a")
    assert shown.returncode == 0
    assert "--resume" not in shown.stderr + cli("train", "--help-all").stdout
    shown = cli("train", corpus, *SMALL, "--steps", 2, "--resume", "--out", "runs/a")
    assert shown.returncode == 3
    assert "runs/a" in shown.stderr and "finished" in shown.stderr
    assert nanolm.train(corpus, out=tmp_path / "b", resume=True, steps=2, **TINY_MODEL).steps == 2
    rows = [{"title": "x", "body": {"en": f"The cat saw {n} dogs."}} for n in range(50)]
    (tmp_path / "news.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("--text-column", "--text-field"):
        shown = cli("data", "check", "news.jsonl", name, "body.en", "--json")
        assert json.loads(shown.stdout)["documents"] == 50, shown.stderr
    assert "--text-column NAME" in cli("data", "check", "news.jsonl").stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_75(
    number: int, commands: Commands, cli: Cli, corpus: Path, tmp_path: Path
) -> None:
    command = commands.start("train", corpus, *SMALL, "--steps", 300, "--out", "r", "--json")
    wait_for_step(tmp_path / "r", 20)
    command.send(number)
    assert command.wait() == 75, command.said()
    assert "run the same command again to resume" in command.stream("stderr")
    assert "Traceback" not in command.stream("stderr")
    stopped = json.loads(command.stream("stdout"))
    assert stopped["stopped"] == "interrupted"
    # As `make resume` does, with all settings from the run's config.toml.
    resumed = cli("train", "--config", "r/config.toml", "--out", "r")
    assert f"r at step {stopped['steps']:,}" in resumed.stderr
    assert resumed.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_before_the_first_step(
    number: int, code: int, commands: Commands, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    silent = os.open(pipe, os.O_RDWR)  # an open writer keeps the reader waiting
    command = commands.start("train", pipe, *SMALL, "--steps", 300)
    opened = Path(f"/proc/{command.pid}/fd")
    while not any(link.resolve() == pipe for link in opened.iterdir()):
        time.sleep(0.01)
    command.send(number)
    assert command.wait() == code
    os.close(silent)
    last = command.stream("stderr").splitlines()[-1]
    assert last.startswith("error: stopped") and "nothing was trained" in last
    assert not (tmp_path / "runs").exists()


def test_training_again_names_the_finished_run(cli: Cli, corpus: Path) -> None:
    first = cli("train", corpus, *SMALL, "--steps", 2)
    assert "finished" not in first.stderr
    again = cli("train", corpus, *SMALL, "--steps", 2)
    assert re.search(
        r"runs/mine is finished.* runs/mine-2\b.*nanolm train --extend runs/mine --minutes 5",
        again.stderr,
    )
    other = cli("train", corpus, *SMALL, "--steps", 3)
    assert "is finished" not in other.stderr


def test_settings_are_checked_before_text_is_read(cli: Cli, tmp_path: Path) -> None:
    """Reading the missing file would be an error, too."""
    shown = cli("train", "nowhere.txt", "--heads", 5, "--dim", 48, "--batch", 0)
    assert shown.returncode == 2
    assert shown.stderr.splitlines() == [
        "error: --batch 0: must be from 1 to 1,000,000",
        "       --dim 48 is not a multiple of --heads 5; try --dim 50 or --heads 6",
    ]


@pytest.mark.parametrize("options", [["--heads", 7], ["--dim", 50], ["--kv-heads", 5]])
def test_one_size_is_enough(options: list[object], cli: Cli, corpus: Path) -> None:
    shown = cli("train", corpus, *options, "--layers", 1, "--context", 16, "--steps", 2)
    assert shown.returncode == 0, shown.stderr


def test_the_live_line_on_a_narrow_terminal(corpus: Path, terminal: Terminal) -> None:
    shown = terminal("train", corpus, *SMALL, "--steps", 40, stream="stderr", COLUMNS="40")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    live = [line for line in re.split(r"[\r\n]+", text) if "% " in line]
    assert any("remaining" in line for line in live)
    assert max(map(len, live)) <= 40


@pytest.mark.parametrize("family", ["rnn", "lstm"])
def test_recurrent_models(family: str, cli: Cli, corpus: Path) -> None:
    shape = ["--layers", 2, "--dim", 16, "--context", 16, "--batch", 4]
    shown = cli("train", corpus, *shape, "--steps", 12, "--family", family, "--json")
    assert shown.returncode == 0, shown.stderr
    assert "format: nanolm only" in shown.stderr
    assert json.loads(shown.stdout)["steps"] == 12
    # Its state has no maximum context.
    written = cli("sample", "runs/mine", "--tokens", 60, "--min-tokens", 20, "--json")
    assert len(json.loads(written.stdout)["tokens"]) > 16


def test_architecture_options(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    classic = ["--positions", "sinusoidal", "--norm", "layer", "--norm-place", "post"]
    more = ["--feed-forward", "relu", "--bias", "--no-qk-norm", "--tied", "--kv-heads", 1]
    shown = cli("train", corpus, *SMALL, *classic, *more, "--steps", 12)
    assert shown.returncode == 0, shown.stderr
    assert "--positions sinusoidal" in shown.stderr
    config = json.loads((tmp_path / "runs/mine/best/config.json").read_text())
    expected = {"positions": "sinusoidal", "norm_place": "post", "bias": True, "kv_heads": 1}
    assert expected.items() <= config.items()
    assert cli("sample", "runs/mine").returncode == 0
    # Another --family overrides the architecture in the file.
    again = cli("train", "--config", "runs/mine/config.toml", "--family", "gpt2")
    assert again.returncode == 0, again.stderr
    config = json.loads((tmp_path / "runs/mine-2/best/config.json").read_text())
    assert (config["model_type"], config["n_embd"], config["n_head"]) == ("gpt2", 16, 2)
    again = cli("train", "--config", "runs/mine/config.toml", "--family", "rnn")
    assert again.returncode == 0, again.stderr


def test_presets_are_listed(cli: Cli) -> None:
    shown = cli("train", "--list-presets", "--family", "gpt2")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"nano +3 +3 +48 +64 ", shown.stdout)
    assert "124,439,808" in shown.stdout
    rows = [json.loads(row) for row in cli("train", "--list-presets", "--json").stdout.splitlines()]
    assert [row["preset"] for row in rows][:3] == ["nano", "micro", "mini"]
    assert rows[0]["parameters"] == 132_528
    assert cli("train", "--list-presets", "--family", "gtp2").returncode == 2


def test_a_hub_model_by_name(cli: Cli, corpus: Path, tmp_path: Path, server: Server) -> None:
    """A GPT-2 folder written by transformers, served like the Hub; then without a network."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    made = tmp_path / "made"
    made.mkdir()
    train_tokenizer([corpus.read_text()], "bpe", 300).save(made, 32)
    AutoTokenizer.from_pretrained(made).save_pretrained(made)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = AutoConfig.for_model("gpt2", vocab_size=300, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    hub(server, "gpt2", [[file.name for file in made.iterdir()]], "models")
    for file in made.iterdir():
        server.put(f"/gpt2/resolve/main/{file.name}", content(file.read_bytes()))

    empty = {"HF_HUB_CACHE": str(tmp_path / "none"), "NANOLM_CACHE": str(tmp_path / "cache")}
    online = {**empty, "HF_ENDPOINT": server.root}
    shown = cli("train", corpus, "--from", "gpt2", "--steps", 5, environment=online)
    assert shown.returncode == 0, shown.stderr
    saved = json.loads((tmp_path / "runs/mine/last/config.json").read_text())
    assert (saved["model_type"], saved["n_embd"]) == ("gpt2", 16)
    server.asked.clear()
    offline = {**empty, "HF_ENDPOINT": "http://127.0.0.1:9"}  # so that nothing is cached
    assert cli("sample", "hf://gpt2", environment=online).returncode == 0
    assert not server.asked
    for words in (["sample", "hf://gpt2"], ["train", str(corpus), "--from", "gpt2"]):
        shown = cli(*words, environment=offline)
        assert shown.returncode == 3
        assert "gpt2" in shown.stderr and "network" in shown.stderr
