"""Makes the pictures of README.md and docs/ from real runs: a terminal (SVG), the playground, a
walk through a model, and ten pages on a desktop and on a phone (PNG).

    python docs/pictures.py                     ten minutes, needs Chromium
    python docs/pictures.py walk                only the walk, in a minute
    python docs/pictures.py pages               only the ten pages, in five minutes
    python docs/pictures.py shakespeare.txt     also refreshes the transcript in README.md

It trains on data/stories.txt in a pseudo-terminal, then opens `nanolm serve` in a headless browser.
"""

import base64
import io
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

DOCS, ROOT = Path(__file__).parent, Path(__file__).parents[1]
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "tests"))
from browser import Browser  # noqa: E402

COLUMNS = 100
TERMINAL = """nanolm train stories.txt --minutes 2 --evaluations 2
nanolm sample --prompt "One day in spring" --stop "***" --tokens 100"""
TRANSCRIPT = """nanolm train shakespeare.txt --minutes 1 --evaluations 2
nanolm sample --prompt "ROMEO:" --tokens 60 --temperature 0.7"""
PAGE = {"#prompt": "Once upon a time", "[data-name=n] input": 2}
WALK = """nanolm train embedded:tiny --preset nano --out small
nanolm inspect small "the small cat chases a" --walk --out walk.html"""
# Of the walk: the name of a picture, the stage, the token, and the number.
WALK_STAGES = (
    ("queries", "query", 3, 1),
    ("scores", "scores", 4, 3),
    ("weights", "weights", 4, 3),
    ("next", "next", 4, 0),
)
PAGE_COMMANDS = """nanolm train embedded:stories --minutes 1 --out stories
nanolm train embedded:stories --minutes 1 --family lstm --out lstm
nanolm finetune-sentiment --from stories --minutes 1 --out reviews
nanolm train embedded:tiny --preset nano --out small
nanolm report stories lstm --out runs.html
nanolm inspect stories "Once upon a time there was a little fox who" --out attention.html
nanolm inspect reviews "The food was not good, but the view was." --out decision.html
nanolm inspect small "the small cat chases a" --walk --out walk.html"""
WIDE, PHONE = 1440, 390  # pixels
HEIGHTS = {WIDE: 900, PHONE: 780}
TOP = "/html"
# The name of a picture, its page, the width, whether it is dark, and what to scroll to (XPath).
PAGES = (
    ("report", "stories/report.html", WIDE, False, TOP),
    ("report-phone", "stories/report.html", PHONE, True, "//h2[.='Curves']"),
    ("runs", "runs.html", WIDE, True, TOP),
    ("reviews", "reviews/report.html", WIDE, False, "//h2[.='Confusion matrix']"),
    ("attention", "attention.html", WIDE, False, TOP),
    ("decision", "decision.html", PHONE, False, TOP),
    ("walk", "walk.html", WIDE, True, TOP),
    ("walk-phone", "walk.html", PHONE, False, "//*[@class='stage']"),
)
MOST_BYTES = 150_000  # per picture of a page
SIZE = {"x": 0, "y": 0, "width": 1160, "height": 640, "scale": 1.5}
ENVIRONMENT = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}


def lines_of(command: str, folder: Path) -> list[str]:
    """What a command leaves on a terminal, with its escape codes for colors."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (200, COLUMNS))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    words = [sys.executable, "-m", *shlex.split(command)]
    process = subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, **streams)
    os.close(theirs)
    output = b""
    with suppress(OSError):  # raised when the other end is closed
        while part := os.read(ours, 1 << 16):
            output += part
    assert process.wait() == 0, output.decode()
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output.decode()):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(up[1])
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r" and (part[0] != "\x1b" or part[-1] == "m"):
            lines[row] += part
    return [line for line in lines if line]


def session(commands: str, folder: Path) -> Text:
    lines: list[Text] = []
    for command in commands.splitlines():
        lines.append(Text.assemble(("$ ", "green"), (command, "bold")))
        lines += [*map(Text.from_ansi, lines_of(command, folder)), Text()]
    return Text("\n").join(lines[:-1])


def draw_terminal(screen: Text) -> None:
    for name, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", SVG_EXPORT_THEME)):
        console = Console(width=COLUMNS, record=True, file=io.StringIO())
        console.print(screen)
        svg = console.export_svg(title="nanolm", theme=theme)
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # downloads nothing
        svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas")
        svg = svg.replace("rgba(255,255,255,0.35)", "#8c959f")
        (DOCS / f"terminal-{name}.svg").write_text(svg, encoding="utf-8")


@contextmanager
def serving(folder: Path, *runs: str) -> Iterator[str]:
    """Serve these runs; gives the URL of the server."""
    serve = [sys.executable, "-m", "nanolm", "serve", *runs, "--port=0"]
    with subprocess.Popen(serve, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE) as server:
        try:
            yield server.stdout.readline().decode().strip()
        finally:
            server.terminate()


def generate(browser: Browser, url: str) -> None:
    browser.tell("Emulation.setScrollbarsHidden", hidden=True)
    browser.tell("Page.navigate", url=url)
    browser.wait("document.body && document.body.dataset.ready === 'yes'")
    for box, value in PAGE.items():
        browser.value(f"box = document.querySelector('{box}'); box.value = '{value}'")
        browser.value("box.dispatchEvent(new Event('input'))")
    browser.value("document.getElementById('pieces').open = true")
    browser.point("#write", click=True)
    browser.wait("document.querySelector('.token') && document.getElementById('stop').disabled")


def draw_playground(browser: Browser, url: str) -> None:
    generate(browser, url)
    token = "document.querySelector('.text:last-child .token:nth-child(n + 22).s2')"  # a close call
    for name in ("light", "dark"):
        browser.look(1160, dark=name == "dark")
        browser.value(f"{token}.dispatchEvent(new Event('mouseenter'))")
        take_picture(browser, f"playground-{name}.png", SIZE)


def take_picture(browser: Browser, name: str, clip: dict[str, float], most: float = inf) -> None:
    """Save a picture, with fewer colors if it would need more than `most` bytes."""
    shot = base64.b64decode(browser.tell("Page.captureScreenshot", clip=clip)["data"])
    for colors in (256, 64, 16):
        picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(colors)
        picture.save(DOCS / name, optimize=True)
        if (DOCS / name).stat().st_size <= most:
            return


def draw_page(browser: Browser, name: str, width: int, place: str) -> None:
    browser.value(f'document.evaluate("{place}", document).iterateNext().scrollIntoView()')
    browser.value("scrollBy(0, -60)")  # room for a header that sticks to the top
    top, height = browser.value("scrollY"), HEIGHTS[width]
    scale = 2 if width == PHONE else 1
    clip = {"x": 0, "y": top, "width": width, "height": height, "scale": scale}
    take_picture(browser, f"page-{name}.png", clip, MOST_BYTES)


def draw_pages(browser: Browser, folder: Path) -> None:
    for command in PAGE_COMMANDS.splitlines():
        lines_of(command, folder)
    browser.tell("Emulation.setScrollbarsHidden", hidden=True)
    for name, page, width, dark, place in PAGES:
        browser.look(width, dark)
        browser.open(folder / page)
        if page == "walk.html":
            browser.value("go(stages.findIndex(stage => stage.role === 'weights'))")
            browser.value("choose(4, 3)")
        draw_page(browser, name, width, place)
    with serving(folder, "stories", "reviews") as url:
        for name, width, dark in (("playground", WIDE, True), ("playground-phone", PHONE, False)):
            browser.look(width, dark)
            generate(browser, url)
            draw_page(browser, name, width, TOP if width == WIDE else "//*[@id='texts']")


def draw_walk(browser: Browser, folder: Path) -> None:
    for command in WALK.splitlines():
        lines_of(command, folder)
    browser.tell("Emulation.setScrollbarsHidden", hidden=True)
    browser.look(1160)
    browser.open(folder / "walk.html", "document.body.dataset.ready === 'yes'")
    for name, role, token, number in WALK_STAGES:
        browser.value(f"go(stages.findIndex(stage => stage.role === '{role}'))")
        browser.value(f"choose({token}, {number})")
        height = browser.value("document.querySelector('.stage').getBoundingClientRect().bottom")
        browser.value("scrollTo(0, 0)")
        take_picture(browser, f"walk-{name}.png", SIZE | {"height": min(900, height + 16)})


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {"walk": draw_walk, "pages": draw_pages}
        alone = [part for part in parts if sys.argv[1:] == [part]]
        with Browser(folder / "profile") as browser:
            for part in alone or parts:
                (own := folder / part).mkdir()  # both have a run of the same name
                parts[part](browser, own)
        if alone:
            return
        shutil.copy(ROOT / "data" / "stories.txt", folder)
        draw_terminal(session(TERMINAL, folder))
        with serving(folder, "runs/stories") as url, Browser(folder / "profile") as browser:
            draw_playground(browser, url)
        if sys.argv[1:]:
            shutil.copy(sys.argv[1], folder / "shakespeare.txt")
            new = re.sub(r" +\n", "\n", f"```console\n{session(TRANSCRIPT, folder).plain}\n```")
            old = r"(?s)```console\n\$ nanolm train shakespeare.txt.*?```"
            text = README.read_text(encoding="utf-8")
            README.write_text(re.sub(old, lambda _: new, text), encoding="utf-8")


if __name__ == "__main__":
    main()
