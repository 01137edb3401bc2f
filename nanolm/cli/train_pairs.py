"""`nanolm train-pairs`: pairs of texts to a model that turns one into the other."""

import shlex
import time
from typing import TYPE_CHECKING, Any, get_args

import click

from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import AVERAGE, ENCODING, MACHINE, PAIR_COLUMNS, Command, Table, run_options
from nanolm.cli.tables import show_sentence
from nanolm.errors import TooLittleTime, UsageError
from nanolm.formats import counted
from nanolm.machine import process
from nanolm.model.config import SEQ2SEQ_FAMILIES, CrossAttentionKind
from nanolm.pairs.settings import DEFAULT_FAMILY, PairSettings
from nanolm.text import TRAINABLE
from nanolm.training.trackers import Trackers

if TYPE_CHECKING:
    from nanolm.pairs.train import PairResult

TABLE: Table = {
    "Pairs": {
        **PAIR_COLUMNS,
        **ENCODING,
        "limit": "Use only the first N pairs, before splitting.",
        "val": "File with validation pairs, used instead of a held-out part; repeat the option "
        "for a second file.",
        "val_fraction": "Fraction to hold out for validation.  [default: 0.05, at most 2,000 "
        "pairs]",
        "test": "File with test pairs, translated and scored once at the end; repeat the option "
        "for a second file.",
        "tokenizer": "Train one (bpe, char or byte) or reuse one (gpt2, cl100k, o200k or a path).  "
        "[default: bpe, or char if a side has no spaces]",
        "vocab_size": "Vocabulary size of a bpe tokenizer.  [default: chosen for the text]",
        "separate_vocabularies": "Separate tokenizers and embeddings for source and target.",
        "source_tokenizer": (
            "|".join(TRAINABLE),
            "Train a separate tokenizer of this type for the source.",
        ),
    },
    "Model": {
        "family": (
            "|".join(SEQ2SEQ_FAMILIES),
            "Architecture: encoder-decoder is the original Transformer (2017); the last three are "
            f"recurrent baselines.  [default: {DEFAULT_FAMILY}]",
        ),
        "attention": (
            "|".join(get_args(CrossAttentionKind)),
            "Attention of a recurrent decoder to the source.  [default: additive]",
        ),
        "start_from": "Start from a run or model folder, with its tokenizer.",
        "layers": "Number of decoder layers.",
        "encoder_layers": "Number of encoder layers.  [default: --layers]",
        "heads": "Attention heads per layer.",
        "dim": "Embedding width; a multiple of --heads.",
        "hidden": "Hidden width of the feed-forward layers.  [default: depends on --dim]",
        "norm_place": "Normalize before each sublayer, or after its residual connection.",
        "context": "Maximum length of source and target in tokens; longer texts are truncated.",
        "dropout": "Dropout rate.  [default: 0.3 for few pairs on a GPU, else 0]",
    },
    "Budget": {
        "minutes": "Total time, including preparation; also caps --steps and --epochs.  "
        "[default: 10 on a CPU, 3 with CUDA, 5 with MPS]",
        "epochs": "Number of passes over the pairs.",
        "steps": "Number of steps; with the same number of threads, reruns are bit-identical.",
    },
    "Optimization": {
        "batch": "Batch size in tokens of source and target, including padding.",
        "label_smoothing": "Fraction of the target token's probability to spread over all tokens.  "
        "[default: 0.1 for few pairs on a GPU, else 0]",
        "optimizer": "Optimizer for the weight matrices.  [default: muon for Transformers, except "
        "narrow ones on a CPU]",
        "lr": "Peak learning rate.  [default: depends on width and optimizer]",
        "average": AVERAGE,
        "weight_decay": "Weight decay for the weight matrices.  [default: 0.1]",
        "seed": "Random seed. The held-out pairs do not depend on it.",
    },
    "Hardware": MACHINE,
    "Run": {
        "evaluations": "Number of times to evaluate, save and translate samples.  [default: 10]",
        "save_every": "Also save a checkpoint every N steps.  [default: every minute]",
    },
}
COMMON = {
    *("source_column", "target_column", "reverse", "val", "test", "tokenizer", "family"),
    *("attention", "start_from", "minutes", "epochs", "batch", "lr", "device", "out", "as_json"),
}
NO_PAIRS = """no pairs to train on. Name a table, or two files whose lines correspond:
  nanolm train-pairs pairs.tsv
  nanolm train-pairs train.de train.en"""


@click.command("train-pairs", cls=Command, common=COMMON)
@click.argument("pairs", nargs=-1, metavar="PAIRS...")
@run_options(PairSettings, TABLE)
def command(out: str | None, report_to: list[str], as_json: bool, **options: Any) -> int:
    """Train a model on pairs of texts such as translations.

    PAIRS is a .tsv, .csv, .jsonl or .parquet file with a source and a target column, or two files
    whose lines correspond (optionally .gz, .zst, .bz2 or .xz). Columns are detected and reported.

    \b
    nanolm train-pairs words.tsv                       spelling to pronunciation
    nanolm train-pairs train.de train.en               German to English
    nanolm train-pairs train.de train.en --reverse     English to German
    nanolm train-pairs pairs.csv --source-column question --target-column answer
    torchrun --nproc-per-node 8 -m nanolm train-pairs train.de train.en

    If training is interrupted, run the same command again to resume it.
    """
    started = time.monotonic() - time.process_time()  # --minutes includes starting the program
    settings = PairSettings.from_dict(options)
    if not settings.pairs:
        raise UsageError(NO_PAIRS)
    settings.check()

    from nanolm.cli.progress import TrainingView
    from nanolm.pairs import train

    if process()[0]:  # the first process plans, prints and writes
        codes = {"interrupted": 75, TooLittleTime.stopped: TooLittleTime.exit_code}
        return codes.get(train.follow().stopped, 0)
    with TrainingView() as view, Trackers(report_to, view.show) as notify:
        result = train.train_pairs(settings, out, notify=notify, started=started)
    if as_json:
        print_json(result.to_json())
    if result.stopped == "interrupted":
        return note_interruption(result.steps)
    if result.stopped == TooLittleTime.stopped:
        raise TooLittleTime(
            f"too little time: {counted(result.steps, 'step')} in {result.seconds:.0f} s. The "
            "model has learned almost nothing. Run the same command with more --minutes."
        )
    if not as_json:
        show(result)
    return 0


def show(result: "PairResult") -> None:
    at = f"at step {result.best_step:,} of {result.steps:,}, after {result.seconds:.0f} s"
    loss = "is not finite" if result.val_loss is None else f"{result.val_loss:.3f}"
    show_sentence(f"{result.run}: validation loss {loss} {at}")
    for name, scores in (("validation", result.val), ("test", result.test)):
        if scores:
            both = f"BLEU {scores.bleu:.1f}, chrF {scores.chrf:.1f}"
            show_sentence(f"{name}: {both}, {scores.exact:.1%} of the translations exact")
    note(f"report: {result.run}/report.html")
    note(f'next: nanolm translate {shlex.quote(result.run)} "..."')
