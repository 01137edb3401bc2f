"""`nanolm train`: train a tokenizer and a language model into a run folder."""

import shlex
import shutil
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import (
    ADAPTER,
    AVERAGE,
    MACHINE,
    PRECISION,
    READING,
    Command,
    Table,
    run_option,
    run_options,
)
from nanolm.cli.tables import show_sentence, show_table
from nanolm.errors import TooLittleTime, UsageError
from nanolm.machine import process
from nanolm.model.config import RECURRENT
from nanolm.text.sources import EMBEDDED, EMBEDDED_PAIRS, SCHEME
from nanolm.training.settings import ARCHITECTURE, DEFAULT_FAMILY, SIZES, SWITCHES, TrainSettings
from nanolm.training.trackers import Trackers

if TYPE_CHECKING:
    from nanolm.pretraining.train import TrainResult

TABLE: Table = {
    "Text": {
        "val": "Validation file, used instead of a held-out part of the corpus.",
        "val_fraction": "Fraction to hold out for validation; 0 for none.  [default: 0.1, at most "
        "1 MB]",
        "val_split": "Hold out passages from across the corpus (spread) or its end (end).  "
        "[default: spread]",
        "max_bytes": "Use at most N bytes, sampled evenly.  [default: depends on --minutes]",
        **READING,
        "tokenizer": "Train one (bpe, char or byte) or reuse one (gpt2, cl100k, o200k or a path).  "
        "[default: bpe]",
        "vocab_size": "Vocabulary size of a bpe tokenizer.  [default: chosen for the text]",
        "lowercase": "Convert all text to lowercase.  [default: if CORPUS starts with a table of "
        "texts in lowercase]",
    },
    "Model": {
        "preset": "Model size, nano to gpt2-xl; see `nanolm train --list-presets`.  "
        "[default: chosen for the text and machine]",
        "family": "Architecture: modern resembles Qwen3; rnn and lstm are baselines.  "
        f"[default: {DEFAULT_FAMILY}]",
        "start_from": "Start from a run, a model folder, or a Hugging Face Hub name such as gpt2.",
        "train": (
            "all|lora",
            "With --from: train all weights, or only LoRA adapters added to them.  [default: all]",
        ),
        "adapter": ADAPTER,
        "layers": "Number of layers.",
        "heads": "Attention heads per layer.",
        "kv_heads": "Key-value heads; fewer than --heads gives grouped-query attention.  "
        "[default: --heads]",
        "dim": "Embedding width; a multiple of --heads.",
        "hidden": "Hidden width of the feed-forward layers.  [default: depends on --dim]",
        "context": "Context length in tokens.",
        "early_context": "Length of the training windows until the learning rate decays; a divisor "
        "of --context.  [default: half of the default --context for small models on a CPU]",
        "dropout": "Dropout rate.  [default: depends on the number of epochs]",
    },
    "Architecture (defaults set by --family)": {
        "positions": "Position encoding.",
        "rope_base": "Base of the rotary frequencies (RoPE theta); larger for longer contexts.",
        "norm": "LayerNorm or RMSNorm.",
        "norm_place": "Normalize before each sublayer, or after its residual connection.",
        "qk_norm": "Normalize queries and keys.",
        "feed_forward": "Activation of the feed-forward layers.",
        "bias": "Use biases in linear layers and layer norms.",
        "tied": "Tie the output layer to the token embedding.",
    },
    "Budget": {
        "steps": "Number of steps; with the same number of threads, reruns are bit-identical.",
        "minutes": "Total time, including preparation; also caps --steps, --epochs and --tokens.  "
        "[default: 3, except for tiny texts]",
        "epochs": "Number of epochs (passes over the text).",
        "tokens": "Number of training tokens, including repeats.",
        "teachers": "Number of models to train first and distill into this one; 0 for none.  "
        "[default: as many as fit, if the text is small for --minutes]",
    },
    "Optimization": {
        "batch": "Batch size in sequences.  [default: depends on the preset or the time budget]",
        "optimizer": "Optimizer for the weight matrices.  [default: muon where it pays off]",
        "lr": "Peak learning rate.  [default: depends on width and optimizer]",
        "average": AVERAGE + "  [default: 0.98 for hundreds of epochs with dropout, else 0]",
        "weight_decay": "Weight decay for the weight matrices.  [default: depends on the number of "
        "epochs]",
        "seed": "Random seed.",
    },
    "Hardware": {
        **MACHINE,
        "dtype": PRECISION,  # float8 too
        "workers": "Split each batch across N parallel workers, which share --threads (CPU only).  "
        "[default: measured]",
        "attention": "Attention kernel on a GPU; math also works on a CPU.  [default: measured]",
        "compile": "Use torch.compile.  [default: if it pays off within the run, but not on a CPU "
        "with a C compiler, where our kernels are faster]",
        "shard": "Shard the weights under torchrun.  [default: if they do not fit otherwise]",
    },
    "Run": {
        "evaluations": "Number of times to evaluate, save and sample.  [default: 10, fewer for "
        "short runs]",
        "save_every": "Also save a checkpoint every N steps.  [default: every minute]",
    },
}
COMMON = {
    *("val", "tokenizer", "preset", "family", "start_from", "train", "context", "minutes", "steps"),
    *("batch", "lr", "device", "out", "extend", "plan_only", "list_presets", "as_json"),
}

BUDGETS = ("steps", "minutes", "epochs", "tokens")
MEASURED = ("threads", "workers", "attention", "compile", "shard")  # per model and machine
# Settings that depend on the model size.
SIZED = ("context", "early_context", "batch", "lr", *MEASURED)
# On the command line, each of these overrides others from the environment or a --config file.
OVERRIDES = {
    **{name: tuple(other for other in BUDGETS if other != name) for name in BUDGETS},
    **dict.fromkeys(("context", "teachers"), ("early_context",)),
    "preset": (*SIZES, *SIZED),
    "family": ("start_from", "kv_heads", "hidden", "teachers", "early_context", *SWITCHES),
    "start_from": (
        *(*ARCHITECTURE, *SIZED, "tokenizer", "vocab_size", "lowercase"),
        *("adapter", "teachers"),
    ),
    "tokenizer": ("vocab_size", "lowercase"),
}

TEXTS = [
    f"{SCHEME}{name:<9} {what}"
    for name, (_, _, what) in EMBEDDED.items()
    if name not in EMBEDDED_PAIRS
]
NO_CORPUS = "no text to train on. Name a file, or use one that comes with nanolm:"
NO_CORPUS = "\n  nanolm train ".join([NO_CORPUS, "my-text.txt", *TEXTS])


@click.command("train", cls=Command, common=COMMON)
@click.argument("corpus", nargs=-1, metavar="CORPUS...")
@run_options(TrainSettings, TABLE)
@run_option(
    "--extend", metavar="RUN", help="Continue training RUN for more --minutes, --steps or --tokens."
)
@run_option("--no-distil", is_flag=True, help="The same as --teachers 0.")
@run_option("--plan", "plan_only", is_flag=True, help="Show the plan and exit.")
@run_option("--list-presets", is_flag=True, help="List the presets of --family and exit.")
@click.pass_context
def command(
    context: click.Context,
    /,
    out: str | None,
    report_to: list[str],
    as_json: bool,
    list_presets: bool,
    extend: str | None,
    plan_only: bool,
    no_distil: bool,
    **options: Any,
) -> int:
    """Train a language model on text.

    CORPUS is one or more files, folders, glob patterns, URLs, hf:// datasets or - (stdin). The
    formats are plain text, .jsonl, .csv, .tsv and .parquet, optionally compressed (.gz, .zst, .bz2,
    .xz).

    \b
    nanolm train novel.txt                      three minutes, automatic settings
    nanolm train novel.txt --minutes 20 --plan  show the plan without training
    nanolm train novel.txt --from gpt2          start from a pretrained model
    nanolm train news.txt:0.7 poems.txt:0.3     a mix, 30% of it from the poems
    torchrun --nproc-per-node 8 -m nanolm train novel.txt

    If training is interrupted, run the same command again to resume it.
    """
    started = time.monotonic() - time.process_time()  # --minutes includes starting the program
    if no_distil:
        options["teachers"] = 0
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
            result = pretraining.train(settings, out, notify=notify, started=started)
    if plan_only and not as_json:
        click.echo("\n".join(plan_lines(plan.choices, shutil.get_terminal_size().columns)))
    if as_json:
        print_json(plan.as_object() if plan_only else asdict(result))
    if plan_only:
        return 0
    if result.stopped == "interrupted":
        return note_interruption(result.steps or None)  # None: still training its teachers
    if result.stopped == TooLittleTime.stopped:
        raise TooLittleTime(pretraining.what_to_type(result))
    if not as_json:
        show_sentence(f"{result.run}: {outcome(result)}")
        note(f"report: {result.run}/report.html")
        note(f'next: nanolm sample {shlex.quote(result.run)} --prompt "..."')
    return 0


def outcome(result: "TrainResult") -> str:
    from nanolm.runs.folder import ending

    at = f"at step {result.best_step:,} of {result.steps:,}, after {result.seconds:.0f} s"
    if result.val_bits_per_byte is None:
        loss = "" if result.train_loss is None else f"; training loss {result.train_loss:.3f}"
        return f"trained on all of the text, with no validation set{loss} {at}"
    early = f"; {ending(asdict(result))}" if result.stopped == "enough" else ""
    bits = f"{result.val_bits_per_byte:.3f} bits per byte on the validation set"
    parts = [f"{name} {each:.3f}" for name, each in result.val_bits_per_byte_by_part.items()]
    return f"{bits} ({', '.join([*parts, f'loss {result.val_loss:.3f}'])}) {at}{early}"


def refuse_others(context: click.Context) -> None:
    given = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
        and parameter.name not in ("extend", "report_to", "as_json", "minutes", "steps", "tokens")
    ]
    if given:
        words = ", ".join(given)
        raise UsageError(f"--extend keeps the settings of a run; omit {words}, or use --from")


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
    note(f"family {family}, vocabulary of {vocabularies}; memory is for training in bfloat16")
    return 0


def without_overridden(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Drop settings that are overridden by another setting from a stronger source."""
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
