"""The shape of the package: which way its imports point, who prints, and what is never used."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "nanolm"
# Each may know those before it; a module may know its own part.
ORDER = [
    "formats",
    "errors",
    "webpage",
    "choice",
    "machine",
    "files",
    "gguf",
    "download",
    "text",
    "model",
    "runs",
    "report",
    "inspect",
    "generation",
    "training",
    "planning",
    "evaluation",
    "pretraining",
    "sweep",
    "classification",
    "pairs",
    "comparison",
    "bench",
    "serve",
    "cli",
]


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {
        ".".join(("nanolm", *file.relative_to(PACKAGE).with_suffix("").parts)): ast.parse(
            file.read_text(encoding="utf-8")
        )
        for file in PACKAGE.rglob("*.py")
        if "data" not in file.parts
    }


def imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_arrows_point_one_way() -> None:
    for name, tree in modules().items():
        part = name.split(".")[1]
        if part not in ORDER:  # __init__ and __main__ are the doors
            continue
        known = {target.split(".")[1] for target in imports(tree) if target.startswith("nanolm.")}
        above = known - set(ORDER[: ORDER.index(part) + 1]) - {"__version__"}
        assert not above, f"{name} imports {above}"


def test_no_cycle_between_modules() -> None:
    trees = modules()
    graph = {name: imports(tree) & set(trees) for name, tree in trees.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_class_name_means_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in where.items() if len(places) > 1}


def dotted(node: ast.AST) -> str:
    """`a.b.c` in source code; nothing for other expressions."""
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(tree: ast.Module) -> set[str]:
    return {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def attributes(tree: ast.Module) -> set[str]:
    return {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_only_the_command_line_prints() -> None:
    for name, tree in modules().items():
        if not name.startswith("nanolm.cli"):
            assert "print" not in calls(tree), name
            assert not {"rich", "click", "logging"} & imports(tree), name
            assert not {"sys.stdout", "sys.stderr"} & attributes(tree), name
        if not name.startswith(("nanolm.cli", "nanolm.__init__")):  # the door for Python warns
            assert "warnings" not in imports(tree), name


UNPICKLE = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
RUN = {"eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load", "torch.hub.load"}


def dangers(tree: ast.Module) -> set[str]:
    """What would unpickle or run what it reads."""
    return (UNPICKLE & imports(tree)) | (RUN & (calls(tree) | imports(tree)))


def test_nothing_unpickles_or_runs_text() -> None:
    for name, tree in modules().items():
        assert not dangers(tree), name
    assert dangers(ast.parse("from torch import load")) == {"torch.load"}
    assert dangers(ast.parse("import pickle, numpy\nx = numpy.load(f, allow_pickle=True)"))


def test_the_picture_shows_the_imports() -> None:
    """Line counts may be older; the graph may not."""
    script = PACKAGE.parent / "docs" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", script)
    assert spec and spec.loader
    architecture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(architecture)

    def graph(svg: str) -> tuple[set[str], set[tuple[str, str]]]:
        names = re.findall(r'class="name"[^>]*>(\w+)<', svg)
        return set(names), set(re.findall(r'data-from="(\w+)" data-to="(\w+)"', svg))

    kept = graph(architecture.PICTURE.read_text(encoding="utf-8"))
    assert kept == graph(architecture.picture()), "run python docs/architecture.py"
    assert kept[0] == set(ORDER)
    assert ("pretraining", "planning") in kept[1]
