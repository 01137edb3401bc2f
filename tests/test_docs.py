"""The documentation: links resolve, examples run, quoted messages exist, and the site builds."""

import ast
import gzip
import json
import lzma
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
from documents import Block, Runner, anchors, blocks, links
from servers import Start

import nanolm

CHECKOUT = Path(__file__).parents[1]
PAGES = sorted((CHECKOUT / "docs").glob("*.md"))
PACKAGE = CHECKOUT / "nanolm"
README = CHECKOUT / "README.md"
DOCUMENTS = [README, CHECKOUT / "CONTRIBUTING.md", *PAGES]
# Pages whose examples take longest.
SLOW = {"README", "benchmarks", "classify", "compare", "course", "distributed", "models"}
SLOW |= {"translate", "works-with", "write"}
LANGUAGES = {"bash", "console", "python", "text"}
SENTENCE = "It was a dark night in the year {n}. She said that the {n} cats sat on the mat.\n"
COMMAND = re.compile(r"^(\S+ )?(nanolm|torchrun|make|python) ", re.MULTILINE)
SST2 = ("test.tsv", "train.tsv", "dev.tsv", "sst2.tsv", "sst2-dev.tsv")
EXAMPLES = {
    slow: [page for page in (README, *PAGES) if any(block.runs(slow) for block in blocks(page))]
    for slow in (False, True)
}
REVIEWS = [
    (f"The film was {word} in {n} ways.", word) for n in range(20) for word in ("good", "bad")
]
PAIRS = [(f"{noun} rennt {n} Mal.", f"A dog runs {n} times.") for n in range(40) for noun in "AB"]


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
    rows = "".join(f"{a}\t{b}\n" for a, b in REVIEWS)
    texts = {
        **dict.fromkeys(("novel.txt", "other.txt", "poems.txt", "page.txt"), novel),
        **dict.fromkeys(("corpus.txt", "shakespeare.txt", "SmallSimpleCorpus.txt"), novel),
        **dict.fromkeys(("letters/one.txt", "letters/two.md", "notes/old/three.md"), novel),
        **dict.fromkeys(
            ("all.txt", "data/stories.txt", "LargerCorpus.txt"), f"{novel}***\n{novel}"
        ),
        **dict.fromkeys(SST2, f"sentence\tlabel\n{rows}"),
        "reviews.tsv": f"text\tlabel\n{rows}",
        "reviews.csv": "text,label\n" + "".join(f"{a},{b}\n" for a, b in REVIEWS),
        "tweets.csv": "text,mood\n" + "".join(f"{a},{b}\n" for a, b in REVIEWS),
        "questions.txt": "".join(f"{b} {a}\n" for a, b in REVIEWS),
        "lines.txt": "".join(f"{a}\n" for a, _ in REVIEWS),
        "labels.txt": "".join(f"{b}\n" for _, b in REVIEWS),
        "comments.txt": "".join(f"{a}\n" for a, _ in REVIEWS[:4]),
        "openings.txt": "It was\nShe said\n",
        **dict.fromkeys(("blimp/one.tsv", "mine.tsv"), "good\tbad\nShe said it.\tShe say it.\n"),
        "pairs.tsv": "source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS),
        "questions.csv": "id,question,answer\n"
        + "".join(f"{n},{a},{b}\n" for n, (a, b) in enumerate(PAIRS)),
        "words.txt": "".join(f"{a.split()[0]}{n} {b}\n" for n, (a, b) in enumerate(PAIRS)),
        "news.jsonl": "".join(json.dumps({"article": {"body": novel}}) + "\n" for _ in range(3)),
    }
    for part in ("train", "val", "test"):
        for language, side in zip(("de", "en"), zip(*PAIRS, strict=True), strict=True):
            texts[f"{part}.{language}"] = "".join(f"{text} {part}\n" for text in side)
    for number, (text, label) in enumerate(REVIEWS):
        part = "train" if number < 30 else "test"
        texts[f"aclImdb/{part}/{label}/{number}.txt"] = text
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "old.txt").write_text("暗い夜だった。\n" * 200, encoding="shift_jis")
    (folder / "logs.gz").write_bytes(gzip.compress(novel.encode()))
    (folder / "reviews.txt.xz").write_bytes(lzma.compress(novel.encode()))
    for name, more in {"gpt2": {"family": "gpt2"}, "stories": {}, "tiny": {}, "novel": {}}.items():
        settings = {**TINY_MODEL, "steps": 1, "evaluations": 1, **more}
        nanolm.train(folder / "novel.txt", out=folder / "runs" / name, **settings)
    settings = {"start_from": folder / "runs" / "novel", "steps": 1, "evaluations": 1}
    nanolm.finetune(folder / "reviews.tsv", out=folder / "runs" / "reviews", **settings)
    shutil.copytree(folder / "runs" / "novel", folder / "runs" / "corpus-2", symlinks=True)
    shutil.copytree(folder / "runs" / "gpt2" / "best", folder / "stories260K")
    return folder


@pytest.fixture
def runner(loaded: Loaded, prepared: Path, tmp_path: Path) -> Runner:
    return Runner(loaded, shutil.copytree(prepared, tmp_path / "folder", symlinks=True))


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda file: file.stem)
def test_blocks_say_what_they_are(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    for block in blocks(page):
        assert block.language != "text" or not COMMAND.search(block.text)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem in SLOW else (), id=page.stem)
        for page in EXAMPLES[False]
    ],
)
def test_examples_run(page: Path, runner: Runner, request: pytest.FixtureRequest) -> None:
    if page.stem in ("serve", "README"):
        start: Start = request.getfixturevalue("start")
        runs = [runner.folder / "runs" / name for name in ("stories", "reviews")]
        runner.address = start(*runs, names=()).url.removeprefix("http://")
    assert runner.run(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", EXAMPLES[True], ids=lambda file: file.stem)
def test_long_examples_run(page: Path, runner: Runner) -> None:
    runner.slow = True
    assert runner.run(page)


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
    text = """
make demo  # needs a network; trains a model
nanolm bench  # takes 20 seconds
nanolm sample runs/novel \\
    --seed 3  # the newest run needs a name
# needs two machines
nanolm train novel.txt
"""
    block = Block("bash", text)
    assert [line.split()[1] for line in block.commands()] == ["bench", "sample"]
    assert block.runs(slow=True) and block.runs(slow=False)
    assert not Block("bash", "# needs a GPU\n" + text).commands()


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
