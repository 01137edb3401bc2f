"""Fine-tuning on a small labeled set, compared with TF-IDF and logistic regression.

    python benchmarks/small_labels.py runs/novel train.tsv --limit 1200 --test dev.tsv --seeds 10

Both train on the same rows, with a new split for each seed. Cross-validation on these rows chooses
the regularization of the logistic regression, whose features are TF-IDF of words and word pairs.
The script prints the paired difference of the accuracies on --test, with its 95% interval over the
seeds (Student's t).
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from scipy.stats import t
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from nanolm.classification.data import LabelSplit, split_data
from nanolm.classification.finetune import finetune
from nanolm.classification.recipe import choose_fraction
from nanolm.classification.settings import FinetuneSettings

STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)


def count_words(split: LabelSplit) -> float:
    """The accuracy of TF-IDF and logistic regression."""
    assert split.test
    vectorizer = TfidfVectorizer(ngram_range=(1, 2))
    features = vectorizer.fit_transform(split.train.texts)
    search = GridSearchCV(LogisticRegression(max_iter=1000), {"C": STRENGTHS}, cv=5)
    model = search.fit(features, split.train.truth)
    return float(model.score(vectorizer.transform(split.test.texts), split.test.truth))


def parsed(text: str) -> Any:
    """The JSON value of the text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="run folder of a language model, or none")
    parser.add_argument("data")
    parser.add_argument("--test", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings for nanolm finetune"
    )
    options = parser.parse_args()
    values = {name: parsed(text) for name, text in (pair.split("=", 1) for pair in options.set)}
    base = {"data": options.data, "test": options.test, "limit": options.limit}
    base |= {"start_from": options.model, **values}
    differences = []
    rows: list[tuple[float, float, float]] = []
    print("seed  nanolm  TF-IDF  difference  seconds")
    for seed in range(options.first, options.first + options.seeds):
        settings = FinetuneSettings.from_dict({**base, "seed": seed})
        words = count_words(split_data(choose_fraction(settings), lambda *_: None))
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = finetune(settings, Path(folder) / "run")
        assert result.test
        row = (100 * result.test.accuracy, 100 * words, time.monotonic() - begin)
        rows.append(row)
        differences.append(row[0] - row[1])
        print(
            f"{seed:4}  {row[0]:6.1f}  {row[1]:6.1f}  {differences[-1]:+10.1f}  {row[2]:7.0f}",
            flush=True,
        )
    means = [statistics.mean(column) for column in zip(*rows, strict=True)]
    difference = statistics.mean(differences)
    print(f"mean  {means[0]:6.1f}  {means[1]:6.1f}  {difference:+10.1f}  {means[2]:7.0f}")
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        half = float(t.ppf(0.975, len(differences) - 1)) * error
        print(
            f"95% interval of the difference: {difference - half:+.1f} to {difference + half:+.1f}"
        )


if __name__ == "__main__":
    main()
