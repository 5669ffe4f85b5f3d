"""Captured towers whose images are a batch, or have sizes: a replay gives what the tower gives without."""

import captured_towers
import pytest
import torch
from captured_towers import ON_GPU, hold_up, note_replays
from image_models import documents, images_of, labels_of, lengths_of, made, tower_of
from tiny import DEVICE, error
from torch import nn

from unsloth_pack import patch_model
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.cuda_graphs.tower import Patches, PatchesForm

DTYPE, BOUND = (torch.bfloat16, 0.02) if ON_GPU else (torch.float64, 1e-6)  # Pixtral norms in float32
BACKEND = "flash" if ON_GPU else "auto"  # of those that a graph holds; batches attend as transformers does
NAMES = ["gemma3", "internvl", "llava_onevision", "mistral3"]
ROWS = [[(1, 2), 5], [3, (1, 1), 2, (2, 2), 4], [(2, 2), 3, (1, 2), (2, 1), 1], [2, (1, 1), 3], [(2, 2), 7]]


@pytest.fixture(autouse=True)
def held_up(monkeypatch):
    hold_up(monkeypatch)
    monkeypatch.setattr(StepGraphs, "run", lambda *_: None)  # the decoder itself is not captured


@pytest.fixture
def replays(monkeypatch):
    return note_replays(monkeypatch)


def pair(name, trained="frozen tower"):
    """The same patched model twice: one may capture its tower, the other may not."""
    models = []
    for why in (None, "for comparison"):
        model = made(name, DTYPE, trained)
        patch_model(model, BACKEND).skip_probe()
        if why is not None or not ON_GPU:  # on a CPU nothing is captured
            tower_of(model).tower_graphs._why_never = why
        models.append(model)
    return models


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


def assert_alike(ours, theirs):
    captured_towers.assert_alike(ours, theirs, BOUND)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_over_a_replayed_tower_is_one_over_the_uncaptured_tower(name, replays):
    models = pair(name)
    for seed, parts in enumerate([*ROWS[:1] * 3, *ROWS, *ROWS[::-1]]):
        docs = documents(name, [parts, [4], parts[::-1]], seed)
        assert_alike(*(step(name, model, docs) for model in models))
    assert len(set(replays)) >= 2  # some are padded
    assert len(replays) >= 5  # two rows of a size, or two of any, run uncaptured
    assert str(tower_of(models[0]).tower_graphs).startswith("captured for ")
    unit = "patches" if name == "mistral3" else "images"
    assert str(tower_of(models[0]).tower_graphs).endswith(unit)


def test_a_form_holds_images_of_its_size_and_dtype_and_what_was_asked():
    pixels = torch.zeros(5, 3, 16, 16)
    form = PatchesForm.of(Patches(pixels))
    assert form.n_patches == 5
    assert form.holds(Patches(pixels[:3]))
    for other in (
        Patches(torch.zeros(6, 3, 16, 16)),
        Patches(torch.zeros(5, 3, 8, 16)),
        Patches(pixels.double()),
        Patches(pixels, asked={"output_hidden_states": True}),
    ):
        assert not form.holds(other)
    assert PatchesForm.of(Patches(torch.zeros(33, 3, 2, 2))).n_patches == 36


@pytest.mark.parametrize("name", ["gemma3", "internvl"])
def test_what_else_is_asked_of_a_tower_is_not_replayed_as_this(name, replays):
    ours, theirs = pair(name)
    side = tower_of(ours).config.image_size
    side = side[0] if isinstance(side, (list, tuple)) else side
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(5, 3, side, side, generator=draw).to(DEVICE, DTYPE)
    with torch.no_grad():
        for given in (pixels, pixels[:5] * 2, pixels + 1, pixels[:4]):
            made = [tower_of(model)(given).last_hidden_state for model in (ours, theirs)]
            assert error(*(x.double() for x in made)) < BOUND
        assert replays == [5, 4]
        more = [tower_of(model)(pixels, output_hidden_states=True).hidden_states for model in (ours, theirs)]
        assert_alike(*more)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("gemma3", lambda tower: tower.eval(), "the model is not training"),
        ("internvl", lambda tower: tower.register_forward_hook(lambda *_: None), "modules have hooks"),
        ("mistral3", lambda tower: setattr(tower, "extra", nn.Dropout(0.1)), "the tower drops at random"),
        ("smolvlm", lambda tower: None, "what comes beside the pixels is read on the host"),
    ],
)
def test_what_is_not_captured_says_why(name, change, why, replays):
    model = pair(name)[0]
    change(tower_of(model))
    for seed in range(4):
        step(name, model, documents(name, [ROWS[0]], seed))
    assert str(tower_of(model).tower_graphs) == f"not captured: {why}"
    assert not replays


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_a_tower_that_trains_is_not_captured(name, replays):
    model = pair(name, "tower")[0]
    for seed in range(4):
        step(name, model, documents(name, [ROWS[1]], seed))
    assert not replays


def test_attention_that_drops_at_random_is_never_captured(replays):
    model = made("gemma3", DTYPE)
    tower_of(model).config.attention_dropout = 0.1
    report = patch_model(model).report
    why = "attention_dropout is 0.1" if ON_GPU else "CUDA graphs need CUDA"
    assert str(tower_of(model).tower_graphs) == f"not captured: {why}"
    assert "captured" not in report.fused.get("tower", "")
