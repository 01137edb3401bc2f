"""`nanolm train`: text to tokenizer to model to a run folder."""

import shlex
import shutil
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import AVERAGE, MACHINE, READING, Command, Table, run_option, run_options
from nanolm.cli.tables import show_table
from nanolm.errors import TooLittleTime, UsageError
from nanolm.machine import process
from nanolm.model.config import RECURRENT
from nanolm.text.sources import EMBEDDED, SCHEME
from nanolm.training.settings import ARCHITECTURE, DEFAULT_FAMILY, SIZES, SWITCHES, TrainSettings
from nanolm.training.trackers import Trackers

if TYPE_CHECKING:
    from nanolm.pretraining.train import TrainResult

TABLE: Table = {
    "Text": {
        "val": "Validate on this file instead of a part of the corpus.",
        "val_fraction": "Hold out this share; 0 trains on all.  [default: 0.1, at most 1 MB]",
        "val_split": "Hold out parts, or documents, from all over, or the end.  [default: spread]",
        "max_bytes": "Use at most N bytes, from all over the text.  [default: by --minutes]",
        **READING,
        "tokenizer": "How text is cut, or whose tokenizer to take over.  [default: bpe]",
        "vocab_size": "Tokens that bpe learns.  [default: measured on the text]",
    },
    "Model": {
        "preset": "A size with a name.  [default: by text and machine]",
        "family": f"modern is as Qwen3; rnn, lstm are baselines.  [default: {DEFAULT_FAMILY}]",
        "start_from": "A trained model: a run, a folder, or a name on the Hugging Face Hub (gpt2).",
        "layers": "Blocks of attention and feed-forward.",
        "heads": "Attention heads in each block.",
        "kv_heads": "Fewer heads of keys and values, shared.  [default: --heads]",
        "dim": "Width of the model; a multiple of --heads.",
        "hidden": "Width inside the feed-forward layer.  [default: by the width]",
        "context": "Tokens the model can look back on.",
        "dropout": "Left out at random while learning.  [default: by passes over the text]",
    },
    "Switches of the model  [default: as its family has them]": {
        "positions": "How a token knows where it stands.",
        "rope_base": "Slowest rotation of --positions rope; more for longer contexts.",
        "norm": "Layer norm, or root mean square alone.",
        "norm_place": "Before each layer, or after its residual.",
        "qk_norm": "Normalise queries and keys.",
        "feed_forward": "Its nonlinearity.",
        "bias": "Biases in linear layers and layer norms.",
        "tied": "Use the token embedding as the output layer.",
    },
    "Budget": {
        "steps": "Updates; on as many threads, the same ones give the same model, bit for bit.",
        "minutes": "Time for all of it, also as a limit.  [default: 3, for all but tiny texts]",
        "epochs": "Passes over the text.",
        "tokens": "Tokens to learn from, as often as they come.",
    },
    "Learning": {
        "batch": "Sequences a step.  [default: by preset, or by time]",
        "optimizer": "What makes updates of gradients.  [default: muon, where it pays]",
        "lr": "Peak learning rate.  [default: by width and optimizer]",
        "average": AVERAGE + "  [default: 0.98 for hundreds of passes with dropout, else 0]",
        "weight_decay": "Pull of the matrices towards zero.  [default: by passes over the text]",
        "seed": "Another seed, another model.",
    },
    "Machine": {
        **MACHINE,
        "workers": "Parallel parts of a batch on a CPU; divides --threads.  [default: measured]",
        "attention": "The kernel of attention on a GPU; math also on a CPU.  [default: measured]",
        "compile": "Let torch compile the model.  [default: if it pays within the run]",
        "shard": "Under torchrun, shard the weights.  [default: if the whole does not fit]",
    },
    "Run": {
        "evaluations": "Times to validate, save and sample.  [default: 10, fewer in a hurry]",
        "save_every": "Also save every N steps.  [default: every minute]",
    },
}

BUDGETS = ("steps", "minutes", "epochs", "tokens")
MEASURED = ("threads", "workers", "attention", "compile", "shard")  # for a model and a machine
SIZED = ("context", "batch", "lr", *MEASURED)  # what goes with the size of a model
# Given on the command line, these override others from the environment or a --config file.
OVERRIDES = {
    **{name: tuple(other for other in BUDGETS if other != name) for name in BUDGETS},
    "preset": (*SIZES, *SIZED),
    "family": ("start_from", "kv_heads", "hidden", *SWITCHES),
    "start_from": (*ARCHITECTURE, *SIZED, "tokenizer", "vocab_size"),
    "tokenizer": ("vocab_size",),
}

TEXTS = [f"{SCHEME}{name:<9} {what}" for name, (_, _, what) in EMBEDDED.items()]
NO_CORPUS = "no text to train on. Name a file, or take one that comes with nanolm:"
NO_CORPUS = "\n  nanolm train ".join([NO_CORPUS, "my-text.txt", *TEXTS])


@click.command("train", cls=Command)
@click.argument("corpus", nargs=-1, metavar="CORPUS...")
@run_options(TrainSettings, TABLE)
@run_option("--extend", metavar="RUN", help="Train RUN for more --minutes, --steps or --tokens.")
@run_option("--plan", "plan_only", is_flag=True, help="Show what would be done, and end.")
@run_option("--list-presets", is_flag=True, help="Show the presets of the --family, and end.")
@click.pass_context
def command(
    context: click.Context,
    /,
    out: str | None,
    resume: bool,
    report_to: list[str],
    as_json: bool,
    list_presets: bool,
    extend: str | None,
    plan_only: bool,
    **options: Any,
) -> int:
    """Train a language model on text.

    CORPUS is any mix of files, folders, patterns, - for stdin, http(s):// addresses and hf://
    data sets: plain text, .jsonl, .csv, .tsv or .parquet, also as .gz, .zst, .bz2 or .xz.

    \b
    nanolm train novel.txt                        three minutes, everything chosen for you
    nanolm train novel.txt --minutes 20 --plan    what that would be
    nanolm train --extend runs/novel --minutes 10
    nanolm train small.txt --preset nano --steps 1000
    nanolm train novel.txt --from runs/stories    go on from another model; or --from gpt2
    nanolm train novel.txt --family lstm          something to compare with
    nanolm train --config runs/novel/config.toml  the same again
    torchrun --nproc-per-node 8 -m nanolm train novel.txt    on eight GPUs

    Killed, or stopped with Ctrl-C, the same command goes on where it was.
    """
    # What a time to train for is counted from: starting the program is part of it.
    started = time.monotonic() - time.process_time()
    settings = TrainSettings.from_dict(without_overridden(context, options))
    if list_presets:
        TrainSettings((), family=settings.family).check()
        return show_presets(settings.family or DEFAULT_FAMILY, as_json)
    if extend is not None:
        refuse_others(context)
    elif not settings.corpus:
        raise UsageError(NO_CORPUS)
    settings.check()

    from nanolm.cli.progress import TrainingView, plan_lines
    from nanolm.pretraining import extend as extension
    from nanolm.pretraining import train as pretraining

    if process()[0]:  # the first process plans, prints and writes
        codes = {"interrupted": 75, TooLittleTime.stopped: TooLittleTime.exit_code}
        return 0 if plan_only else codes.get(pretraining.follow().stopped, 0)
    with TrainingView() as view, Trackers(report_to, view.show) as notify:
        if plan_only:
            plan = pretraining.plan_only(settings, view.show, started)
        elif extend is not None:
            budget = {name: getattr(settings, name) for name in extension.BUDGETS}
            budget = {name: value for name, value in budget.items() if value is not None}
            result = extension.extend(extend, budget, notify, started)
        else:
            result = pretraining.train(settings, out, resume, notify, started)
    if plan_only and not as_json:
        click.echo("\n".join(plan_lines(plan.choices, shutil.get_terminal_size().columns)))
    if as_json:
        print_json(plan.as_object() if plan_only else asdict(result))
    if plan_only:
        return 0
    if result.stopped == "interrupted":
        return note_interruption(result.steps)
    if result.stopped == TooLittleTime.stopped:
        raise TooLittleTime(pretraining.what_to_type(result))
    if not as_json:
        click.echo(f"{result.run}: {outcome(result)}")
        note(f"report: {result.run}/report.html")
        note(f'next: nanolm sample {shlex.quote(result.run)} --prompt "..."')
    return 0


def outcome(result: "TrainResult") -> str:
    from nanolm.runs.folder import ending

    at = f"at step {result.best_step:,} of {result.steps:,}, after {result.seconds:.0f} s"
    if result.val_bits_per_byte is None:
        loss = "" if result.train_loss is None else f"; training loss {result.train_loss:.3f}"
        return f"trained on all of the text, nothing held out{loss} {at}"
    early = f"; {ending(asdict(result))}" if result.stopped == "enough" else ""
    bits = f"{result.val_bits_per_byte:.3f} bits per byte on held-out text"
    return f"{bits} (loss {result.val_loss:.3f}) {at}{early}"


def refuse_others(context: click.Context) -> None:
    given = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
        and parameter.name not in ("extend", "report_to", "as_json", "minutes", "steps", "tokens")
    ]
    if given:
        words = ", ".join(given)
        raise UsageError(f"--extend keeps a run's settings: leave out {words}, or use --from")


def show_presets(family: str, as_json: bool) -> int:
    from nanolm.model.size import preset_sizes

    sizes = preset_sizes(family)
    if as_json:
        for size in sizes:
            print_json(asdict(size))
        return 0
    rows = [["preset", "layers", "heads", "width", "context", "parameters", "memory", "for"]]
    for size in sizes:
        heads = "-" if family in RECURRENT else str(size.heads)
        shape = [str(size.layers), heads, str(size.dim), str(size.context), f"{size.parameters:,}"]
        rows.append([size.preset, *shape, f"{size.training_bytes / 1e9:.2f} GB", size.purpose])
    show_table(rows, left=(0, 7))
    vocabularies = f"{sizes[0].vocab_size:,} to {sizes[-1].vocab_size:,} tokens"
    note(f"Family {family}, with a vocabulary of {vocabularies}; memory: to train it in bfloat16.")
    return 0


def without_overridden(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Drop settings that another setting, from a stronger source, decides too."""
    order = [ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE]

    def strength(name: str) -> int:
        source = context.get_parameter_source(name)
        return order.index(source) if source in order else -1

    recurrent = {"family": (*OVERRIDES["family"], "heads")}
    overrides = OVERRIDES | (recurrent if options["family"] in RECURRENT else {})
    for flag, names in overrides.items():
        for name in names:
            if strength(flag) > strength(name) >= 0:
                options.pop(name, None)
    return options
