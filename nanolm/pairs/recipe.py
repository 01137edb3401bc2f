"""Choose the settings of `nanolm train-pairs` that were not given, each with its reason."""

from dataclasses import replace

from nanolm.choice import Choice, Chosen
from nanolm.formats import counted
from nanolm.machine import available_threads
from nanolm.model.config import Seq2SeqConfig, complete_shape, configure
from nanolm.model.device import choose_device, choose_dtype
from nanolm.pairs.settings import DEFAULT_FAMILY, RECURRENT, PairSettings
from nanolm.planning import recipe
from nanolm.planning.tuning import NARROW_DIM
from nanolm.text import TRAINABLE
from nanolm.text.pairs import Pairs

LEAST_VOCAB, MOST_VOCAB = 1_000, 32_000
REFERENCE_VOCAB, REFERENCE_BYTES = 8_000, 4_000_000  # twice the tokens for four times the text
SPACED = 0.5  # of the texts on a side have a space: it consists of words
MANY_PAIRS = 100_000  # from here on, a wider model learns more, and dropout less
MINUTES = {"cpu": 10.0, "cuda": 3.0, "mps": 5.0}
BATCH_TOKENS = {"cpu": 4_096, "cuda": 8_192, "mps": 4_096}
LEAST_CONTEXT, MOST_CONTEXT = 64, 512  # tokens; longer texts are cut
EMA_DECAY = {"cpu": 0.99, "cuda": 0.998, "mps": 0.99}  # an average over a tenth of a short run
EVALUATIONS = 10


def choose_tokenizer(settings: PairSettings, train: Pairs) -> tuple[PairSettings, list[Choice]]:
    """The kind of tokenizer, and its vocabulary size."""
    chosen = Chosen(settings)
    sides = {"source": train.sources, "target": train.targets}
    unspaced = [
        name for name, texts in sides.items() if sum(map(spaced, texts)) < SPACED * len(texts)
    ]
    if unspaced:
        reason = f"the {' and the '.join(unspaced)} has no spaces between words"
        chosen.choose("tokenizer", "char", reason)
    chosen.choose("tokenizer", "bpe", "both sides consist of words")
    chosen.fill(separate_vocabularies=False)
    if chosen.settings.tokenizer == "bpe":
        size = sum(len(text.encode()) for texts in sides.values() for text in texts)
        if chosen.settings.separate_vocabularies:
            size //= 2
        wanted = REFERENCE_VOCAB * (size / REFERENCE_BYTES) ** 0.5
        vocabulary = min(MOST_VOCAB, max(LEAST_VOCAB, round(wanted, -2)))
        shared = "" if chosen.settings.separate_vocabularies else ", shared by both sides"
        chosen.choose("vocab_size", int(vocabulary), f"for {size / 1e6:.1f} MB of text{shared}")
    return chosen.settings, chosen.choices


def spaced(text: str) -> bool:
    return " " in text


def choose_settings(
    settings: PairSettings, base: Seq2SeqConfig | None, count: int, longest: int
) -> tuple[PairSettings, list[Choice]]:
    """Choose what depends on the machine and the training pairs: there are `count`, and the longest
    text has `longest` tokens. `base` is the config of the model to start from, if any."""
    chosen = Chosen(settings)
    choose, fill = chosen.choose, chosen.fill
    choose("device", *choose_device(settings.device))
    device = chosen.settings.device
    if device != "cpu":  # on a CPU, both are measured later
        choose("dtype", *choose_dtype(settings.dtype, device))
        fill(threads=available_threads())
    many = count >= MANY_PAIRS
    if base is None:
        choose("family", DEFAULT_FAMILY, "learns more per minute than the Transformer of 2017")
        choose_shape(chosen, device, many)
        most = min(MOST_CONTEXT, max(LEAST_CONTEXT, 1 << (longest - 1).bit_length()))
        choose("context", most, f"the longest text has {longest:,} tokens")
    dim = base.dim if base else chosen.settings.dim or 1
    if dim < NARROW_DIM:
        choose("threads", 1, "small models gain little from more")
    choose("batch", BATCH_TOKENS[device], "tokens of source and target, including padding")
    recurrent = chosen.settings.family in RECURRENT
    if base is None and not recurrent:
        choose("optimizer", "muon", "orthogonalized updates of the weight matrices")
    fill(optimizer="adamw", weight_decay=0.1, average=EMA_DECAY[device], label_smoothing=0.1)
    config = base or fresh_config(replace(chosen.settings, dropout=0.0), 1, None)
    rate = recipe.learning_rate(chosen.settings.optimizer or "adamw", config)
    rate = rate if base is None else float(f"{recipe.CONTINUED_RATE * rate:.2g}")
    choose("lr", rate, f"for width {dim} with {chosen.settings.optimizer}")
    dropout = 0.3 if device == "cuda" and not many else 0.1
    choose("dropout", dropout, f"{counted(count, 'training pair')}")
    if not (settings.steps or settings.epochs or settings.minutes):
        change = "change with --minutes, --epochs or --steps"
        choose("minutes", MINUTES[device], f"in all, for training on {device}; {change}")
    fill(evaluations=EVALUATIONS)
    return chosen.settings, chosen.choices


def choose_shape(chosen: Chosen[PairSettings], device: str, many: bool) -> None:
    given = chosen.settings
    wide, layers = (512, 6) if many else (256, 3)
    if device == "cpu":
        wide, layers = 128, 3
    heads, dim = complete_shape(wide // 32, wide, given.heads, given.dim)
    chosen.choose("dim", dim, f"for training on {device}")
    if given.family not in RECURRENT:
        chosen.fill(heads=heads)
    chosen.choose("layers", layers, "of the decoder; --encoder-layers for the encoder")
    chosen.fill(encoder_layers=chosen.settings.layers)


def fresh_config(
    settings: PairSettings, vocab_size: int, source_vocab_size: int | None
) -> Seq2SeqConfig:
    assert settings.family and settings.context
    shape = {**settings.shape(), "context": settings.context, "dropout": settings.dropout}
    sizes = {"vocab_size": vocab_size, "source_vocab_size": source_vocab_size}
    config = configure(settings.family, **shape, **sizes)
    assert isinstance(config, Seq2SeqConfig)
    return config


def learned(kind: str | None) -> bool:
    """Whether the tokenizer is learned from the pairs."""
    return kind in (None, *TRAINABLE)
