import pytest

from nanolm.errors import UsageError
from nanolm.training.settings import TrainSettings


def test_everything_wrong_is_named_at_once() -> None:
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
        "--tokenizer bpee: there is bpe, char, byte, gpt2, cl100k, o200k, or the file",
        "--family modren: there is modern, llama, gpt2, rnn, lstm; did you mean modern?",
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
        ({"steps": 5, "epochs": 1.0}, "give one of --steps and --epochs"),
        ({"tokenizer": "char", "vocab_size": 300}, "--vocab-size is for --tokenizer bpe"),
        ({"seed": -1}, "--seed -1"),
        ({"dtype": "float8", "compile": True}, "--compile and --dtype float8 cannot be together"),
        ({"val": "a.txt"}, "--val a.txt is trained on too"),
        ({"corpus": ["a.txt", "a.txt"]}, "named twice"),
        ({"layers": 0, "dropout": 1.0}, "--layers 0.*\n.*--dropout 1.0"),
        ({"threads": 10**9}, "--threads"),
        ({"weight_decay": float("inf")}, "--weight-decay inf"),
        ({"positions": "rotary"}, "--positions rotary: there is learned, sinusoidal, rope, none"),
        ({"family": "rnn", "heads": 3, "qk_norm": False}, "--heads is for .*\n--qk-norm is for"),
        ({"family": "gpt2", "rope_base": 500.0}, "--rope-base is for --positions rope"),
        ({"start_from": "x", "dim": 3, "vocab_size": 300}, "--dim cannot .*\n--vocab-size cannot"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainSettings.from_dict({"corpus": "a.txt", **changes}).check()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="stepps: no such setting; did you mean steps"):
        TrainSettings.from_dict({"stepps": 3})


@pytest.mark.parametrize(
    ("name", "value"), [("steps", "3"), ("minutes", [1]), ("seed", True), ("bias", 1)]
)
def test_a_value_of_the_wrong_kind_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name} = .*: must be (int|float|bool)"):
        TrainSettings.from_dict({"corpus": "a.txt", name: value})
    assert TrainSettings.from_dict({"minutes": 3}).minutes == 3


def test_there_and_back() -> None:
    settings = TrainSettings(corpus=("a", "b"), steps=3, dropout=0.1)
    settings.check()
    assert TrainSettings.from_dict(settings.to_dict()) == settings
