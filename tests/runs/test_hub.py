"""Models from a stand-in for the Hugging Face Hub, and from the cache of its own tools."""

import json
import os
from pathlib import Path

import pytest
from loopback import DATA, Server, content, hub, quiet, ranges_asked, status

from nanolm import machine
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.runs.hub import hub_model

NEEDED = ["config.json", "merges.txt", "model.safetensors", "source_tokenizer.json"]
NEEDED += ["tokenizer.json", "vocab.json"]
UNNEEDED = ["README.md", "pytorch_model.bin", "onnx/model.safetensors", "tokenizer.model"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
LISTING = "/api/models/o/n/tree/main?recursive=true"


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hugging Face cache, still empty; ours is empty too."""
    monkeypatch.setenv("NANOLM_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "theirs"))
    return tmp_path / "theirs"


def index(*shards: object) -> bytes:
    names = {f"tensor.{number}": shard for number, shard in enumerate(shards)}
    return json.dumps({"weight_map": names}).encode()


def asked(server: Server) -> list[str]:
    """The files requested since the last call."""
    names = [path.rpartition("/")[2] for path, _ in server.asked if "/api/" not in path]
    server.asked.clear()
    return names


def contents(folder: Path) -> dict[str, bytes]:
    """The downloaded files, without the records beside them."""
    files = [file for file in folder.iterdir() if (folder / f"{file.name}.json").exists()]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "qwen.tiktoken"])
def test_other_tokenizer_files_are_needed_without_a_json(name: str, server: Server) -> None:
    files = ["config.json", "model.safetensors", name, "tokenizer_config.json"]
    files += ["added_tokens.json", "chat_template.jinja", "special_tokens_map.json"]
    hub(server, "o/n", [["README.md", "other.model"], files], "models")
    assert contents(hub_model("o/n", quiet)).keys() == {*files}


def test_a_model_is_downloaded_once(server: Server) -> None:
    hub(server, "o/n", [UNNEEDED, NEEDED], "models")
    folder = hub_model("hf://o/n", quiet)
    assert contents(folder) == {name: name.encode() for name in NEEDED}
    names = asked(server)
    assert (names[0], names[-1]) == ("config.json", "model.safetensors")  # the small files first
    for name in ("hf://o/n", "o/n", "o/n/"):
        assert hub_model(name, quiet) == folder
    assert not server.asked  # no network once everything is cached
    (folder / "vocab.json").unlink()
    assert hub_model("o/n", quiet) == folder
    assert asked(server) == ["vocab.json"]


def test_weights_in_several_files(server: Server) -> None:
    hub(server, "gpt2", [["config.json", INDEX, *SHARDS[::-1]]], "models")
    server.put(f"/gpt2/resolve/main/{INDEX}", content(index(*SHARDS)))
    folder = hub_model("gpt2", quiet)
    assert contents(folder).keys() == {"config.json", INDEX, *SHARDS}
    assert asked(server) == ["config.json", INDEX, *SHARDS]
    assert hub_model("hf://gpt2", quiet) == folder
    assert not server.asked


def test_an_index_of_files_that_are_not_there(server: Server) -> None:
    hub(server, "o/n", [["config.json", INDEX, SHARDS[0]]], "models")
    server.put(f"/o/n/resolve/main/{INDEX}", content(index(*SHARDS)))
    with pytest.raises(ModelError, match=f"{INDEX} lists files that are missing.*delete"):
        hub_model("o/n", quiet)


def test_broken_off_and_continued(server: Server) -> None:
    hub(server, "o/n", [["config.json", "model.safetensors"]], "models")
    server.put("/o/n/resolve/main/model.safetensors", content(cut=200_000))
    arrived = r"^model o/n: .* 200,000 bytes of model.safetensors .* resume"
    with pytest.raises(DataError, match=arrived):
        hub_model("o/n", quiet)
    server.asked.clear()
    server.put("/o/n/resolve/main/model.safetensors", content())
    folder = hub_model("o/n", quiet)
    assert contents(folder) == {"config.json": b"config.json", "model.safetensors": DATA}
    assert ranges_asked(server) == [None, "bytes=200000-"]  # the listing, and the rest


def test_offline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(server, "o/n", [NEEDED], "models")
    folder = hub_model("o/n", quiet)
    with Server() as gone:
        moved = status(302, Location=f"{gone.root}/elsewhere")
    server.put("/o/n/resolve/main/vocab.json", moved)
    (folder / "vocab.json").unlink()
    message = r"^model o/n could not be reached \(.*refused.*local path"
    with pytest.raises(DataError, match=message):  # gone after the listing
        hub_model("o/n", quiet)
    monkeypatch.setenv("HF_ENDPOINT", gone.root)
    with pytest.raises(DataError, match=message):
        hub_model("o/n", quiet)


@pytest.mark.parametrize("code", [401, 403, 404])
@pytest.mark.parametrize("path", [LISTING, "/o/n/resolve/main/config.json"])
def test_not_open(server: Server, code: int, path: str) -> None:
    hub(server, "o/n", [NEEDED], "models")
    server.put(path, status(code))
    message = rf"^the Hub has no public model o/n \(HTTP {code}\); check .*HF_TOKEN"
    with pytest.raises(UsageError, match=message):
        hub_model("o/n", quiet)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["config.json", "pytorch_model.bin", "x.h5"], r"has pytorch_model.bin, x.h5 .*code"),
        (["model.Q4.gguf"], r"has model.Q4.gguf instead .* only .safetensors"),
        (["config.json", *SHARDS], r"has model-00001-of.* instead of .*index.json"),
        (["config.json", INDEX], r"has no weights: neither"),
        ([], r"has no weights"),
        (["model.safetensors"], r"has no config.json"),
    ],
)
def test_repositories_that_are_of_no_use(server: Server, paths: list[str], message: str) -> None:
    hub(server, "o/n", [paths], "models")
    with pytest.raises(ModelError, match=f"^o/n {message}"):
        hub_model("o/n", quiet)
    assert not asked(server)
    hub(server, "o/n", [NEEDED], "models")  # fixed, and noticed at once
    assert contents(hub_model("o/n", quiet)).keys() == set(NEEDED)


def test_hostile_names_lead_nowhere(server: Server) -> None:
    evil = ["../config.json", "/etc/config.json", "..", "a\\config.json", "config.json\n", ".lock"]
    evil += ["../model-00001-of-00001.safetensors", "model-1-of-1.safetensors", "C:vocab.json"]
    evil += ["model-00001-of-00001.safetensors/x", "model.safetensors/../../x", "\x1b[2J.bin"]
    hub(server, "o/n", [[*evil, *NEEDED, "config.json"]], "models")
    folder = hub_model("o/n", quiet)
    assert sorted(asked(server)) == NEEDED
    ours = machine.cache_folder()
    everything = {file for file in ours.parent.rglob("*") if file.is_file()}
    records = {folder / f"{name}{suffix}" for name in NEEDED for suffix in ("", ".json")}
    listing = folder.with_name(f"{folder.name}.json")
    assert everything == {*records, listing, folder / ".lock", listing.with_name(".lock")}
    hub(server, "evil/n", [evil], "models")
    with pytest.raises(ModelError, match=r"has model-1-of-1.safetensors instead of") as caught:
        hub_model("evil/n", quiet)
    assert str(caught.value).isprintable()


def test_a_model_that_has_moved(server: Server) -> None:
    hub(server, "new/n", [NEEDED], "models")
    for path in list(server.answers):
        server.put(path.replace("new/n", "n"), status(307, Location=path))
    assert contents(hub_model("n", quiet)).keys() == set(NEEDED)


@pytest.mark.parametrize(
    "name",
    ["", "hf://", "o/n/main", "hf://o/n/x.txt", "o//n", "../n", "o/..", "/o/n", "o n", "n?x", "ü"],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="OWNER/NAME or hf://OWNER/NAME, with nothing after"):
        hub_model(name, quiet)


def kept(cache: Path, name: str, files: dict[str, bytes]) -> Path:
    """A Hugging Face cache: files are links to a folder with all versions."""
    repository, revision = cache / name, "0123456789abcdef" * 2 + "01234567"
    snapshot = repository / "snapshots" / revision
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for number, (file, data) in enumerate(files.items()):
        (repository / "blobs" / str(number)).write_bytes(data)
        (snapshot / file).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot


SINGLE = {"config.json": b"{}", "model.safetensors": b""}
SHARDED = {"config.json": b"{}", INDEX: index(*SHARDS, SHARDS[0]), SHARDS[0]: b"", SHARDS[1]: b""}


@pytest.mark.parametrize("files", [SINGLE, SHARDED])
def test_the_copy_of_other_tools_is_used(theirs: Path, files: dict[str, bytes]) -> None:
    snapshot = kept(theirs, "models--o--n", files)
    assert hub_model("o/n", quiet) == snapshot
    assert not (theirs.parent / "ours").exists()


@pytest.mark.parametrize(
    ("variable", "cache"),
    [
        ("HF_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_where_other_tools_keep_them(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, variable: str, cache: str
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(theirs))
    snapshot = kept(theirs / cache, "models--gpt2", SINGLE)
    assert hub_model("gpt2", quiet) == snapshot


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": b"{}"},
        {"model.safetensors": b""},
        {**SHARDED, INDEX: b"{"},
        {**SHARDED, INDEX: b"[" * 100_000},
        {**SHARDED, INDEX: b"[]"},
        {**SHARDED, INDEX: b'{"weight_map": [1]}'},
        {**SHARDED, INDEX: index()},
        {**SHARDED, INDEX: index(7)},
        {**SHARDED, INDEX: index(["a"])},
        {**SHARDED, INDEX: index(*SHARDS, "model-00003-of-00002.safetensors")},
        {**SHARDED, INDEX: index("../refs/main")},
        {**SHARDED, INDEX: index(os.devnull, "\0")},
    ],
)
def test_a_damaged_copy_of_other_tools_is_passed_over(
    server: Server, theirs: Path, files: dict[str, bytes]
) -> None:
    kept(theirs, "models--o--n", files)
    hub(server, "o/n", [NEEDED], "models")
    assert contents(hub_model("o/n", quiet)).keys() == set(NEEDED)


@pytest.mark.parametrize("revision", [b"", b"\xff", b"../snapshots", b"\0", b"nowhere", b".", None])
def test_a_damaged_revision_is_passed_over(
    server: Server, theirs: Path, revision: bytes | None
) -> None:
    snapshot = kept(theirs, "models--o--n", SINGLE)
    (snapshot.parents[1] / "refs" / "main").unlink()
    if revision is not None:
        (snapshot.parents[1] / "refs" / "main").write_bytes(revision)
    hub(server, "o/n", [NEEDED], "models")
    assert hub_model("o/n", quiet) != snapshot


def test_a_link_to_nothing_is_passed_over(server: Server, theirs: Path) -> None:
    snapshot = kept(theirs, "models--o--n", SINGLE)
    (snapshot / "model.safetensors").resolve().unlink()
    hub(server, "o/n", [NEEDED], "models")
    assert hub_model("o/n", quiet) != snapshot
