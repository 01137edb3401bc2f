"""A long run takes no more memory and no more files than a short one."""

import json
from pathlib import Path

import pytest
from conftest import TINY_MODEL, Tally
from journeys import counts

import nanolm
from nanolm.training.events import Event, Progressed

GROWTH = 0.02


@pytest.mark.parametrize("steps", counts(1_000, 100_000))
def test_memory_and_open_files_stay_what_they_were(
    steps: int, tmp_path: Path, tally: Tally
) -> None:
    """Looked at in twenty places of the run, after the first fifth of it."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from /proc")
    seen: list[tuple[int, int]] = []

    def look(event: Event) -> None:
        if isinstance(event, Progressed) and event.record["step"] % (steps // 25) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append((pages, len(list(Path("/proc/self/fd").iterdir()))))

    small = {**TINY_MODEL, "threads": 1, "evaluations": 25, "save_every": steps // 50}
    nanolm.train("embedded:tiny", out=tmp_path / "run", steps=steps, notify=look, **small)
    memory, opened = zip(*seen[len(seen) // 5 :], strict=True)
    written = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len([line for line in written if "lr" in json.loads(line)]) == steps // 10
    assert max(opened) <= opened[0] + 1, opened  # a checkpoint may just be written
    assert max(memory) <= (1 + GROWTH) * memory[0], memory
    tally("steps of one run without growing", steps, steps)
