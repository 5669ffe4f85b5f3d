"""Fused kernels: plain functions with autograd, each with a torch oracle of the same name in `reference`.

CUDA tensors run on Triton. CPU tensors run on the oracle, or on Triton's interpreter when TRITON_INTERPRET=1
is set before the first import. Triton itself is optional.
"""

from .fp8 import Fp8Rows, fp8_linear, fp8_linear_backward, quantize_rows
from .gated import gated, gated_backward_
from .linear_cross_entropy import LabelledRows, linear_cross_entropy
from .norm import rms_norm
from .reference import QKNorm
from .rope import rope_qk

__all__ = [
    "Fp8Rows",
    "LabelledRows",
    "QKNorm",
    "fp8_linear",
    "fp8_linear_backward",
    "gated",
    "gated_backward_",
    "linear_cross_entropy",
    "quantize_rows",
    "rms_norm",
    "rope_qk",
]
