"""Fused kernels: plain functions, each with a torch oracle of the same name and arguments in `reference`.

All have autograd except `linear_top_k`, and what autograd nodes call: `dropout`, `gated_lora`, fp8, four bits
and routed experts.
CUDA tensors run on Triton or torch's GEMMs. CPU tensors run on the oracle, or on Triton's interpreter if
TRITON_INTERPRET=1 is set before the first import. Triton is optional. Shapes, dtypes or devices that do not
fit together raise ValueError in all that have autograd.
"""

from unsloth_pack.kernels.arguments import (
    Distillation,
    ExtraLogits,
    Gate,
    InnerSum,
    LoraOutput,
    LowRank,
    NestedScales,
    QKNorm,
    Scaled,
    TeacherHead,
    TokenScores,
    TopLogProbs,
)
from unsloth_pack.kernels.attention import varlen_attention
from unsloth_pack.kernels.cross_entropy import linear_cross_entropy
from unsloth_pack.kernels.distillation import linear_distillation
from unsloth_pack.kernels.elementwise import dropout, relu2, xielu
from unsloth_pack.kernels.gated_lora import gated, gated_lora_, gated_lora_backward_
from unsloth_pack.kernels.head import LabelledRows
from unsloth_pack.kernels.moe import (
    grouped_mm,
    grouped_outer,
    routed_gate_,
    routed_gate_backward_,
    sum_of_rows,
)
from unsloth_pack.kernels.norm import add_rms_norm, rms_norm
from unsloth_pack.kernels.quantized import (
    Fp8Columns,
    Fp8Rows,
    dequantize_4bit,
    fp8_linear,
    fp8_linear_backward,
    fp8_transposed,
    quantize_rows,
)
from unsloth_pack.kernels.rope import rope_qk
from unsloth_pack.kernels.token_scores import token_scores
from unsloth_pack.kernels.top_k import linear_top_k

__all__ = [
    "Distillation",
    "ExtraLogits",
    "LabelledRows",
    "QKNorm",
    "TeacherHead",
    "TokenScores",
    "TopLogProbs",
    "add_rms_norm",
    "gated",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_top_k",
    "relu2",
    "rms_norm",
    "rope_qk",
    "token_scores",
    "varlen_attention",
    "xielu",
]
