"""`nanolm finetune` and `nanolm finetune-sentiment`: labelled text to a classifier."""

import shlex
from typing import TYPE_CHECKING, Any, get_args

import click

from nanolm.classification.settings import DATA, SCRATCH, FinetuneSettings
from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import AVERAGE, LABELLED, MACHINE, Command, Table, run_option, run_options
from nanolm.model.config import Long, Pool
from nanolm.training.trackers import Trackers

if TYPE_CHECKING:
    from nanolm.classification.finetune import FinetuneResult
    from nanolm.classification.seeds import SeedResults

TABLE: Table = {
    "Data": {
        **LABELLED,
        "limit": "Use only the first N rows, and split those.",
        "val": "Validate on this file instead of a part of DATA.",
        "val_fraction": "Hold out this part, the same of each label.  [default: 0.2]",
        "test": "Measure on this file at the end; nothing is chosen by it.",
        "test_fraction": "Or hold out a part for that too.",
        "class_weights": "Let rare labels count as much as common ones.",
    },
    "Model": {
        "start_from": "The trained model: a run, a folder, a name on the Hugging Face Hub (gpt2) "
        f"or {SCRATCH}, from scratch.  [default: the newest run of a language model]",
        "train": ("head|last-N|all|lora", "What is trained.  [default: by model, data, machine]"),
        "pool": ("|".join(get_args(Pool)), "The last token's vector, or the mean or max of all."),
        "context": "Tokens looked at together.  [default: the model's, 512 at most]",
        "long": ("|".join(get_args(Long)), "Of longer texts: the part taken, or all in windows."),
        "preset": "From scratch: a size.  [default: micro]",
        "family": "From scratch: a kind.  [default: modern]",
        "tokenizer": "From scratch.  [default: bpe]",
        "vocab_size": "Vocabulary size; with --from, extends the model's with words of DATA.",
    },
    "Budget (one of them)": {
        "epochs": "Passes over the texts.  [default: by model and data]",
        "steps": "Updates; the same steps give the same model, bit for bit.",
        "minutes": "Time to train for.",
    },
    "Learning": {
        "batch": "Texts a step.",
        "optimizer": "What updates the matrices.  [default: muon from scratch, else adamw]",
        "lr": "Peak learning rate.  [default: by what is trained]",
        "layer_decay": "Multiply the learning rate by this for each layer further from the output.",
        "language_loss": "Weight of foretelling the text's tokens too.",
        "distill": "Weight of the soft labels of a linear n-gram model, also on synthetic texts.  "
        "[default: for small models and few texts, by cross-validation; else 0]",
        "dropout": "Share of numbers left out while training.",
        "weight_decay": "Pull of the weight matrices towards zero.",
        "average": AVERAGE,
        "patience": "Stop after this many evaluations in a row with a loss 5 percent above its "
        "lowest.  [default: 5; with --steps or --epochs: never]",
        "seed": "Another seed, another split and another model.",
    },
    "Machine": MACHINE,
    "Run": {
        "evaluations": "Times to validate and save.  [default: once per epoch]",
        "save_every": "Also save every N steps.  [default: every minute]",
    },
}
ABOUT_DATA = """
    DATA is a .csv, .tsv, .jsonl or .parquet (also as .gz, .zst, .bz2, .xz), a folder with one
    folder for each label, or lines such as `__label__x text`, `label sentence` or
    `sentence@label`. Columns are found by themselves and shown. Without DATA the embedded reviews
    are taken, in which only the order of the words tells good from bad.

    \b
"""


@click.command(
    "finetune",
    cls=Command,
    help=f"""Teach a trained model to tell labels: any number of them, of any kind.
{ABOUT_DATA}    nanolm finetune questions.tsv --from gpt2
    nanolm finetune tweets.csv --label-column mood --class-weights
    nanolm finetune texts/ --from {SCRATCH} --test-fraction 0.1

    `nanolm finetune-sentiment` is the same, and calls the labels 0 and 1 negative and positive.
    Killed, or stopped with Ctrl-C, the same command goes on where it was.
    """,
)
@click.argument("data", nargs=-1, metavar="[DATA]...")
@run_options(FinetuneSettings, TABLE)
@run_option("--seeds", type=click.IntRange(1, 100), metavar="N", help="Train with N seeds.")
@click.pass_context
def command(
    context: click.Context,
    /,
    data: tuple[str, ...],
    seeds: int | None,
    out: str | None,
    resume: bool,
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
            result = finetune(settings, out, resume, notify)
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
    help=f"""Teach a trained model to tell good from bad (or any labels there are).
{ABOUT_DATA}    nanolm finetune-sentiment                                 the embedded reviews
    nanolm finetune-sentiment sst2.tsv --limit 1200 --seeds 5
    nanolm finetune-sentiment sst2.tsv --from gpt2 --train last-2
    nanolm finetune-sentiment train.tsv --val dev.tsv --test test.tsv

    Killed, or stopped with Ctrl-C, the same command goes on where it was.
    """,
)


def show(result: "FinetuneResult") -> None:
    from nanolm.cli.scores import show_mistakes, show_scores
    from nanolm.runs.folder import FINISHED, ending

    assert result.val and result.uncalibrated
    click.echo(
        f"{result.run}: {result.val.accuracy:.1%} of {result.val.count:,} validation texts right "
        f"(always the commonest label: {result.majority:.1%}) at step {result.best_step:,} of "
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
    losses = f"log-loss {result.uncalibrated.loss:.3f} before, {result.val.loss:.3f} after"
    note(f"scores divided by {result.temperature:g}, fitted on the validation texts: {losses}")
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
        click.echo(f"{name}: {mean:.1%} right on average, standard deviation {deviation:.1%}")
    return 0
