"""The cost of checkpoints: runs that save every few steps, compared with runs that rarely save.

    python benchmarks/saving.py

Runs alternate. The cost of one checkpoint is the time difference divided by the number of
checkpoints. By default, `nanolm train` saves once a minute.
"""

import argparse
import statistics
import tempfile
from typing import Any

from results import save

import nanolm
from nanolm.training.checkpointer import SAVE_SECONDS


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--preset", default="micro")
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    arguments.add_argument("--rounds", type=int, default=5)
    asked = arguments.parse_args()
    how: dict[str, Any] = {"preset": asked.preset, "steps": asked.steps, "evaluations": 1}
    how |= {"compile": False}
    with tempfile.TemporaryDirectory() as folder:
        nanolm.train("embedded:stories", out=f"{folder}/first", **(how | {"steps": 20}))
        fixed = settings(f"{folder}/first")
        seconds: dict[int, list[float]] = {0: [], asked.every: []}
        for turn in range(asked.rounds):
            for every in seconds:
                more: dict[str, Any] = {"save_every": every} if every else {}
                out = f"{folder}/{turn}-{every}"
                found = nanolm.train("embedded:stories", out=out, **how, **fixed, **more)
                seconds[every].append(found.seconds)
    rarely, often = (statistics.median(times) for times in seconds.values())
    each = (often - rarely) / (asked.steps // asked.every - 1)
    save(
        "saving",
        [
            {
                "what": f"{asked.preset}, {asked.steps} steps",
                "seconds": round(rarely, 3),
                f"saving every {asked.every}": round(often, 3),
                "milliseconds a checkpoint": round(1000 * each, 1),
                "share of the time at one a minute": round(each / SAVE_SECONDS, 5),
            }
        ],
    )


def settings(run: str) -> dict[str, Any]:
    """Settings measured on this machine by the first run, reused so that all runs are alike."""
    from pathlib import Path

    from nanolm.runs.folder import Run

    found = Run(Path(run)).settings()
    return {name: found[name] for name in ("threads", "workers", "dtype") if name in found}


if __name__ == "__main__":
    main()
