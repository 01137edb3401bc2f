"""The optimizer, and its state as plain tensors.

AdamW, with weight decay on the matrices alone: pulling norms, biases and single vectors towards
zero helps nothing.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanolm.errors import ModelError
from nanolm.model.base import Model

MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS = (0.9, 0.95)  # the second shorter than Adam's 0.999: runs here are short


def make_optimizer(model: Model, lr: float, weight_decay: float) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = model.device.type in ("cpu", "cuda")  # one kernel for all parameters
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=1e-10, fused=fused)


def save_optimizer(optimizer: torch.optim.AdamW, model: Model, file: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            tensors |= {f"{name}.{moment}": state[moment].cpu() for moment in MOMENTS}
            tensors["step"] = state["step"].cpu()
    save_file(tensors, file)


def load_optimizer(optimizer: torch.optim.AdamW, model: Model, file: Path) -> None:
    tensors = load_file(file)
    if not tensors:
        return  # saved before the first step
    for name, parameter in model.named_parameters():
        try:
            moments = {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS}
        except KeyError as error:
            raise ModelError(f"{file}: {error} is missing") from None
        optimizer.state[parameter] = {
            "step": tensors["step"].clone().to(parameter.device),
            **{moment: value.to(parameter.device) for moment, value in moments.items()},
        }
