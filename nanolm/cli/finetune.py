"""`nanolm finetune` and `nanolm finetune-sentiment`: labeled text to a classifier."""

import shlex
from typing import TYPE_CHECKING, Any, get_args

import click

from nanolm.classification.settings import DATA, SCRATCH, FinetuneSettings
from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import (
    ADAPTER,
    AVERAGE,
    LABELED,
    MACHINE,
    Command,
    Table,
    run_option,
    run_options,
)
from nanolm.cli.tables import show_sentence
from nanolm.model.config import Long, Pool
from nanolm.training.trackers import Trackers

if TYPE_CHECKING:
    from nanolm.classification.finetune import FinetuneResult
    from nanolm.classification.seeds import SeedResults

TABLE: Table = {
    "Data": {
        **LABELED,
        "limit": "Use only the first N rows, before splitting.",
        "val": "Validation file, used instead of a held-out part of DATA.",
        "val_fraction": "Fraction to hold out for validation, stratified by label.  [default: 0.2]",
        "test": "Test file, evaluated once at the end.",
        "test_fraction": "Fraction to hold out for testing, instead of --test.",
        "class_weights": "Weight the loss so that rare labels count as much as common ones.",
    },
    "Model": {
        "start_from": "Model to start from: a run, a folder, a Hugging Face Hub name such as gpt2, "
        f"or {SCRATCH} to train from scratch.  [default: the newest language model under runs/]",
        "train": (
            "head|last-N|all|lora",
            "Weights to train.  [default: depends on the model, data and machine]",
        ),
        "adapter": ADAPTER,
        "pool": ("|".join(get_args(Pool)), "How to pool the token vectors."),
        "context": "Maximum input length in tokens.  [default: the model's, at most 512]",
        "long": (
            "|".join(get_args(Long)),
            "Which part of a text longer than --context to use; windows uses the whole text.",
        ),
        "preset": "Model size (from scratch only).  [default: micro]",
        "family": "Architecture (from scratch only).  [default: modern]",
        "tokenizer": "Tokenizer (from scratch only).  [default: bpe]",
        "vocab_size": "Vocabulary size; with --from, words from DATA are added up to this size.",
    },
    "Budget (choose one)": {
        "epochs": "Number of epochs (passes over the data).  "
        "[default: chosen for the model and data]",
        "steps": "Number of steps; reruns are bit-identical.",
        "minutes": "Time limit, including reading the data.",
    },
    "Optimization": {
        "batch": "Batch size in texts.",
        "optimizer": "Optimizer for the weight matrices.  [default: muon from scratch, else adamw]",
        "lr": "Peak learning rate.  [default: depends on --train]",
        "layer_decay": "Layer-wise learning rate decay: factor per layer, starting at the output.",
        "language_loss": "Weight of the auxiliary language-model loss.",
        "distill": "Weight of the soft labels that a linear n-gram model assigns to the training "
        "texts and to synthetic texts (distillation).  [default: chosen by cross-validation for "
        "small models and few texts, else 0]",
        "ngrams": "Also fit a linear n-gram model, and add its scores to the classifier's if that "
        "lowers the validation loss.  [default: for 10,000 training texts or more, if it takes at "
        "most 30 s and a tenth of --minutes]",
        "dropout": "Dropout rate.",
        "weight_decay": "Weight decay for the weight matrices.",
        "average": AVERAGE,
        "patience": "Stop early once N evaluations after the best one have had a loss more than 5% "
        "above the lowest.  [default: 5; off with --steps or --epochs]",
        "seed": "Random seed for the split and for training.",
    },
    "Hardware": MACHINE,
    "Run": {
        "evaluations": "Number of times to evaluate and save.  [default: once per epoch]",
        "save_every": "Also save a checkpoint every N steps.  [default: every minute]",
    },
}
COMMON = {
    *("text_column", "label_column", "val", "test", "class_weights", "start_from", "train"),
    *("epochs", "minutes", "batch", "lr", "device", "out", "as_json", "seeds"),
}
ABOUT_DATA = """
    DATA is a .csv, .tsv, .jsonl or .parquet file (optionally .gz, .zst, .bz2 or .xz), a folder
    with one subfolder per label, or lines such as `__label__x text`, `label sentence` or
    `sentence@label`. Columns are detected and reported. Without DATA, nanolm uses its embedded
    reviews, in which only word order distinguishes positive from negative.

    \b
"""


@click.command(
    "finetune",
    cls=Command,
    common=COMMON,
    help=f"""Fine-tune a text classifier.
{ABOUT_DATA}    nanolm finetune questions.tsv --from gpt2
    nanolm finetune tweets.csv --label-column mood --class-weights
    nanolm finetune texts/ --from {SCRATCH} --test-fraction 0.1

    `nanolm finetune-sentiment` does the same, but calls label 0 negative and label 1 positive.
    If training is interrupted, run the same command again to resume it.
    """,
)
@click.argument("data", nargs=-1, metavar="[DATA]...")
@run_options(FinetuneSettings, TABLE)
@run_option(
    "--seeds",
    type=click.IntRange(1, 100),
    metavar="N",
    help="Train once per seed and report the mean. With --val and a pretrained model, also save "
    "the average of the weights, which is often a better classifier.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    data: tuple[str, ...],
    seeds: int | None,
    out: str | None,
    report_to: list[str],
    as_json: bool,
    **options: Any,
) -> int:
    configured = (context.default_map or {}).get("sentiment", context.command is sentiment)
    options |= {"data": data or (DATA,), "sentiment": configured}
    settings = FinetuneSettings.from_dict(options)
    settings.check()

    from nanolm.classification.finetune import finetune
    from nanolm.classification.seeds import finetune_seeds
    from nanolm.cli.progress import TrainingView

    with TrainingView() as view, Trackers(report_to, view.show) as notify:
        if seeds is not None:
            spread = finetune_seeds(settings, seeds, out, notify)
        else:
            result = finetune(settings, out, notify=notify)
    if seeds is not None:
        return show_spread(spread, as_json)
    if as_json:
        print_json(result.to_json())
    if result.stopped == "interrupted":
        return note_interruption(result.steps)
    if not as_json:
        show(result)
    return 0


sentiment = Command(
    "finetune-sentiment",
    callback=command.callback,
    params=command.params,
    common=COMMON,
    help=f"""Fine-tune a sentiment classifier.
{ABOUT_DATA}    nanolm finetune-sentiment                                 the embedded reviews
    nanolm finetune-sentiment sst2.tsv --limit 1200 --seeds 5
    nanolm finetune-sentiment sst2.tsv --from gpt2 --train last-2
    nanolm finetune-sentiment train.tsv --val dev.tsv --test test.tsv

    If training is interrupted, run the same command again to resume it.
    """,
)


def show(result: "FinetuneResult") -> None:
    from nanolm.cli.scores import show_mistakes, show_scores
    from nanolm.runs.folder import FINISHED, ending

    assert result.val and result.uncalibrated
    show_sentence(
        f"{result.run}: accuracy {result.val.accuracy:.1%} on {result.val.count:,} validation "
        f"texts (majority-class baseline {result.majority:.1%}) at step {result.best_step:,} of "
        f"{result.steps:,}, after {result.seconds:.0f} s"
    )
    if (how := ending(result.to_json())) != FINISHED:
        click.echo(how)
    parts = [("validation", result.val, result.mistakes, "mistakes.csv")]
    if result.test:
        parts.append(("test", result.test, result.test_mistakes, "test_mistakes.csv"))
    for name, scores, *_ in parts:
        click.echo()
        show_scores(name, scores)
    name, _, mistakes, _ = parts[-1]
    if mistakes:
        click.echo(f"\nmost confident mistakes on the {name} texts")
        show_mistakes(mistakes[:5])
    if result.ngram_weight:
        alone = f"accuracy without them is {result.accuracy_without_ngrams:.1%}"
        note(f"n-gram scores are added with weight {result.ngram_weight:g}; {alone}")
    elif result.ngram_weight is not None:
        note("n-gram scores did not lower the validation loss and are not added")
    losses = f"log-loss {result.uncalibrated.loss:.3f} before, {result.val.loss:.3f} after"
    note(f"calibrated with temperature {result.temperature:g} on the validation texts: {losses}")
    for name, scores, _, file in parts:
        wrong = scores.count - sum(row[label] for label, row in enumerate(scores.confusion))
        note(f"all mistakes: {result.run}/{file} ({wrong:,} of {scores.count:,} {name} texts)")
    note(f"report: {result.run}/report.html")
    note(f'next: nanolm classify {shlex.quote(result.run)} "..."')


def show_spread(spread: "SeedResults", as_json: bool) -> int:
    if as_json:
        print_json(spread.to_json())
    if spread.interrupted:
        return note_interruption()
    if as_json:
        return 0
    for result in spread.results:
        test = f", test {result['test']['accuracy']:.1%}" if "test" in result else ""
        click.echo(f"{result['run']}: validation {result['val']['accuracy']:.1%}{test}")
    for name, values in spread.summary().items():
        mean, deviation = values["accuracy"]["mean"], values["accuracy"]["spread"]
        click.echo(f"{name}: mean accuracy {mean:.1%}, standard deviation {deviation:.1%}")
    if average := spread.average:
        test = f", test {average['test']['accuracy']:.1%}" if "test" in average else ""
        scores = f"validation {average['val']['accuracy']:.1%}{test}"
        click.echo(f"{average['run']} (average of the weights): {scores}")
        note(f'next: nanolm classify {shlex.quote(average["run"])} "..."')
    return 0
