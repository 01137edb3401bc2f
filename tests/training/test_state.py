"""The saved state of the loop, under the names of version 0.1.0."""

import json
from pathlib import Path

import pytest

from nanolm.errors import ModelError
from nanolm.training.state import State, read_state

ON_DISK = """step passed_over tokens seconds sums summed evaluation_sums evaluation_steps train_loss
evaluations evaluated_tokens scores best best_step lowest_loss beyond decay_step bad_steps skipped
returns good_step reserve begun setup first_loss told parts lengths"""
ADDED_SINCE = {"whole_to_part"}


def test_it_is_written_and_read_under_the_old_names(tmp_path: Path) -> None:
    state = State(step=7, data_offset=3, rollbacks=1, grad_accum_steps=4, warnings_shown=["stuck"])
    (tmp_path / "state.json").write_text(state.to_json())
    values = json.loads(state.to_json())
    assert set(values) == {"format", *ON_DISK.split(), *ADDED_SINCE}
    assert (values["passed_over"], values["returns"], values["parts"]) == (3, 1, 4)
    assert read_state(tmp_path) == state


@pytest.mark.parametrize("text", ["", "[]", '{"no such field": 1}', "7"])
def test_what_cannot_be_read_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ModelError, match=r"state\.json cannot be read"):
        read_state(tmp_path)
