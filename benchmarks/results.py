"""Saves benchmark results: one file per machine, with a description of that machine.

>>> save("training", [{"what": "nanolm", "milliseconds": 24.1}])
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from nanolm.bench.machine import facts

FOLDER = Path(__file__).parent / "results"


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the results and write them to the results folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = facts(device, "bfloat16" if device == "cuda" else "float32")
    print(json.dumps(machine))
    for row in rows:
        print(json.dumps(row))
    FOLDER.mkdir(exist_ok=True)
    where = re.sub(r"\W+", "-", machine["name"]).strip("-").lower()
    file = FOLDER / f"{name}-{where}.json"
    file.write_text(json.dumps({"machine": machine, "results": rows}, indent=1) + "\n")
    print(f"results written to {file}")
