"""axe-core finds nothing wrong on any page, light and dark, on a desktop and on a phone."""

import importlib.util
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from commands import Commands, Loaded
from journeys import journeys
from servers import Start

AXE = os.environ.get("NANOLM_AXE", "")  # another version of axe.min.js
if package := importlib.util.find_spec("axe_core_python"):
    AXE = AXE or str(Path(*package.submodule_search_locations or [], "axe.min.js"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.skipif(not AXE, reason="there is no axe-core: pip install axe-core-python"),
]
LOOKS = [(width, dark) for width in (1440, 390) for dark in (False, True)]
READY = "document.readyState === 'complete' && (document.body.dataset.ready || 'yes') === 'yes'"
# In addition to these pages, every run has a report.
PAGES = """
report words classic --out runs.html
sample words --prompt "the cat" --tokens 20 --seed 1 --show top=3 --html sample.html
eval words text.txt --html eval.html
eval pairs pairs.tsv --html translations.html
tokenizer show "the small cat 字" --tokenizer words --html tokens.html
inspect words "the small cat sleeps" --out inspect.html
inspect words "the small cat sleeps" --walk --out walk.html
inspect words --word cat "a cat sleeps" "the cat sees a dog" --out word.html
inspect words --neighbours cat --out neighbours.html
inspect classic --positions --out positions.html
inspect labels "the band was good" --out decision.html
inspect pairs "my shoe 3" --out alignment.html
inspect pairs "my shoe 3" --walk --out walk-pairs.html
sweep embedded:tiny --over lr=0.001:0.01 --minutes 0.1 --preset nano --threads 1 --out sweep
compare labeled.tsv --only majority,bag --budget 0.05 --seeds 2 --threads 1 --out compare
report sweep
report compare
"""
WRONG = """axe.run().then(result => result.violations.map(rule => rule.id + ": "
    + rule.nodes.map(node => node.target.join(" ") + " " + node.html.slice(0, 120)).join("; ")))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, loaded: Loaded) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text.txt").write_text("the small cat sleeps. a dog likes a bird.\n" * 9)
    ways = journeys(folder)
    ways["training"].go(folder / "words")
    ways["training"].go(folder / "classic", family="gpt2")
    ways["fine-tuning"].go(folder / "labels")
    ways["pairs"].go(folder / "pairs")
    commands = Commands(loaded, folder)
    for line in PAGES.strip().splitlines():
        code, said = commands.run(*shlex.split(line))
        assert code == 0, said
    return sorted([*folder.glob("*.html"), *folder.glob("*/*.html")])


def wrong(browser: Browser, what: str) -> list[str]:
    """The violations on the page as it is now."""
    if not browser.value("window.axe !== undefined"):
        browser.value(Path(AXE).read_text(encoding="utf-8"))
    asked = {"expression": WRONG, "awaitPromise": True, "returnByValue": True}
    result = browser.tell("Runtime.evaluate", **asked)["result"]
    return [f"{what}: {each}" for each in result["value"]]


def test_pages_from_disk(browser: Browser, pages: list[Path]) -> None:
    found: list[str] = []
    for page in pages:
        for width, dark in LOOKS:
            browser.look(width, dark)
            browser.open(page, READY)
            name = f"{page.parent.name}/{page.name}"
            found += wrong(browser, f"{name}, {width} pixels{' dark' * dark}")
    assert len(pages) >= 17
    assert not found, "\n".join(found)


def test_every_stage_of_a_walk(browser: Browser, pages: list[Path]) -> None:
    found: list[str] = []
    page = next(page for page in pages if page.name == "walk-pairs.html")  # has all of them
    for width, dark in LOOKS[1:3]:
        browser.look(width, dark)
        browser.open(page, READY)
        roles = browser.value("stages.map(stage => stage.role)")
        assert len(roles) > 10
        for role in dict.fromkeys(roles):
            browser.value(f"go({roles.index(role)})")
            found += wrong(browser, f"{role}, {width} pixels{' dark' * dark}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_playground(width: int, dark: bool, browser: Browser, start: Start) -> None:
    """Its three views, with nothing yet, with results, and with the drawer open."""
    server, found = start(names=("writer", "labels", "translator")), list[str]()

    def look(what: str) -> None:
        found.extend(wrong(browser, what))

    def choose(model: str, view: str) -> None:
        browser.value(
            f"(box => {{ box.value = '{model}'; box.dispatchEvent(new Event('change')) }})"
            "(document.getElementById('model'))"
        )
        browser.wait(f"!document.getElementById('{view}').hidden")

    def type_in(box: str) -> None:
        browser.value(
            f"(box => {{ box.value = 'the cat sat'; box.dispatchEvent(new Event('input')) }})"
            f"(document.getElementById('{box}'))"
        )

    def click(button: str) -> None:
        browser.value(f"document.querySelector('{button}').click()")

    def open_drawer(button: str) -> None:
        click(button)
        browser.wait("!document.getElementById('inside').hidden")
        look(f"the drawer, by {button}")
        click("#close")

    browser.fresh_page()
    browser.look(width, dark)
    browser.tell("Page.navigate", url=server.url)
    browser.wait("document.body && document.body.dataset.ready === 'yes'")
    look("nothing yet")
    type_in("prompt")
    click("#write")
    browser.wait("document.querySelector('.token') && document.getElementById('stop').disabled")
    look("texts")
    browser.value("document.querySelector('.token').focus()")
    browser.wait("document.querySelector('.other') !== null")
    look("other tokens")
    open_drawer(".text header button")
    choose("labels", "labeling")
    type_in("input")
    browser.wait("document.querySelectorAll('.label').length === 2")
    look("labels")
    open_drawer("#why")
    choose("translator", "translating")
    type_in("source")
    browser.wait("document.querySelector('.pair') !== null")
    look("translations")
    assert not found, "\n".join(found)
