"""Datasets from a fake Hugging Face Hub."""

import threading
from pathlib import Path

import pytest
from loopback import DATA, Server, content, hub, quiet, status

from nanolm.download import fetch
from nanolm.errors import DataError, UsageError
from nanolm.text.datasets import dataset_files


def texts(files: list[Path]) -> list[str]:
    return [file.read_text() for file in files]


def test_a_data_set_in_pages(server: Server, tmp_path: Path) -> None:
    hub(server, "owner/name", [["README.md", "b c.parquet"], ["a.jsonl.gz", "x.py"], ["d/c.TXT"]])
    files = dataset_files("hf://owner/name", tmp_path, quiet)
    assert texts(files) == ["a.jsonl.gz", "b c.parquet", "d/c.TXT"]
    asked = len(server.asked)
    assert dataset_files("hf://owner/name", tmp_path, quiet) == files
    assert len(server.asked) == asked  # no network once everything is cached
    files[0].unlink()
    assert dataset_files("hf://owner/name", tmp_path, quiet) == files
    assert len(server.asked) == asked + 3 + 1  # listed again, one file downloaded


@pytest.mark.parametrize(
    ("paths", "name", "chosen"),
    [
        (["test.csv", "train.csv"], "hf://squad", ["train.csv"]),
        (["constrained.csv", "training.csv"], "hf://squad", ["constrained.csv", "training.csv"]),
        (["data/train-0.parquet", "data/test-0.parquet"], "hf://o/n", ["data/train-0.parquet"]),
        (["en/1.txt", "en/2.txt", "en2/3.txt"], "hf://o/n/en", ["en/1.txt", "en/2.txt"]),
        (["en/1.txt", "en/2.txt"], "hf://o/n/en/2.txt", ["en/2.txt"]),
        (["en/a b.txt", "train.txt"], "hf://o/n/en/", ["en/a b.txt"]),
        (["README.md", "LICENSE.txt", "readmes.txt"], "hf://o/n", ["readmes.txt"]),
        (["README.md"], "hf://o/n", ["README.md"]),
        (["a.arrow", "b.tsv.ZST", "c.gz"], "hf://o/n", ["a.arrow", "b.tsv.ZST"]),
    ],
)
def test_which_files_are_chosen(
    server: Server, tmp_path: Path, paths: list[str], name: str, chosen: list[str]
) -> None:
    hub(server, "/".join(name.removeprefix("hf://").split("/")[:2]), [paths])
    assert texts(dataset_files(name, tmp_path, quiet)) == chosen


def test_data_sets_that_are_of_no_use(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no public dataset hf://no/such \(HTTP 404\)"):
        dataset_files("hf://no/such", tmp_path, quiet)
    hub(server, "o/n", [["a.json", "b.json", "c.py", "LICENSE"]])
    with pytest.raises(DataError, match=r"\.json \(2\), \.py \(1\), others \(1\)"):
        dataset_files("hf://o/n", tmp_path, quiet)
    for name in ("hf://", "hf://a//b", "hf://../b", "o/n"):
        with pytest.raises(UsageError, match="OWNER/NAME"):
            dataset_files(name, tmp_path, quiet)


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[1]", b'[{"type": "file"}]', b"3"])
def test_a_listing_that_is_none(server: Server, tmp_path: Path, body: bytes) -> None:
    server.put("/api/datasets/o/n/tree/main?recursive=true", lambda h: h.reply(200, body))
    with pytest.raises(DataError, match="hf://o/n"):
        dataset_files("hf://o/n", tmp_path, quiet)


def test_a_listing_stays_at_its_host_and_ends(server: Server, tmp_path: Path) -> None:
    path = "/api/datasets/o/n/tree/main?recursive=true"
    for elsewhere in ("http://localhost:1/next", "file:///etc/passwd", path):
        link = f'<{elsewhere}>; rel="next"'
        server.put(path, lambda h, link=link: h.reply(200, b"[]", Link=link))  # type: ignore[misc]
        with pytest.raises((DataError, UsageError), match=r"next page|cannot be downloaded"):
            dataset_files("hf://o/n", tmp_path, quiet)


def test_a_listing_cut_short_is_asked_for_again(server: Server, tmp_path: Path) -> None:
    path = "/api/datasets/o/n/tree/main?recursive=true"
    hub(server, "o/n", [["a.txt"]])
    server.put(path, content(b"[]  ", cut=2), *server.answers[path])
    assert texts(dataset_files("hf://o/n", tmp_path, quiet)) == ["a.txt"]
    server.put(path, content(b"[]  ", cut=2))
    with pytest.raises(DataError, match="try again"):
        dataset_files("hf://o/n/other", tmp_path, quiet)


def test_the_token_goes_to_the_hub_only(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret\n")
    hub(server, "o/n", [["a.txt"]])
    with Server() as other:
        threading.Thread(target=other.serve_forever, args=(0.01,)).start()
        elsewhere = other.put("/a", content())
        server.put("/moved", status(302, Location=elsewhere))
        server.put("/datasets/o/n/resolve/main/a.txt", status(307, Location="/moved"))
        (file,) = dataset_files("hf://o/n", tmp_path, quiet)
        fetch(other.put("/b", content()), tmp_path, quiet)
        other.shutdown()
    assert file.read_bytes() == DATA
    assert [headers["Authorization"] for _, headers in server.asked] == ["Bearer secret"] * 3
    assert [headers["Authorization"] for _, headers in other.asked] == [None, None]
