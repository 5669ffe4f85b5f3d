"""Captured towers: a replay gives what the frozen tower gives without, of whatever images.

Without a GPU, graphs are recorded and computed again, in float64.
"""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from image_models import PIXELS, documents, images_of, labels_of, lengths_of, made, tower_of
from peft import LoraConfig, get_peft_model
from recorded_graphs import record_graphs
from tiny import DEVICE, error
from torch import nn

from unsloth_pack import patch_model
from unsloth_pack.cuda_graphs import tower as tower_graphs
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision
from unsloth_pack.cuda_graphs.memory import GraphMemory
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.layers.vision import tower as vision_tower

ON_GPU = DEVICE != "cpu"
ATTEND = vision_tower.attend


DTYPE, BOUND = (torch.bfloat16, 0.02) if ON_GPU else (torch.float64, 1e-9)
BACKEND = "flash" if ON_GPU else "auto"  # the fastest of those that a graph holds
NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
# The patches of images in height and width, row by row: shapes of 64 and of 128 patches, one of them full
ROWS = [
    [(4, 6)],
    [(2, 2), (4, 6)],
    [(4, 4), (2, 8), (2, 2)],
    [(8, 8)],
    [(2, 2)],
    [(10, 8), (2, 2), (4, 4)],
    [(4, 6), (2, 2), (8, 8)],
    [(6, 4)],
    [(16, 8)],
]
OF_BATCHES = ["gemma3", "internvl", "llava_onevision", "mistral3"]
PARTS = [[(1, 2), 5], [3, (1, 1), 2, (2, 2), 4], [(2, 2), 3, (1, 2), (2, 1), 1], [2, (1, 1), 3], [(2, 2), 7]]


@pytest.fixture(autouse=True)
def held_up(monkeypatch):
    """Towers are known to wait for Python. Without a GPU, graphs are recorded."""
    monkeypatch.setattr(CaptureDecision, "is_held_up", lambda *_: True)
    if not ON_GPU:
        record_graphs(monkeypatch)
        monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
        monkeypatch.setattr(vision_tower, "attend", _by_ends)


def _by_ends(q_NHD, k_NHD, v_NHD, row, options, backend):
    """Attention that reads of a static row what kernels read on the device."""
    if "static" not in row._built:
        return ATTEND(q_NHD, k_NHD, v_NHD, row, options, backend)
    image = torch.searchsorted(row.cu_seqlens, torch.arange(len(q_NHD)), right=True)
    heads = (x.transpose(0, 1)[None] for x in (q_NHD, k_NHD, v_NHD))
    seen = image[:, None] == image
    out = nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=options.scale)
    return out[0].transpose(0, 1)


@pytest.fixture
def replays(monkeypatch):
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


def assert_alike(ours, theirs, bound=BOUND):
    """Of lists of tensors, which have to have the same shapes."""
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert error(one.double(), other.double()) < bound


@pytest.fixture
def no_steps(monkeypatch):
    """The decoder itself is not captured."""
    monkeypatch.setattr(StepGraphs, "run", lambda *_: None)


def pair(name, trained="frozen tower"):
    """The same patched model twice: one may capture its tower, the other may not."""
    models = []
    for why in (None, "for comparison"):
        model = made(name, DTYPE, trained)
        patch_model(model, BACKEND).skip_probe()
        if why is not None or not ON_GPU:  # on a CPU nothing is captured
            tower_of(model).tower_graphs.why_never = why
        models.append(model)
    return models


def patched(*given):
    return pair(*given)[0]


def step(name, model, docs):
    """The loss and all gradients, over documents in one row."""
    model.zero_grad()
    given, _ = images_of(name, model, docs)
    out = model(
        input_ids=torch.cat([doc.ids for doc in docs])[None].to(DEVICE),
        labels=labels_of(docs)[None].to(DEVICE),
        packed_seq_lengths=lengths_of(docs),
        use_cache=False,
        **given,
    )
    out.loss.backward()
    return [out.loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def images(grids, seed, dtype=DTYPE):
    grids = torch.tensor([[1, *grid] for grid in grids])
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(int(grids.prod(-1).sum()), PIXELS, generator=draw)
    return pixels.to(DEVICE, dtype), grids


def seen(model, grids, seed, **asked):
    """All tensors that a tower makes of images, without gradients."""
    with torch.no_grad():
        out = tower_of(model)(*images(grids, seed), **asked)
    return flat(out)


def flat(output):
    values = [value for value in output.values() if value is not None]
    return [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_tower_is_the_uncaptured_one(name, replays):
    """What a replay has made outlives the next."""
    models = pair(name)
    found = [[seen(model, grids, seed) for model in models] for seed, grids in enumerate(ROWS)]
    for ours, theirs in found:
        assert_alike(ours, theirs)
    n_patches = [sum(height * width for height, width in grids) for grids in ROWS]
    assert replays == n_patches[2:]  # two rows compile the kernels
    assert str(tower_of(models[0]).tower_graphs) == "captured for 2 shapes of rows, of 64, 128 patches"


@pytest.mark.parametrize("name", NAMES)
def test_a_step_over_a_replayed_tower_is_one_over_the_uncaptured_tower(name, replays, no_steps):
    """The loss and the gradients."""
    models = pair(name)
    for seed in range(5):
        docs = documents(name, seed=seed)
        assert_alike(*(step(name, model, docs) for model in models))
    assert len(replays) == 3


def test_weights_that_changed_are_read_and_other_weights_make_other_graphs(replays):
    models = pair("qwen2_5_vl")
    for seed in range(4):
        assert_alike(*(seen(model, ROWS[0], seed) for model in models))
    for model in models:
        with torch.no_grad():
            tower_of(model).blocks[1].mlp.down_proj.weight.mul_(1.5)
    assert_alike(*(seen(model, ROWS[0], 4) for model in models))
    assert len(replays) == 3
    for model in models:
        norm = tower_of(model).blocks[0].norm1
        norm.weight = nn.Parameter(norm.weight.detach() * 2, requires_grad=False)
    assert_alike(*(seen(model, ROWS[0], 5) for model in models))
    assert len(replays) == 4  # captured anew at once: all kernels are compiled


def test_a_graph_that_gives_other_features_is_refused(replays, monkeypatch, caplog):
    """A capture is compared with the tower itself, once."""
    models = pair("qwen3_vl")
    replay = tower_graphs._CapturedTower.replay

    def of_other_patches(captured, patches):
        return replay(captured, replace(patches, pixels=patches.pixels.flip(0)))

    monkeypatch.setattr(tower_graphs._CapturedTower, "replay", of_other_patches)
    monkeypatch.setattr(GraphMemory, "after_broken_capture", lambda *_: GraphMemory())
    with caplog.at_level(logging.WARNING, "unsloth_pack"):
        for seed in range(4):
            assert_alike(*(seen(model, ROWS[0], seed) for model in models))
    assert "a replay makes other features than the tower itself" in caplog.text
    assert len(replays) == 1


def test_adapters_that_are_switched_off_are_seen(replays):
    """Frozen adapters in a tower: their output goes into the graph, and comes out of the next one."""
    models = []
    for why in (None, "for comparison"):
        base = made("qwen3_vl", DTYPE, "all")
        torch.manual_seed(0)
        config = LoraConfig(target_modules=r".*visual\.blocks.*\.qkv", init_lora_weights=False)
        model = get_peft_model(base, config).to(DTYPE).train()
        patch_model(model, BACKEND).skip_probe()
        model.requires_grad_(False)
        tower_of(model).tower_graphs.why_never = why
        models.append(model)
    for seed in range(4):
        assert_alike(*(seen(model, ROWS[0], seed) for model in models))
    for model in models:
        model.base_model.disable_adapter_layers()
    assert_alike(*(seen(model, ROWS[0], 4) for model in models))
    assert len(replays) == 3


# Images that are a batch, or have sizes


@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_step_over_a_replayed_tower_of_batches_is_one_over_the_uncaptured_tower(name, replays, no_steps):
    models = pair(name)
    for seed, parts in enumerate([*PARTS[:1] * 3, *PARTS, *PARTS[::-1]]):
        docs = documents(name, [parts, [4], parts[::-1]], seed)
        assert_alike(*(step(name, model, docs) for model in models), max(BOUND, 1e-6))
    assert len(set(replays)) >= 2  # some are padded
    assert len(replays) >= 5  # two rows of a size, or two of any, run uncaptured
    assert str(tower_of(models[0]).tower_graphs).startswith("captured for ")
    unit = "patches" if name == "mistral3" else "images"
    assert str(tower_of(models[0]).tower_graphs).endswith(unit)
