"""Arguments that do not fit a kernel are refused in one line, before anything runs."""

import math
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

BF16 = torch.bfloat16


zeros, ones, I64 = torch.zeros, torch.ones, torch.int64
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
    (rope, {"q": zeros(5, 8)}, r"q \[5, 8\] and k \[5, 2, 8\] must both be"),
    (rope, {"k": zeros(6, 2, 8)}, r"k \[6, 2, 8\] may differ in heads"),
    (rope, {"k": zeros(5, 2, 8, dtype=BF16)}, "cast both to one floating dtype"),
    (rope, {"q": zeros(5, 4, 8, dtype=I64), "k": zeros(5, 2, 8, dtype=I64)}, "floating dtype"),
    (rope, {"sin": zeros(5, 6)}, r"cos \[5, 8\] and sin \[5, 6\]"),
    (rope, {"cos": zeros(8), "sin": zeros(8)}, "must have one shape"),
    (rope, {"cos": zeros(5, 10), "sin": zeros(5, 10)}, "10 columns for head dim 8"),
    (rope, {"cos": zeros(5, 3), "sin": zeros(5, 3)}, "3 columns for head dim 8"),
    (rope, {"q": zeros(5, 4, 7), "k": zeros(5, 2, 7), "cos": zeros(5, 6), "sin": zeros(5, 6)}, "head dim 7"),
    (rope, {"cos": zeros(9, 8), "sin": zeros(9, 8)}, "without position_ids: pass a row for each token"),
    (rope, {"position_ids": POSITIONS.float()}, "position_ids are torch.float32"),
    (rope, {"position_ids": POSITIONS[:4]}, r"position_ids \[4\]"),
    (rope, {"position_ids": POSITIONS, "cos": zeros(1, 5, 8), "sin": zeros(1, 5, 8)}, r"tables \[P, R\]"),
    (rope, {"cos": zeros(5, 8, device="meta")}, "on meta"),
    (rope, {"qk_norm": replace(QK_NORM, k_weight=zeros(16))}, r"k_weight is \[16\]"),
    (rope, {"qk_norm": replace(QK_NORM, flat=True)}, r"q_weight is \[8\].*flat=True needs \[32\]"),
    (rope, {"qk_norm": replace(QK_NORM, eps=0.0)}, "eps is 0.0"),
    (rms_norm, {"weight": zeros(6)}, r"x \[5, 8\] needs a weight of its last dim, not \[6\]"),
    (rms_norm, {"x": zeros(()), "weight": zeros(())}, r"x \[\] needs a weight"),
    (rms_norm, {"x": zeros(5, 0), "weight": zeros(0)}, r"x \[5, 0\] needs a weight"),
    (rms_norm, {"x": zeros(5, 8, dtype=I64)}, "x is torch.int64"),
    (rms_norm, {"weight": zeros(8, dtype=torch.int32)}, "weight is torch.int32"),
    (rms_norm, {"weight": zeros(8, device="meta")}, "but weight on meta"),
    (rms_norm, {"eps": 0.0}, "eps is 0.0"),
    (add_rms_norm, {"added": zeros(5, 7)}, r"added is \[5, 7\] on cpu and x is \[5, 8\] on cpu"),
    (add_rms_norm, {"added": zeros(5, 8, device="meta")}, r"added is \[5, 8\] on meta"),
    (gated, {"up": zeros(5, 6)}, r"gate \[5, 8\] and up \[5, 6\] must have one shape"),
    (gated, {"up": zeros(8)}, r"up \[8\] must have one shape"),
    (gated, {"gate": zeros(()), "up": zeros(())}, r"gate \[\] and up \[\]"),
    (gated, {"gate": zeros(5, 8, dtype=I64)}, "gate is torch.int64"),
    (gated, {"up": zeros(5, 8, dtype=torch.bool)}, "up is torch.bool"),
    (gated, {"up": zeros(5, 8, device="meta")}, "but up on meta"),
    (gated, {"activation": "relu"}, "activation is 'relu': pass one of silu, gelu_tanh"),
    (gated_lora_, {"of_gate": LowRank(ones(4, 2), ones(8, 2))}, r"\[4, 2\] and \[8, 2\]: pass \[N, r\]"),
    (gated_lora_, {"of_up": LowRank(ones(5, 2), ones(8, 3))}, "has ranks 2 and 3"),
    (gated_lora_, {"of_up": LowRank(ones(5, 0), ones(8, 0))}, "has ranks 0 and 0"),
    (gated_lora_, {"of_up": LowRank(ones(5, 2).half(), ones(8, 2))}, "pass torch.float32"),
    (gated_lora_, {"gate": ones(8), "up": ones(8)}, r"gate is \[8\]: pass \[N, F\]"),
    (gated_lora_, {"activation": "relu"}, "activation is 'relu'"),
    (gated_lora_, {"up": ones(1, 8).expand(5, 8)}, r"up is \[5, 8\] with strides \[0, 1\]"),
    (routed_gate_, {"inner": InnerSum(ones(5, 7))}, r"gate and up are \[5, 7\]: pass \[S, 2F\]"),
    (routed_gate_, {"inner": InnerSum(ones(8, 5).t())}, "not contiguous"),
    (routed_gate_, {"inner": InnerSum(ones(5, 8), Scaled(ones(5, 4), 1.0))}, r"low-rank part is \[5, 4\]"),
    (routed_gate_, {"inner": InnerSum(ones(5, 8), None, ones(2, 8))}, "bias or expert is missing"),
    (routed_gate_, {"inner": InnerSum(ones(5, 8), None, ones(2, 4), ones(5))}, r"bias is \[2, 4\]"),
    (routed_gate_, {"weight": ones(4)}, r"weight is \[4\]: pass \[5\]"),
    (routed_gate_, {"gate": Gate("relu")}, "activation is 'relu'"),
    (routed_gate_, {"gate": Gate("gelu_tanh", alpha=2.0)}, "alpha is 2.0 with gelu_tanh"),
    (varlen, {"q": zeros(5, 8)}, r"q \[5, 8\], .*: pass \[N, H, D\]"),
    (varlen, {"v": zeros(5, 1, 8)}, r"v \[5, 1, 8\]: pass"),
    (varlen, {"q": zeros(6, 4, 8)}, "may differ in heads"),
    (varlen, {"q": zeros(5, 4, 16)}, "may differ in heads"),
    (varlen, {"q": zeros(5, 3, 8)}, "those of k dividing those of q"),
    (varlen, {name: zeros(5, 2, 257) for name in "qkv"}, "head dim 257: pass one from 1 to 256"),
    (varlen, {"k": VARLEN["k"].bfloat16()}, "k torch.bfloat16 and v torch.float32: cast all"),
    (varlen, {name: VARLEN[name].long() for name in "qkv"}, "cast all to one floating dtype"),
    (varlen, {"cu_seqlens": VARLEN["cu_seqlens"].long()}, r"cu_seqlens is \[3\] of torch.int64: pass"),
    (varlen, {"cu_seqlens": VARLEN["cu_seqlens"][:0]}, r"cu_seqlens is \[0\]"),
    (varlen, {"cu_seqlens": VARLEN["cu_seqlens"].to("meta")}, "cu_seqlens on meta: move it there"),
    (varlen, {"scale": math.inf}, "scale is inf"),
    (varlen, {"sinks": zeros(2)}, r"sinks are \[2\] on .*: pass \[4\]"),
    (varlen, {"window": 0}, "window is 0: pass at least 1"),
    (varlen, {"softcap": 0.0}, "softcap is 0.0"),
    (varlen, {"softcap": math.nan}, "softcap is nan"),
    (lce, {"hidden": zeros(5, 6)}, r"hidden \[5, 6\] and weight \[40, 8\]: pass"),
    (lce, {"weight": zeros(8)}, r"weight \[8\]: pass"),
    (lce, {"weight": zeros(0, 8)}, r"weight \[0, 8\]: pass"),
    (lce, {"labels": zeros(4, dtype=I64)}, r"labels \[4\], hidden \[5, 8\]: pass one label"),
    (lce, {"labels": zeros(5)}, "labels are torch.float32: cast them"),
    (lce, {"bias": zeros(8)}, r"bias \[8\], weight \[40, 8\]: pass one number"),
    (lce, {"weight": zeros(40, 8, dtype=BF16)}, "float32 and weight torch.bfloat16"),
    (lce, {"bias": zeros(40, dtype=BF16)}, "float32 and bias torch.bfloat16"),
    (lce, {"weight": zeros(40, 8, device="meta")}, "but weight on meta"),
    (lce, {"labels": zeros(5, dtype=I64, device="meta")}, "but labels on meta"),
    (lce, {"softcap": 0.0}, "softcap is 0.0: pass a positive one"),
    (lce, {"softcap": math.nan}, "softcap is nan: pass a positive one"),
    (lce, {"softcap": math.inf}, "softcap is inf: pass a positive one"),
    *(
        (lce, {"extra": ExtraLogits(h, **more)}, message)
        for h, more, message in (
            (zeros(5, 2), {}, "both b and outputs, or neither"),
            (
                zeros(5, 2),
                {"b": zeros(40, 2), "outputs": torch.tensor([1, 2])},
                "both b and outputs, or neither",
            ),
            (zeros(3, 2), {"outputs": torch.tensor([1, 2])}, "one row a row"),
            (zeros(5, 2), {"b": zeros(39, 2)}, r"pass \[40, 2\]"),
            (zeros(5, 2), {"outputs": torch.tensor([1, 2, 3])}, r"pass \[2\] of torch.int64"),
            (zeros(5, 2), {"outputs": torch.tensor([1, 2]).int()}, r"pass \[2\] of torch.int64"),
            (zeros(5, 2), {"b": zeros(40, 2, dtype=BF16)}, "cast both to one"),
            (zeros(5, 2), {"b": zeros(40, 2, device="meta")}, "move it there"),
        )
    ),
    (dropout, {"x": ones(3)}, "pass rows"),
    (dropout, {"x": ones(2, 4, dtype=I64)}, "of a floating dtype"),
    (dropout, {"seed": torch.tensor([1], dtype=torch.int32)}, "pass one int64"),
    (dropout, {"seed": torch.tensor([1, 2])}, "pass one int64"),
    (dropout, {"p": 1.5}, "p is 1.5: pass a probability"),
    (dropout, {"add_to": ones(2, 3)}, "pass one like x"),
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
