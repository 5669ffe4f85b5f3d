"""Two faults that tests plant into patched models: parts that come too late."""

import torch
from transformers import vision_utils

from unsloth_pack.layers import decoder


def late_windows(monkeypatch, which=slice(1, -1)):
    """Windows of the tower's attention end a patch late."""
    right = vision_utils.get_vision_window_index

    def late(*args, **kwargs):
        index, ends = right(*args, **kwargs)
        ends = ends.clone()
        ends[which] += 1
        return index, ends

    monkeypatch.setattr(vision_utils, "get_vision_window_index", late)


def late_deepstack(monkeypatch):
    """The features of the tower's middle layers are added one layer late."""
    right = decoder.take_visual_by_layer

    def late(row, kwargs):
        by_layer = right(row, kwargs)
        return [torch.zeros_like(by_layer[0]), *by_layer] if by_layer else []

    monkeypatch.setattr(decoder, "take_visual_by_layer", late)
