"""config.json: a model's config in the format of its Hugging Face family.

    >>> config_to_json(configure("modern", vocab_size=300, layers=2, heads=2, dim=32, context=16))
    {'model_type': 'qwen3', ...}

Models that fit no family (recurrent, ALiBi, ...) are saved as "model_type": "nanolm", with the
fields of our own config. Unknown settings that would change the results are refused by name.
"""

import types
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nanolm.errors import ModelError
from nanolm.model.config import (
    ClassifierConfig,
    EncoderDecoderConfig,
    GPTConfig,
    Long,
    ModelConfig,
    Pool,
    RecurrentConfig,
    RecurrentSeq2SeqConfig,
    RopeScaling,
    Seq2SeqConfig,
    unsupported,
)
from nanolm.model.families import CAUSAL, CLASSES, CLASSIFIERS, EXPRESSED, read_family, write_family
from nanolm.model.json_values import LARGEST, Values
from nanolm.model.marian_json import (
    EXPRESSED_SEQ2SEQ,
    SEQ2SEQ,
    marian_to_json,
    read_marian,
    separate_source,
)

KINDS: dict[str, type[ModelConfig]] = {
    "transformer": GPTConfig,
    "recurrent": RecurrentConfig,
    "encoder-decoder": EncoderDecoderConfig,
    "recurrent-seq2seq": RecurrentSeq2SeqConfig,
}


def model_type(config: ModelConfig | ClassifierConfig) -> tuple[str, str]:
    """The family that `config` is saved as; for "nanolm", the reason that no other fits."""
    if isinstance(config, ClassifierConfig):
        if config.pool != "last":
            return "nanolm", f"--pool {config.pool}"
        return model_type(config.base)
    if not isinstance(config, GPTConfig | EncoderDecoderConfig):
        return "nanolm", "it is recurrent"
    reasons = []
    seq2seq = isinstance(config, EncoderDecoderConfig)
    for family in SEQ2SEQ if seq2seq else CLASSES:
        missing = [
            as_option(name, getattr(config, name))
            for name in unsupported(config, (EXPRESSED | EXPRESSED_SEQ2SEQ)[family])
        ]
        if (seq2seq or family in ("gpt2", "gpt_neox")) and config.kv_heads != config.heads:
            missing.append(as_option("kv_heads", config.kv_heads))
        if family == "pegasus" and separate_source(config):
            missing.append("--separate-vocabularies")
        if not missing:
            return family, ""
        reasons.append((len(missing), f"{family} does not support {' or '.join(missing)}"))
    return "nanolm", min(reasons, key=lambda reason: reason[0])[1]  # the first of the closest


def as_option(name: str, value: object) -> str:
    """A switch as a command-line option."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word} {value}"


def config_to_json(config: ModelConfig | ClassifierConfig) -> dict[str, Any]:
    family, _ = model_type(config)
    if isinstance(config, ClassifierConfig):
        looked_at: dict[str, Any] = {"window": config.window, "long_texts": config.long}
        looked_at |= {"ngrams": True} if config.ngrams else {}
        names = list(config.labels)
        if family == "nanolm":
            own = {"kind": "classifier", "labels": names, "pool": config.pool, **looked_at}
            return {"model_type": family, **own, "base": own_to_json(config.base)}
        return {
            **config_to_json(config.base),
            "architectures": [CLASSIFIERS[family]],
            "id2label": {str(id): name for id, name in enumerate(names)},
            "label2id": {name: id for id, name in enumerate(names)},
            "problem_type": "single_label_classification",
            **looked_at,  # ours
        }
    if family == "nanolm":
        return {"model_type": "nanolm", **own_to_json(config)}
    assert isinstance(config, GPTConfig | EncoderDecoderConfig)
    shared = {
        "model_type": family,
        "architectures": [(CAUSAL | SEQ2SEQ)[family]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
    }
    if isinstance(config, EncoderDecoderConfig):
        return {**shared, **marian_to_json(config, family)}
    return {**shared, **write_family(config, family)}


def own_to_json(config: ModelConfig) -> dict[str, Any]:
    kind = next(name for name, made in KINDS.items() if isinstance(config, made))
    return {"kind": kind, **asdict(config)}


def config_from_json(values: dict[str, Any], file: Path) -> ModelConfig | ClassifierConfig:
    """The config described by the contents of `file`, or a ModelError that says what is wrong."""
    found = Values(values, str(file))
    config: ModelConfig | ClassifierConfig
    match family := values.get("model_type"):
        case str() if family in CLASSES:
            config = read_family(found, family)
        case "marian" | "pegasus":
            config = read_marian(found, family)
        case "nanolm" if values.get("kind") == "classifier":
            config = read_own_classifier(found, file)
        case "nanolm":
            config = read_own(found)
        case _:
            known = ", ".join([*CLASSES, *SEQ2SEQ, "nanolm"])
            raise ModelError(f"{file}: nanolm supports models of type {known}, not {family!r:.100}")
    if isinstance(config, GPTConfig) and CLASSIFIERS.get(family) in found.like("architectures", []):
        config = read_classifier(found, config, read_labels(found))
    if problems := config.problems():
        raise ModelError(f"{file}: {'; '.join(problems)}")
    return config


def read_labels(values: Values) -> tuple[str, ...]:
    """The label names in order; transformers omits the default, two unnamed labels."""
    single = ["single_label_classification", None]
    values.only("problem_type", single, None, "regression or multi-label classification")
    names = values.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    order = [str(id) for id in range(len(names))] if isinstance(names, dict) else []
    if order and set(names) == set(order) and are_labels(labels := [names[id] for id in order]):
        return tuple(labels)
    raise values.wrong("id2label", "must name at least two labels, numbered from 0")


def read_classifier(
    values: Values, base: ModelConfig, labels: tuple[str, ...], pool: Pool = "last"
) -> ClassifierConfig:
    window = values.count("window", base.context)
    long = values.only("long_texts", get_args(Long), "head", "this strategy for long texts")
    ngrams = values.like("ngrams", False)
    return ClassifierConfig(
        base=base, labels=labels, pool=pool, window=window, long=long, ngrams=ngrams
    )


def are_labels(names: list[Any]) -> bool:
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names) >= 2


def read_own_classifier(values: Values, file: Path) -> ClassifierConfig:
    labels = values.like("labels", [])
    if not are_labels(labels):
        raise values.wrong("labels", "must name at least two labels")
    pool = values.only("pool", get_args(Pool), None, "this kind of pooling")
    values.check_names("labels", "pool", "window", "long_texts", "ngrams", "base")
    config = config_from_json({**values.like("base", {}), "model_type": "nanolm"}, file)
    if isinstance(config, ClassifierConfig | Seq2SeqConfig):
        raise values.wrong("base", "must be a language model")
    return read_classifier(values, config, tuple(labels), pool)


def read_own(values: Values) -> ModelConfig:
    """Our own format: exactly the fields of the config, each of its type."""
    made = KINDS[values.only("kind", KINDS, None, "this kind of model")]
    hints = get_type_hints(made)
    values.check_names(*hints)
    taken = {}
    for field in fields(made):
        missing = ... if field.default is MISSING else field.default  # of an older version
        value = values.values.get(field.name, missing)
        if field.name == "unrotated_layers" and isinstance(value, list):
            value = tuple(value)
        if field.name == "rope_scaling" and isinstance(value, dict):
            try:
                value = RopeScaling(**value)
            except TypeError:
                raise values.wrong("rope_scaling", "not in nanolm's format") from None
        hint = hints[field.name]
        if not fits(value, hint):
            whole = (f"of type {getattr(hint, '__name__', hint)}",)
            words = map(str, get_args(hint) if get_origin(hint) is Literal else whole)
            raise values.wrong(field.name, f"must be {' or '.join(words)}")
        taken[field.name] = value
    return made(**taken)


def fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (types.UnionType, Union):
        return any(fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if get_origin(hint) is tuple:
        return type(value) is tuple and all(fits(part, get_args(hint)[0]) for part in value)
    if hint in (int, float):
        return type(value) in (int, hint) and abs(value) <= LARGEST  # type: ignore[arg-type]
    if type(value) is RopeScaling is hint:
        inside = get_type_hints(RopeScaling).items()
        return all(fits(getattr(value, name), part) for name, part in inside)
    return type(value) is hint
