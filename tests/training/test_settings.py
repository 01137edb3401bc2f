import pytest

from nanolm.errors import UsageError
from nanolm.model.config import FAMILIES, PRESETS, complete_shape
from nanolm.planning.sizes import LADDER
from nanolm.training.settings import TrainSettings


def test_all_problems_are_reported_at_once() -> None:
    settings = TrainSettings(
        corpus=("a.txt",),
        tokenizer="bpee",
        family="modren",
        preset="nanoo",
        steps=0,
        minutes=-1,
        val_fraction=0.9,
        vocab_size=100,
        batch=0,
        lr=float("nan"),
        dtype="int8",
    )
    with pytest.raises(UsageError) as caught:
        settings.check()
    message = str(caught.value)
    for part in [
        "--tokenizer bpee: choose bpe, char, byte, gpt2, cl100k, o200k, or the path",
        "--family modren: choose from modern, llama, gpt2, rnn, lstm; did you mean modern?",
        "did you mean nano?",
        "--steps 0",
        "--minutes -1",
        "--val-fraction 0.9",
        "--vocab-size 100: must be at least 258",
        "--batch 0",
        "--lr nan",
        "--dtype int8",
    ]:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 5, "epochs": 1.0}, "one of --steps and --epochs"),
        ({"tokenizer": "char", "vocab_size": 300}, "--vocab-size .*; .*--tokenizer char"),
        ({"seed": -1}, "--seed -1"),
        ({"dtype": "float8", "compile": True}, "--compile and --dtype float8 cannot be combined"),
        ({"val": "a.txt"}, "--val a.txt is also part of the corpus"),
        ({"corpus": ["a.txt", "a.txt"]}, "a.txt is listed twice"),
        ({"layers": 0, "dropout": 1.0}, "--layers 0.*\n.*--dropout 1.0"),
        ({"threads": 10**9}, "--threads"),
        ({"weight_decay": float("inf")}, "--weight-decay inf"),
        (
            {"positions": "rotary"},
            "--positions rotary: choose from learned, sinusoidal, rope, alibi, none",
        ),
        (
            {"family": "rnn", "heads": 3, "qk_norm": False},
            "--heads applies to .*\n--qk-norm applies to",
        ),
        ({"family": "gpt2", "rope_base": 500.0}, "--rope-base applies to --positions rope"),
        ({"heads": 5, "dim": 48}, "--dim 48 is not a .* --heads 5; try --dim 50 or --heads 6"),
        ({"heads": 5, "preset": "nano"}, "try --dim 50 or .*--preset nano has --dim 48"),
        ({"dim": 50, "preset": "nano", "batch": 0}, "--batch 0.*\n--dim 50 is not a multiple"),
        ({"heads": 3, "dim": 45}, "need an even width per head.*; try --dim 48"),
        ({"heads": 4, "kv_heads": 3}, "--heads 4 is not a multiple of --kv-heads 3"),
        ({"dim": 97}, "even width per head"),
        ({"dim": 100, "kv_heads": 3}, "--dim 100 is not a multiple of --heads 3; try --dim 102"),
        ({"rope_base": 1.0}, "--rope-base 1.0: must be above 1"),
        ({"norm_place": "post", "dtype": "float8"}, "--dtype float8: only for Transformers with"),
        ({"start_from": "x", "dim": 3, "vocab_size": 300}, "--dim cannot .*\n--vocab-size cannot"),
    ],
)
def test_settings_that_cannot_be_combined(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainSettings.from_dict({"corpus": "a.txt", **changes}).check()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="stepps: no such setting; did you mean steps"):
        TrainSettings.from_dict({"stepps": 3})


@pytest.mark.parametrize(
    ("name", "value"), [("steps", "3"), ("minutes", [1]), ("seed", True), ("bias", 1)]
)
def test_a_value_of_the_wrong_kind_is_refused(name: str, value: object) -> None:
    with pytest.raises(
        UsageError, match=f"{name} = .*: must be (a whole number|a number|a string|true or false)"
    ):
        TrainSettings.from_dict({"corpus": "a.txt", name: value})
    assert TrainSettings.from_dict({"minutes": 3}).minutes == 3


def test_there_and_back() -> None:
    settings = TrainSettings(corpus=("a", "b"), steps=3, dropout=0.1)
    settings.check()
    assert TrainSettings.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize("heads", range(1, 40))
def test_what_is_left_open_is_chosen_to_fit(heads: int) -> None:
    """As the planner does for each candidate size."""
    for _, usual_heads, usual_dim, _ in LADDER:
        shape = complete_shape(usual_heads, usual_dim, heads=heads)
        TrainSettings(("a",), heads=shape[0], dim=shape[1]).check()
        assert abs(shape[1] - usual_dim) <= 2 * heads
        shape = complete_shape(usual_heads, usual_dim, dim=2 * heads, kv_heads=1)
        TrainSettings(("a",), heads=shape[0], dim=shape[1]).check()
        assert complete_shape(usual_heads, usual_dim) == (usual_heads, usual_dim)
    TrainSettings(("a",), heads=heads).check()


def test_every_preset_is_a_model() -> None:
    for family in FAMILIES:
        for preset in PRESETS:
            TrainSettings(("a",), family=family, preset=preset).check()
