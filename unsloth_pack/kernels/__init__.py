"""Fused kernels: plain functions with autograd, each with a torch oracle of the same name in `reference`.

CUDA tensors run on Triton. CPU tensors run on the oracle, or on Triton's interpreter when TRITON_INTERPRET=1
is set before the first import. Triton itself is optional.
"""

from .gated import gated, gated_backward
from .norm import rms_norm
from .reference import QKNorm
from .rope import rope_qk

__all__ = ["QKNorm", "gated", "gated_backward", "rms_norm", "rope_qk"]
