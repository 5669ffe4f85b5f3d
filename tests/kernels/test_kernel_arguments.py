"""Arguments that do not fit a kernel are refused in one line, before anything runs."""

from dataclasses import replace

import pytest
import torch
from tables import table

from unsloth_pack.kernels import (
    ExtraLogits,
    Gate,
    InnerSum,
    LowRank,
    QKNorm,
    Scaled,
    add_rms_norm,
    dropout,
    gated,
    gated_lora_,
    rms_norm,
    routed_gate_,
)
from unsloth_pack.kernels import linear_cross_entropy as lce
from unsloth_pack.kernels import rope_qk as rope
from unsloth_pack.kernels import varlen_attention as varlen

zeros, ones, I64, BF16 = torch.zeros, torch.ones, torch.int64, torch.bfloat16
ROPE = dict(q=zeros(5, 4, 8), k=zeros(5, 2, 8), cos=zeros(5, 8), sin=zeros(5, 8))
POSITIONS = torch.arange(5)
QK_NORM = QKNorm(zeros(8), zeros(8), 1e-6)
VARLEN = dict(q=zeros(5, 4, 8), k=zeros(5, 2, 8), v=zeros(5, 2, 8), scale=0.3)
VARLEN["cu_seqlens"] = torch.tensor([0, 2, 5], dtype=torch.int32)
GATED_LORA = dict(gate=ones(5, 8), up=ones(5, 8), activation="silu", store=True)
GATED_LORA |= dict(of_gate=LowRank(ones(5, 2), ones(8, 2)), of_up=LowRank(ones(5, 3), ones(8, 3)))
FIT = {
    rope: ROPE,
    rms_norm: dict(x=zeros(5, 8), weight=zeros(8), eps=1e-6),
    add_rms_norm: dict(x=zeros(5, 8), added=zeros(5, 8), weight=zeros(8), eps=1e-6),
    gated: dict(gate=zeros(5, 8), up=zeros(5, 8), activation="silu"),
    gated_lora_: GATED_LORA,
    routed_gate_: dict(inner=InnerSum(ones(5, 8)), weight=ones(5), gate=Gate("silu"), keep=True),
    varlen: VARLEN,
    lce: dict(hidden=zeros(5, 8), weight=zeros(40, 8), labels=zeros(5, dtype=I64)),
    dropout: dict(x=ones(2, 4), seed=torch.tensor([1]), p=0.5),
}
REFUSED = [
    (rope, {"q": zeros(5, 8)}, r"q is \[5, 8\]: pass \[B, H, T, D\]"),
    (rope, {"k": zeros(6, 2, 8)}, r"k is \[6, 2, 8\]: pass \[T, K, D\] of T = 5"),
    (rope, {"k": zeros(5, 2, 8, dtype=BF16)}, "cast all to one floating dtype"),
    (rope, {"sin": zeros(5, 6)}, r"sin is \[5, 6\]"),
    (rope, {"cos": zeros(5, 10), "sin": zeros(5, 10)}, "10 columns for head dim 8"),
    (rope, {"cos": zeros(9, 8), "sin": zeros(9, 8)}, "pass a row for each token"),
    (rope, {"position_ids": POSITIONS.float()}, r"\[5\] of torch.float32: pass"),
    (rope, {"position_ids": POSITIONS[:4]}, r"position_ids \[4\]"),
    (rope, {"cos": zeros(5, 8, device="meta")}, "cos is on meta: move it to cpu"),
    (rope, {"qk_norm": replace(QK_NORM, flat=True)}, r"flat is True: pass a weight \[32\]"),
    (rms_norm, {"weight": zeros(6)}, r"weight is \[6\]: pass \[C\] of C = 8"),
    (add_rms_norm, {"added": zeros(5, 7)}, r"added is \[5, 7\]"),
    (gated, {"up": zeros(8)}, r"up is \[8\]: pass \[\*, F\]"),
    (gated, {"activation": "relu"}, "activation is 'relu': pass one of silu, gelu_tanh"),
    (gated_lora_, {"of_gate": LowRank(ones(4, 2), ones(8, 2))}, r"left is \[4, 2\]: pass \[N, r\] of N = 5"),
    (gated_lora_, {"of_up": LowRank(ones(5, 2), ones(8, 3))}, r"right is \[8, 3\]: pass \[F, r\]"),
    (gated_lora_, {"of_up": LowRank(ones(5, 2).half(), ones(8, 2))}, "cast all to one floating dtype"),
    (gated_lora_, {"up": ones(1, 8).expand(5, 8)}, r"up has strides \[0, 1\]"),
    (routed_gate_, {"inner": InnerSum(ones(8, 5).t())}, "base has strides"),
    (routed_gate_, {"inner": InnerSum(ones(5, 8), Scaled(ones(5, 4), 1.0))}, r"low_rank is \[5, 4\]"),
    (routed_gate_, {"inner": InnerSum(ones(5, 8), None, ones(2, 8))}, "bias or expert is missing"),
    (routed_gate_, {"weight": ones(4)}, r"weight is \[4\]: pass \[S\] of S = 5"),
    (routed_gate_, {"gate": Gate("gelu_tanh", alpha=2.0)}, "alpha is 2.0 with gelu_tanh"),
    (varlen, {"v": zeros(5, 1, 8)}, r"v is \[5, 1, 8\]: pass"),
    (varlen, {"q": zeros(5, 3, 8)}, "3 and 2 heads of 8: pass a multiple"),
    (varlen, {name: zeros(5, 2, 257) for name in "qkv"}, "a size from 1 to 256"),
    (varlen, {"cu_seqlens": VARLEN["cu_seqlens"].long()}, "cu_seqlens is torch.int64: pass"),
    (varlen, {"sinks": zeros(2)}, r"sinks is \[2\]: pass \[H\] of H = 4"),
    (varlen, {"window": 0}, "window is 0 and softcap None: pass positive ones"),
    (lce, {"hidden": zeros(5, 6)}, r"weight is \[40, 8\]: pass \[V, C\] of C = 6"),
    (lce, {"labels": zeros(4, dtype=I64)}, r"labels is \[4\]: pass \[\*\]"),
    (lce, {"labels": zeros(5)}, "labels are torch.float32: cast them"),
    (lce, {"bias": zeros(40, dtype=BF16)}, "bias is torch.bfloat16: cast all"),
    (lce, {"softcap": 0.0}, "softcap is 0.0: pass a positive one"),
    (lce, {"extra": ExtraLogits(zeros(5, 2), b=zeros(39, 2))}, r"b is \[39, 2\]: pass \[V, R\] of V = 40"),
    (dropout, {"x": ones(3)}, r"x is \[3\]: pass \[N, C\]"),
    (dropout, {"p": 1.5}, "p 1.5: pass one int64 and a probability"),
    (dropout, {"add_to": ones(4, 2).t()}, "not contiguous"),
]


@table(("kernel", "changes", "message"), REFUSED, ids=lambda case: getattr(case, "__name__", str(case)[:40]))
def test_what_does_not_fit_is_refused_in_one_line(kernel, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        kernel(**(FIT[kernel] | changes))
    assert "\n" not in str(error.value)


def test_what_fits_runs():
    for kernel, arguments in FIT.items():
        kernel(**arguments)
