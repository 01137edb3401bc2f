"""Time from entering `nanolm train` to the end of the first step.

    python benchmarks/starting.py

On a GPU, this uses the small model of training.py, first with empty compiler caches and then with
populated ones. On a CPU, it uses the `micro` preset. The text is already tokenized.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from results import save

SMALL = ["--tokenizer", "char", "--layers", "6", "--heads", "6", "--dim", "384"]
SMALL += ["--context", "256", "--batch", "64"]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--typed", type=float, help=argparse.SUPPRESS)
    arguments.add_argument("--rounds", type=int, default=5)
    asked, _ = arguments.parse_known_args()
    if asked.typed:
        child(asked.typed)
    model = SMALL if torch.cuda.is_available() else ["--preset", "micro"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NANOLM_CACHE")
        caches = {name: f"{folder}/{name}" for name in names}
        first_step(model, folder, caches)  # prepares the text
        for name in names[:2]:
            caches[name] += "-empty"
        times = [first_step(model, folder, caches) for _ in range(1 + asked.rounds)]
    rows.append({"what": "nothing compiled yet", "seconds": round(times[0], 2)})
    rows.append({"what": "again", "seconds": round(statistics.median(times[1:]), 2)})
    save("starting", rows)


def first_step(model: list[str], folder: str, caches: dict[str, str]) -> float:
    run = f"{folder}/run-{time.monotonic_ns()}"
    typed = time.time()
    command = [sys.executable, __file__, "--typed", str(typed)]
    command += ["train", "embedded:stories", "--minutes", "3", "--out", run, *model]
    shown = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    return float(shown.stdout.split()[-1])


def child(typed: float) -> None:
    """Run nanolm and exit after its first training step."""
    sys.argv[1:] = sys.argv[sys.argv.index("train") :]
    from nanolm.training import trainer

    step = trainer.Trainer.train_step

    def train_step(self: trainer.Trainer, lr: float) -> Any:
        numbers = step(self, lr).tolist()
        print(f"{time.time() - typed:.3f}", flush=True)
        os._exit(0 if numbers else 1)

    trainer.Trainer.train_step = train_step  # type: ignore[method-assign]
    from nanolm.cli.main import main

    main()


if __name__ == "__main__":
    main()
