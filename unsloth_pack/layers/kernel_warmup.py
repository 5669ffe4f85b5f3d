"""Compile the kernels of a first step side by side instead of one after another.

One layer of each kind, the loss and their backward pass run once over the step's own row, and the leak probe
over its row. Kernels are not launched meanwhile, see `compile_in_parallel`; the meaningless results are
thrown away.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.cuda_graphs.protocols import CapturableDecoder
from unsloth_pack.kernels.launch import compile_in_parallel, triton
from unsloth_pack.layers.leak_probe import (
    DecoderProbe,
    bare_forward,
    packed_forward,
    side_effect_free_pass,
)
from unsloth_pack.modules import sharded_by
from unsloth_pack.packed_row.padded_batch import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow

logger = logging.getLogger("unsloth_pack")


def compile_kernels(
    decoder: CapturableDecoder,
    described: PackedRow | PaddedBatch,
    loss_of: Callable[[Tensor], Tensor],
    probe: DecoderProbe | None,
) -> None:
    """Compile the kernels of a training step, of its loss of `[B, T, C]`, and of a probe that is to run."""
    batch = described if isinstance(described, PaddedBatch) else None
    row = described if isinstance(described, PackedRow) else described.row
    if not _compiles_for(row.device) or torch.is_anomaly_enabled() or sharded_by(decoder) is not None:
        return
    only = find_layer_kinds(decoder)
    try:
        with compile_in_parallel(row.device), torch.autograd.set_multithreading_enabled(False):
            with side_effect_free_pass(decoder, dropout=True), bare_forward(decoder):
                ids = torch.zeros(row.shape, dtype=torch.long, device=row.device)
                with torch.no_grad():
                    embeds = decoder.get_input_embeddings()(ids).requires_grad_()  # as of layers below
                own = decoder.embed_per_layer(ids)
                hidden: Any = packed_forward(decoder, row, None, embeds, only=only, **own).last_hidden_state
                loss = loss_of(hidden if batch is None else batch.padded(hidden))
                trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
                if trained and loss.requires_grad:  # accumulates no gradient, so that no hook for one runs
                    torch.autograd.grad(loss, trained, allow_unused=True)
            if probe is not None and probe.is_due(decoder, row):
                probe.compile_kernels(decoder, row, only)
    except Exception as error:  # the step itself reports it
        logger.debug("kernels are not compiled side by side: %s", error)


def find_layer_kinds(decoder: CapturableDecoder) -> Collection[int]:
    """Return the number of the first layer of each kind, by its modules and its type in the config.

    The names of classes tell modules apart: each module with quantised stacks has a class of its own.
    """
    config = getattr(decoder, "config", None)
    names = getattr(config, "layer_types", None) or [None] * len(decoder.layers)
    first: dict[Any, int] = {}
    for number, (name, layer) in enumerate(zip(names, decoder.layers, strict=False)):
        first.setdefault((name, *(type(module).__qualname__ for module in layer.modules())), number)
    return first.values()


def _compiles_for(device: torch.device) -> bool:
    return triton is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
