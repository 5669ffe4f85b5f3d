"""What a measured run is asked for, and what it answers. Both go between processes as JSON."""

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
        is_patched: with unsloth_pack, else as transformers and PEFT have it.
        rows_per_step: rows of a micro-batch, which is the whole update.
        steps: that are measured, after the warm-up; or that are profiled.
        load_in_fp8: the patched model; transformers and PEFT cannot, so the plain one stays in 16 bits.
        use_gradient_checkpointing: as for `get_peft_model`; the plain model recomputes where it is not False.
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
    """How a run went.

    Args:
        attention: what computed it.
        step_graphs: what of the step was captured, or why nothing was; None for a plain model.
        startup_seconds: from the start of the process to the first step: imports, weights, adapter, trainer.
        first_step_seconds: of the first step, compilation included.
        step_ms: mean over the measured steps; under the profiler, which slows the host, of profiled ones.
        tokens_per_second, documents_per_second: over the measured steps, padding not counted.
        tokens_padded: share of the computed tokens that are padding.
        peak_memory_bytes, peak_memory_of: how much, of what.
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
    kernel_ms: dict[str, float] | None = None
    busy_ms: float | None = None


def plain_packing_leaks() -> bool:
    """Whether transformers' own attention, as it is here, lets packed documents see each other.

    Only FlashAttention's varlen form keeps them apart whatever else is passed; the others take the boundaries
    from `position_ids`, and forget them beside a cache or a mask.
    """
    return not (torch.cuda.is_available() and is_flash_attn_2_available())
