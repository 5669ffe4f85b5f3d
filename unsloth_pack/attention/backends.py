"""Attend over a packed row with the backend that serves the layer.

Shapes: N tokens of the row, H query heads, K key and value heads, D head size, V that of v. In bidirectional
blocks, as of images in Gemma 3: Q tokens in blocks, M keys of all blocks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from unsloth_pack.attention import flash, sdpa, triton_varlen
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.errors import BackendUnavailable, InputError, first_line
from unsloth_pack.packed_row.images import BlockRows
from unsloth_pack.packed_row.row import PackedRow

ENVIRONMENT_VARIABLE = "UNSLOTH_PACK_ATTN"


@dataclass(frozen=True)
class Backend:
    """One way to compute attention over a packed row."""

    # explains in one clause why it cannot serve a need; None if it can
    why_unavailable: Callable[[AttentionNeed], str | None]
    # `[N, H, D]` from q, k, v, the row and the options; and from `sinks_H` if these have sinks
    attend: Callable[..., Tensor]
    kernel_name: Callable[[AttentionNeed], str | None] = lambda need: None  # of several
    can_be_captured: bool = False  # CUDA graphs can hold it: it reads nothing of the row on the host
    # room in a row for more and longer documents costs no time. FlashAttention's grids grow with both
    room_is_free: bool = False
    # explains in one clause why `auto` skips it even where it can run, or None
    why_not_by_default: Callable[[AttentionNeed], str | None] = lambda need: None
    needs_trial: bool = True  # a tiny step must show that it runs: its package may be built for another torch
    takes_other_v: bool = False  # v may have another head size than q and k; otherwise zeros pad the smaller
    takes_branches: bool = False  # `attend` takes a row that branches
    # `attend` takes `keys`, another row: a segment of queries attends to the segment in its place there
    takes_other_keys: bool = False


BACKENDS = {  # fastest first
    "triton": Backend(
        triton_varlen.why_unavailable,
        triton_varlen.attend,
        can_be_captured=True,
        room_is_free=True,
        why_not_by_default=triton_varlen.why_not_by_default,
        needs_trial=False,  # its kernels would be compiled for other heads than the layer's
        takes_branches=True,
    ),
    "flash": Backend(
        flash.why_unavailable, flash.attend, flash.kernel_name, can_be_captured=True, takes_other_keys=True
    ),
    "xformers": Backend(flash.why_no_xformers, flash.attend_by_xformers),
    "sdpa": Backend(
        lambda need: None, sdpa.attend, takes_other_v=True, takes_branches=True, takes_other_keys=True
    ),
}


def attend(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    backend: str = "auto",
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend within the segments of a row: no token sees another segment, but for those that its continues.

    Args:
        q_NHD: `[N, H, D]`, any strides with a contiguous last dimension.
        k_NKD, v_NKV: `[N, K, D]` and `[N, K, V]`; K divides H. V is mostly D.
        row: the segments of the N tokens, and the blocks of them that see each other in both directions.
        backend: "auto", or a name in `BACKENDS`.
        sinks_H: `[H]`, the logit of each head's sink, where `options.sinks`. It may require a gradient.

    Returns:
        `[N, H, V]` in the dtype of `q_NHD`.

    Raises:
        BackendUnavailable: `backend` cannot run on this device, dtype, head size or options.
    """
    need = _read_need(q_NHD, v_NKV, options)
    name, _ = choose_backend(backend, need)
    if row.parent is not None:
        name = choose_able(name, need, "takes_branches")
    out_NHV = _run(BACKENDS[name], q_NHD, k_NKD, v_NKV, row, options, sinks_H=sinks_H)
    if not len(row.blocks):
        return out_NHV
    return attend_in_blocks(out_NHV, q_NHD, k_NKD, v_NKV, row, options, name)


def attend_in_blocks(
    out_NHV: Tensor,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    name: str,
) -> Tensor:
    """Replace the output of causal attention at the tokens of blocks, which see in both directions.

    The keys of a block are the tokens of its document up to the block's end, so no mask is needed. Under a
    sliding window a block has the keys that its first token can reach, and the window bounds how far back its
    other tokens see. transformers means the same by masks (`create_masks_for_vision_model`): for full
    attention causal or of one block, for sliding windows both of it and inside the window.

    Source: Gemma 3 (Gemma Team 2025).
    """
    options = replace(options, causal=False)
    blocks = BlockRows.from_row(row, options.window)
    q_QHD = q_NHD.index_select(0, blocks.query_places)
    k_MKD, v_MKV = (x.index_select(0, blocks.key_places) for x in (k_NKD, v_NKV))
    backend = BACKENDS[choose_able(name, _read_need(q_NHD, v_NKV, options), "takes_other_keys")]
    out_QHV = _run(backend, q_QHD, k_MKD, v_MKV, blocks.queries, options, keys=blocks.keys)
    return out_NHV.index_copy(0, blocks.query_places, out_QHV)


def _read_need(q_NHD: Tensor, v_NKV: Tensor, options: AttentionOptions) -> AttentionNeed:
    size, size_of_v = q_NHD.shape[-1], v_NKV.shape[-1]
    other = None if size == size_of_v else size_of_v
    return AttentionNeed(q_NHD.device.type, q_NHD.dtype, size, options, other)


def _run(
    backend: Backend,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    **more: Tensor | PackedRow | None,
) -> Tensor:
    """Return `[N, H, V]`. Zeros behind q and k change none of their products; those behind v are cut off."""
    size, size_of_v = q_NHD.shape[-1], v_NKV.shape[-1]
    more = {name: value for name, value in more.items() if value is not None}
    if size == size_of_v or backend.takes_other_v:
        return backend.attend(q_NHD, k_NKD, v_NKV, row, options, **more)
    most = max(size, size_of_v)
    qkv = (x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in (q_NHD, k_NKD, v_NKV))
    return backend.attend(*qkv, row, options, **more)[..., :size_of_v]


def requested_backend(name: str) -> tuple[str, str]:
    """Return the requested backend and its source; the environment variable overrides `name`."""
    source, value = "attn_backend", name
    if override := os.environ.get(ENVIRONMENT_VARIABLE):
        source, value = ENVIRONMENT_VARIABLE, override
    if value != "auto" and value not in BACKENDS:
        raise InputError(f"{source} is {value!r}; choose one of auto, {', '.join(BACKENDS)}")
    return value, source


@lru_cache(maxsize=256)
def why_unavailable(name: str, need: AttentionNeed) -> str | None:
    """Return why the backend cannot serve `need`, or None. May run one tiny step."""
    backend = BACKENDS[name]
    return backend.why_unavailable(need) or (_try_tiny_step(backend, need) if backend.needs_trial else None)


def why_not_captured(name: str) -> str | None:
    """Return why CUDA graphs cannot hold the backend, or None."""
    return None if BACKENDS[name].can_be_captured else f"{name} reads the row on the host"


def why_passed_over(name: str, need: AttentionNeed) -> str | None:
    """Return why `auto` skips the backend for `need`, or None. What it never takes is not tried."""
    return BACKENDS[name].why_not_by_default(need) or why_unavailable(name, need)


@lru_cache(maxsize=256)
def choose_backend(name: str, need: AttentionNeed, source: str = "attn_backend") -> tuple[str, str]:
    """Return the backend that serves `need`, and why; BackendUnavailable if the requested one cannot."""
    if name == "auto":
        skipped = []
        for chosen in BACKENDS:  # later ones are not tried: some compile
            if (passed_over := why_passed_over(chosen, need)) is None:
                break
            skipped.append(f"{chosen}: {passed_over}")
        why = f"fastest that can run here ({'; '.join(skipped)})" if skipped else "fastest of all"
    elif reason := why_unavailable(name, need):
        able = [candidate for candidate in BACKENDS if why_unavailable(candidate, need) is None]
        remedy = f"use 'auto' or one of {', '.join(able)}"
        raise BackendUnavailable(f"{source} {name!r} cannot run: {reason}; {remedy}")
    else:
        chosen, why = name, f"asked for by {source}"
    kernel = BACKENDS[chosen].kernel_name(need)
    return chosen, f"{why}, through {kernel}" if kernel else why


def choose_able(name: str, need: AttentionNeed, ability: str) -> str:
    """Return the first backend with the ability, `name` before all others; sdpa has any."""
    able = (other for other in (name, *BACKENDS) if getattr(BACKENDS[other], ability))
    return next((other for other in able if why_unavailable(other, need) is None), "sdpa")


def _try_tiny_step(backend: Backend, need: AttentionNeed) -> str | None:
    device = torch.device(need.device_type)
    row = PackedRow.of_lengths((3, 5), device)
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(gpus),  # dropout draws
            torch.inference_mode(False),
            torch.enable_grad(),
            saved_tensors_hooks(lambda x: x, lambda x: x),  # a checkpoint around this must not count these
            torch.autocast(need.device_type, enabled=False),
        ):
            shapes = (2, need.head_dim), (1, need.head_dim), (1, need.v_head_dim or need.head_dim)
            like = torch.zeros((), dtype=need.dtype, device=device)
            q, k, v = (like.new_zeros(8, *shape, requires_grad=True) for shape in shapes)
            sinks = like.new_zeros(2) if need.options.sinks else None
            _run(backend, q, k, v, row, need.options, sinks_H=sinks).sum().backward()
    except Exception as error:  # kernels that compile themselves raise their compiler's own errors
        return f"a tiny step failed with {type(error).__name__}: {first_line(error)[:120]}"
    return None
