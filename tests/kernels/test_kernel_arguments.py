"""Arguments that do not fit a kernel are refused in one line, before anything runs."""

from dataclasses import replace

import pytest
import torch
from tables import table

from unsloth_pack.kernels import ExtraLogits, QKNorm, gated, rms_norm
from unsloth_pack.kernels import linear_cross_entropy as lce
from unsloth_pack.kernels import rope_qk as rope
from unsloth_pack.kernels import varlen_attention as varlen

zeros, I64, BF16 = torch.zeros, torch.int64, torch.bfloat16
ROPE = dict(q=zeros(5, 4, 8), k=zeros(5, 2, 8), cos=zeros(5, 8), sin=zeros(5, 8))
POSITIONS = torch.arange(5)
QK_NORM = QKNorm(zeros(8), zeros(8), 1e-6)
VARLEN = dict(q=zeros(5, 4, 8), k=zeros(5, 2, 8), v=zeros(5, 2, 8), scale=0.3)
VARLEN["cu_seqlens"] = torch.tensor([0, 2, 5], dtype=torch.int32)
FIT = {
    rope: ROPE,
    rms_norm: dict(x=zeros(5, 8), weight=zeros(8), eps=1e-6),
    gated: dict(gate=zeros(5, 8), up=zeros(5, 8), activation="silu"),
    varlen: VARLEN,
    lce: dict(hidden=zeros(5, 8), weight=zeros(40, 8), labels=zeros(5, dtype=I64)),
}
REFUSED = [
    (rope, {"q": zeros(5, 8)}, r"q is \[5, 8\] on cpu: pass \[B, H, T, D\]"),
    (rope, {"k": zeros(5, 2, 8, dtype=BF16)}, "cast all to one floating dtype"),
    (rope, {"sin": zeros(5, 6)}, r"sin is \[5, 6\]"),
    (rope, {"cos": zeros(9, 8), "sin": zeros(9, 8)}, "pass a row for each token"),
    (rope, {"position_ids": POSITIONS.float()}, r"\[5\] of torch.float32: pass"),
    (rope, {"cos": zeros(5, 8, device="meta")}, "cos is .* on meta: pass .* of device = cpu"),
    (rope, {"qk_norm": replace(QK_NORM, flat=True)}, r"QKNorm is \[8\]: pass \[32\]"),
    (rms_norm, {"weight": zeros(6)}, r"weight is \[6\] on cpu: pass \[C\] of C = 8"),
    (gated, {"up": zeros(8)}, r"up is \[8\] on cpu: pass \[\*, F\]"),
    (gated, {"activation": "relu"}, "activation is 'relu': pass silu or gelu_tanh"),
    (varlen, {"q": zeros(5, 3, 8)}, "3 and 2 heads of 8: pass a multiple"),
    (varlen, {"cu_seqlens": VARLEN["cu_seqlens"].long()}, "cu_seqlens is torch.int64: pass"),
    (varlen, {"parents": zeros(3, dtype=torch.int32)}, r"parents is 3 of torch.int32: pass \[segments\]"),
    (varlen, {"window": 0}, "window is 0 and softcap None: pass positive ones"),
    (lce, {"hidden": zeros(5, 6)}, r"weight is \[40, 8\] on cpu: pass \[V, C\] of C = 6"),
    (lce, {"labels": zeros(5)}, "labels are torch.float32: cast them"),
    (lce, {"softcap": 0.0}, "softcap is 0.0: pass a positive one"),
    (
        lce,
        {"extra": ExtraLogits(zeros(5, 2), b=zeros(39, 2))},
        r"b is \[39, 2\] on cpu: pass \[V, R\] of V = 40",
    ),
]


@table(("kernel", "changes", "message"), REFUSED, ids=lambda case: getattr(case, "__name__", str(case)[:40]))
def test_what_does_not_fit_is_refused_in_one_line(kernel, changes, message):
    kernel(**FIT[kernel])
    with pytest.raises(ValueError, match=message) as error:
        kernel(**(FIT[kernel] | changes))
    assert "\n" not in str(error.value)
