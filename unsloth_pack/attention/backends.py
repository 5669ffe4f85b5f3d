"""List the attention backends, say which can run, and choose one for `auto`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from unsloth_pack.attention import flash, sdpa, triton_varlen, xformers
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.errors import BackendUnavailable, InputError, first_line
from unsloth_pack.packed_row.row import PackedRow

ENVIRONMENT_VARIABLE = "UNSLOTH_PACK_ATTN"


@dataclass(frozen=True)
class Backend:
    """One way to compute attention over a packed row."""

    # returns why it cannot serve a need, in one clause, or None
    why_unavailable: Callable[[AttentionNeed], str | None]
    # `[N, H, D]` from queries of H heads, keys and values of K heads, the row, the options, and the sinks
    # `[H]` where there are any
    attend: Callable[..., Tensor]
    # which of its kernels serves a need, where it has several
    kernel_name: Callable[[AttentionNeed], str | None] = lambda need: None
    can_be_captured: bool = False  # CUDA graphs can hold it: it reads nothing of the row on the host
    # it takes no longer over a row with room for more and longer documents. FlashAttention does: its grids
    # grow with both
    room_is_free: bool = False
    # returns why `auto` skips it even where it can run, in one clause, or None
    why_not_by_default: Callable[[AttentionNeed], str | None] = lambda need: None
    needs_trial: bool = True  # a tiny step must show that it runs: its package may be built for another torch
    # v may have another head size than q and k; for others `run` pads the smaller one with zeros
    takes_other_v: bool = False
    # the queries of a segment may attend to the segment in the same place of another row, which `attend`
    # takes as `keys`
    takes_other_keys: bool = False

    def run(
        self,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKV: Tensor,
        row: PackedRow,
        options: AttentionOptions,
        sinks_H: Tensor | None = None,
        **other_keys: PackedRow,
    ) -> Tensor:
        """Return `[N, H, V]`, where V is the head size of v and D that of q and k.

        Zeros behind q and k change none of their products, and those behind v are cut off again.

        Args:
            other_keys: `keys`, where they are another row's; only with `takes_other_keys`.
        """
        size, size_of_v = q_NHD.shape[-1], v_NKV.shape[-1]
        if size == size_of_v or self.takes_other_v:
            return self.attend(q_NHD, k_NKD, v_NKV, row, options, sinks_H, **other_keys)
        if size < size_of_v:
            q_NHD, k_NKD = (F.pad(x, (0, size_of_v - size)) for x in (q_NHD, k_NKD))
        else:
            v_NKV = F.pad(v_NKV, (0, size - size_of_v))
        out = self.attend(q_NHD, k_NKD, v_NKV, row, options, sinks_H, **other_keys)
        return out[..., :size_of_v]


BACKENDS = {  # fastest first
    "triton": Backend(
        triton_varlen.why_unavailable,
        triton_varlen.attend,
        can_be_captured=True,
        room_is_free=True,
        why_not_by_default=triton_varlen.why_not_by_default,
        needs_trial=False,  # its kernels would be compiled for other heads than the layer's
    ),
    "flash": Backend(
        flash.why_unavailable, flash.attend, flash.kernel_name, can_be_captured=True, takes_other_keys=True
    ),
    "xformers": Backend(xformers.why_unavailable, xformers.attend),
    "sdpa": Backend(sdpa.why_unavailable, sdpa.attend, takes_other_v=True, takes_other_keys=True),
}


def requested_backend(name: str) -> tuple[str, str]:
    """Return the requested backend and its source; the environment variable overrides `name`.

    Raises:
        InputError: the request is neither "auto" nor a backend.
    """
    source, value = "attn_backend", name
    if override := os.environ.get(ENVIRONMENT_VARIABLE):
        source, value = ENVIRONMENT_VARIABLE, override
    if value != "auto" and value not in BACKENDS:
        raise InputError(f"{source} is {value!r}; choose one of auto, {', '.join(BACKENDS)}", about=source)
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
    """Return the backend that serves `need`, and why; `source` asks for it, for messages.

    Raises:
        BackendUnavailable: the requested backend cannot run. Says why, and which ones can.
    """
    if name == "auto":
        chosen, why = _choose_fastest(need)
    elif reason := why_unavailable(name, need):
        able = [candidate for candidate in BACKENDS if why_unavailable(candidate, need) is None]
        raise BackendUnavailable(
            f"{source} {name!r} cannot run: {reason}; use 'auto' or one of {', '.join(able)}", about=source
        )
    else:
        chosen, why = name, f"asked for by {source}"
    kernel = BACKENDS[chosen].kernel_name(need)
    return chosen, f"{why}, through {kernel}" if kernel else why


def choose_backend_for_other_keys(name: str, need: AttentionNeed) -> str:
    """Choose a backend for queries with other keys than their own, best the layer's own, `name`.

    Raises:
        BackendUnavailable: none can.
    """
    for candidate in (name, *BACKENDS):
        if BACKENDS[candidate].takes_other_keys and why_unavailable(candidate, need) is None:
            return candidate
    raise BackendUnavailable(
        f"no attention backend takes tokens that see each other in both directions with {need.options}; "
        "train rows of text alone"
    )


def _choose_fastest(need: AttentionNeed) -> tuple[str, str]:
    """Return the first backend that `auto` may take, and why. Later ones are not tried: some compile."""
    skipped = []
    for name in BACKENDS:
        reason = why_passed_over(name, need)
        if reason is None:
            break
        skipped.append(f"{name}: {reason}")
    return name, f"fastest that can run here ({'; '.join(skipped)})" if skipped else "fastest of all"


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
            q, k, v = (
                torch.zeros(8, *shape, dtype=need.dtype, device=device, requires_grad=True)
                for shape in shapes
            )
            sinks = torch.zeros(2, dtype=need.dtype, device=device) if need.options.sinks else None
            backend.run(q, k, v, row, need.options, sinks).sum().backward()
    except Exception as error:  # kernels that compile themselves raise their compiler's own errors
        return f"a tiny step failed with {type(error).__name__}: {first_line(error)[:120]}"
    return None
