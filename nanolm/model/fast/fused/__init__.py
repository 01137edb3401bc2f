"""What stands between the matrices of a Transformer, in one kernel each, for training on a GPU.

    >>> gate_and_up = torch.randn(2, 5, 96, device="cuda", requires_grad=True)
    >>> swiglu(gate_and_up).shape
    torch.Size([2, 5, 48])

All of it waits for memory, so what counts is that every number is read once and written once; the
backward kernels above all write the gradient of a fused product into one piece, without pasting it
together. Arithmetic is in float32, results are in the precision of the input. The plain twins that
the tests hold this to are the functions and modules of `gpt.py`. All functions
but `cross_entropy_` can be differentiated.
"""

from nanolm.model.fast.fused.feed_forward import gelu_tanh, swiglu
from nanolm.model.fast.fused.heads import qk_norm_rope, split
from nanolm.model.fast.fused.launch import available
from nanolm.model.fast.fused.matrices import embedding, linear, multiply_, refresh
from nanolm.model.fast.fused.norms import add_norm
from nanolm.model.fast.fused.scores import cross_entropy_

__all__ = [
    "add_norm",
    "available",
    "cross_entropy_",
    "embedding",
    "gelu_tanh",
    "linear",
    "multiply_",
    "qk_norm_rope",
    "refresh",
    "split",
    "swiglu",
]
