"""AdamW: torch's fused kernel, one launch for all parameters of a group."""

import torch
from torch.optim.adamw import adamw

from nanolm.training.distributed import local_tensor
from nanolm.training.optim import BaseOptimizer

BETA1, BETA2 = 0.9, 0.95  # beta2 below Adam's default 0.999, because runs here are short
EPSILON = 1e-10


class AdamW(BaseOptimizer):
    moments = ("exp_avg", "exp_avg_sq")

    def init_state(self) -> None:
        super().init_state()
        for parameter, state in self.state.items():
            state["step"] = torch.zeros((), device=parameter.device)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self.state[p] for p in params]
            adamw(
                [local_tensor(p) for p in params],
                [local_tensor(p.grad) for p in params],
                [local_tensor(state["exp_avg"]) for state in states],
                [local_tensor(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                capturable=isinstance(group["lr"], torch.Tensor),
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=BETA1,
                beta2=BETA2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=EPSILON,
                maximize=False,
            )
