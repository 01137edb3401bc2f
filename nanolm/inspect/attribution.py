"""How much each token contributed to a classifier's label, by two methods that need not agree.

    >>> result = attribute(classifier, ids)
    >>> result.label, result.rollout, result.gradient

Attention rollout: each token's share of the vector that is classified, assuming that layers consist
of attention alone. Gradient times input: how the label's logit changes with the length of a token's
vector. Positive values support the label, negative values count against it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanolm.errors import UsageError
from nanolm.inspect.inspection import Floats
from nanolm.model.classifier import Classifier
from nanolm.model.gpt import GPT


@dataclass(frozen=True)
class Attribution:
    label: int
    probabilities: Floats  # of all labels
    rollout: Floats  # shares that sum to 1
    gradient: Floats  # for (+) or against (-) the label
    attention: Floats  # (layers, heads, time, time)


def attribute(classifier: Classifier, ids: list[int]) -> Attribution:
    base = classifier.base
    if not isinstance(base, GPT):
        raise UsageError("a recurrent classifier has no attention to inspect")
    embedded: list[Tensor] = []

    def end_gradient_here(_module: object, _inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    weights: list[Tensor] = []
    lengths = torch.tensor([len(ids)], device=base.device)
    hook = base.token_embedding.register_forward_hook(end_gradient_here)
    with hook, base.eval_mode(), torch.enable_grad():
        x = base.hidden_states(torch.tensor([ids], device=base.device), attn_weights=weights)
        logits = classifier.score(classifier.pooled(x, lengths))[0]
        label = int(logits.argmax())
        # Relative to the mean of the others, because raising all logits equally changes nothing.
        others = (logits.sum() - logits[label]) / max(1, len(logits) - 1)
        (gradient,) = torch.autograd.grad(logits[label] - others, embedded[0])
    attention = torch.cat(weights).detach().float()
    total = identity = torch.eye(attention.shape[-1], device=attention.device)
    for layer in attention.mean(dim=1):  # over heads
        total = (layer + identity) / 2 @ total  # half of each layer is residual
    rollout = total[-1] if classifier.config.pool == "last" else total.mean(dim=0)
    gradient = (gradient * embedded[0]).sum(dim=-1)[0].float()
    results = (logits.float().softmax(dim=0), rollout, gradient, attention)
    return Attribution(label, *(each.detach().cpu().numpy() for each in results))
