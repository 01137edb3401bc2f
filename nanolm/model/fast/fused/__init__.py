"""Fused kernels for everything between matrix products, for training on a GPU.

    >>> swiglu(torch.randn(2, 5, 96, device="cuda", requires_grad=True)).shape
    torch.Size([2, 5, 48])

These operations are memory-bound, so every value is read once and written once; the backward
kernels write the gradient of a fused product into one tensor. Arithmetic is in float32, results are
in the precision of the input. All functions except `cross_entropy_` are differentiable.
"""

from nanolm.model.fast.fused.feed_forward import gelu_tanh as gelu_tanh
from nanolm.model.fast.fused.feed_forward import swiglu as swiglu
from nanolm.model.fast.fused.heads import qk_norm_rope as qk_norm_rope
from nanolm.model.fast.fused.heads import split as split
from nanolm.model.fast.fused.launch import available as available
from nanolm.model.fast.fused.matrices import embedding as embedding
from nanolm.model.fast.fused.matrices import linear as linear
from nanolm.model.fast.fused.matrices import multiply_ as multiply_
from nanolm.model.fast.fused.matrices import refresh as refresh
from nanolm.model.fast.fused.norms import add_norm as add_norm
from nanolm.model.fast.fused.scores import cross_entropy_ as cross_entropy_
