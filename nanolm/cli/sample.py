"""`nanolm sample`: generate text with a trained model, streamed as it is sampled."""

import contextlib
import csv
import io
import json
import math
import secrets
import sys
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.columns import Columns, color, short, show_table, visible_text
from nanolm.cli.console import finite, note, show_text, write_file
from nanolm.cli.options import (
    Command,
    Table,
    adapter_option,
    chosen_bits,
    device_option,
    dtype_option,
    json_option,
    options_of,
    quantization_options,
    special_tokens_option,
    unknown,
    unwritable,
)
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.generation.sampling_params import DECLARATIONS, GROUPS, TYPES, SamplingParams
from nanolm.training.settings import DEVICES, DTYPES

if TYPE_CHECKING:
    from nanolm.generation.language_model import LanguageModel, Sample
    from nanolm.generation.words import Word

TABLE: Table = {
    group: {
        name: ("TEXT", f"{about.help[:-1]}; can be repeated.")
        if TYPES[name] is str
        else ("", about.help)
        for name, about in DECLARATIONS.items()
        if about.group == group and name != "seed"  # random here by default
    }
    for group in GROUPS
}


@click.command("sample", cls=Command)
@click.argument("run", required=False)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Prompt to continue; can be repeated.  [default: stdin if piped]",
)
@click.option(
    "--prompt-file",
    "files",
    multiple=True,
    metavar="FILE",
    help="Read the prompt from a file; can be repeated.",
)
@click.option("--each-line", is_flag=True, help="Treat each line of the file or stdin as a prompt.")
@special_tokens_option()
@click.option("--interactive", is_flag=True, help="Ask for prompts in a loop.")
@click.option("-n", "count", type=int, default=1, show_default=True, help="Samples per prompt.")
@click.option("--seed", type=int, help=f"{DECLARATIONS['seed'].help}  [default: random]")
@click.option(
    "--show",
    metavar="probs|top=N|words|words=N",
    help="Show the probability of each token (probs) or the N most likely tokens at each position "
    "(top=N); words and words=N do the same for whole words. Probabilities are the model's own, "
    "before temperature and filters.",
)
@click.option("--csv", "csv_file", metavar="FILE", help="Write the output of --show to a CSV file.")
@click.option("--html", metavar="FILE", help="Write the output of --show to an HTML page.")
@json_option(help="Print one JSON object per sample.")
@adapter_option()
@device_option()
@dtype_option()
@quantization_options()
@options_of(SamplingParams, TABLE)
def command(
    run: str | None,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    each_line: bool,
    special_tokens: bool,
    interactive: bool,
    count: int,
    seed: int | None,
    show: str | None,
    csv_file: str | None,
    html: str | None,
    as_json: bool,
    adapter: str | None,
    device: str,
    dtype: str,
    int8: bool,
    int4: bool,
    **options: Any,
) -> None:
    """Generate text with a trained model.

    RUN is a run folder, a checkpoint, a Hugging Face model folder, a GGUF file, or hf://NAME to
    download one from the Hub. The default is the newest run under runs/.

    When a text exceeds the context length, the model continues from the second half of its context.
    Recurrent models have no such limit.

    \b
    nanolm sample --prompt "Once upon a time"
    nanolm sample runs/novel -n 3 --temperature 1 --min-p 0.05
    nanolm sample --prompt "the cat" --show words=6 --html cat.html
    nanolm sample hf://gpt2 --prompt "The meaning of life" --stop "."
    nanolm sample --prompt-file questions.txt --each-line --json
    """
    params = SamplingParams(seed=secrets.randbelow(1_000_000) if seed is None else seed, **options)
    problems = params.problems()
    shown, top = what_to_show(show, problems)
    if not 1 <= count <= 1000:
        problems.append(f"-n {count}: must be from 1 to 1000")
    elif 1 < params.beams < count:
        problems.append(f"-n {count}: must be at most --beams {params.beams}")
    problems += unknown("--device", device, DEVICES) + unknown("--dtype", dtype, DTYPES)
    if adapter is not None and run is None:
        problems.append(f"--adapter {adapter}: name RUN, the model that it is for")
    problems += unwritable("--csv", csv_file) + unwritable("--html", html)
    if csv_file is not None and csv_file == html:
        problems.append(f"--csv and --html {html}: use two different files")
    if each_line and prompts and not files:
        problems.append("--each-line needs --prompt-file or a pipe; omit --prompt")
    if interactive and (as_json or csv_file or html or each_line):
        problems.append("--interactive cannot be used with --json, --csv, --html or --each-line")
    elif interactive and not (sys.stdin and sys.stdin.isatty()):
        problems.append("--interactive needs a terminal; use --each-line for prompts from a pipe")
    if problems:
        raise UsageError("\n".join(problems))
    asked = list(prompts)
    for name in files:
        try:
            asked += prompts_in(Path(name).read_bytes(), name, each_line)
        except FileNotFoundError:
            raise UsageError(f"--prompt-file {name} does not exist") from None
    if not asked and not interactive:
        piped = sys.stdin is not None and not sys.stdin.isatty()
        asked = prompts_in(sys.stdin.buffer.read() if piped else b"", "stdin", each_line)

    name, writer = ready(run, device, dtype, (int8, int4), adapter)
    writer.tokenizer.parse_special = special_tokens
    writing = SampleSession(writer, params, count, shown, top)
    if not params.effectively_greedy and params.beams == 1:
        note(f"seed {params.seed}" + ", incremented for each prompt" * interactive)
    if interactive:
        interactive_loop(writing, asked)
        return
    samples = writing.write(asked, live=not as_json)
    if as_json:
        writing.print_json(samples)
    if csv_file is not None:
        if writing.words:
            write_csv(Path(csv_file), writing.words, "word", top)
        else:
            tokens, most = map(writing.tokens, samples), min(top, writer.tokenizer.vocab_size)
            write_csv(Path(csv_file), list(tokens), "token", most)
    if html is not None:
        from nanolm.generation.page import samples_page

        facts = {"model": name, **facts_of(params)}
        page = samples_page(writer.tokenizer, samples, facts, writing.words)
        write_file(Path(html), page)
    for file in filter(None, (csv_file, html)):
        note(f"wrote {file}")
    if writing.interrupted:
        raise KeyboardInterrupt


def what_to_show(show: str | None, problems: list[str]) -> tuple[str, int]:
    """ "", "probs", "top" or "words", and the number of most likely tokens or words."""
    kind, _, number = (show or "").partition("=")
    if kind in ("top", "words") and not number:
        return kind, 6 if kind == "top" else 0
    if kind in ("top", "words") and number.isdecimal() and 1 <= int(number) <= 100:
        return kind, int(number)
    if show not in (None, "probs"):
        problems.append(f"--show {show}: choose probs, top=N, words or words=N (N from 1 to 100)")
    return kind, 0


def ready(
    run: str | None,
    device: str,
    dtype: str,
    quantized: tuple[bool, bool],
    adapter: str | None = None,
) -> tuple[str, "LanguageModel"]:
    import torch

    from nanolm.cli.progress import TrainingView
    from nanolm.generation.language_model import load
    from nanolm.model.device import choose_device, choose_dtype, use_fitting_threads

    where, reason = choose_device(device)
    kind, kind_reason = choose_dtype(dtype, where)
    bits = chosen_bits(*quantized, where)
    if where != "cpu":
        note(f"{where} ({reason}), {kind} ({kind_reason})")
    if run is None:
        run, writer = load_newest()
    else:
        with TrainingView() as view:
            writer = load(run, note, view.report, adapter)
    writer.model.to(where, getattr(torch, kind))
    if where == "cpu":
        use_fitting_threads(writer.model)
    if bits:
        from nanolm.model.fast.quantized import quantize

        quantize(writer.model, bits)
    return run, writer


class SampleSession:
    def __init__(
        self, writer: "LanguageModel", params: SamplingParams, count: int, shown: str, top: int
    ) -> None:
        self.writer, self.params, self.count = writer, params, count
        self.shown, self.top = shown, top
        self.columns = Columns()
        self.words: list[list[Word]] = []  # of each sample, if shown
        self.speed = 0.0  # tokens per second of the last generation
        self.interrupted = False

    def write(self, prompts: list[str], live: bool) -> list["Sample"]:
        """Sample from all prompts; if `live`, show the samples and stream the first one."""
        from nanolm.cli.progress import TrainingView
        from nanolm.generation.language_model import Sample

        for prompt in prompts:
            if unseen := self.writer.unseen(prompt):
                context = self.writer.model.config.context
                note(f"prompt truncated to fit {context:,} tokens; dropped the first {unseen:,}")
        samples = [Sample(prompt, number) for prompt in prompts for number in range(self.count)]
        started = time.monotonic()
        if live:
            self.begin(samples[0])
        done = 0  # tokens of the first sample already shown
        with TrainingView() as view:
            silent = view.report if not live or self.params.beams > 1 else lambda *how_far: None
            try:
                top = self.top if self.shown == "top" else 0
                for row, text in self.writer.stream(samples, self.params, top, report=silent):
                    if live and row == 0:
                        done = self.advance(samples[0], done, text)
            except KeyboardInterrupt:  # show the text so far
                self.interrupted = True
                for sample in samples:  # it may have come in the middle of a token
                    lists: list[list[Any]] = [sample.tokens, sample.logprobs]
                    lists += [sample.top] if top else []
                    whole = min(map(len, lists))
                    for each in lists:
                        del each[whole:]
                samples = [sample for sample in samples if sample.tokens]
        self.speed = sum(len(sample.tokens) for sample in samples) / (time.monotonic() - started)
        if any(math.isnan(logprob) for sample in samples for logprob in sample.logprobs):
            note("the model is damaged: its outputs are not finite (NaN)")
        if self.shown == "words":
            from nanolm.generation.words import score_words

            self.words = [score_words(self.writer, sample, self.top) for sample in samples]
        if live:
            for number, sample in enumerate(samples):
                if number:
                    show_text("---\n")
                    self.begin(sample)
                    self.advance(sample, 0, sample.text)
                self.end(sample, self.words[number] if self.words else [])
        return samples

    def begin(self, sample: "Sample") -> None:
        if self.shown and not sys.stdout.isatty():
            return  # machine-readable lines
        show_text(sample.prompt, bold=True)
        if self.shown and sample.prompt:
            show_text("\n")

    def advance(self, sample: "Sample", done: int, text: str) -> int:
        if not self.shown:
            show_text(text)
        elif self.shown == "probs":
            self.show_probabilities(self.tokens(sample, done))
        return len(sample.tokens)

    def end(self, sample: "Sample", words: list["Word"]) -> None:
        if not self.shown:
            show_text("\n")
        elif self.top:
            rows = []
            for word in words or self.tokens(sample):
                cells = [(visible_text(text), p, text == word.text) for text, p in word.top]
                rows.append(((visible_text(word.text), word.probability, True), cells))
            show_table(rows)
        elif self.shown == "words":
            self.show_probabilities(words)
        self.columns.flush()

    def tokens(self, sample: "Sample", start: int = 0) -> list["Word"]:
        """Each token as if it were a word."""
        from nanolm.generation.transcript import token_name
        from nanolm.generation.words import Word

        text = partial(token_name, self.writer.tokenizer)
        top = sample.top or [[]] * len(sample.tokens)
        tokens = list(zip(sample.tokens, sample.logprobs, top, strict=True))[start:]
        return [
            Word(text(id), math.exp(logprob), [id], [(text(i), math.exp(p)) for i, p in top])
            for id, logprob, top in tokens
        ]

    def show_probabilities(self, words: list["Word"]) -> None:
        for word in words:
            if sys.stdout.isatty():
                chance = word.probability
                self.columns.add(visible_text(word.text), short(chance), color(chance))
            else:
                click.echo(f"{word.probability:.6f}\t{json.dumps(word.text, ensure_ascii=False)}")

    def print_json(self, samples: list["Sample"]) -> None:
        for number, sample in enumerate(samples):
            line: dict[str, Any] = {
                "prompt": sample.prompt,
                "text": sample.text,
                "tokens": sample.tokens,
                "logprobs": [finite(logprob) for logprob in sample.logprobs],
                "stopped": sample.stopped or "interrupt",
                "tokens_per_second": round(self.speed, 1),
            }
            if self.words:
                line["words"] = [word_json(word, self.top) for word in self.words[number]]
            elif self.top:
                line["top"] = [
                    [
                        {"token": token, "id": id, "probability": finite(probability)}
                        for (id, _), (token, probability) in zip(top, word.top, strict=True)
                    ]
                    for top, word in zip(sample.top, self.tokens(sample), strict=True)
                ]
            click.echo(json.dumps(line, ensure_ascii=False))


def interactive_loop(writing: SampleSession, prompts: list[str]) -> None:
    """Read prompts from the keyboard. Ctrl-C stops a text, Ctrl-D quits."""
    with contextlib.suppress(ImportError):  # not on every system
        import readline  # noqa: F401  # history on the arrow keys
    note("Ctrl-C stops the current text, Ctrl-D quits")
    params = writing.params
    while True:
        try:
            prompts = prompts or [input("> ")]
            writing.write(prompts, live=True)
            writing.params = params = replace(params, seed=params.seed + 1)
        except KeyboardInterrupt:  # while typing
            click.echo()
        except EOFError:
            click.echo()
            return
        except DataError as error:
            note(str(error))
        prompts = []


def word_json(word: "Word", top: int) -> dict[str, Any]:
    values = {"word": word.text, "probability": finite(word.probability), "tokens": word.tokens}
    others = [{"word": text, "probability": finite(chance)} for text, chance in word.top]
    return values | ({"top": others} if top else {})


def write_csv(file: Path, samples: list[list["Word"]], kind: str, most: int) -> None:
    """One row per token or word of each sample, with at most `most` alternatives."""
    others = [f"{what}_{n}" for n in range(1, most + 1) for what in (kind, "probability")]
    stream = io.StringIO(newline="")
    rows = csv.writer(stream)
    count = "id" if kind == "token" else "tokens"
    rows.writerow(["sample", "position", kind, count, "probability", *others])
    for number, sample in enumerate(samples, start=1):
        for place, word in enumerate(sample, start=1):
            about = word.tokens[0] if kind == "token" else len(word.tokens)
            row = [number, place, word.text, about, f"{word.probability:.6f}"]
            for text, chance in word.top:
                row += [text, f"{chance:.6f}"]
            rows.writerow(row)
    write_file(file, stream.getvalue())


def facts_of(params: SamplingParams) -> dict[str, str]:
    facts = {
        field.name.replace("_", " "): str(getattr(params, field.name))
        for field in fields(params)
        if getattr(params, field.name) != field.default and field.name != "seed"
    }
    if params.effectively_greedy or params.beams > 1:
        return facts
    return {"temperature": str(params.temperature), **facts, "seed": str(params.seed)}


def load_newest() -> tuple[str, "LanguageModel"]:
    from nanolm.generation.language_model import load
    from nanolm.runs.folder import is_language_model, runs_by_age

    for run in filter(is_language_model, runs_by_age(Path("runs"))):
        try:
            writer = load(run, note)
        except ModelError as error:
            note(f"{error}; trying the previous run")
        else:
            note(f"using {run}, the newest run")
            return str(run), writer
    raise ModelError(
        "no trained model under runs/; name one, or train one first: nanolm train CORPUS"
    )


def prompts_in(data: bytes, name: str, each_line: bool) -> list[str]:
    """The prompts in a file or on stdin, without the final line end."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8: invalid byte at offset {error.start:,}") from None
    return text.split("\n") if each_line else [text]
