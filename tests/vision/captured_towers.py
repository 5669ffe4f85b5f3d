"""Towers that are captured at once, on a CPU as recorded graphs; and which rows were replayed."""

from contextlib import nullcontext

import torch
from recorded_graphs import record_graphs
from tiny import DEVICE, error
from torch import nn

from unsloth_pack.cuda_graphs import tower as tower_graphs
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision
from unsloth_pack.layers.vision import tower, variable_size_tower

ON_GPU = DEVICE != "cpu"
ATTEND = tower.attend


def hold_up(monkeypatch):
    """Towers are known to wait for Python. Without a GPU, graphs are recorded."""
    monkeypatch.setattr(CaptureDecision, "is_held_up", lambda *_: True)
    if not ON_GPU:
        record_graphs(monkeypatch)
        monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
        for forward in (tower, variable_size_tower):
            monkeypatch.setattr(forward, "attend", _by_ends)


def _by_ends(q_NHD, k_NHD, v_NHD, row, options, backend):
    """Attention that reads of a static row what kernels read on the device."""
    if "static" not in row._built:
        return ATTEND(q_NHD, k_NHD, v_NHD, row, options, backend)
    image = torch.searchsorted(row.cu_seqlens, torch.arange(len(q_NHD)), right=True)
    heads = (x.transpose(0, 1)[None] for x in (q_NHD, k_NHD, v_NHD))
    seen = image[:, None] == image
    out = nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=options.scale)
    return out[0].transpose(0, 1)


def note_replays(monkeypatch):
    """The patches of rows that will be replayed, without those by which a capture is checked.

    Before each replay, what graphs read is poisoned.
    """
    replayed = []
    replay, check = tower_graphs._CapturedTower.replay, tower_graphs._CapturedTower.check

    def noted(captured, patches):
        replayed.append(len(patches.pixels))
        for static in captured._static.tensors:
            static.fill_(float("nan") if static.is_floating_point() else 2**40)
        for row in captured._rows:
            row._built["static"].fill_(2**40)
        return replay(captured, patches)

    def checked(captured, patches, expected):
        check(captured, patches, expected)
        replayed.pop()

    monkeypatch.setattr(tower_graphs._CapturedTower, "replay", noted)
    monkeypatch.setattr(tower_graphs._CapturedTower, "check", checked)
    return replayed


def assert_alike(ours, theirs, bound):
    """Of lists of tensors, which have to have the same shapes."""
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert error(one.double(), other.double()) < bound
