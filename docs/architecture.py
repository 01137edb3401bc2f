"""Draws docs/architecture.svg from the imports of the package.

    python docs/architecture.py

Packages are boxes in layers; an arrow goes from a package to one that it imports. What follows from
other arrows is left out (transitive reduction), so that the picture can be read.
"""

import ast
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "nanolm"
PICTURE = HERE / "architecture.svg"
SUFFIXES = {".py", ".js", ".css", ".html"}
BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW, MARGIN, TOP = 150, 46, 186, 92, 24, 64  # pixels
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
    """The files of each package, and of each module right below nanolm/."""
    files: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*")):
        if file.suffix in SUFFIXES:
            name = file.relative_to(PACKAGE).parts[0].partition(".")[0]
            files.setdefault(name, []).append(file)
    return {name: each for name, each in files.items() if not name.startswith("__")}


def imports() -> dict[str, set[str]]:
    """Which parts each part imports, in any of its functions too."""
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
    """Without the imports that others imply."""

    def reachable(name: str) -> set[str]:
        return graph[name].union(*map(reachable, graph[name]))

    return {
        name: {each for each in known if not any(each in reachable(other) for other in known)}
        for name, known in graph.items()
    }


def layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """The parts by the longest chain of imports below them, the highest layer first."""

    def depth(name: str) -> int:
        return 1 + max(map(depth, graph[name]), default=-1)

    rows: dict[int, list[str]] = {}
    for name in graph:
        rows.setdefault(depth(name), []).append(name)
    order = [rows[number] for number in sorted(rows, reverse=True)]
    # Each below the middle of what imports it, so that arrows are short and cross little.
    for number, row in enumerate(order[1:], start=1):
        above = {name: place for upper in order[:number] for place, name in enumerate(upper)}

        def middle(name: str, above: dict[str, int] = above) -> float:
            places = [place for other, place in above.items() if name in graph[other]]
            return sum(places) / max(1, len(places))

        row.sort(key=middle)
    return order


def picture() -> str:
    graph, files = reduced(imports()), parts()
    rows = layers(graph)
    width = 2 * MARGIN + COLUMN * max(map(len, rows))
    height = TOP + ROW * len(rows)
    places = {
        name: (width / 2 + COLUMN * (place - (len(row) - 1) / 2), TOP + ROW * number)
        for number, row in enumerate(rows)
        for place, name in enumerate(row)
    }
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>The packages of nanolm</title><style>{STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker>',
        f'<text class="title" x="{MARGIN}" y="32">nanolm: an arrow points to what is imported</text>',
    ]
    for name, known in graph.items():
        for other in sorted(known):
            (x1, y1), (x2, y2) = places[name], places[other]
            y1, bend = y1 + BOX_HEIGHT, ROW / 2
            lines.append(
                f'<path class="arrow" data-from="{name}" data-to="{other}" marker-end="url(#head)" '
                f'd="M{x1:g},{y1:g} C{x1:g},{y1 + bend:g} {x2:g},{y2 - bend:g} {x2:g},{y2:g}"/>'
            )
    for name, (x, y) in places.items():
        count = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files[name])
        lines.append(
            f'<rect class="box" x="{x - BOX_WIDTH / 2:g}" y="{y:g}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6"/><text class="name" x="{x:g}" y="{y + 20:g}">{name}</text>'
            f'<text class="lines" x="{x:g}" y="{y + 37:g}">{count:,} lines</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
