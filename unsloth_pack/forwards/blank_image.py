"""An image for a row without any, where something waits for the gradients of what sees images."""

from typing import Any

import torch
from torch import distributed, nn

from unsloth_pack.forwards.image_arguments import Images
from unsloth_pack.models.vision_spec import VisionSpec
from unsloth_pack.modules.sharding import is_gathered_as_group, is_gathered_by_module


def needs_blank_image(model: Any, spec: VisionSpec) -> bool:
    """Whether a row of text alone has to go through the tower and the aligner of a model as well.

    Other processes wait for the gradients of what trains there, and for the parts of weights that are
    sharded. And where nothing else trains, the loss would have no gradient.
    """
    if not torch.is_grad_enabled():
        return False
    parts = [model.base_model.get_submodule(path) for path in (spec.tower, *spec.aligner)]
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        return any(map(_is_waited_for, parts))
    trained_here = {weight for part in parts for weight in part.parameters() if weight.requires_grad}
    return bool(trained_here) and all(
        weight in trained_here for weight in model.parameters() if weight.requires_grad
    )


def _is_waited_for(part: nn.Module) -> bool:
    trains_or_gathers = any(w.requires_grad or is_gathered_by_module(w) for w in part.parameters())
    return trains_or_gathers or any(map(is_gathered_as_group, part.modules()))


def blank_image(spec: VisionSpec, config: Any) -> Images:
    """The arguments of a call with the smallest image that a model takes, all ones; none of it is put in.

    Args:
        config: of the model of vision and language.
    """
    vision = config.vision_config
    names = ("in_channels", "in_chans", "num_channels")
    channels = next(n for name in names if (n := getattr(vision, name, None)) is not None)
    if spec.grid is not None:
        merge = getattr(vision, spec.merge)
        numbers = channels * vision.temporal_patch_size * vision.patch_size**2
        return Images(torch.ones(merge**2, numbers), {spec.grid: [[1, merge, merge]]}, is_blank=True)
    size = [vision.image_size] * 2 if isinstance(vision.image_size, int) else [*vision.image_size]
    if spec.attends == "sizes":
        side = vision.patch_size * config.spatial_merge_size
        size = [side, 2 * side]  # Mistral 3 fails on an image of one token
    n_images = 1 if spec.of_documents is None else 2  # of two images in a document none is cut into tiles
    tiles = [1] * (max(spec.dimensions) - 4)
    described: dict[str, Any] = {}
    if spec.sizes is not None:
        described[spec.sizes] = [size] * n_images
    if spec.of_documents is not None:
        described[spec.of_documents] = [n_images]
    return Images(torch.ones(n_images, *tiles, channels, *size), described, is_blank=True)
