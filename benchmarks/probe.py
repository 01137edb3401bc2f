"""Fine-tuning a pretrained model, compared with a linear probe on its frozen features.

    python benchmarks/probe.py MODEL sst2/train.tsv --dev sst2/dev.tsv --rows 300 --seeds 5

For each seed, the script splits the first rows as `nanolm finetune` does and fine-tunes the model
with each method. It also fits logistic regression with cross-validated regularization
(scikit-learn, or nanolm's own if scikit-learn is not installed) to the last-token vectors of the
same training rows. It prints the accuracies on the dev file and their paired difference with its
95% interval.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanolm.classification.classifier import LENGTH_MULTIPLE, in_batches
from nanolm.classification.data import Texts, Truncation, encode, split_data
from nanolm.classification.finetune import finetune
from nanolm.classification.probe import fit_probe
from nanolm.classification.settings import FinetuneSettings
from nanolm.model.classifier import pooled
from nanolm.model.device import choose_device
from nanolm.model.huggingface import load_model
from nanolm.runs.folder import find_model, model_tokenizer
from nanolm.training.events import Note

# Student's t for a two-sided 95% interval, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--dev", required=True)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--train", default="head,lora,all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], help="settings, such as lr=1e-4 epochs=5")
    options = parser.parse_args()
    device, _ = choose_device(options.device)
    ways = options.train.split(",")
    more: dict[str, Any] = {}
    for each in options.set:
        name, _, value = each.partition("=")
        more[name] = float(value) if not value.isdigit() else int(value)
    settings = FinetuneSettings.from_dict(
        {
            "data": options.data,
            "start_from": options.model,
            "limit": options.rows,
            "val_fraction": 0.2,
            "test": options.dev,
            "device": device,
            **more,
        }
    )
    features = Features(options.model, device)
    accuracy: dict[str, list[float]] = {name: [] for name in ("probe", *ways)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(options.first, options.first + options.seeds):
        chosen = replace(settings, seed=seed)
        split = split_data(chosen, lambda *how_far: None)
        assert split.test
        train, dev = features(split.train), features(split.test)
        accuracy["probe"].append(probe(train, split.train.truth, dev, split.test.truth, seed))
        line = [f"seed {seed}: probe {accuracy['probe'][-1]:.2f}"]
        for way in ways:
            folder, start = Path(tempfile.mkdtemp()), time.monotonic()
            result = finetune(replace(chosen, train=way), folder / "run", notify=show)
            shutil.rmtree(folder)
            assert result.test
            accuracy[way].append(100 * result.test.accuracy)
            seconds[way].append(time.monotonic() - start)
            what = f"best at step {result.best_step} of {result.steps}, {seconds[way][-1]:.0f} s"
            line.append(f"{way} {accuracy[way][-1]:.2f} ({what})")
        print(", ".join(line), flush=True)
    print(f"\n{'':8}{'dev %':>8}{'minus probe':>14}{'95% interval':>18}{'seconds':>10}")
    print(f"{'probe':8}{statistics.mean(accuracy['probe']):8.2f}")
    for way in ways:
        differences = np.subtract(accuracy[way], accuracy["probe"])
        mean, half = float(differences.mean()), interval(differences)
        between = f"{mean - half:+.2f} to {mean + half:+.2f}"
        taken = statistics.mean(seconds[way])
        print(
            f"{way:8}{statistics.mean(accuracy[way]):8.2f}{mean:+14.2f}{between:>18}{taken:10.0f}"
        )


def show(event: object) -> None:
    if isinstance(event, Note) and "probe" in event.text:
        print(f"  {event.text}", flush=True)


def interval(differences: Any) -> float:
    """Half the width of the 95% interval."""
    count = len(differences)
    if count < 2:
        return float("nan")
    spread = float(differences.std(ddof=1))
    return float(STUDENT.get(count - 1, 2.1) * spread / count**0.5)


class Features:
    """The last-token vectors of texts from the frozen model; each text is computed once."""

    def __init__(self, name: str, device: str) -> None:
        folder = find_model(name, print)
        self.model = load_model(folder).to(device)
        self.tokenizer = model_tokenizer(folder)
        self.device, self.known = torch.device(device), dict[str, torch.Tensor]()

    def __call__(self, texts: Texts) -> torch.Tensor:
        new = [text for text in dict.fromkeys(texts.texts) if text not in self.known]
        if new:
            cut = Truncation(min(self.model.config.context, 512), "tail")
            unlabeled = Texts(new, np.zeros(len(new), dtype=np.int64))
            data = encode(unlabeled, self.tokenizer, cut, quiet, LENGTH_MULTIPLE[self.device.type])

            def last(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
                return pooled(self.model.hidden_states(ids), lengths, "last")

            for rows, vectors in in_batches(last, data, self.device):
                self.known |= {new[row]: x for row, x in zip(rows, vectors.cpu(), strict=True)}
        return torch.stack([self.known[text] for text in texts.texts])


def quiet(*how_far: object) -> None:
    pass


def probe(
    train: torch.Tensor, truth: np.ndarray, dev: torch.Tensor, dev_truth: np.ndarray, seed: int
) -> float:
    """Accuracy of the linear probe on the dev rows, in percent."""
    try:
        from sklearn.linear_model import LogisticRegressionCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        weight = fit_probe(train, truth, int(truth.max()) + 1, seed=seed).weight
        return 100 * float(((dev @ weight.T).argmax(dim=1).numpy() == dev_truth).mean())
    warnings.simplefilter("ignore", FutureWarning)
    strengths = np.logspace(-5, 3, 17)
    regression = LogisticRegressionCV(Cs=strengths, cv=5, scoring="accuracy", max_iter=300)
    fitted = make_pipeline(StandardScaler(), regression).fit(train.numpy(), truth)
    return 100 * float((fitted.predict(dev.numpy()) == dev_truth).mean())


if __name__ == "__main__":
    main()
