"""Default hyperparameters, chosen by experiment.

>>> weight_decay(passes=8, lr=0.004, steps=1500, parameters=10_600_000)
1.8

docs/experiments.md lists the experiments and their results. With many passes over the same text,
weight decay matters most: with enough of it, the twentieth pass still lowers validation loss.
"""

import math
from dataclasses import replace

from nanolm.model.config import GPTConfig, ModelConfig, TransformerConfig
from nanolm.model.size import non_embedding_parameters
from nanolm.training.optimizers import OPTIMIZERS
from nanolm.training.settings import TrainSettings

EMBEDDING_RATE = 4.0  # times the learning rate: a token is seen rarely, a matrix at every step
HEAD_RATE = 0.6  # times the learning rate: slower than the layers below; also if tied
REFERENCE_DIM = 384  # embedding width that the registry's learning rates are for
WIDTH_EXPONENT = 0.75  # learning rate ~ width ** -0.75
NARROW_EXPONENT = {"muon": 0.5}  # the same below REFERENCE_DIM
RECURRENT_RATE = 2  # times the learning rate of a Transformer
MOST_PULL = 0.05  # learning rate * weight decay; more would undo recent steps
PULL, PULL_EXPONENT = 0.9, 1.2  # learning rate * weight decay * steps = 0.9 * passes ** 1.2
FULL_PULL_PARAMETERS = 1e7  # a smaller model overfits less, and needs less weight decay:
PULL_SIZE_EXPONENT = 0.4  # times (parameters / 10 million) ** 0.4
LEAST_DECAY = 0.1  # weight decay for a single pass
MOST_PASSES = 20  # more hardly help, whatever the weight decay
SPARE_PASSES = 24  # of a single model, if there is time left; they do no harm
MANY_PASSES = 10  # from here on, dropout helps too
DROPOUT = 0.1
HUNDREDS_OF_PASSES = 40  # as over a tiny text: from here on, more dropout helps
MOST_DROPOUT = 0.4
EMA_DECAY = 0.98  # dropout makes single steps noisy; an average of fifty is better
EMA_SHARE = 0.02  # of the steps, to average the weights over; twice that for many passes,
NOISY_EMA_SHARE = 0.1  # and this for small batches, which make steps noisy
SMALL_BATCH = 4_096  # tokens
LONG_CONTEXT = 256  # tokens; the start of such a window, with little context, hardly counts
TINY_STEPS = 240  # of the smallest model
REPRODUCED_BYTES = 10_000  # below this, the model should reproduce the text, not generalize
LIGHT_PULL = 1.5  # learning rate * weight decay * steps below that size
STRONG_PULL = 0.1  # learning rate * weight decay above it, against memorizing
TINY_CONTEXT = 16  # tokens; with more, the model memorizes whole sentences
TINY_BATCH = 64
MUON_POLYNOMIALS = 3  # of three products each, to orthogonalize one update
CONTINUED_RATE = 0.15  # of the learning rate, for a pretrained model
LORA_RATE = 1e-3  # the learning rate of LoRA adapters; 12 million parameters diverge at 1e-2
LORA_CLASSIFIER_RATE = 3e-4
MOST_MUON_SHARE = 0.8  # of the rest of a step; above it, AdamW is as good in the same time

# Distillation of several models, the teachers, into one, the student.
LEAST_TEACHERS, MOST_TEACHERS = 2, 24
STUDENT_SHARE = 0.25  # of the training time, at least
LEAST_STUDENT_SHARE = 0.2  # of all time; on a slow machine, fewer teachers are trained
TEACHER_OVERHEAD = 0.05  # of the time of its steps: evaluation, predictions for all of the text
TEACHER_SECONDS = 1.5  # to set up a teacher and to save it
STUDENT_RATE = 0.7  # times the learning rate of the teachers
STUDENT_PULL = 0.003  # learning rate * weight decay
OFFSETS_ON_GPU = 4  # at which the text is cut into windows
MOST_GAIN = 0.04  # of the loss, with infinitely many teachers
SIZE_GAIN = 0.01  # of the loss, that distillation may cost in model size
LEAST_COLUMNS = 16  # probabilities that are kept for each token; fewer are too few
COLUMNS_MEMORY_SHARE = 0.25  # of the free memory that they may use, and at most
MOST_COLUMNS_BYTES = 8 << 30


def optimizer(config: ModelConfig, batch: int) -> tuple[str, str]:
    """Muon, unless its updates cost more time than they save; with the reason."""
    if not isinstance(config, GPTConfig):
        return "adamw", "recurrent layers"
    wide = config.hidden / config.dim
    inner = 3 if config.feed_forward == "swiglu" else 2
    per_layer = MUON_POLYNOMIALS * (4 * (2 + 1) + inner * (2 * wide + 1))
    products = 2 * per_layer * config.layers * config.dim**3
    share = products / (6 * non_embedding_parameters(config) * batch * config.context)
    if share > MOST_MUON_SHARE:
        return "adamw", f"Muon's updates would take {share:.1f} times as long as the rest of a step"
    return "muon", f"orthogonalized updates, {share:.0%} more arithmetic per step"


def learning_rate(optimizer: str, config: ModelConfig) -> float:
    narrow = NARROW_EXPONENT.get(optimizer, WIDTH_EXPONENT)
    exponent = narrow if config.dim < REFERENCE_DIM else WIDTH_EXPONENT
    rate = OPTIMIZERS[optimizer].lr * (REFERENCE_DIM / config.dim) ** exponent
    return float(f"{rate * (1 if isinstance(config, TransformerConfig) else RECURRENT_RATE):.2g}")


def weight_decay(
    passes: float, lr: float, steps: int, parameters: float = math.inf, size: float = math.inf
) -> float:
    """Weight decay for this many passes of a model over a text of `size` bytes; `parameters` is
    without embeddings."""
    small = min(1.0, parameters / FULL_PULL_PARAMETERS) ** PULL_SIZE_EXPONENT
    pull = min(PULL * small * passes**PULL_EXPONENT / steps, MOST_PULL)
    if passes >= HUNDREDS_OF_PASSES:
        pull = STRONG_PULL if size >= REPRODUCED_BYTES else LIGHT_PULL / steps
    return float(f"{max(LEAST_DECAY, pull / lr):.2g}")


def student(settings: TrainSettings) -> TrainSettings:
    """The settings of the model that learns from the teachers that `settings` are for, if any. It
    has all of the remaining time, or as many steps as each of them."""
    if not settings.teachers:
        return settings
    assert settings.lr
    lr = float(f"{STUDENT_RATE * settings.lr:.2g}")
    how = replace(settings, lr=lr, weight_decay=float(f"{STUDENT_PULL / lr:.2g}"), average=0.0)
    steps = None if settings.minutes else settings.steps
    return replace(how, dropout=0.0, steps=steps, compile=bool(settings.compile))


def affordable_teachers(each: float, predicted_epochs: float, left: float) -> int:
    """How many models to distill within `left` seconds; 0 if there is no time for enough. The steps
    of a teacher, or of the student, take `each` seconds. Then a teacher makes its predictions."""
    seconds = (1 + TEACHER_OVERHEAD * predicted_epochs) * each + TEACHER_SECONDS
    count = int(min((1 - STUDENT_SHARE) * left, left - each) / seconds)
    return min(MOST_TEACHERS, count) if count >= LEAST_TEACHERS else 0


def distillation_gain(teachers: int) -> float:
    """The share by which distillation lowers the loss, approximately."""
    return MOST_GAIN * (1 - 1 / max(1, teachers))


def ema_decay(steps: int, passes: float, step_tokens: float = math.inf) -> float:
    """The decay of an EMA over a small share of the steps; 0 for too few steps."""
    share = EMA_SHARE * (2 if passes >= MANY_PASSES else 1)
    averaged = steps * (NOISY_EMA_SHARE if step_tokens < SMALL_BATCH else share)
    return round(1 - 1 / averaged, 6) if averaged >= 2 else 0.0


def rates(tied: bool) -> dict[str, float]:
    """Learning rate multipliers of the embedding and the head."""
    embedding = HEAD_RATE if tied else EMBEDDING_RATE
    return {
        "token_embedding.weight": embedding,
        "source_embedding.weight": EMBEDDING_RATE,  # of a sequence-to-sequence model
        "head.weight": HEAD_RATE,
    }
