"""Choose the settings of `nanolm train-pairs` that were not given, each with its reason."""

from dataclasses import replace

from nanolm.choice import Choice, Chosen
from nanolm.machine import available_threads
from nanolm.model.config import (
    EncoderDecoderConfig,
    RecurrentSeq2SeqConfig,
    Seq2SeqConfig,
    complete_shape,
    configure,
)
from nanolm.model.device import choose_device, choose_dtype
from nanolm.pairs.settings import DEFAULT_FAMILY, RECURRENT, PairSettings
from nanolm.planning import recipe
from nanolm.text import TRAINABLE
from nanolm.text.pairs import Pairs

LEAST_VOCAB, MOST_VOCAB = 500, 32_000
VOCAB_PER_MB = {"cpu": 750, "cuda": 2_000, "mps": 2_000}  # less time, fewer tokens to learn
SPACED = 0.5  # of the texts on a side have a space: it consists of words
MOST_SYMBOLS = 200  # different words on the target side, such as phonemes: each is one token
MANY_TOKENS = 20_000_000  # in the training pairs; from here on, a larger model learns more
MINUTES = {"cpu": 10.0, "cuda": 3.0, "mps": 5.0}
BATCH_TOKENS = {"cpu": 2_048, "cuda": 8_192, "mps": 4_096}
CPU_WIDTHS = (192, 128, 96, 64)  # the widest with which there is time for both of these is used
LEAST_EPOCHS, LEAST_STEPS = 5, 1_000
CPU_FLOPS = 25e9  # per core and second
CPU_LAYERS = 3  # 2 with the least width
CPU_DIM = 128  # narrower models learn more from more, smaller batches
RECURRENT_LAYERS, LEAST_RECURRENT_DIM = 1, 128  # with more layers or less width they learn slowly
MUON_RATE = 0.7  # times the learning rate of a language model
RECURRENT_RATE = 0.5  # relative to a recurrent language model
POST_NORM_RATE = 0.5  # relative to a model whose blocks begin with a norm
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
    symbols = len({word for text in train.targets for word in text.split()})
    spelled = unspaced == ["source"] and symbols <= MOST_SYMBOLS
    if settings.vocab_size is not None:
        chosen.choose("tokenizer", "bpe", "a vocabulary size is given")
    own = settings.source_tokenizer
    if own is not None:
        spelled, unspaced = spelled and own == "char", [n for n in unspaced if n == "target"]
    if spelled and chosen.open("tokenizer") and chosen.open("separate_vocabularies"):
        chosen.set("tokenizer", "bpe", f"each of the {symbols} symbols of the target is one token")
        chosen.set("separate_vocabularies", True, "the source is tokenized by character", "yes")
        chosen.fill(source_tokenizer="char")
    elif unspaced:
        reason = f"no spaces between words in the {' and the '.join(unspaced)}"
        chosen.choose("tokenizer", "char", reason)
    words = "both sides consist" if own is None else "the target consists"
    chosen.choose("tokenizer", "bpe", f"{words} of words")
    if own is not None:
        chosen.choose("separate_vocabularies", True, "the source has its own tokenizer", "yes")
    chosen.fill(separate_vocabularies=False)
    if chosen.settings.separate_vocabularies:
        chosen.fill(source_tokenizer=chosen.settings.tokenizer)
    by_symbol = spelled and chosen.settings.source_tokenizer == "char"
    if chosen.settings.tokenizer == "bpe" and not by_symbol:
        size = sum(len(text.encode()) for texts in sides.values() for text in texts)
        if chosen.settings.separate_vocabularies:
            size //= 2
        wanted = VOCAB_PER_MB[choose_device(settings.device)[0]] * size / 1e6
        vocabulary = min(MOST_VOCAB, max(LEAST_VOCAB, round(wanted, -2)))
        shared = "" if chosen.settings.separate_vocabularies else ", shared by both sides"
        chosen.choose("vocab_size", int(vocabulary), f"for {size / 1e6:.1f} MB of text{shared}")
    return chosen.settings, chosen.choices


def spaced(text: str) -> bool:
    return " " in text


def choose_settings(
    settings: PairSettings, base: Seq2SeqConfig | None, tokens: int, longest: int
) -> tuple[PairSettings, list[Choice]]:
    """Choose what depends on the machine and the training pairs, which have `tokens` tokens; the
    longest text has `longest`. `base` is the config of the model to start from, if any."""
    chosen = Chosen(settings)
    choose, fill = chosen.choose, chosen.fill
    choose("device", *choose_device(settings.device))
    device = chosen.settings.device
    if device != "cpu":  # on a CPU, both are measured later
        choose("dtype", *choose_dtype(settings.dtype, device))
        fill(threads=available_threads(), workers=1)
    if not (settings.steps or settings.epochs or settings.minutes):
        change = "change with --minutes, --epochs or --steps"
        choose("minutes", MINUTES[device], f"default total time on {device}; {change}")
    many = tokens >= MANY_TOKENS
    if base is None:
        choose("family", DEFAULT_FAMILY, "learns more per minute than the original Transformer")
        choose_shape(chosen, tokens)
        most = min(MOST_CONTEXT, max(LEAST_CONTEXT, 1 << (longest - 1).bit_length()))
        choose("context", most, f"the longest text has {longest:,} tokens")
    dim = base.dim if base else chosen.settings.dim or 1
    batch = BATCH_TOKENS[device] // (2 if dim < CPU_DIM else 1)
    choose("batch", batch, "tokens of source and target, including padding")
    if base is None and chosen.settings.family not in RECURRENT:
        if device == "cpu" and dim < CPU_DIM:
            choose("optimizer", "adamw", "Muon costs too much for a model this narrow")
        choose("optimizer", "muon", "orthogonalized updates of the weight matrices")
    repeated = device != "cpu" and not many  # a GPU reads few pairs many times
    times = "many" if repeated else "only a few"
    choose("dropout", 0.3 if repeated else 0.0, f"each pair is seen {times} times")
    choose("label_smoothing", 0.1 if repeated else 0.0, f"each pair is seen {times} times")
    fill(optimizer="adamw", weight_decay=0.1, average=EMA_DECAY[device])
    config = base or fresh_config(replace(chosen.settings, dropout=0.0), 1, None)
    rate = recipe.learning_rate(chosen.settings.optimizer or "adamw", config)
    post_norm = isinstance(config, EncoderDecoderConfig) and config.norm_place == "post"
    recurrent = isinstance(config, RecurrentSeq2SeqConfig)
    rate *= RECURRENT_RATE if recurrent else POST_NORM_RATE if post_norm else 1
    rate *= recipe.CONTINUED_RATE if base else 1
    rate *= MUON_RATE if chosen.settings.optimizer == "muon" else 1
    choose("lr", float(f"{rate:.2g}"), f"for width {dim} with {chosen.settings.optimizer}")
    fill(evaluations=EVALUATIONS)
    return chosen.settings, chosen.choices


def choose_shape(chosen: Chosen[PairSettings], tokens: int) -> None:
    given, device = chosen.settings, chosen.settings.device
    wide, layers = (512, 6) if tokens >= MANY_TOKENS else (384, 4)
    width, reason = 64, f"for training on {device}"  # of a head
    if device == "cpu":
        seen = CPU_FLOPS * available_threads() * 60 * (given.minutes or MINUTES[device])
        batch = given.batch or BATCH_TOKENS[device]
        parameters = seen / 6 / max(LEAST_EPOCHS * tokens, LEAST_STEPS * batch)
        # 12 dim ** 2 in each encoder layer, 16 in each decoder layer
        fits = [dim for dim in CPU_WIDTHS if 28 * CPU_LAYERS * dim**2 <= parameters]
        wide, width = max([*fits, CPU_WIDTHS[-1]]), 32
        layers = 2 if (given.dim or wide) <= CPU_WIDTHS[-1] else CPU_LAYERS
        reason = f"the widest model that has time to learn from {tokens:,} tokens"
    if given.family in RECURRENT:
        layers = RECURRENT_LAYERS
        if wide < LEAST_RECURRENT_DIM:
            wide, reason = LEAST_RECURRENT_DIM, "narrower recurrent models learn slowly"
    heads, dim = complete_shape(wide // width, wide, given.heads, given.dim)
    chosen.choose("dim", dim, reason)
    if given.family not in RECURRENT:
        chosen.fill(heads=heads)
    chosen.choose("layers", layers, "in the decoder; set --encoder-layers for the encoder")
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
