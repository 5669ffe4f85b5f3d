"""The request for a measured run, and its figures, as JSON between processes."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available


@dataclass(frozen=True)
class Case:
    """One short training run.

    Args:
        model_name: "demo", a folder or a hub name of a model, not of an adapter.
        rows: folder of tokenised documents, or of packed rows.
        is_patched: True for unsloth_pack; False for plain transformers and PEFT.
        rows_per_step: rows of a micro-batch, which is the whole update.
        steps: measured or profiled steps, after the warm-up.
        load_in_fp8: of the patched model; the plain one stays in 16 bits.
        use_gradient_checkpointing: as for `get_peft_model`; the plain model recomputes unless it is False.
        is_profiled: True to break the step down instead of timing it.
    """

    model_name: str
    rows: str
    is_packed: bool
    is_patched: bool
    max_seq_length: int
    rows_per_step: int
    steps: int
    load_in_4bit: bool = False
    load_in_fp8: bool = False
    attn_backend: str = "auto"
    use_gradient_checkpointing: Any = False
    is_profiled: bool = False


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Args:
        attention: the attention backend.
        step_graphs: the captured graphs of the step, or the reason for none; None for a plain model.
        startup_seconds: from the start of the process to the first step: imports, weights, adapter, trainer.
        first_step_seconds: of the first step, with compilation.
        step_ms: mean over the steps; the profiler slows the host.
        tokens_per_second, documents_per_second: over the measured steps, without padding.
        tokens_padded: the padding's share of the computed tokens.
        peak_memory_bytes, peak_memory_of: the peak, and the kind of memory, in words.
        core_share: the share of the measured time in which the thread had a core; None on a GPU.
        kernel_ms: milliseconds of a step by category; None unless profiled.
        busy_ms: milliseconds of a step with any activity; None unless profiled.
    """

    attention: str
    step_graphs: str | None
    startup_seconds: float
    first_step_seconds: float
    step_ms: float
    tokens_per_second: float
    documents_per_second: float
    tokens_padded: float
    peak_memory_bytes: int
    peak_memory_of: str
    core_share: float | None = None
    kernel_ms: dict[str, float] | None = None
    busy_ms: float | None = None


def plain_packing_leaks() -> bool:
    """True if transformers' own attention on this machine leaks between packed documents.

    Only FlashAttention's varlen form never does. The other backends read the boundaries from `position_ids`,
    and ignore them with a cache or a mask.
    """
    return not (torch.cuda.is_available() and is_flash_attn_2_available())
