"""The wheel works where there is no checkout, with the embedded data inside."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def test_a_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--no-index", "-w", tmp_path, CHECKOUT], check=True)
    (built,) = tmp_path.glob("nanolm-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(installed)
        names = archive.namelist()
    data = ("tiny.txt", "stories.txt", "reviews.tsv", "dates.tsv", "veltish.tsv")
    assert {f"nanolm/data/{name}" for name in data} <= set(names)
    assert "nanolm/py.typed" in names  # type checkers then use our annotations
    assert any(name.endswith("LICENSE") for name in names)
    assert not any(name.startswith(("tests", "data")) for name in names)
    # -P keeps the current folder, and so the checkout, off the path.
    program = [sys.executable, "-P", "-m", "nanolm"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    small = ["--layers", "1", "--heads", "2", "--dim", "16", "--steps", "2"]
    for arguments in (["train", "embedded:tiny", *small], ["sample", "--tokens", "3"]):
        subprocess.run(
            [*program, *arguments],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    where = "import nanolm; print(nanolm.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", where], env=environment, capture_output=True, text=True
    )
    assert str(installed) in found.stdout
