import pytest

from nanolm.formats import counted, readable


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1040.3, "1,040"),
        (1e6, "1,000,000"),
        (10**12, "1,000,000,000,000"),
        (999.96, "1,000"),
        (12.345, "12.3"),
        (3.0, "3"),
        (0.01234, "0.0123"),
        (0.0, "0"),
        (1e-9, "1e-09"),
        (-2.5, "-2.5"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_no_exponent(value: float, shown: str) -> None:
    assert readable(value) == shown


def test_one_is_singular() -> None:
    assert [counted(n, "step") for n in (0, 1, 1.0, 2)] == [
        "0 steps",
        "1 step",
        "1 step",
        "2 steps",
    ]
    assert counted(1.5, "pass") == "1.5 passes"
