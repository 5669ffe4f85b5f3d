"""Fused kernels: plain functions, each with a torch oracle of the same name and arguments in `reference`.

All have autograd except `dropout` and those of `gated_lora`, fp8, four bits and routed experts, which are
called inside autograd nodes.
CUDA tensors run on Triton, or on torch's own GEMMs. CPU tensors run on the oracle, or on Triton's interpreter
when TRITON_INTERPRET=1 is set before the first import. Triton itself is optional.
"""

from .chunked_head import LabelledRows
from .dropout import dropout
from .extra_logits import ExtraLogits
from .four_bits import dequantize_4bit
from .fp8 import Fp8Columns, Fp8Rows, fp8_linear, fp8_linear_backward, fp8_transposed, quantize_rows
from .gated import gated
from .gated_lora import gated_lora_, gated_lora_backward_
from .grouped import grouped_mm, grouped_outer
from .linear_cross_entropy import linear_cross_entropy
from .norm import add_rms_norm, rms_norm
from .reference import NestedScales, QKNorm
from .reference_experts import Gate, InnerSum, Scaled
from .reference_gated import LowRank
from .rope import rope_qk
from .routed import routed_gate_, routed_gate_backward_, sum_of_rows
from .token_scores import TokenScores, token_scores
from .ungated import relu2, xielu
from .varlen_attention import varlen_attention

__all__ = [
    "ExtraLogits",
    "Fp8Columns",
    "Fp8Rows",
    "Gate",
    "InnerSum",
    "LabelledRows",
    "LowRank",
    "NestedScales",
    "QKNorm",
    "Scaled",
    "TokenScores",
    "add_rms_norm",
    "dequantize_4bit",
    "dropout",
    "fp8_linear",
    "fp8_linear_backward",
    "fp8_transposed",
    "gated",
    "gated_lora_",
    "gated_lora_backward_",
    "grouped_mm",
    "grouped_outer",
    "linear_cross_entropy",
    "quantize_rows",
    "relu2",
    "rms_norm",
    "rope_qk",
    "routed_gate_",
    "routed_gate_backward_",
    "sum_of_rows",
    "token_scores",
    "varlen_attention",
    "xielu",
]
