"""The first step is rehearsed, so that its kernels are compiled side by side and not one behind the other.

One layer of each kind, the loss and their backward pass run once over the step's own row, and the leak
probe over its row. Kernels are not launched meanwhile, see `compiled_side_by_side`: what comes out is
meaningless, and all of it is thrown away.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.cuda_graphs.protocols import PackedDecoder
from unsloth_pack.kernels.launch import compiled_side_by_side, triton
from unsloth_pack.layers.layer import own_embeddings
from unsloth_pack.layers.leak_probe import (
    OwnProbe,
    packed_forward,
    side_effect_free_pass,
    without_cached_casts,
    without_hooks,
)
from unsloth_pack.modules.sharding import sharded_by
from unsloth_pack.packed_row.labels import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow

logger = logging.getLogger("unsloth_pack")


class Rehearsal:
    """Held by a patched decoder; over once its first step in training has come."""

    def __init__(self) -> None:
        self._is_over = False

    def hold(
        self,
        decoder: PackedDecoder,
        described: PackedRow | PaddedBatch,
        loss_of: Callable[[Tensor], Tensor],
        probe: OwnProbe | None,
    ) -> None:
        """Rehearse a step, if it is the first.

        Args:
            described: the row, or the padded batch that becomes one.
            loss_of: the loss for the last hidden states `[B, T, C]` of what came in.
            probe: what the decoder will be looked at with before its first step.
        """
        if self._is_over or not (decoder.training and torch.is_grad_enabled()):
            return
        self._is_over = True
        batch = described if isinstance(described, PaddedBatch) else None
        row = described if isinstance(described, PackedRow) else described.row
        if not _compiles_for(row.device) or _has_to_be_real(decoder):
            return
        only = layers_of_each_kind(decoder)
        try:
            with compiled_side_by_side(row.device), torch.autograd.set_multithreading_enabled(False):
                with (
                    side_effect_free_pass(decoder, dropout=True),
                    without_hooks(decoder),
                    without_cached_casts(decoder),
                ):
                    hidden = _passed(decoder, row, only)
                    loss = loss_of(hidden if batch is None else batch.padded(hidden))
                    _send_back(loss, decoder)
                if probe is not None and probe.is_due(decoder, row):
                    probe.rehearse(decoder, only)
        except Exception as error:  # the step itself is to say so
            logger.debug("kernels are not compiled side by side: %s", error)


def layers_of_each_kind(decoder: PackedDecoder) -> Collection[int]:
    """The numbers of the first layers whose modules, or kind by the configuration, no layer before has."""
    config = getattr(decoder, "config", None)
    names = getattr(config, "layer_types", None) or [None] * len(decoder.layers)
    first: dict[Any, int] = {}
    for number, (name, layer) in enumerate(zip(names, decoder.layers, strict=False)):
        first.setdefault((name, *map(type, layer.modules())), number)
    return first.values()


def _compiles_for(device: torch.device) -> bool:
    """Whether kernels are compiled for a device at this moment."""
    return triton is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _has_to_be_real(decoder: PackedDecoder) -> bool:
    """Whether somebody else takes part in a pass, or looks at what it computes."""
    return torch.is_anomaly_enabled() or sharded_by(decoder) is not None


def _passed(decoder: PackedDecoder, row: PackedRow, only: Collection[int]) -> Any:
    """`[B, T, C]`, through these layers as if others lay below them: gradients go on to what comes in."""
    ids = torch.zeros(row.shape, dtype=torch.long, device=row.device)
    with torch.no_grad():
        embeds = decoder.get_input_embeddings()(ids)
    more = own_embeddings(decoder, ids)
    return packed_forward(decoder, row, None, embeds.requires_grad_(), only=only, **more).last_hidden_state


def _send_back(loss: Tensor, decoder: PackedDecoder) -> None:
    """The backward pass; gradients are not accumulated, so that no hook for them runs."""
    trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    if trained and loss.requires_grad:
        torch.autograd.grad(loss, trained, allow_unused=True)
