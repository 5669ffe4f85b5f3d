"""The request for a measured run, and its answer. Both pass between processes as JSON."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available


@dataclass(frozen=True)
class Case:
    """One short training run.

    Args:
        model_name: "demo", a folder or a hub name of a model, not of an adapter.
        rows: folder of tokenised documents, or of rows packed with them.
        is_patched: whether unsloth_pack runs the model; otherwise transformers and PEFT alone.
        rows_per_step: rows of a micro-batch, which is the whole update.
        steps: measured or profiled steps, after the warm-up.
        load_in_fp8: for the patched model; transformers and PEFT cannot, so the plain one stays in 16 bits.
        use_gradient_checkpointing: as for `get_peft_model`; the plain model recomputes unless it is False.
        is_profiled: break the step down instead of timing it.
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
    """The answer of a run.

    Args:
        attention: the backend that computed it.
        step_graphs: the captured graphs of the step, or why nothing was captured; None for a plain model.
        startup_seconds: from the start of the process to the first step: imports, weights, adapter, trainer.
        first_step_seconds: of the first step, compilation included.
        step_ms: mean over the steps; if they are profiled, the profiler slows the host.
        tokens_per_second, documents_per_second: over the measured steps, padding not counted.
        tokens_padded: share of the computed tokens that are padding.
        peak_memory_bytes, peak_memory_of: the peak, and the memory that it is of, in words.
        core_share: of the time of the measured steps, the part in which their thread had a core; None on a
            GPU, for which it waits.
        kernel_ms: milliseconds of a step by category; None unless profiled.
        busy_ms: milliseconds of a step in which anything ran; None unless profiled.
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
    """Whether transformers' own attention on this machine lets packed documents see each other.

    Only FlashAttention's varlen form always keeps them apart. The other backends take the boundaries from
    `position_ids`, and ignore them if a cache or a mask is given too.
    """
    return not (torch.cuda.is_available() and is_flash_attn_2_available())
