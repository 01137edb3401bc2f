"""How well `nanolm train FILE --minutes M` uses its time: a table of files and budgets.

    python benchmarks/budgets.py novel.txt chat.log --minutes 0.25,0.5,1,3 --jobs 2 --busy

Every run starts with an empty cache, so preparing the text counts. Each job is pinned to two cores.
With --busy, two busy-loop processes are pinned to the same cores.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORES = 2  # per job
COLUMNS = {
    "file": "file",
    "minutes": "minutes",
    "exit": "exit",
    "seconds": "seconds",
    "of_budget": "of budget",
    "setup_seconds": "setup seconds",
    "of_quarter": "of setup limit",
    "steps": "steps",
    "stopped": "stopped",
    "bits_per_byte": "bits/byte",
    "worse": "change from shorter",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--minutes", default="0.25,0.5,1,3")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, two cores each")
    parser.add_argument("--busy", action="store_true", help="start two busy-loop processes per job")
    parser.add_argument("--out", type=Path, help="file to write the rows to as JSON")
    parser.add_argument("--options", default="", help="additional options for nanolm train")
    asked = parser.parse_args()
    budgets = sorted(float(part) for part in asked.minutes.split(","))
    more = asked.options.split()
    allowed = sorted(os.sched_getaffinity(0))
    places: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for job in range(asked.jobs):
        places.put(set(allowed[CORES * job : CORES * (job + 1)]) or set(allowed))
    # Longest first, so that no job runs alone at the end.
    pairs = [(file, minutes) for minutes in reversed(budgets) for file in asked.files]
    with ThreadPoolExecutor(asked.jobs) as pool:
        work = partial(one, places=places, busy=asked.busy, more=more)
        rows = list(pool.map(work, pairs))
    rows.sort(key=lambda row: (asked.files.index(row["path"]), row["minutes"]))
    compare(rows)
    print(table(rows))
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def one(
    pair: tuple[str, float], places: "queue.SimpleQueue[set[int]]", busy: bool, more: list[str]
) -> dict[str, Any]:
    """One run, on two cores that no other job uses."""
    cores = places.get()
    try:
        with spinning(cores if busy else set()):
            return run(*pair, cores, more)
    finally:
        places.put(cores)


def run(file: str, minutes: float, cores: set[int], more: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nanolm", "train", file, "--minutes", f"{minutes:g}"]
        command += ["--out", f"{folder}/run", "--json", *more]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "NANOLM_CACHE": f"{folder}/cache"}
        start = time.monotonic()
        process = subprocess.run(
            pinned(cores, command), env=environment, capture_output=True, encoding="utf-8"
        )
        seconds = time.monotonic() - start
    lines = process.stdout.splitlines()
    result = json.loads(lines[-1]) if lines else {}
    row: dict[str, Any] = {
        "path": file,
        "file": Path(file).name,
        "minutes": minutes,
        "exit": process.returncode,
        "seconds": round(seconds, 1),
        "of_budget": round(seconds / (60 * minutes), 3),
        "setup_seconds": result.get("setup_seconds"),
        "steps": result.get("steps"),
        "stopped": result.get("stopped"),
        "bits_per_byte": result.get("val_bits_per_byte"),
        "log": process.stderr[-6_000:],
    }
    if row["setup_seconds"] is not None:
        row["of_quarter"] = round(row["setup_seconds"] / (15 * minutes), 3)
    print(f"{row['file']} {minutes:g}: exit {row['exit']}, {seconds:.0f} s", file=sys.stderr)
    return row


def pinned(cores: set[int], command: list[str]) -> list[str]:
    """The command, restricted to these cores."""
    program = "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    program += "os.execv(sys.argv[2], sys.argv[2:])"
    return [sys.executable, "-c", program, ",".join(map(str, sorted(cores))), *command]


@contextlib.contextmanager
def spinning(cores: set[int]) -> Iterator[None]:
    """One busy-loop process per core, free to move between the cores."""
    command = pinned(cores, [sys.executable, "-c", "while True: pass"])
    processes = [subprocess.Popen(command) for _ in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(rows: list[dict[str, Any]]) -> None:
    """Add the change in bits per byte from the next shorter run on the same file."""
    for before, row in pairwise(rows):
        if before["path"] != row["path"] or not (before["bits_per_byte"] and row["bits_per_byte"]):
            continue
        row["worse"] = round(row["bits_per_byte"] / before["bits_per_byte"] - 1, 4)


def table(rows: list[dict[str, Any]]) -> str:
    def shown(name: str, value: Any) -> str:
        if value is None:
            return ""
        if name in ("of_budget", "of_quarter", "worse"):
            return f"{value:+.1%}" if name == "worse" else f"{value:.0%}"
        return f"{value:.3f}" if name == "bits_per_byte" else f"{value}"

    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    lines += [[shown(name, row.get(name)) for name in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
