"""Twenty steps in float64, in one process or several; saves the final weights to a file.

python twenty_steps.py FOLDER replicated
torchrun --nproc-per-node 2 twenty_steps.py FOLDER sharded
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanolm.model.build import build_model
from nanolm.planning.sizes import model_config
from nanolm.pretraining.language import NextToken
from nanolm.pretraining.prepare import Job
from nanolm.runs.folder import Run
from nanolm.text.store import TextRequest, prepare_tokens
from nanolm.training.distributed import World, gathered_copy, join_world
from nanolm.training.interrupt import StopRequest
from nanolm.training.settings import TrainSettings
from nanolm.training.trainer import Trainer


def learn(folder: Path, world: World, sharded: bool) -> None:
    settings = TrainSettings(
        corpus=("embedded:tiny",),
        family="modern",
        layers=2,
        heads=2,
        dim=32,
        context=16,
        batch=6,
        steps=20,
        lr=3e-3,
        weight_decay=0.1,
        dropout=0.0,
        optimizer="muon",
        evaluations=1,
        device="cpu",
        dtype="float32",
        threads=1,
        workers=1,
        compile=False,
        shard=sharded,
    )
    text = prepare_tokens(TextRequest(settings.corpus, tokenizer="byte"))
    torch.manual_seed(1)
    model = build_model(model_config(settings, text.tokenizer.vocab_size)).double()
    world.connect("cpu")
    (folder / "run").mkdir(exist_ok=True)
    job = Job(settings, Run(folder / "run"), text, model, None, fixed_steps=True)
    task = NextToken(job, print, world)
    trainer = Trainer(job.run, settings, task, None, lambda event: None, 0.0, world)
    trainer.train(StopRequest())
    weights = {name: gathered_copy(value) for name, value in model.named_parameters()}
    if world.first:
        save_file(weights, folder / "weights.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_world() as joined:
        learn(Path(sys.argv[1]), joined, sys.argv[2] == "sharded")
