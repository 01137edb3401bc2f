"""`nanolm eval`: loss and accuracy of a model on a text, or on labeled texts or pairs."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.classification.settings import FinetuneSettings
from nanolm.cli import options
from nanolm.cli.columns import Columns, color, visible
from nanolm.cli.console import finite, note, print_json, write_file
from nanolm.cli.tables import show_sentence, show_table
from nanolm.errors import UsageError, refuse
from nanolm.formats import counted
from nanolm.pairs.settings import PairSettings
from nanolm.text import spelled
from nanolm.training.settings import DEVICES, TrainSettings

if TYPE_CHECKING:
    from nanolm.evaluation import Score
    from nanolm.text.labeled import LabelReading
    from nanolm.text.tokenizer import Tokenizer

# Tokens. Beyond this, attention takes most of the time, and downloaded models may have contexts
# of 100,000 tokens.
MOST_WINDOW = 8192
PAGE_TOKENS = 20_000  # what a browser still scrolls smoothly


@click.command("eval", cls=options.Command)
@click.argument("run")
@click.argument("corpus", nargs=-1, metavar="FILE...")
@click.option(
    "--against", multiple=True, metavar="RUN2", help="Model to compare with; can be repeated."
)
@click.option(
    "--context",
    type=int,
    help=f"Tokens per window.  [default: the model's context, at most {MOST_WINDOW:,}]",
)
@click.option(
    "--stride",
    type=int,
    metavar="N",
    help="Tokens from one window to the next; smaller is more accurate but slower.  "
    "[default: --context]",
)
@click.option(
    "--full-windows",
    is_flag=True,
    help="Give the last window as much context as the others, as lm-evaluation-harness does.",
)
@click.option(
    "--minimal-pairs",
    multiple=True,
    metavar="FILE|FOLDER",
    help="Measure how often the acceptable sentence of a pair is more likely; can be repeated.",
)
@click.option("--per-token", is_flag=True, help="Show the bits and rank of every token.")
@click.option(
    "--html",
    metavar="FILE",
    help="Write an HTML page with the text colored by surprisal or, for pairs, scores by length.",
)
@click.option(
    "--mistakes",
    metavar="FILE.csv",
    help="Write all misclassified texts or, for pairs, all inexact translations to a CSV file.",
)
@click.option("--beams", type=int, help="Number of beams for translating pairs.  [default: 4]")
@options.adapter_option()
@options.device_option()
@options.quantization_options()
@options.json_option(help="Print one JSON object per model.")
@options.options_of(TrainSettings, {"Reading text": options.READING})
@options.options_of(FinetuneSettings, {"Reading labeled text": options.LABEL_COLUMNS})
@options.options_of(PairSettings, {"Reading pairs": options.PAIR_COLUMNS})
def command(
    run: str,
    corpus: tuple[str, ...],
    against: tuple[str, ...],
    context: int | None,
    stride: int | None,
    full_windows: bool,
    minimal_pairs: tuple[str, ...],
    per_token: bool,
    html: str | None,
    mistakes: str | None,
    beams: int | None,
    adapter: str | None,
    device: str,
    int8: bool,
    int4: bool,
    as_json: bool,
    label_column: str | None,
    label_file: str | None,
    source_column: str | None,
    target_column: str | None,
    reverse: bool,
    **how_to_read: Any,
) -> None:
    """Evaluate a model on a text.

    RUN can be anything that `nanolm sample` accepts, and FILE anything that `nanolm train` accepts.
    Loss (in nats) and perplexity are per token; top 1 and top 5 are the top-k accuracies of
    next-token prediction. If RUN is a classifier, FILE is labeled text, as for `nanolm finetune`,
    and the command reports accuracy, macro F1, log-loss, calibration error and the confusion
    matrix. If RUN was trained on pairs, FILE contains pairs, as for `nanolm train-pairs`, and the
    command reports BLEU, chrF, exact match, loss and edit distance. With --minimal-pairs instead of
    FILE, it reports the accuracy on BLiMP or your own pairs of sentences.

    \b
    nanolm eval runs/novel other.txt --html surprise.html
    nanolm eval runs/novel other.txt --against runs/older --against hf://gpt2
    nanolm eval hf://gpt2 other.txt --stride 512 --json
    nanolm eval runs/novel other.txt --int4 --against runs/novel    what 4 bits cost
    nanolm eval runs/novel --minimal-pairs blimp/
    nanolm eval runs/reviews test.tsv --mistakes wrong.csv    a classifier
    nanolm eval runs/de-en test.de test.en --html scores.html    a model trained on pairs
    """
    settings = TrainSettings(corpus=corpus, **how_to_read)
    reading = settings.reading()
    problems = reading.problems() + options.unknown("--device", device, DEVICES)
    for option, value in {"--context": context, "--stride": stride}.items():
        if value is not None and value < 1:
            problems.append(f"{option} {value}: must be at least 1")
    problems += options.unwritable("--html", html) + options.unwritable("--mistakes", mistakes)
    if against and (html is not None or (per_token and not as_json)):
        problems.append(
            "--against cannot be used with --html, or with --per-token unless --json is given"
        )
    given = (corpus, context, stride, full_windows, per_token, html, mistakes, beams, int8, int4)
    if minimal_pairs and any(given):
        problems.append("--minimal-pairs works only with --adapter, --against, --device and --json")
    elif not corpus and not minimal_pairs:
        problems.append("pass the FILE to evaluate on, or --minimal-pairs FILE")
    refuse(problems)

    from nanolm.cli.progress import TrainingView
    from nanolm.evaluation import evaluate_texts
    from nanolm.generation.language_model import load, load_folder
    from nanolm.model.config import ClassifierConfig, Seq2SeqConfig
    from nanolm.model.device import choose_device
    from nanolm.model.fast.quantized import quantize
    from nanolm.model.stored import load_any_config
    from nanolm.runs.folder import find_named

    where, _ = choose_device(device)
    bits = options.chosen_bits(int8, int4, where)
    if minimal_pairs:
        from nanolm.cli.eval_minimal_pairs import evaluate_minimal_pairs

        evaluate_minimal_pairs((run, *against), minimal_pairs, where, as_json)
        return
    with TrainingView() as view:
        folder = find_named(run, note, view.report)
    config = load_any_config(folder)
    if isinstance(config, Seq2SeqConfig):
        if against or per_token or context or stride or full_windows or adapter or bits:
            raise UsageError(
                f"{run} was trained on pairs; --against, --context, --stride, --full-windows, "
                "--per-token, --adapter, --int8 and --int4 do not work with it"
            )
        from nanolm.cli.eval_pairs import evaluate_translator
        from nanolm.text.pairs import PairReading

        columns = PairReading(settings.encoding, source_column, target_column, reverse)
        evaluate_translator(run, folder, corpus, columns, beams, device, as_json, html, mistakes)
        return
    if beams is not None or source_column or target_column or reverse:
        flags = "--beams, --source-column, --target-column and --reverse"
        raise UsageError(f"{flags} need a model trained on pairs, which {run} is not")
    if isinstance(config, ClassifierConfig):
        if any((against, per_token, html, context, stride, full_windows, bits)):
            others = "--against, --context, --stride, --full-windows, --per-token, --html, --int8"
            raise UsageError(f"{run} is a classifier, which does not support {others} or --int4")
        from nanolm.text.labeled import LabelReading

        labels = LabelReading(settings.encoding, settings.text_column, label_column, label_file)
        evaluate_classifier(run, folder, corpus, labels, device, as_json, mistakes, adapter)
        return
    if mistakes is not None:
        raise UsageError(
            f"--mistakes needs a classifier or a model trained on pairs; {run} is a language model"
        )
    names = (run, *against)
    with TrainingView() as view:
        models = [
            load_folder(folder, adapter),
            *(load(name, note, view.report) for name in against),
        ]
        windows = [context or min(each.model.config.context, MOST_WINDOW) for each in models]
        for name, loaded, window in zip(names, models, windows, strict=True):
            most = loaded.model.window() or sys.maxsize
            if window > most:
                problems.append(f"--context {context}: must be at most {most} for {name}")
            elif stride is not None and stride > window:
                problems.append(f"--stride {stride}: must be at most {window:,} (--context)")
            if context is None and window < (whole := loaded.model.config.context):
                shorter = f"{name}: windows of {window:,} tokens to save time, of a context of"
                note(f"{shorter} {whole:,}; --context {whole} uses all of it")
        refuse(problems)
        if bits:
            quantize(models[0].model, bits)
        pairs = list(zip(models, windows, strict=True))
        kept = sys.maxsize if per_token else PAGE_TOKENS if html is not None else 0
        how = (reading, where, view.report, stride, kept, full_windows, note)
        scores = evaluate_texts(pairs, corpus, *how)
    tokenizer, score = models[0].tokenizer, scores[0]
    shown = run + f", {bits}-bit" * bool(bits)
    if html is not None:
        write_page(Path(html), shown, tokenizer, score)
    if as_json:
        for name, model, each in zip(names, models, scores, strict=True):
            quantized = bits if model is models[0] else None
            print_score(name, model.tokenizer if per_token else None, each, quantized)
    elif against:
        show_comparison(list(zip((shown, *against), scores, strict=True)))
    elif per_token:
        show_surprise(tokenizer, score)
        note(summary(score))
    else:
        show_sentence(summary(score))


def evaluate_classifier(
    run: str,
    folder: Path,
    names: tuple[str, ...],
    reading: "LabelReading",
    device: str,
    as_json: bool,
    mistakes_file: str | None,
    adapter: str | None,
) -> None:
    from nanolm.classification.classifier import MISTAKES, load, mistakes_csv
    from nanolm.cli.progress import TrainingView
    from nanolm.cli.scores import show_mistakes, show_scores

    with TrainingView() as view:
        classifier = load(folder, note, adapter=adapter).on(device, "auto")
        measured = classifier.measure(names, reading, view.report)
    for text in measured.notes:
        note(text)
    if mistakes_file is not None:
        write_file(Path(mistakes_file), mistakes_csv(measured.mistakes))
        note(f"wrote {counted(len(measured.mistakes), 'mistake')} to {mistakes_file}")
    if as_json:
        values = {"run": run, "labels": classifier.labels, **measured.scores.to_json()}
        print_json(values | {"mistakes": [vars(each) for each in measured.mistakes[:MISTAKES]]})
        return
    show_scores(", ".join(names), measured.scores)
    if measured.mistakes:
        click.echo()
        show_mistakes(measured.mistakes[:5])


def figures(score: "Score") -> dict[str, str]:
    return {
        "bits per byte": f"{score.bits_per_byte:.4f}",
        "bits per character": f"{score.bits_per_character:.4f}",
        "loss": f"{score.loss:.4f}",
        "perplexity": f"{score.perplexity:,.2f}",
        "top 1": f"{score.top_1_accuracy:.1%}",
        "top 5": f"{score.top_5_accuracy:.1%}",
        "tokens": f"{score.tokens:,}",
        "window": f"{score.window:,}",
    }


def summary(score: "Score") -> str:
    bits, per_character, *values, tokens, window = figures(score).values()
    rest = "loss {}, perplexity {}, top 1 {}, top 5 {}".format(*values)
    text = f"{bits} bits per byte, {per_character} per character, {rest}"
    return f"{text}, over {tokens} tokens ({score.bytes:,} bytes) in windows of {window}"


def show_comparison(scores: "list[tuple[str, Score]]") -> None:
    bits = [score.bits_per_byte for _, score in scores]
    best = min(bits, key=lambda each: (math.isnan(each), each))
    rows = [["model", *figures(scores[0][1])]]
    for name, score in scores:
        first, *others = figures(score).values()
        rows.append([name, first + " *" * (score.bits_per_byte == best), *others])
    show_table(rows, left=(0, 1))
    note("* best. Compare loss and perplexity only between models with the same tokenizer")


def print_score(
    name: str, tokenizer: "Tokenizer | None", score: "Score", weight_bits: int | None = None
) -> None:
    """One object on one line. With a `tokenizer`, its tokens too, streamed to save memory."""
    quantized = {"bits_per_weight": weight_bits} if weight_bits else {}
    values = {"run": name, **quantized, **vars(score), "perplexity": score.perplexity}
    del values["surprises"], values["bits_by_part"]
    click.echo(json.dumps({key: finite(value) for key, value in values.items()})[:-1], nl=False)
    if tokenizer is not None:
        click.echo(', "per_token": [', nl=False)
        for number, (token, id, bits, rank) in enumerate(tokens_of(tokenizer, score)):
            values = {"token": token, "id": id, "bits": finite(bits), "rank": rank}
            text = json.dumps(values, ensure_ascii=False)
            click.echo(f"{', ' if number else ''}{text}", nl=False)
        click.echo("]", nl=False)
    click.echo("}")


def tokens_of(tokenizer: "Tokenizer", score: "Score") -> Iterator[tuple[str, int, float, int]]:
    """(token, id, bits, rank) of every scored token."""
    for surprise in score.surprises:
        id, bits, rank = surprise.item()
        if id != tokenizer.start_of_text:
            yield spelled(tokenizer.tokens[id]), id, bits, rank


def show_surprise(tokenizer: "Tokenizer", score: "Score") -> None:
    """Colored tokens above their bits; one line per token in a pipe."""
    if not sys.stdout.isatty():
        for token, _, bits, rank in tokens_of(tokenizer, score):
            click.echo(f"{bits:.4f}\t{rank}\t{json.dumps(token, ensure_ascii=False)}")
        return
    columns = Columns()
    for _, id, bits, _ in tokens_of(tokenizer, score):
        columns.add(visible(tokenizer, id), f"{bits:.1f}", color(2**-bits))
    columns.flush()


def write_page(file: Path, name: str, tokenizer: "Tokenizer", score: "Score") -> None:
    from nanolm.text.page import surprise_page

    tokens = score.surprises[:PAGE_TOKENS]
    sizes = {"bytes": f"{score.bytes:,}", "characters": f"{score.characters:,}"}
    facts = {"model": name, **figures(score), **sizes}
    shown = int((tokens["id"] != tokenizer.start_of_text).sum())
    if shown < score.tokens:
        facts["shown"] = f"the first {shown:,} tokens"
    page = surprise_page(tokenizer, tokens.tolist(), facts, f"{Path(name).name}: surprisal in bits")
    write_file(file, page)
    note(f"wrote {file}: {facts.get('shown', 'all tokens')}")
