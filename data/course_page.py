"""Copy the output of `make course` into docs/course.md, shortened.

    make course 2>&1 | tee course.log
    make course SMALL=... LARGE=... SST=... COURSE=runs/own 2>&1 | tee own.log
    make course-pairs 2>&1 | tee pairs.log
    python data/course_page.py embedded=course.log own=own.log pairs=pairs.log

Step 3 of the log named `embedded` replaces the block that follows `<!-- embedded 3 -->`.
"""

import re
import sys
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "course.md"
BLOCK = re.compile(r"(<!-- (\w+) (\w+) -->\n```(?:console)?\n)(.*?)(```\n)", re.DOTALL)
STEP = re.compile(r"^=== (\w+).*===$", re.MULTILINE)
PROGRESS = re.compile(r" *\d+%  ")
SKIPPED = re.compile(r" *\d+%  [a-z ]+  \S+ remaining$|wrote |compile: ")
# Settings of the plan that the page discusses.
DISCUSSED = ("validation set", "vocabulary", "model", "steps", "lr", "weight_decay", "dropout")
DISCUSSED += ("average", "text", "train", "forecast", "language_loss", "layer_decay", "preset")
SHOWN = 6  # progress lines kept of each group
WIDTH = 110


def steps(log: str) -> dict[str, str]:
    """The output of each step, keyed by its number or first word."""
    _, *parts = STEP.split(log)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def shortened(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not SKIPPED.match(line)]
    kept: list[str] = []
    progress: list[str] = []
    planning = False
    for line in [*lines, ""]:
        if PROGRESS.match(line):
            progress.append(line)
            continue
        kept += some(progress)
        progress = []
        planning = line == "the plan" or (planning and line.startswith("  "))
        name = line.strip().partition(":")[0]
        if planning and line != "the plan" and name not in DISCUSSED:
            kept += ["  ..."] * (kept[-1] != "  ...")
        elif len(line) > WIDTH and not line.startswith("$") and "  " not in line:
            kept += textwrap.wrap(line, WIDTH, break_on_hyphens=False)  # prose, not a table
        else:
            kept.append(line)
    return "\n".join(kept).strip()


def some(progress: list[str]) -> list[str]:
    """A few evenly spaced lines, including the first and the last."""
    if len(progress) <= SHOWN:
        return progress
    places = sorted({round(n * (len(progress) - 1) / (SHOWN - 1)) for n in range(SHOWN)})
    return [line for place in places for line in (progress[place], " ...")][:-1]


def updated(page: str, logs: dict[str, str]) -> str:
    """The page with the blocks of these logs replaced; other blocks are unchanged."""
    found = {
        (name, step): shortened(text)
        for name, log in logs.items()
        for step, text in steps(log).items()
    }

    def replaced(block: re.Match[str]) -> str:
        before, name, step, old, after = block.groups()
        return before + (found[name, step] + "\n" if (name, step) in found else old) + after

    return BLOCK.sub(replaced, page)


if __name__ == "__main__":
    named = (word.split("=", 1) for word in sys.argv[1:])
    output = {name: Path(file).read_text(encoding="utf-8") for name, file in named}
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), output), encoding="utf-8")
