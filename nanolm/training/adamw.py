"""AdamW: torch's fused kernel, one launch for all parameters of a group."""

import torch

from nanolm.training.distributed import local_tensor
from nanolm.training.optim import BaseOptimizer

BETA1, BETA2 = 0.9, 0.95  # beta2 below Adam's default 0.999, because runs here are short
EPSILON = 1e-10


class AdamW(BaseOptimizer):
    moments = ("exp_avg", "exp_avg_sq")

    def init_state(self) -> None:
        super().init_state()
        count = torch.zeros((), device=next(iter(self.state)).device)
        for state in self.state.values():
            state["step"] = count  # one for all, also for parameters without a gradient

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        count = next(iter(self.state.values()))["step"]
        count += 1 if self.found_inf is None else 1 - self.found_inf
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self.state[p] for p in params]
            torch._fused_adamw_(
                [local_tensor(p) for p in params],
                [local_tensor(p.grad) for p in params],
                [local_tensor(state["exp_avg"]) for state in states],
                [local_tensor(state["exp_avg_sq"]) for state in states],
                [],
                [count] * len(params),
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
