"""The order in which packed rows are trained on: even work for every rank, by `PackedSampler`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow.compute as pc
from torch import nn
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsloth_pack.data.cache import scan
from unsloth_pack.data.rows import DOCUMENT
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.lora.vision_targets import VisionParts
from unsloth_pack.packing import PackedSampler
from unsloth_pack.training.image_rows import COLUMN, ImageRowCollator

# The share of attention in the time of a row: it grows with the squares of the documents' lengths.

# Multiplications of attention take longer than those of GEMMs, of which a step does 630 TFLOP/s on an H200:
# 1.7 times as long over long documents (docs/speed.md: 377 TFLOP/s from documents of 512 tokens to one of
# 8,192), and 3.6 times where a token's document has 290 tokens (docs/ranks.md), as tiles are not full.
_SLOWER, _NOT_FULL = 1.7, 320
_PASSES = 3.5  # forward once, backward 2.5 times
_FROZEN_PASSES, _TRAINED_PASSES = 2, 3  # through a linear layer: its weight's gradient is one of them


def attention_share(model: Any, seq_lengths: Sequence[Sequence[int]]) -> float:
    """The share of an average row's time, 0 to 1, as `PackedSampler` takes it.

    Multiplications are counted: those of attention with the tokens that a token sees, half of its document on
    average, and those in the linear layers of the decoder and in the head. Layers with a window count like
    the others.

    Args:
        model: its decoder, with an adapter or without.
        seq_lengths: document lengths of the packed rows.
    """
    lengths = np.fromiter(chain.from_iterable(seq_lengths), np.int64)
    of_token = float((lengths**2).sum() / max(1, lengths.sum()))  # tokens of its document, on average
    width = _attention_width(model.config.get_text_config())
    of_attention = _PASSES * _SLOWER * width * (of_token + _NOT_FULL)
    of_weights = sum(_weights_by_passes(model))
    return of_attention / (of_attention + of_weights) if of_attention else 0.0


def _attention_width(config: Any) -> int:
    """Features of the queries of all layers that attend."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    n_layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    heads = config.num_attention_heads
    return n_layers * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def _weights_by_passes(model: Any) -> list[float]:
    """Of every linear layer that a token of text goes through, its weights by how often."""
    parts = VisionParts.locate(model) if hasattr(model.config, "vision_config") else None
    found: list[float] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and (parts is None or parts.kind(path) not in ("tower", "aligner")):
            passes = _TRAINED_PASSES if module.weight.requires_grad else _FROZEN_PASSES
            found.append(passes * module.in_features * module.out_features)
    n_chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    for path, weight in model.named_parameters():
        if weight.ndim == 3 and n_chosen and (parts is None or parts.kind(path) == "decoder"):
            passes = _TRAINED_PASSES if weight.requires_grad else _FROZEN_PASSES
            found.append(passes * weight.numel() * n_chosen / len(weight))
    return found


# The time of the tower for a row's images, in tokens of text of the same time.

_ROWS = 1000  # looked at at a time
_FORWARD, _FORWARD_AND_BACKWARD = 1, 2  # passes; a frozen tower needs the first alone


def vision_work(rows: Any, column: str, model: Any, make: ImageFamily) -> np.ndarray | None:
    """`[rows]` float64: the work of the tower; None where no row has images.

    An estimate by multiplications: those of a patch in the linear layers of the tower and with the patches
    that it attends to, by those of a token in the linear layers of the decoder.

    Args:
        rows: packed, a data set.
        column: that holds their images.
        model: its tower and decoder, with an adapter or without.
        make: what counts the patches of an image.
    """
    a_patch, an_attended = _of_patch(model)
    work, found = [], False
    for table in scan(rows, [column], _ROWS):
        array = table[column].combine_chunks()
        row_of, images = pc.list_parent_indices(array).to_numpy(), array.flatten()
        document_of = images.field(DOCUMENT).to_numpy()
        of_document = Counter(zip(row_of.tolist(), document_of.tolist(), strict=True))
        of_image = np.zeros(len(images))
        fields = (images.field(name).to_pylist() for name in ("tokens", "height", "width"))
        for place, (tokens, height, width) in enumerate(zip(*fields, strict=True)):
            siblings = of_document[row_of[place], document_of[place]]
            patches, attended = make.seen(tokens, (height, width), siblings)
            of_image[place] = patches * (a_patch + attended * an_attended)
        work.append(np.bincount(row_of, of_image, minlength=len(table)))
        found = found or bool(len(images))
    return np.concatenate(work) if found else None


def _of_patch(model: Any) -> tuple[float, float]:
    """The work on a patch, by that on a token: in linear layers, and for each patch that it attends to."""
    parts, weights = VisionParts.locate(model), Counter[str]()
    of_text, of_tower = model.config.get_text_config(), model.config.vision_config
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weights[parts.kind(path)] += module.in_features * module.out_features
    for path, weight in model.named_parameters():
        if weight.ndim == 3 and parts.kind(path) == "decoder":  # of experts, a token goes through some
            weights["decoder"] += weight.numel() * of_text.num_experts_per_tok // len(weight)
    trains = any(
        weight.requires_grad and parts.kind(path) == "tower" for path, weight in model.named_parameters()
    )
    a_token = _FORWARD_AND_BACKWARD * weights["decoder"]
    passes = _FORWARD_AND_BACKWARD if trains else _FORWARD
    # Scores and values; layers that attend within windows see few patches
    width = getattr(of_tower, "embed_dim", None) or of_tower.hidden_size
    layers = getattr(of_tower, "depth", None) or of_tower.num_hidden_layers
    layers = len(getattr(of_tower, "fullatt_block_indexes", None) or range(layers))
    return passes * weights["tower"] / a_token, passes * 2 * width * layers / a_token


def packed_sampler(
    rows: Any, arguments: TrainingArguments, model: Any, image_rows: ImageRowCollator | None = None
) -> PackedSampler | None:
    """What deals out these rows to the ranks; None if they are not packed, and have no `seq_lengths`.

    Args:
        model, image_rows: what trains, and what makes its batches, where rows may have images.
    """
    if "seq_lengths" not in rows.column_names:
        return None
    seq_lengths = rows.with_format("arrow")["seq_lengths"].to_pylist()
    work: dict[str, Any] = {}  # of one process the shares are all of it
    if arguments.world_size > 1:
        work["attention_weight"] = attention_share(model, seq_lengths)
        if image_rows is not None:
            work["vision_work"] = vision_work(rows, COLUMN, model, image_rows.make_images)
    return PackedSampler(
        seq_lengths,
        arguments.world_size,
        rows_per_rank=arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps,
        batch_size=arguments.per_device_train_batch_size,
        seed=arguments.seed,
        **work,
    )


class DealtInTurn(Sampler[int]):
    """All ranks' rows, in the order in which accelerate deals them out."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def __copy__(self) -> DealtInTurn:
        return DealtInTurn(copy.copy(self.sampler))

    def __len__(self) -> int:
        return len(self.sampler) * self.sampler.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler.dealt_in_turn().tolist())

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


class TurnToEpoch(TrainerCallback):
    """Tells the sampler the epoch. accelerate does not, if several ranks skip batches of a resumed epoch."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))
