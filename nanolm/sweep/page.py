"""The report page of a sweep, from its sweep.json.

>>> sweep_page(Path("runs/novel-sweep"))
"""

import math
from html import escape
from pathlib import Path

from nanolm.errors import DataError
from nanolm.model.config import ModelConfig
from nanolm.pretraining.ledger import read_state
from nanolm.report.curves import LINE_STYLES, Chart, Panel, Series
from nanolm.report.figure import figures, figures_page
from nanolm.report.page import best_sentence, setting_text, text_table
from nanolm.report.sweep import Dot, draw_sweep
from nanolm.runs.folder import config_of
from nanolm.sweep.result import SweepState, SweepTrial, combinations, in_words, ranked


def sweep_page(folder: Path) -> str:
    state = read_state(folder / "sweep.json", SweepState)
    trials = ranked(state.trials) if state else []
    ended = [trial for trial in trials if trial.results]
    if state is None or not ended:
        raise DataError(f"{folder}: no trial has finished yet")
    base, tried = state.base or {}, [each for each in combinations(trials) if each.rounds()]
    groups = {in_words([each.values]): each for each in tried}
    rounds = max(len(each.rounds()) for each in groups.values())
    chance, curves, rows = uniform_guess(folder, state, ended), [], []
    for name, each in groups.items():
        bits, seeds = dict(enumerate(each.rounds(), start=1)), len(each.trials)
        spread = {number: std for number, (_, std) in bits.items() if seeds > 1}
        curves.append(Series(name, [(number, mean) for number, (mean, _) in bits.items()], spread))
        cells = [f"{mean:.3f}" + f" ± {std:.3f}" * (seeds > 1) for mean, std in bits.values()]
        rows.append([name, str(seeds), *cells, *[""] * (rounds - len(cells))])
    baseline = (chance, "uniform guess") if chance else None
    panel = Panel("validation bits per byte", curves[:LINE_STYLES], baseline=baseline)
    chart = Chart(f"{folder.name}: each round trains longer", [panel], "round")
    dots = [Dot(t.values, t.bits()[0], len(t.results) > 1, t is ended[0]) for t in ended]
    after = f"{folder.name}: after {state.budgets[0]:,.1f} s"
    drawings = [draw_sweep(dots, after, [name]) for name in dots[0].values]
    failed = [(in_words([t.values]), t.error) for t in state.trials if t.error]
    header = ["settings", "seeds", *(f"round {number + 1}" for number in range(rounds))]
    sections = {
        "Results": figures([chart, *drawings]),
        "Bits per byte, best first": text_table(header, rows),
        "Failed": text_table([], failed) if failed else "",
        "Skipped for lack of time": escape(in_words(state.waiting)),
        "Shared settings": text_table([], [(k, setting_text(v)) for k, v in base.items()]),
    }
    scored = {name: each for name, each in groups.items() if each.score() < math.inf}
    scores = {name: [trial.score() for trial in each.trials] for name, each in scored.items()}
    facts = {"text": ", ".join(base.get("corpus", [])), "time": f"{state.seconds / 60:.1f} minutes"}
    facts["state"] = "finished" if state.finished else "not finished"
    sentence = best_sentence("bits_per_byte", scores)
    return figures_page(f"{folder.name}: report", facts, sentence, sections)


def uniform_guess(folder: Path, state: SweepState, trials: list[SweepTrial]) -> float | None:
    """Bits per byte if all tokens had the same probability."""
    for trial in trials:
        path, result = folder / f"trial-{trial.number:02}", trial.results[0]
        config = config_of(path if path.exists() or not state.run else Path(state.run))
        if isinstance(config, ModelConfig) and (loss := result.get("val_loss")):
            return float(result["val_bits_per_byte"] * math.log(config.vocab_size) / loss)
    return None
