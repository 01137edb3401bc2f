"""The optimizer, and its state as plain tensors.

AdamW, with weight decay on the matrices alone: pulling norms, biases and single vectors towards
zero helps nothing.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanolm.errors import ModelError

MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS = (0.9, 0.95)  # the second shorter than Adam's 0.999: runs here are short


def make_optimizer(
    parameters: dict[str, nn.Parameter],
    lr: float,
    weight_decay: float,
    scale: Callable[[str], float] = lambda name: 1.0,
) -> torch.optim.AdamW:
    """For `parameters` by name; `scale` is what to multiply the learning rate of each by."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter.dim() >= 2, scale(name)), []).append(parameter)
    device = next(iter(parameters.values())).device
    on_gpu = device.type == "cuda"
    return torch.optim.AdamW(
        [
            {
                "params": members,
                "weight_decay": weight_decay if matrix else 0.0,
                "lr": torch.tensor(lr, device=device) if on_gpu else lr,
                "scale": times,
            }
            for (matrix, times), members in groups.items()
        ],
        betas=BETAS,
        eps=1e-10,
        fused=device.type in ("cpu", "cuda"),  # one kernel for all parameters
        capturable=on_gpu,
    )


def save_optimizer(
    optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter], file: Path
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter)
        if state:
            tensors |= {f"{name}.{moment}": state[moment].cpu() for moment in MOMENTS}
            tensors["step"] = state["step"].cpu()
    save_file(tensors, file)


def load_optimizer(
    optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter], file: Path
) -> None:
    tensors = load_file(file)
    if not tensors:
        return  # saved before the first step
    for name, parameter in parameters.items():
        try:
            moments = {moment: tensors[f"{name}.{moment}"] for moment in MOMENTS}
        except KeyError as error:
            raise ModelError(f"{file}: {error} is missing") from None
        optimizer.state[parameter] = {
            "step": tensors["step"].clone().to(parameter.device),
            **{moment: value.to(parameter.device) for moment, value in moments.items()},
        }
