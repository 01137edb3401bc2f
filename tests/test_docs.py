"""The documentation: links resolve, examples run, quoted messages exist, and the site builds."""

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from commands import Loaded
from conftest import TINY_MODEL
from documents import REASON, Runner, anchors, blocks, links
from servers import Start

import nanolm

CHECKOUT = Path(__file__).parents[1]
PAGES = sorted((CHECKOUT / "docs").glob("*.md"))
PACKAGE = CHECKOUT / "nanolm"
DOCUMENTS = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *PAGES]
# Pages whose blocks do not run here, with the reason.
NOT_RUN = {
    "benchmarks": "a log of measurements, each with the command that made it",
    "course": "its commands take 5 minutes; tests/test_course.py checks them with a stand-in",
    "distributed": "its commands need several GPUs; see tests/training/test_distributed.py",
    "experiments": "a log of measurements, each with the command that made it",
    "reliability": "each row of its table names its own tests",
}
GUIDES = [page for page in PAGES if page.stem not in NOT_RUN]
WITH_EXAMPLES = [page for page in GUIDES if {b.language for b in blocks(page)} - {"text"}]
SLOW = ("classify", "compare", "models", "write")  # pages whose examples take longest
LANGUAGES = {"bash", "console", "python", "text"}
SENTENCE = "It was a dark night in the year {n}. She said that the {n} cats sat on the mat.\n"
REVIEWS = [
    (f"The film was {word} in {n} ways.", word) for n in range(20) for word in ("good", "bad")
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_links_resolve(document: Path) -> None:
    for target in links(document):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / unquote(name)).resolve() if name else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
        # The site contains only files in docs/.
        assert document not in PAGES or file.parent == document.parent, target


@pytest.mark.parametrize("page", PAGES, ids=lambda file: file.name)
def test_every_page_is_in_the_navigation_once(page: Path) -> None:
    navigation = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    assert navigation.count(f": {page.name}\n") == 1


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny versions of all files and runs that the guides mention."""
    folder = tmp_path_factory.mktemp("docs")
    novel = "".join(SENTENCE.format(n=n) for n in range(60))
    table = [("text", "label"), *REVIEWS]
    texts = {
        **dict.fromkeys(("novel.txt", "other.txt", "poems.txt", "page.txt"), novel),
        **dict.fromkeys(("letters/one.txt", "letters/two.txt", "notes/old/three.md"), novel),
        **dict.fromkeys(("all.txt", "data/stories.txt"), f"{novel}***\n{novel}"),
        **dict.fromkeys(("reviews.tsv", "test.tsv"), "".join(f"{a}\t{b}\n" for a, b in table)),
        "reviews.csv": "".join(f"{a},{b}\n" for a, b in table),
        "tweets.csv": "text,mood\n" + "".join(f"{a},{b}\n" for a, b in REVIEWS),
        "questions.txt": "".join(f"{b} {a}\n" for a, b in REVIEWS),
        "lines.txt": "".join(f"{a}\n" for a, _ in REVIEWS),
        "labels.txt": "".join(f"{b}\n" for _, b in REVIEWS),
        "comments.txt": "".join(f"{a}\n" for a, _ in REVIEWS[:4]),
        "openings.txt": "It was\nShe said\n",
        "news.jsonl": "".join(json.dumps({"article": {"body": novel}}) + "\n" for _ in range(3)),
    }
    for number, (text, label) in enumerate(REVIEWS):
        part = "train" if number < 30 else "test"
        texts[f"aclImdb/{part}/{label}/{number}.txt"] = text
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "old.txt").write_text("暗い夜だった。\n" * 200, encoding="shift_jis")
    (folder / "logs.gz").write_bytes(gzip.compress(novel.encode()))
    for name, more in {"gpt2": {"family": "gpt2"}, "stories": {}, "tiny": {}, "novel": {}}.items():
        settings = {**TINY_MODEL, "steps": 1, "evaluations": 1, **more}
        nanolm.train(folder / "novel.txt", out=folder / "runs" / name, **settings)
    settings = {"start_from": folder / "runs" / "novel", "steps": 1, "evaluations": 1}
    nanolm.finetune(folder / "reviews.tsv", out=folder / "runs" / "reviews", **settings)
    return folder


@pytest.fixture
def runner(loaded: Loaded, prepared: Path, tmp_path: Path) -> Runner:
    return Runner(loaded, shutil.copytree(prepared, tmp_path / "folder", symlinks=True))


@pytest.mark.parametrize("page", GUIDES, ids=lambda file: file.stem)
def test_blocks_say_what_they_are(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    for block in blocks(page):
        assert block.language != "text" or not re.search(
            r"^(\$ )?nanolm ", block.text, re.MULTILINE
        )


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem in SLOW else (), id=page.stem)
        for page in WITH_EXAMPLES
    ],
)
def test_examples_run(page: Path, runner: Runner, request: pytest.FixtureRequest) -> None:
    if page.stem == "serve":
        start: Start = request.getfixturevalue("start")
        runs = [runner.folder / "runs" / name for name in ("stories", "reviews")]
        runner.address = start(*runs, names=()).url.removeprefix("http://")
    assert runner.run(page)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classify", "compare", "train"])
def test_long_examples_run(name: str, runner: Runner) -> None:
    runner.slow = True
    assert runner.run(CHECKOUT / "docs" / f"{name}.md")


def test_messages_of_the_faq_exist() -> None:
    nodes = (ast.walk(ast.parse(file.read_text("utf-8"))) for file in PACKAGE.rglob("*.py"))
    strings = [node.value for each in nodes for node in each if isinstance(node, ast.Constant)]
    messages = "\n".join(text for text in strings if isinstance(text, str))
    quoted = re.findall(
        r"^### `(.+)`$", (CHECKOUT / "docs/faq.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(quoted) > 40
    assert [message for message in quoted if message not in messages] == []


def test_reasons_are_recognized() -> None:
    assert REASON.search("nanolm sample hf://gpt2  # needs a network; a model of the Hub")
    assert not REASON.search("nanolm sample runs/novel  # the newest run")


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=CHECKOUT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?([^" >]+)', page.read_text())
        assert loaded
        assert not [address for address in loaded if "//" in address], page.name
