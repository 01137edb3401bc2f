"""Bits that rot, files cut short, texts and tokenizers that are no longer what they were."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Tally
from faults import before_step, damaged, flip, press, truncate
from journeys import Journey, counts, journeys, same

import nanolm
from nanolm.errors import DataError, ModelError
from nanolm.files import verify
from nanolm.runs.checkpoint import list_checkpoints, newest_valid
from nanolm.text.tokenizer import train_tokenizer

Ended = tuple[Journey, Path]


@pytest.mark.parametrize("flips", counts(100, 1000))
def test_a_flipped_bit_is_found_and_the_file_named(flips: int, ended: Ended, tally: Tally) -> None:
    """In every file of a checkpoint, the manifest included; then the one before it is used."""
    tally(f"a flipped bit, {ended[0].name}", flips, found(ended[1], flip, flips))


@pytest.mark.parametrize("cuts", counts(40, 200))
def test_a_file_cut_short_is_found_and_named(cuts: int, ended: Ended, tally: Tally) -> None:
    tally(f"a truncated file, {ended[0].name}", cuts, found(ended[1], truncate, cuts))


def found(run: Path, damage: Any, times: int) -> int:
    dice, survived = random.Random(times), 0
    before, newest = list_checkpoints(run / "checkpoints")[-2:]
    assert newest_valid(run / "checkpoints", pytest.fail) == newest
    files = sorted(newest.iterdir())
    for number in range(times):
        file, reports = files[number % len(files)], list[str]()
        with damaged(file, damage, dice):
            used = newest_valid(run / "checkpoints", reports.append)
        survived += used == before and str(file) in reports[0]
    verify(newest)
    return survived


def test_a_run_goes_on_from_the_checkpoint_before(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journey, whole = ended
    run, notes = tmp_path / "run", list[str]()
    with monkeypatch.context() as patch:
        before_step(patch, 20, press)
        journey.go(run)
    flip(run / "last" / "optimizer.safetensors", random.Random(1))
    journey.go(run, lambda event: notes.append(str(event)))
    assert any("optimizer.safetensors is damaged" in note for note in notes)
    assert same(run, whole)


@pytest.mark.parametrize("swaps", counts(4, 20))
def test_another_text_of_the_same_size_is_refused(
    swaps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """One word of the text, a label, a tokenizer: half of the swaps each in training and in
    fine-tuning; put back, the run goes on."""
    dice, refused = random.Random(swaps), 0
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {n} cats sat on {n + 1} mats.\n" for n in range(200)))
    kinds = journeys(tmp_path)
    for number in range(swaps):
        journey = kinds["fine-tuning" if number % 2 else "training"]
        file = Path(journey.text) if number % 2 else text
        more: dict[str, Any] = {}
        if number % 4 == 2:  # the tokenizer instead
            file = tmp_path / f"tokenizer-{number}.json"
            file.write_text(train_tokenizer(["aaaab"], "bpe", 259).to_json())
            more = {"tokenizer": str(file)}
        journey = Journey(
            **{**vars(journey), "text": str(text) if not number % 2 else journey.text}
        )
        run = tmp_path / f"run-{number}"
        with monkeypatch.context() as patch:
            before_step(patch, 10, press)
            journey.go(run, steps=12, **more)
        before = file.read_bytes()
        places = [place for place in range(len(before)) if before[place : place + 1].isdigit()]
        place = dice.choice(places)
        digit = str((int(before[place : place + 1]) + 1) % 10).encode()
        after = before[:place] + digit + before[place + 1 :]
        if more:
            after = train_tokenizer(["bbbba"], "bpe", 259).to_json().encode()
        assert len(after) == len(before) and after != before
        file.write_bytes(after)
        with pytest.raises(DataError, match=r"has changed since .* started"):
            journey.go(run, steps=12, **more)
        refused += 1
        file.write_bytes(before)
        assert journey.go(run, steps=12, **more).stopped == "steps"
    tally("text or tokenizer changed under a run", swaps, refused)


def test_weights_that_are_no_numbers_are_refused(trained: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree((trained / "best").resolve(), folder)
    (folder / "MANIFEST.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        tensors[name][0, 0] = wrong
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=r"down_proj.*not finite"):
            nanolm.load(folder)
    tensors[name][:] = 3e38  # finite, though their sum is not
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj.*too large"):
        nanolm.load(folder)
