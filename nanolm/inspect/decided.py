"""Which tokens of a text decided its label, by two measures that need not agree.

    >>> found = decided(classifier, ids)
    >>> found.label, found.attention, found.gradient

Attention roll-out follows attention back through all layers: how much of what is read off at the
end has come from each token, if looking were all that layers do. Gradient times input asks how the
score of the label would change if a token's vector were a little longer: above 0 it speaks for the
label, below 0 against it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanolm.errors import UsageError
from nanolm.model.classifier import Classifier
from nanolm.model.gpt import GPT

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Decided:
    """Of one text; both measures have a number for each token."""

    label: int
    chances: Floats  # of every label
    attention: Floats  # shares: together 1
    gradient: Floats  # for (+) or against (-) the label
    looks: Floats  # (layers, heads, time, time): where each place looks


def decided(classifier: Classifier, ids: list[int]) -> Decided:
    base = classifier.base
    if not isinstance(base, GPT):
        raise UsageError("a recurrent classifier has no attention to look at")
    given: list[Tensor] = []
    handle = base.token_embedding.register_forward_hook(lambda _, x, y: keep(given, y))
    weights: list[Tensor] = []
    inputs = torch.tensor([ids], device=base.device)
    lengths = torch.tensor([len(ids)], device=base.device)
    try:
        with base.eval_mode(), torch.enable_grad():
            x = base.hidden_states(inputs, weights=weights)
            logits = classifier.score(classifier.pooled(x, lengths))[0]
            label = int(logits.argmax())
            # Against the mean of the others: what lifts all labels alike decides nothing.
            others = (logits.sum() - logits[label]) / max(1, len(logits) - 1)
            (gradient,) = torch.autograd.grad(logits[label] - others, given[0])
    finally:
        handle.remove()
    by_gradient = (gradient * given[0]).sum(dim=-1)[0].detach()
    looks = torch.cat(weights).detach().float()
    return Decided(
        label=label,
        chances=logits.detach().float().softmax(dim=0).cpu().numpy(),
        attention=rollout(looks, classifier.config.pool).cpu().numpy(),
        gradient=by_gradient.float().cpu().numpy(),
        looks=looks.cpu().numpy(),
    )


def keep(given: list[Tensor], embedded: Tensor) -> Tensor:
    """Let the way back end at these vectors."""
    vectors = embedded.detach().requires_grad_()
    given.append(vectors)
    return vectors


def rollout(weights: Tensor, pool: str) -> Tensor:
    """Weights (layers, heads, time, time), of all heads alike, each layer half a residual."""
    time = weights.shape[-1]
    whole = stay = torch.eye(time, device=weights.device)
    for layer in weights.mean(dim=1):
        whole = (layer + stay) / 2 @ whole
    return whole[-1] if pool == "last" else whole.mean(dim=0)
