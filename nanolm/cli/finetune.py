"""`nanolm finetune` and `nanolm finetune-sentiment`: labelled text to a classifier."""

import json
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from nanolm.classification.settings import DATA, SCRATCH, FinetuneSettings
from nanolm.cli.console import note
from nanolm.cli.options import (
    LABELLED,
    MACHINE,
    READING,
    Command,
    Option,
    Table,
    options_of,
    run_options,
)
from nanolm.text import NAMED, TRAINABLE
from nanolm.training.settings import CHOICES
from nanolm.training.trackers import Trackers

if TYPE_CHECKING:
    from nanolm.classification.finetune import FinetuneResult
    from nanolm.classification.seeds import SeedResults

TABLE: Table = {
    "Data": {
        **LABELLED,
        "encoding": READING["encoding"],
        "limit": ("ROWS", "Take the first so many rows, and split those."),
        "val": ("FILE", "Validate on this file instead of a part of DATA."),
        "val_fraction": ("", "Hold out this part, the same of each label.  [default: 0.2]"),
        "test": ("FILE", "Measure on this file at the end; nothing is chosen by it."),
        "test_fraction": ("", "Or hold out a part for that too."),
        "class_weights": ("", "Let rare labels count as much as common ones."),
    },
    "Model": {
        "start_from": (
            "RUN",
            "The trained model: a run, a model folder, a name on the Hugging Face Hub (gpt2), or "
            f"{SCRATCH} to start from scratch.  [default: the newest run of a language model]",
        ),
        "train": ("head|last-N|all|lora", "What is trained.  [default: by model, data, machine]"),
        "pool": (
            "last|mean|max",
            "What is classified: the vector of the last token, or of all tokens the mean or max.",
        ),
        "context": ("", "Tokens looked at together.  [default: the model's, 512 at most]"),
        "long": (
            "head|tail|windows",
            "Of longer texts: the beginning, the end, or all of it in several windows.",
        ),
        "preset": ("|".join(CHOICES["preset"]), "From scratch: a size.  [default: micro]"),
        "family": ("|".join(CHOICES["family"]), "From scratch: a kind.  [default: modern]"),
        "tokenizer": ("|".join([*TRAINABLE, *NAMED, "PATH"]), "From scratch.  [default: bpe]"),
        "vocab_size": (
            "",
            "Vocabulary size; with --from, extends the model's with words of the labelled texts.",
        ),
    },
    "Budget (one of them)": {
        "epochs": ("", "Passes over the texts.  [default: by model and data]"),
        "steps": ("", "Updates; the same steps give the same model, bit for bit."),
        "minutes": ("", "Time to train for."),
    },
    "Learning": {
        "batch": ("", "Texts a step."),
        "optimizer": (
            "|".join(CHOICES["optimizer"]),
            "What updates the matrices.  [default: muon from scratch, else adamw]",
        ),
        "lr": ("", "Peak learning rate.  [default: by what is trained]"),
        "layer_decay": ("", "Each layer further from the end learns so many times as fast."),
        "language_loss": ("", "Weight of foretelling the text's tokens too."),
        "distill": (
            "",
            "Weight of the soft labels of a linear n-gram model, which labels synthetic texts too; "
            "0 turns it off.  [default: for small models and few texts, by cross-validation]",
        ),
        "dropout": ("", "Share of numbers left out while training."),
        "weight_decay": ("", "Pull of the weight matrices towards zero."),
        "average": (
            "",
            "Judge and keep a mean of the weights, into which each step goes with 1 minus this.",
        ),
        "patience": (
            "",
            "Stop after this many evaluations in a row with a validation loss 5 percent above its "
            "lowest.  [default: 5; with --steps or --epochs: never]",
        ),
        "seed": ("", "Another seed, another split and another model."),
    },
    "Machine": MACHINE,
    "Run": {
        "evaluations": ("", "Times to validate and save.  [default: once per epoch]"),
        "save_every": ("STEPS", "Save also every so many steps.  [default: every minute]"),
    },
}
SENTENCE = """
    DATA is a .csv, .tsv, .jsonl or .parquet (also as .gz, .zst, .bz2, .xz), a folder with one
    folder for each label, or lines such as `__label__x text`, `label sentence` or
    `sentence@label`. Columns are found by themselves and shown. Without DATA the embedded reviews
    are taken, in which only the order of the words tells good from bad.

    \b
"""


def with_options(function: Callable[..., int]) -> Callable[..., int]:
    """What both names of the command take."""
    options: list[Callable[[Any], Any]] = [
        click.argument("data", nargs=-1, metavar="[DATA]..."),
        options_of(FinetuneSettings, TABLE),
        click.option(
            "--seeds",
            cls=Option,
            heading="Run",
            type=click.IntRange(1, 100),
            metavar="N",
            help="Train N times, from --seed on, and tell mean and spread.",
        ),
        run_options(FinetuneSettings),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command("finetune", cls=Command)
@with_options
@click.pass_context
def command(context: click.Context, /, **options: Any) -> int:
    return run(sentiment=(context.default_map or {}).get("sentiment", False), **options)


@click.command("finetune-sentiment", cls=Command)
@with_options
@click.pass_context
def sentiment(context: click.Context, /, **options: Any) -> int:
    return run(sentiment=(context.default_map or {}).get("sentiment", True), **options)


command.help = f"""Teach a trained model to tell labels: any number of them, of any kind.
{SENTENCE}    nanolm finetune questions.tsv --from gpt2
    nanolm finetune tweets.csv --label-column mood --class-weights
    nanolm finetune texts/ --from {SCRATCH} --test-fraction 0.1

    `nanolm finetune-sentiment` is the same, and calls what is labelled 0 and 1 negative and
    positive.
    Killed, or stopped with Ctrl-C, the same command goes on where it was.
    """
sentiment.help = f"""Teach a trained model to tell good from bad (or any labels there are).
{SENTENCE}    nanolm finetune-sentiment                                 the embedded reviews
    nanolm finetune-sentiment sst2.tsv --limit 1200 --seeds 5
    nanolm finetune-sentiment sst2.tsv --from gpt2 --train last-2
    nanolm finetune-sentiment train.tsv --val dev.tsv --test test.tsv

    Killed, or stopped with Ctrl-C, the same command goes on where it was.
    """


def run(
    sentiment: bool,
    data: tuple[str, ...],
    seeds: int | None,
    out: str | None,
    resume: bool,
    report_to: list[str],
    as_json: bool,
    **options: Any,
) -> int:
    settings = FinetuneSettings.from_dict(
        {**options, "data": data or (DATA,), "sentiment": sentiment}
    )
    settings.check()

    from nanolm.classification.finetune import finetune
    from nanolm.classification.seeds import finetune_seeds
    from nanolm.cli.progress import TrainingView

    with TrainingView() as view, Trackers(report_to, view.show) as told:
        if seeds is not None:
            spread = finetune_seeds(settings, seeds, out, told)
        else:
            result = finetune(settings, out, resume, told)
    if seeds is not None:
        return show_spread(spread, as_json)
    if as_json:
        click.echo(json.dumps(result.to_json(), ensure_ascii=False))
    if result.stopped == "interrupted":
        note(f"saved at step {result.steps:,}; run the same command again to go on")
        return 75
    if not as_json:
        show(result)
    return 0


def show(result: "FinetuneResult") -> None:
    from nanolm.cli.scores import show_mistakes, show_scores
    from nanolm.runs.folder import FINISHED, ending

    assert result.val
    click.echo(
        f"{result.run}: {result.val.accuracy:.1%} of {result.val.count:,} validation texts right "
        f"(always the commonest label: {result.majority:.1%}) at step {result.best_step:,} of "
        f"{result.steps:,}, after {result.seconds:.0f} s"
    )
    if (how := ending(result.to_json())) != FINISHED:
        click.echo(how)
    click.echo()
    show_scores("validation", result.val)
    name, mistakes = "validation", result.mistakes
    if result.test:
        click.echo()
        show_scores("test", result.test)
        name, mistakes = "test", result.test_mistakes
    if mistakes:
        click.echo(f"\nmost confident mistakes on the {name} texts")
        show_mistakes([(m.text, m.label, m.predicted, m.probability) for m in mistakes[:5]])
    assert result.uncalibrated
    note(
        f"scores divided by {result.temperature:g}, fitted on the validation texts: log-loss "
        f"{result.uncalibrated.loss:.3f} before, {result.val.loss:.3f} after"
    )
    for part, scores, file in (
        ("validation", result.val, "mistakes.csv"),
        ("test", result.test, "test_mistakes.csv"),
    ):
        if scores:
            right = sum(row[number] for number, row in enumerate(scores.confusion))
            wrong = f"{scores.count - right:,} of {scores.count:,} {part} texts"
            note(f"all mistakes: {result.run}/{file} ({wrong})")
    note(f"report: {result.run}/report.html")
    note(f'next: nanolm classify {shlex.quote(result.run)} "..."')


def show_spread(spread: "SeedResults", as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps(spread.to_json(), ensure_ascii=False))
    if spread.interrupted:
        note("saved; run the same command again to go on")
        return 75
    if as_json:
        return 0
    for result in spread.results:
        test = f", test {result['test']['accuracy']:.1%}" if "test" in result else ""
        click.echo(f"{result['run']}: validation {result['val']['accuracy']:.1%}{test}")
    for name, values in spread.summary().items():
        mean, deviation = values["accuracy"]["mean"], values["accuracy"]["spread"]
        click.echo(f"{name}: {mean:.1%} right on average, standard deviation {deviation:.1%}")
    return 0
