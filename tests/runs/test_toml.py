import tomllib

from hypothesis import given
from hypothesis import strategies as st

from nanolm.runs.toml import dump_toml

SCALARS = st.text() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), SCALARS | st.lists(SCALARS)))
def test_what_is_written_is_read(settings: dict[str, object]) -> None:
    assert tomllib.loads(dump_toml(settings)) == settings


def test_none_is_left_out() -> None:
    assert dump_toml({"a": None, "b": 1}) == "b = 1\n"
