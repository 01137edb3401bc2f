"""The optimizers by name. To add one, write a class in its own file and a line here.

>>> OPTIMIZERS["muon"].load()([{"params": matrices, "lr": 1e-3, ...}])

Importing this costs nothing (no torch), so the command line can use it for its help.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class OptimizerSpec:
    """The location of an optimizer, the parameters it handles, and its default learning rates."""

    path: str  # module:class; a subclass of nanolm.training.optim.BaseOptimizer
    lr: float  # for `nanolm train` at width 384; wider models need less
    fresh_lr: float  # for `nanolm finetune` from random weights
    distill_lr: float  # for distillation
    takes: Literal["all", "matrices"] = "all"  # "matrices": AdamW updates everything else

    def load(self) -> Any:
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)


OPTIMIZERS = {
    "muon": OptimizerSpec("nanolm.training.muon:Muon", 4.2e-3, 2e-3, 4e-3, takes="matrices"),
    "adamw": OptimizerSpec("nanolm.training.adamw:AdamW", 1.15e-3, 1e-3, 3e-3),
}
