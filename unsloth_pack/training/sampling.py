"""The order in which packed rows are trained on: even work for every rank, by `PackedSampler`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainingArguments

from unsloth_pack.data.cache import scan
from unsloth_pack.data.rows import DOCUMENT
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.lora.trained_parts import VisionParts
from unsloth_pack.packing import PackedSampler
from unsloth_pack.training.image_rows import COLUMN, ImageRowCollator

# Multiplications of attention take longer than those of GEMMs, of which a step does 630 TFLOP/s on an H200:
# 1.7 times as long over long documents (docs/speed.md: 377 TFLOP/s from documents of 512 tokens to one of
# 8,192), and 3.6 times where a token's document has 290 tokens (docs/ranks.md), as tiles are not full.
_SLOWER, _NOT_FULL = 1.7, 320
_PASSES = 3.5  # of attention: forward once, backward 2.5 times
_FROZEN_PASSES, _TRAINED_PASSES = 2, 3  # through a linear layer: its weight's gradient is one of them
_FORWARD, _FORWARD_AND_BACKWARD = 1, 2  # passes of a tower; a frozen one needs the first alone
_N_ROWS = 1000  # looked at at a time


def attention_share(model: PreTrainedModel, seq_lengths: Sequence[Sequence[int]]) -> float:
    """Estimate the share of attention in an average row's time, 0 to 1, as `PackedSampler` takes it.

    Multiplications are counted: those of attention with the tokens that a token sees, half of its document on
    average, and those in the linear layers of the decoder and in the head. Layers with a window count like
    the others.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    n_layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    heads = config.num_attention_heads
    width = n_layers * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    lengths = np.fromiter(chain.from_iterable(seq_lengths), np.int64)
    of_token = float((lengths**2).sum() / max(1, lengths.sum()))  # tokens of its document, on average
    of_attention = _PASSES * _SLOWER * width * (of_token + _NOT_FULL)
    of_weights = sum(
        n * (_TRAINED_PASSES if is_trained else _FROZEN_PASSES)
        for part, n, is_trained in _weights_of_a_token(model)
        if part not in ("tower", "aligner")
    )
    return of_attention / (of_attention + of_weights) if of_attention else 0.0


def _weights_of_a_token(model: PreTrainedModel) -> Iterator[tuple[str, float, bool]]:
    """Yield the part, the number and whether they train of the weights that each token is multiplied by."""
    parts = VisionParts.locate(model) if hasattr(model.config, "vision_config") else None
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            part = parts.kind(path) if parts else "decoder"
            yield part, module.in_features * module.out_features, module.weight.requires_grad
    n_chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    for path, weight in model.named_parameters():  # stacks of experts, of which a token goes through some
        if weight.ndim == 3 and n_chosen and (parts is None or parts.kind(path) == "decoder"):
            yield "decoder", weight.numel() * n_chosen / len(weight), weight.requires_grad


def vision_work(rows: Dataset, column: str, model: PreTrainedModel, make: ImageFamily) -> np.ndarray:
    """Estimate the tower's time for each row's images, `[rows]` float64, in tokens of text of the same time.

    Multiplications are counted: those of a patch in the linear layers of the tower and with the patches
    that it attends to, by those of a token in the linear layers of the decoder.
    """
    a_patch, an_attended = _work_of_a_patch(model)
    work = []
    for table in scan(rows, [column], _N_ROWS):
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
    return np.concatenate(work)


def _work_of_a_patch(model: PreTrainedModel) -> tuple[float, float]:
    """Return the work on a patch, by that on a token: in linear layers, and for each patch it attends to."""
    parts, config, weights = VisionParts.locate(model), model.config.vision_config, Counter[str]()
    for part, n, _ in _weights_of_a_token(model):
        weights[part] += int(n)
    trains = any(
        weight.requires_grad and parts.kind(path) == "tower" for path, weight in model.named_parameters()
    )
    a_token = _FORWARD_AND_BACKWARD * weights["decoder"]
    passes = _FORWARD_AND_BACKWARD if trains else _FORWARD
    # Scores and values; layers that attend within windows see few patches
    width = getattr(config, "embed_dim", None) or config.hidden_size
    layers = getattr(config, "depth", None) or config.num_hidden_layers
    layers = len(getattr(config, "fullatt_block_indexes", None) or range(layers))
    return passes * weights["tower"] / a_token, passes * 2 * width * layers / a_token


def packed_sampler(
    rows: Any,
    arguments: TrainingArguments,
    model: PreTrainedModel,
    image_rows: ImageRowCollator | None = None,
) -> PackedSampler | None:
    """Deal out these rows to the ranks; None if they are not packed, and have no `seq_lengths`."""
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
