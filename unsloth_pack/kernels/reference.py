"""The kernels in plain torch, differentiable by autograd. Tests compare with them; CPUs run them.

Each has the contract of its namesake in `unsloth_pack.kernels`. It computes in float32, or float64 if an
input is float64, and rounds once. B rows of T tokens, H heads (k may have fewer than q), D head dim, R <= D
rotated dims.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unsloth_pack.kernels.arguments import (
    Distillation,
    Divergence,
    ExtraLogits,
    Field,
    Gate,
    InnerSum,
    LoraOutput,
    NestedScales,
    QKNorm,
    Scaled,
    TeacherHead,
    TokenScores,
    TopLogProbs,
    dropout_scale,
    dropout_threshold,
)
from unsloth_pack.kernels.head import complete_teacher, expect, scale_and_cap, score
from unsloth_pack.kernels.launch import wide_dtype


def routed_gate_(inner: InnerSum, weight: Tensor, gate: Gate, keep: bool) -> Tensor:
    total = _total(inner)
    if keep:
        inner.base.copy_(total)
    product = gate.product(*gate.halves(total.to(wide_dtype(total))))
    return (weight[:, None] * product).to(total.dtype)


def _total(inner: InnerSum) -> Tensor:
    wide = inner.base.to(wide_dtype(inner.base), copy=True)
    if inner.low_rank is not None:
        wide += inner.low_rank.scale * inner.low_rank.values
    if inner.bias is not None and inner.expert is not None:
        wide += inner.bias[inner.expert.long()]
    return wide.to(inner.base.dtype)


def routed_gate_backward_(
    g_out: Tensor, of_g_out: Scaled | None, inner: InnerSum, weight: Tensor, gate: Gate, g_inner: Tensor
) -> Tensor:
    total = _total(inner).to(wide_dtype(g_out)).requires_grad_()
    g = g_out.to(total.dtype)
    if of_g_out is not None:
        g = g + of_g_out.scale * of_g_out.values
    with torch.enable_grad():
        product = gate.product(*gate.halves(total))
    wide_weight = weight.to(total.dtype)
    (g_total,) = torch.autograd.grad(product, total, wide_weight[:, None] * g)
    g_inner.copy_(g_total)
    product = product.detach()
    g_weight = (g * product).sum(-1)  # first: g may be g_out itself
    g_out.copy_(wide_weight[:, None] * product)
    return g_weight


def sum_of_rows(parts: list[Scaled], places: Tensor) -> Tensor:
    first = parts[0].values
    total = first.new_zeros(len(places), first.shape[1], dtype=wide_dtype(first))
    for column in places.t():
        for values, scale in parts:
            total += scale * values[column].to(total.dtype)
    return total.to(first.dtype)


def grouped_mm(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    y_SO = x_SI.new_empty((len(x_SI), weight_EIO.shape[2]))
    for group, rows in _list_groups(ends_E):
        torch.mm(x_SI[rows], weight_EIO[group], out=y_SO[rows])
    return y_SO


def grouped_outer(left_SI: Tensor, right_SO: Tensor, ends_E: Tensor) -> Tensor:
    product_EIO = left_SI.new_zeros((len(ends_E), left_SI.shape[1], right_SO.shape[1]))
    for group, rows in _list_groups(ends_E):
        torch.mm(left_SI[rows].t(), right_SO[rows], out=product_EIO[group])
    return product_EIO


def _list_groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """List the groups that have rows, and their rows."""
    ends = ends_E.tolist()
    bounds = zip([0, *ends[:-1]], ends, strict=True)
    return [(group, slice(start, end)) for group, (start, end) in enumerate(bounds) if start < end]


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    promoted = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.promote_types(promoted, torch.float32)
    x = gate.to(wide)
    acted = F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")
    return (acted * up.to(wide)).to(promoted)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x.to(wide_dtype(x))).square().to(x.dtype)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    wide = x.to(wide_dtype(x))
    beta, eps = beta.detach().to(wide.dtype), eps.detach().to(wide.dtype)
    above = F.softplus(alpha_p.to(wide.dtype)) * wide.square()
    below = (beta + F.softplus(alpha_n.to(wide.dtype))) * (torch.minimum(wide, eps).expm1() - wide)
    return (torch.where(wide >= 0, above, below) + beta * wide).to(x.dtype)


def gated_lora_(gate: LoraOutput, up: LoraOutput, activation: str, store: bool) -> Tensor:
    x, u = (_sum(y).to(y.base.dtype) for y in (gate, up))
    if store:
        gate.base.copy_(x)
        up.base.copy_(u)
    return gated(x, u, activation)


def gated_lora_backward_(
    g_out: LoraOutput,
    gate: LoraOutput,
    up: LoraOutput,
    activation: str,
    g_gate: Tensor,
    g_up: Tensor,
    overwrite: bool = True,
) -> list[Tensor | None]:
    wide = wide_dtype(gate.base)
    x, u = (_sum(y).to(y.base.dtype).to(wide).requires_grad_() for y in (gate, up))
    with torch.enable_grad():
        product = gated(x, u, activation)
    grads = torch.autograd.grad(product, (x, u), _sum(g_out))
    products: list[Tensor | None] = []
    into = g_out.base if overwrite else torch.empty_like(g_out.base)
    outputs, parts = (into, g_gate, g_up), (g_out.low_rank, gate.low_rank, up.low_rank)
    for output, result, part in zip(outputs, (product, *grads), parts, strict=True):
        output.detach().copy_(result.detach())
        products.append(None if part is None else output.detach().t().to(wide) @ part.left.to(wide))
    return products


def _sum(x: LoraOutput) -> Tensor:
    """Add up in float32 or wider."""
    wide = x.base.detach().to(wide_dtype(x.base), copy=True)
    if x.low_rank is None:
        return wide
    left, right = x.low_rank.left.to(wide.dtype), x.low_rank.right.to(wide.dtype)
    return wide.addmm_(left, right.t(), alpha=x.low_rank.scale)


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    qk_norm: QKNorm | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    R = cos.shape[-1]
    cos, sin = cos[..., : R // 2], sin[..., : R // 2]  # the second half of the tables repeats the first
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    if q.dim() == 3:
        cos, sin = cos.reshape(-1, 1, R // 2), sin.reshape(-1, 1, R // 2)  # [T, H, D]: the head is axis -2
    else:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # [B, H, T, D]: the head is axis -3

    wide = wide_dtype(q)
    q_wide, k_wide, cos, sin = q.to(wide), k.to(wide), cos.to(wide), sin.to(wide)
    if qk_norm is not None:
        q_wide = _rms_norm(q_wide, qk_norm.q_weight, qk_norm)
        k_wide = _rms_norm(k_wide, qk_norm.k_weight, qk_norm)
    q_out, k_out = (_rotate(x, cos, sin, interleaved) for x in (q_wide, k_wide))
    return q_out.to(q.dtype), k_out.to(k.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    if interleaved:
        x1, x2, rest = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
        rotated = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2)
        return torch.cat([rotated, rest], dim=-1)
    x1, x2, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


def _rms_norm(x: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    weight = weight.to(x.dtype)
    if norm.flat:
        H, D = x.shape[1], x.shape[-1]  # the head is axis 1 of [T, H, D] and of [B, H, T, D]
        weight = weight.view(H, D) if x.dim() == 3 else weight.view(H, 1, D)
    mean_square = x.square().mean(dim=(1, -1) if norm.flat else -1, keepdim=True)
    return x * torch.rsqrt(mean_square + norm.eps) * (norm.offset + weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    promoted = torch.promote_types(x.dtype, weight.dtype)
    wide = torch.promote_types(promoted, torch.float32)
    x_wide, weight = x.to(wide), weight.to(wide)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * (offset + weight)).to(promoted if offset == 0 else x.dtype)


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = x.view_as(x) if added is None else x + added
    return total, rms_norm(total, weight, eps, offset)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    starts, group, wide = cu_seqlens.tolist(), q.shape[1] // k.shape[1], wide_dtype(q)
    parent_of = [-1] * (len(starts) - 1) if parents is None else parents.tolist()
    outs: list[Tensor] = []
    paths: list[Tensor] = []  # by segment: its tokens behind those that it continues
    for start, end, parent in zip(starts, starts[1:], parent_of, strict=False):
        own = torch.arange(start, end, device=q.device)
        paths.append(torch.cat([*([] if parent < 0 else [paths[parent]]), own]))
        q_LHD, k_MHD, v_MHD = (
            q[own].to(wide),
            *(x[paths[-1]].to(wide).repeat_interleave(group, dim=1) for x in (k, v)),
        )
        z_HLM = scale * torch.einsum("qhd,khd->hqk", q_LHD, k_MHD)
        if softcap is not None:
            z_HLM = softcap * torch.tanh(z_HLM / softcap)
        places = torch.arange(len(k_MHD), device=q.device)
        age = places[len(k_MHD) - len(q_LHD) :, None] - places[None, :]
        is_seen = (age >= 0) if window is None else (age >= 0) & (age < window)
        z_HLM = z_HLM.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            z_HLM = torch.cat([z_HLM, sinks.to(wide)[:, None, None].expand(-1, len(own), 1)], dim=-1)
        weights = z_HLM.softmax(-1)[..., : len(places)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v_MHD))
    return torch.cat(outs).to(q.dtype)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, extra: ExtraLogits | None) -> Tensor:
    wide = wide_dtype(hidden)
    logits = F.linear(hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    if extra is not None and extra.b is not None:
        return logits + extra.h.to(wide) @ extra.b.to(wide).t()
    if extra is not None and extra.outputs is not None:
        return logits.index_copy(-1, extra.outputs, extra.h.to(wide))
    return logits


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    scores = token_scores(hidden, weight, labels, bias=bias, softcap=softcap, scale=scale, extra=extra)
    return -scores.log_prob.sum() / ((labels != -100).sum() if num_items is None else num_items)


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
    fields: Collection[Field] = (),
) -> TokenScores:
    return score(scale_and_cap(_logits(hidden, weight, bias, extra), scale, softcap), labels, fields)


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherHead | TopLogProbs,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
    divergence: Divergence = "forward_kl",
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    num_items: Tensor | float | None = None,
) -> Distillation:
    z = scale_and_cap(_logits(hidden, weight, bias, extra), scale, softcap)
    log_p = (z / temperature).log_softmax(-1)
    if isinstance(teacher, TopLogProbs):
        log_q = complete_teacher(z.detach() / temperature, teacher)
    else:
        u = _logits(teacher.hidden, teacher.weight, teacher.bias, teacher.extra)
        log_q = (scale_and_cap(u, teacher.scale, teacher.softcap) / temperature).log_softmax(-1)
    if divergence == "forward_kl":
        by_token = _kl(log_q, log_p)
    elif divergence == "reverse_kl":
        by_token = _kl(log_p, log_q)
    else:
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        by_token = (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2
    has_no_label = labels == -100
    by_token, entropy = (x.masked_fill(has_no_label, 0) for x in (by_token, -expect(log_q.exp(), log_q)))
    scores = score(z, labels, {"is_top1"})
    total = (kl_weight * by_token - ce_weight * scores.log_prob).sum()
    loss = total / ((labels != -100).sum() if num_items is None else num_items)
    assert scores.is_top1 is not None
    return Distillation(loss, -scores.log_prob, by_token, entropy, scores.is_top1)


def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
) -> TopLogProbs:
    z = scale_and_cap(_logits(hidden, weight, bias, extra), scale, softcap)
    log_probs, ids = z.log_softmax(-1).topk(k)
    has_no_label = (labels == -100)[..., None]
    ids = torch.where(has_no_label, torch.arange(k, device=ids.device), ids)
    return TopLogProbs(ids.int(), log_probs.masked_fill(has_no_label, -math.inf))


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return expect(log_a.exp(), log_a - log_b)


def dequantize_4bit(
    packed: Tensor,
    code: Tensor,
    scales: Tensor | NestedScales,
    block: int,
    dtype: torch.dtype,
    lower_first: bool = False,
) -> Tensor:
    if isinstance(scales, NestedScales):
        outer = scales.scale.repeat_interleave(scales.group)[: len(scales.values)]
        scales = scales.code[scales.values.long()] * outer + scales.offset
    halves = (packed & 15, packed >> 4) if lower_first else (packed >> 4, packed & 15)
    values = torch.stack(halves, dim=1).view(-1, block)
    return (code[values.long()] * scales[:, None]).view(-1).to(dtype)


def quantize_rows(*parts: Tensor, column_scales: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    x = torch.cat(parts, dim=1).float()
    if column_scales is not None:
        x = x * torch.cat(list(column_scales)).t()
    scale = (x.abs().amax(dim=1, keepdim=True) / 448).clamp(min=1e-30)
    return (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def dequantize_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * scale).to(dtype)


def fp8_linear(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    (x_values, x_scale), (w_values, w_scale) = x, weight
    return out.copy_((x_values.float() @ w_values.float().t()) * x_scale * w_scale.t())


def fp8_transposed(weights: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    values, scales = zip(*weights, strict=True)
    joined = torch.cat([v.view(torch.uint8) for v in values]).t().contiguous()
    return joined.view(torch.float8_e4m3fn), scales


def fp8_linear_backward(
    gs: Sequence[Tensor], weights: tuple[Tensor, tuple[Tensor, ...]], out: Tensor
) -> Tensor:
    w_values, w_scales = weights
    g_values, g_scale = quantize_rows(*gs, column_scales=w_scales)
    return out.copy_((g_values.float() * g_scale) @ w_values.float().t())


def dropout(x: Tensor, seed: Tensor, p: float, first_row: int = 0, add_to: Tensor | None = None) -> Tensor:
    (n_rows, n_columns), wide = x.shape, wide_dtype(x)
    counters = torch.arange(-(-n_columns // 8), device=x.device)[None]
    rows = first_row + torch.arange(n_rows, device=x.device)[:, None]
    words = torch.cat(_philox(seed.view(()), counters, rows), dim=1)
    numbers = torch.cat([words & 0xFFFF, words >> 16], dim=1)[:, :n_columns]
    out = torch.where(numbers >= dropout_threshold(p), x.to(wide) * dropout_scale(p), 0.0)
    return out.to(x.dtype) if add_to is None else add_to.copy_(add_to.to(wide) + out)


def _philox(key: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox 4x32-7 of the counters (c0, c1, 0, 0): four words of 32 bits, in int64."""
    low = 2**32 - 1
    k0, k1 = key & low, key >> 32 & low
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32 & low) ^ c1 ^ k0, b & low, (a >> 32 & low) ^ c3 ^ k1, a & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0, c1, c2, c3
