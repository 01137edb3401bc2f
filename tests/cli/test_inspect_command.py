"""`nanolm inspect` on the command line."""

import importlib.util
import json
from pathlib import Path

import pytest
from conftest import Cli
from journeys import journeys

import nanolm

TEXT = "The brown dog saw a cat."


def test_a_text_becomes_a_page(trained: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("inspect", trained, TEXT)
    assert shown.returncode == 0, shown.stderr
    assert "wrote inspect.html" in shown.stderr
    page = (tmp_path / "inspect.html").read_text(encoding="utf-8")
    assert page.count("<h2>") >= 3
    for part in ("tokens", "large", "data"):
        assert f'id="{part}"' in page
    assert "script-src 'sha256-" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_numbers(trained: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("inspect", trained, TEXT, "--json", "--top", 3)
    found = json.loads(shown.stdout)
    time = len(found["tokens"])
    assert "".join(found["tokens"]).endswith(TEXT)
    assert len(found["attention"]) == 1  # layer
    assert len(found["attention"][0]) == len(found["heads"][0]) == 2
    assert [len(row) for row in found["attention"][0][1]] == [time] * time
    assert len(found["predictions"]["tokens"][0]) == 3
    assert found["layers"][-1] == found["predictions"]
    assert not (tmp_path / "inspect.html").exists()
    # The same probabilities as those of `nanolm sample`.
    model = nanolm.load(trained)
    rows = found["predictions"]["probabilities"]
    ids = model.tokenizer.encode_prompt(TEXT)
    import torch

    with torch.inference_mode():
        best = model.model(torch.tensor([ids]))[0].softmax(dim=-1).topk(3).values
    assert rows == [pytest.approx(row, abs=1e-5) for row in best.tolist()]


def test_from_a_file_and_a_pipe(trained: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text(TEXT + "\n")
    direct = cli("inspect", trained, TEXT, "--json").stdout
    assert cli("inspect", trained, "--file", "some.txt", "--json").stdout == direct
    assert cli("inspect", trained, "--file", "-", "--json", stdin=TEXT).stdout == direct


def test_a_classifier_shows_its_attribution(cli: Cli, tmp_path: Path) -> None:
    journey = journeys(tmp_path)["fine-tuning"]
    journey.go(tmp_path / "run", steps=4, evaluations=1)
    shown = cli("inspect", "run", "a long day was good", "--out", "why.html")
    assert shown.returncode == 0, shown.stderr
    page = (tmp_path / "why.html").read_text(encoding="utf-8")
    assert "gradient" in page and "attention" in page
    found = json.loads(cli("inspect", "run", "a long day was good", "--json").stdout)
    assert len(found["rollout"]) == len(found["gradient_x_input"]) == len(found["tokens"])
    labels = json.loads(cli("classify", "run", "a long day was good", "--json").stdout)
    assert found["label"] == labels["label"]
    assert found["probabilities"] == pytest.approx(labels["probabilities"], abs=1e-4)
    refused = cli("inspect", "run", "--neighbours", "x")
    assert refused.returncode == 2
    assert "is a classifier" in refused.stderr


def test_words_neighbours_and_positions(trained: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli(
        "inspect", trained, "--word", "dog", "The dog saw.", "A dog ran.", "--out", "w.html"
    )
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "w.html").read_text(encoding="utf-8").count("[dog]") >= 2
    found = json.loads(cli("inspect", trained, "--word", "dog", "A dog ran.", "--json").stdout)
    assert found["places"] == ["A [dog] ran."]
    shown = cli("inspect", trained, "--neighbours", "dog")
    assert len(shown.stdout.splitlines()) == 10
    assert float(shown.stdout.split()[0]) <= 1
    shown = cli("inspect", trained, "--neighbours", "dog", "--out", "n.html")
    assert "wrote n.html" in shown.stderr and not shown.stdout
    assert (tmp_path / "n.html").read_text(encoding="utf-8").count("<tr>") == 11
    shown = cli("inspect", trained, "--positions", "--out", "p.html")
    assert '<canvas class="heat"' in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_a_walk(trained: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("inspect", trained, TEXT, "--walk", "--out", "walk.html")
    assert shown.returncode == 0, shown.stderr
    page = (tmp_path / "walk.html").read_text(encoding="utf-8")
    assert "A walk through the model" in page and "http://" not in page
    found = json.loads(cli("inspect", trained, TEXT, "--walk", "--json").stdout)
    logits = found["stages"][-1]
    assert logits["stage"] == "logits" and len(logits["values"]) == len(found["tokens"])
    scores = next(stage for stage in found["stages"] if stage["stage"] == "scores")
    assert scores["layer"] == 1 and scores["values"][0][0][1] < -1e8  # masked
    long = cli("inspect", trained, TEXT * 9, "--walk", "--out", "walk.html")
    assert long.returncode == 0 and "truncated to the first " in long.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="nanolm[plot]")
def test_pictures(trained: Path, cli: Cli, tmp_path: Path) -> None:
    shown = cli("inspect", trained, "It costs $5 or $6", "--head", "1.2", "--png", "pictures")
    assert shown.returncode == 0, shown.stderr
    for name in ("attention", "predictions", "head-1.2"):
        picture = (tmp_path / "pictures" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--file FILE"),
        (("a", "b"), "--word takes several texts"),
        (("a", "--head", "3"), "--head 3: "),
        (("a", "--head", "9.9"), "--head 9.9: the last head is 1.2"),
        (("a", "--word", "x", "--positions"), "one of --word, --positions"),
        (("a", "--walk", "--head", "1.1"), "--walk cannot be used with --head"),
        (("a", "--walk", "--word", "x"), "--walk cannot be used with --word"),
        (("a", "--positions"), "--positions takes no TEXT"),
        (("a", "--out", "no/where.html"), "--out no/where.html: "),
        (("a", "--file", "b"), "--file replaces TEXT"),
        (("--word", "zebra", "A dog."), "--word zebra: "),
        (("--file", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_mistakes_are_reported(
    arguments: tuple[str, ...], message: str, trained: Path, cli: Cli
) -> None:
    shown = cli("inspect", trained, *arguments)
    assert shown.returncode in (2, 3)
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr
