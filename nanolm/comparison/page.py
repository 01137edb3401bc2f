"""The report page of a comparison, from its compare.json.

>>> compare_page(Path("runs/reviews-compare"))
"""

from pathlib import Path

from nanolm.comparison.classifiers import CLASSIFIERS
from nanolm.comparison.compare import CompareState, pictures, result_of
from nanolm.comparison.language_models import LANGUAGE_MODELS
from nanolm.comparison.pairs import PAIR_MODELS
from nanolm.errors import DataError
from nanolm.pretraining.ledger import read_state
from nanolm.report.figure import figures, figures_page
from nanolm.report.page import EPOCH_COLUMNS, best_sentence, mean_text, text_table

MODELS = {  # and their measure, by the name of the setting for the data
    "corpus": (LANGUAGE_MODELS, "bits_per_byte"),
    "pairs": (PAIR_MODELS, "exact"),
    "data": (CLASSIFIERS, "accuracy"),
}
OTHERS = ("seeds", "parameters", "training", "what it shows")


def compare_page(folder: Path) -> str:
    state = read_state(folder / "compare.json", CompareState)
    if state is None or not state.found:
        raise DataError(f"{folder}: no model has been trained yet")
    asked = state.asked["settings"]
    key = next(key for key in MODELS if key in asked)
    kinds, measure = MODELS[key]
    state.measure = measure = state.measure or measure
    result = result_of(folder, state, kinds)
    scores = {row.title: [each[measure] for each in row.results] for row in result.rows}
    rows = []
    for row in result.rows:
        size = f"{row.means['parameters']:,.0f}" if "parameters" in row.means else ""
        others = (str(row.seeds), size, f"{row.means['seconds']:,.1f} s", row.teaches)
        rows.append([row.title, mean_text(measure, scores[row.title]), *others])
    header = ["model", EPOCH_COLUMNS[f"val_{measure}"][0], *OTHERS]
    images = list(pictures(result, folder.name).values())
    sections = {"Results": figures(images), "Models": text_table(header, rows)}
    facts = {"data": ", ".join(asked[key]), "time": f"{state.seconds / 60:.1f} minutes"}
    facts["state"] = "finished" if state.finished else "not finished"
    return figures_page(f"{folder.name}: report", facts, best_sentence(measure, scores), sections)
