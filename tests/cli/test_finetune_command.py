"""The commands for classifiers."""

import csv
import io
import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from commands import Commands
from conftest import Cli, Terminal, program
from faults import wait_for_step

from nanolm.classification.finetune import finetune
from nanolm.classification.settings import FinetuneSettings

SMALL = ("--from", "none", "--preset", "nano", "--tokenizer", "byte", "--threads", 1)


def write(file: Path) -> Path:
    nouns = ("film", "plot", "cast", "song", "end", "set", "food", "room", "view", "tune")
    rows = [
        f"the {noun} was {word}\t{label}\n"
        for noun in nouns
        for label, words in enumerate((("bad", "poor", "awful"), ("good", "fine", "great")))
        for word in words
    ]
    file.write_text("text\tlabel\n" + "".join(rows))
    return file


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("films") / "films.tsv")


@pytest.fixture(scope="module")
def run(films: Path) -> Path:
    """A classifier that has learned its data."""
    out = films.parent / "run"
    finetune(
        FinetuneSettings(
            data=(str(films),),
            start_from="none",
            preset="nano",
            tokenizer="byte",
            steps=120,
            lr=3e-3,
            batch=8,
            threads=1,
            sentiment=True,
        ),
        out,
    )
    return out


def test_from_data_to_a_classifier(films: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("finetune-sentiment", films, *SMALL, "--steps", 20, "--test-fraction", 0.2)
    assert shown.returncode == 0, shown.stderr
    for expected in ("baseline 50.0%)", "macro F1", "true \\ predicted"):
        assert expected in shown.stdout
    assert "test: accuracy" in shown.stdout
    for expected in ("'text'", "'label'", "  negative: the film was bad", "lr: 0.002 ("):
        assert expected in shown.stderr
    assert "next: nanolm classify runs/films" in shown.stderr
    assert (tmp_path / "runs/films/loss.svg").read_text().startswith("<svg")
    result = json.loads((tmp_path / "runs/films/run.json").read_text())["result"]
    for part, name in (("val", "mistakes.csv"), ("test", "test_mistakes.csv")):
        rows = list(csv.DictReader((tmp_path / "runs/films" / name).open(newline="")))
        confusion = result[part]["confusion"]
        assert len(rows) == confusion[0][1] + confusion[1][0]
        assert all(row.keys() == {"text", "label", "prediction", "probability"} for row in rows)
        assert f"all mistakes: runs/films/{name} ({len(rows)} of " in shown.stderr
    # The newest run is not a language model, and `sample` says so.
    shown = cli("sample")
    assert shown.returncode == 4
    assert "no trained model under runs/" in shown.stderr
    shown = cli("sample", "runs/films")
    assert shown.returncode == 4
    assert "is a classifier" in shown.stderr
    shown = cli("finetune", "--config", "runs/films/config.toml", "--out", "runs/again", "--json")
    assert shown.returncode == 0, shown.stderr
    result = json.loads(shown.stdout.splitlines()[-1])
    assert result["labels"] == ["negative", "positive"]  # from the file
    assert {"run", "val", "test", "steps", "mistakes"} <= result.keys()
    assert {"accuracy", "macro_f1", "loss", "confusion"} <= result["val"].keys()


def test_test_results_are_reported_separately(films: Path, cli: Cli, tmp_path: Path) -> None:
    """Half of these must be wrong."""
    both = "".join(f"a hat of {n} parts\t{label}\n" for n in range(4) for label in (0, 1))
    (tmp_path / "test.tsv").write_text("text\tlabel\n" + both)
    shown = cli("finetune", films, *SMALL, "--steps", 20, "--test", "test.tsv")
    assert shown.returncode == 0, shown.stderr
    before, heading, after = shown.stdout.partition("most confident mistakes on the test texts\n")
    assert heading
    assert "test: accuracy 50.0%" in before
    assert "hat of" in after
    assert "the film" not in after
    (row,) = [json.loads(line) for line in cli("runs", "--json").stdout.splitlines()]
    assert row["accuracy"] == row["test_accuracy"] == 0.5
    result = json.loads((tmp_path / "runs/films/run.json").read_text())["result"]
    assert row["val_accuracy"] == result["val"]["accuracy"]
    assert len(result["test_mistakes"]) == 4
    header = cli("runs").stdout.splitlines()[0]
    assert "val acc  test acc" in header
    page = (tmp_path / "runs/films/report.html").read_text()
    assert page.index("<h3>test</h3>", page.index("confident mistakes")) < page.index("a hat of")


def test_a_usage_error_leaves_the_folder_free(films: Path, trained: Path, cli: Cli) -> None:
    start = ("finetune", films, "--from", trained, "--out", "run", "--steps", 2)
    shown = cli(*start, "--train", "last-9")
    assert shown.returncode == 2
    assert re.search("--train last-9.*1 layer.*--train all", shown.stderr)
    shown = cli(*start, "--context", 99)
    assert shown.returncode == 2
    assert re.search("--context 99.*16", shown.stderr)
    shown = cli(*start, "--train", "head", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["labels"] == ["0", "1"]


def test_seeds(films: Path, cli: Cli) -> None:
    shown = cli("finetune", films, *SMALL, "--steps", 3, "--seeds", 2)
    assert shown.returncode == 0, shown.stderr
    assert "runs/films-seeds/seed-2: validation" in shown.stdout
    assert "standard deviation" in shown.stdout
    shown = cli("finetune", films, *SMALL, "--steps", 3, "--seeds", 2, "--json")
    assert {"mean", "spread"} == json.loads(shown.stdout)["val"]["accuracy"].keys()
    shown = cli("finetune", films, *SMALL, "--steps", 2, "--seeds", 2, "--json")
    assert json.loads(shown.stdout)["run"] == "runs/films-seeds-2"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["none.tsv"], ["none.tsv does not exist"]),
        (["--train", "some", "--pool", "middle"], ["--train some: ", "--pool middle"]),
        (["--train", "head", "--from", "none"], ["--train head"]),
        (["--from", "runs/x", "--preset", "nano"], ["--preset ", "--from"]),
        (["--val-fraction", "2", "--patience", "0"], ["--val-fraction 2.0", "--patience 0"]),
        (["--test", "a", "--test-fraction", "0.1"], ["--test ", "--test-fraction"]),
        (["--epochs", "2", "--steps", "3"], ["--steps ", "--epochs"]),
        (["--val", "a", "--val-fraction", "0.1"], ["--val ", "--val-fraction"]),
        (["--dtype", "float8"], ["--dtype float8", "--dtype bfloat16"]),
        (["--train", "head", "--language-loss", "1"], ["--language-loss", "--train head"]),
        (
            ["--language-loss", "-1", "--encoding", "klingon"],
            ["--language-loss -1.0", "--encoding klingon"],
        ),
        (["--label-colum", "x"], ["--label-column"]),
        (["--limit", "1"], ["one label", "--limit"]),
        (["--label-column", "mood"], ["--label-column mood", "text ("]),
        (["--from", "nowhere/at/all"], ["nowhere/at/all"]),
    ],
    ids=str,
)
def test_mistakes_are_reported(arguments: list[str], messages: list[str], cli: Cli) -> None:
    shown = cli("finetune-sentiment", *arguments)
    assert shown.returncode in (2, 3), shown.stderr
    for message in messages:
        assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_ctrl_c_saves_and_the_same_command_resumes(
    films: Path, commands: Commands, cli: Cli, tmp_path: Path
) -> None:
    arguments = ("finetune", films, *SMALL, "--steps", 200, "--out", "run", "--save-every", 10)
    command = commands.start(*arguments)
    wait_for_step(tmp_path / "run", 10)
    command.send(signal.SIGINT)
    assert command.wait() == 75, command.said()
    assert "run the same command again to resume" in command.said()
    assert "Traceback" not in command.said()
    again = cli(*arguments)
    assert again.returncode == 0, again.stderr
    assert "resuming run at step" in again.stderr
    assert cli(*arguments).returncode == 3  # finished


def test_classify(run: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("classify", run, "the band was bad", "the band was great", "--json")
    assert shown.returncode == 0, shown.stderr
    first, second = map(json.loads, shown.stdout.splitlines())
    assert (first["label"], second["label"]) == ("negative", "positive")
    assert first["text"] == "the band was bad"
    assert first["probability"] == max(first["probabilities"].values())
    assert sum(first["probabilities"].values()) == pytest.approx(1)
    shown = cli("classify", run, "--top", 2, stdin="the band was fine\n\n the set was awful\n")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["positive", "negative"]
    assert "\tthe set was awful" in shown.stdout
    assert shown.stdout.count("%") == 4
    (tmp_path / "some.csv").write_text('id,text\n1,"the set was good, fine"\n2,the room was bad\n')
    shown = cli("classify", run, "--file", "some.csv", "--csv")
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert [row["label"] for row in rows] == ["positive", "negative"]
    assert rows[0]["text"] == "the set was good, fine"
    assert float(rows[0]["positive"]) + float(rows[0]["negative"]) == pytest.approx(1, abs=1e-5)
    shown = cli("classify", run, "the", "--min-probability", 1)
    assert shown.stdout.startswith("unsure ")
    shown = cli("classify", run, "the", "--min-probability", 1, "--top", 2)
    assert shown.stdout.startswith("unsure: ")
    table = "\ufefftext,id\r\nthe set was good,1\r\n,2\r\nthe room was bad,3\r\n"
    shown = cli("classify", run, "--file", "-", "--json", stdin=table)
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["the set was good", "", "the room was bad"]
    shown = cli("classify", run, "--json", stdin="\ufeffthe set was good\r\n")
    assert json.loads(shown.stdout)["text"] == "the set was good"


def test_classify_keeps_true_labels(run: Path, cli: Cli, tmp_path: Path) -> None:
    text = "text,label\nthe set was good,1\nthe room was bad,positive\nthe view was fine,\n"
    (tmp_path / "some.csv").write_text(text.replace("positive", "1"))
    shown = cli("classify", run, "--file", "some.csv", "--csv")
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert [row["label"] for row in rows] == ["positive", "negative", "positive"]
    assert [row["true_label"] for row in rows] == ["positive", "positive", ""]
    assert [row["correct"] for row in rows] == ["true", "false", ""]
    assert "accuracy 50.0% (1 of 2 " in shown.stderr
    (tmp_path / "odd.csv").write_text("words,mood\nthe set was good,negative\n")
    shown = cli("classify", run, "--file", "odd.csv", "--json", "--label-column", "mood")
    row = json.loads(shown.stdout)
    assert (row["true_label"], row["correct"]) == ("negative", False)
    (tmp_path / "other.csv").write_text("text,label\nthe set was good,blue\n")
    assert "true_label" not in cli("classify", run, "--file", "other.csv", "--csv").stdout
    shown = cli("classify", run, "--file", "other.csv", "--csv", "--label-column", "label")
    assert (shown.returncode, ": blue" in shown.stderr) == (3, True)


def test_lines_are_classified_as_they_come(run: Path) -> None:
    process = subprocess.Popen(
        program("classify", run), stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stdin
    assert process.stdout
    for text, label in (("the set was good\n", "positive"), ("the set was bad\n", "negative")):
        process.stdin.write(text)
        process.stdin.flush()
        assert process.stdout.readline().startswith(label)  # before the next one arrives
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def test_many_texts_keep_their_order(run: Path, cli: Cli, tmp_path: Path) -> None:
    texts = [
        f"the {'x' * (number % 17)} was {'bad' if number % 3 else 'good'}" for number in range(900)
    ]
    (tmp_path / "many.txt").write_text("\n".join(texts))
    shown = cli("classify", run, "--file", "many.txt", "--json")
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [row["text"] for row in rows] == texts
    alone = json.loads(cli("classify", run, texts[700], "--json").stdout)
    assert alone["probability"] == pytest.approx(rows[700]["probability"], abs=1e-5)


def test_classify_on_a_terminal_is_safe_and_fits(run: Path, terminal: Terminal) -> None:
    text = "the \x1b[31m set [/x] was good " * 9
    shown = terminal("classify", run, text, COLUMNS="60")
    assert "\x1b[31m" not in shown
    assert "[/x]" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "text"], "does not exist"),
        (["RUN", "text", "--json", "--csv"], "--json and --csv"),
        (["RUN", "text", "--file", "x"], "TEXT or --file"),
        (["RUN", "--file", "none.txt"], "none.txt does not exist"),
        (["RUN", "text", "--device", "tpu"], "--device tpu"),
        (["RUN", "text", "--min-probability", "7"], "min-probability"),
    ],
    ids=str,
)
def test_mistakes_with_classify(arguments: list[str], message: str, run: Path, cli: Cli) -> None:
    shown = cli("classify", *[str(run) if word == "RUN" else word for word in arguments])
    assert shown.returncode == 2
    assert message in shown.stderr


def test_a_language_model_is_not_a_classifier(trained: Path, cli: Cli) -> None:
    shown = cli("classify", trained, "text")
    assert shown.returncode == 4
    assert "nanolm finetune DATA --from" in shown.stderr


def test_eval_of_a_classifier(run: Path, films: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("eval", run, films, "--json")  # 0 and 1 are negative and positive
    assert shown.returncode == 0, shown.stderr
    values = json.loads(shown.stdout)
    assert values["accuracy"] == 1.0
    assert values["confusion"] == [[30, 0], [0, 30]]
    assert {"macro_f1", "loss", "calibration_error", "mistakes"} <= values.keys()
    (tmp_path / "odd.csv").write_text(
        "mood,words\nnegative,the set was good\npositive,it was good\n"
    )
    shown = cli("eval", run, "odd.csv", "--label-column", "mood", "--text-column", "words")
    assert "accuracy 50.0%" in shown.stdout
    assert "the set was good" in shown.stdout  # the mistake
    (tmp_path / "many.tsv").write_text("the set was good\t0\n" * 12 + "it was good\t1\n")
    shown = cli("eval", run, "many.tsv", "--mistakes", "wrong.csv", "--json")
    rows = list(csv.DictReader((tmp_path / "wrong.csv").open(newline="")))
    assert len(rows) == 12  # all of them
    assert (rows[0]["text"], rows[0]["label"]) == ("the set was good", "negative")
    assert rows[0]["prediction"] == "positive"
    assert 0.5 < float(rows[0]["probability"]) <= 1
    assert len(json.loads(shown.stdout)["mistakes"]) == 10
    (tmp_path / "strange.tsv").write_text("it was so\tblue\nit was not\tred\n" * 9)
    shown = cli("eval", run, "strange.tsv")
    assert shown.returncode == 3
    assert ": blue, red" in shown.stderr
    shown = cli("eval", run, films, "--stride", 3)
    assert shown.returncode == 2
    assert "is a classifier" in shown.stderr


def test_info_of_a_classifier(run: Path, cli: Cli) -> None:
    shown = cli("info", run)
    assert "AutoModelForSequenceClassification" in " ".join(shown.stdout.split())
    assert re.search(r"\n  .*classification head", shown.stdout)
    assert json.loads(cli("info", run, "--json").stdout)["architecture"]["labels"] == [
        "negative",
        "positive",
    ]
