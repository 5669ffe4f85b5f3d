"""How long the tower takes for the images of a row, as tokens of text that take as long."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow.compute as pc
from torch import nn

from unsloth_pack.data.image_columns import DOCUMENT
from unsloth_pack.data.mapped import scan
from unsloth_pack.images.maker import ImageMaker
from unsloth_pack.lora.vision_parts import VisionParts

_ROWS = 1000  # looked at at a time
_FORWARD, _FORWARD_AND_BACKWARD = 1, 2  # passes; a frozen tower needs the first alone


def vision_work(rows: Any, column: str, model: Any, make: ImageMaker[Any]) -> np.ndarray | None:
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
    parts, weights = VisionParts.of(model), Counter[str]()
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
