"""Draws docs/architecture.svg from the imports of the package.

    python docs/architecture.py

Each box is a package, and each arrow points from a package to one that it imports. Imports that
follow from other arrows are omitted (transitive reduction), which keeps the picture readable.
"""

import ast
import itertools
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "nanolm"
PICTURE = HERE / "architecture.svg"
SUFFIXES = {".py", ".js", ".css", ".html"}
BOX_WIDTH, BOX_HEIGHT, COLUMN, LANE = 140, 46, 166, 26  # pixels
ROW, MARGIN, TOP = 92, 24, 64
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; text-anchor: middle; }
.title { font-size: 16px; font-weight: 600; text-anchor: start; }
.name { font-weight: 600; } .lines { font-size: 11px; fill: #59636e; }
.page { fill: #fff; } .box { fill: #eef4fa; stroke: #0072b2; }
.arrow { fill: none; stroke: #8c959f; } .head { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .lines { fill: #9da7b1; } .page { fill: #0d1117; }
.box { fill: #12233a; stroke: #62b8f0; } .arrow { stroke: #6e7681; } .head { fill: #6e7681; }
}
"""


def parts() -> dict[str, list[Path]]:
    """The files of each package, and of each module directly in nanolm/."""
    files: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*")):
        if file.suffix in SUFFIXES:
            name = file.relative_to(PACKAGE).parts[0].partition(".")[0]
            files.setdefault(name, []).append(file)
    return {name: each for name, each in files.items() if not name.startswith("__")}


def imports() -> dict[str, set[str]]:
    """The parts that each part imports, also inside functions."""
    files = parts()
    graph: dict[str, set[str]] = {}
    for name, each in files.items():
        modules: set[str] = set()
        for file in each:
            if file.suffix == ".py":
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Import):
                        modules |= {alias.name for alias in node.names}
                    elif isinstance(node, ast.ImportFrom) and node.module:
                        modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        known = {module.split(".")[1] for module in modules if module.startswith("nanolm.")}
        graph[name] = (known & set(files)) - {name}
    return graph


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without imports that follow from others."""

    def reachable(name: str) -> set[str]:
        return graph[name].union(*map(reachable, graph[name]))

    return {
        name: {each for each in known if not any(each in reachable(other) for other in known)}
        for name, known in graph.items()
    }


def chains(graph: dict[str, set[str]]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """The points (row, name) of each arrow, with an unnamed point in each row that it crosses."""

    def depth(name: str) -> int:
        return 1 + max(map(depth, graph[name]), default=-1)

    top = max(map(depth, graph))
    return {
        (name, other): [
            (top - depth(name), name),
            *((row, f"{name} {other}") for row in range(top - depth(name) + 1, top - depth(other))),
            (top - depth(other), other),
        ]
        for name, known in graph.items()
        for other in sorted(known)
    }


def positions(arrows: Iterable[list[tuple[int, str]]]) -> dict[tuple[int, str], float]:
    """The x of each point. Points in a row are sorted by the mean x of the points above them, which
    keeps arrows short and crossings few."""
    x: dict[tuple[int, str], float] = {}
    rows: dict[int, set[str]] = {}
    above: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for chain in arrows:
        for row, name in chain:
            rows.setdefault(row, set()).add(name)
        for upper, lower in itertools.pairwise(chain):
            above.setdefault(lower, []).append(upper)
    for row in sorted(rows):
        wanted = {
            name: sum(x[point] for point in above.get((row, name), []))
            / len(above.get((row, name), "x"))
            for name in rows[row]
        }
        names = sorted(rows[row], key=lambda name: (wanted[name], name))
        widths = [LANE if " " in name else COLUMN for name in names]
        left = fmean(wanted.values()) - sum(widths) / 2
        for name, width in zip(names, widths, strict=True):
            x[row, name] = left + width / 2
            left += width
    return x


def picture() -> str:
    graph, files = reduced(imports()), parts()
    arrows = chains(graph)
    x = positions(arrows.values())
    shift = MARGIN + BOX_WIDTH / 2 - min(x.values())
    width = shift + max(x.values()) + BOX_WIDTH / 2 + MARGIN
    height = TOP + ROW * (1 + max(row for row, _ in x))
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}">',
        f"<title>nanolm packages and their imports</title><style>{STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker>',
        f'<text class="title" x="{MARGIN}" y="32">nanolm packages and their imports</text>',
    ]
    for (name, other), chain in arrows.items():
        path = ""
        for upper, lower in itertools.pairwise(chain):
            (x1, y1), (x2, y2) = (
                (x[point] + shift, TOP + ROW * point[0]) for point in (upper, lower)
            )
            y1, bend = y1 + BOX_HEIGHT, (ROW - BOX_HEIGHT) / 2
            path += f"{'L' if path else 'M'}{x1:.1f},{y1} "
            path += f"C{x1:.1f},{y1 + bend:g} {x2:.1f},{y2 - bend:g} {x2:.1f},{y2} "
        lines.append(
            f'<path class="arrow" data-from="{name}" data-to="{other}" marker-end="url(#head)" '
            f'd="{path.strip()}"/>'
        )
    for (row, name), middle in x.items():
        if name in files:
            at, y = middle + shift, TOP + ROW * row
            count = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files[name])
            lines.append(
                f'<rect class="box" x="{at - BOX_WIDTH / 2:.1f}" y="{y}" width="{BOX_WIDTH}" '
                f'height="{BOX_HEIGHT}" rx="6"/>'
                f'<text class="name" x="{at:.1f}" y="{y + 20}">{name}</text>'
                f'<text class="lines" x="{at:.1f}" y="{y + 37}">{count:,} lines</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
