"""Imported by tests of Triton kernels: skips them where neither a GPU nor an interpreter is."""

import os

import pytest
import torch

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA GPU, or TRITON_INTERPRET=1", allow_module_level=True)
