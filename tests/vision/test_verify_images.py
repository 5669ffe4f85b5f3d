"""`verify` of models of vision and language: right descriptions pass, each wrong one is found."""

from itertools import product

import numpy as np
import pytest
import torch
from image_models import GRIDS, MODELS, TILED, made
from tiny import positions_of
from transformers import vision_utils

from unsloth_pack import patch_model, verify
from unsloth_pack.layers import decoder
from unsloth_pack.packed_row.row import PackedRow


def in_turn(models, values):
    """Each model with each value; every day each model, and each value, with one or two."""
    n = max(len(models), len(values))
    daily = {(models[i % len(models)], values[i % len(values)]) for i in range(n)}
    return [
        pytest.param(*pair, marks=[] if pair in daily else [pytest.mark.nightly])
        for pair in product(models, values)
    ]


each_model = pytest.mark.parametrize("name", GRIDS)
DTYPES = [torch.float32, torch.bfloat16]


def name_of(value):
    return getattr(value, "__name__", str(value))


def failed(report):
    return {check.name for check in report.checks if not check.passed}


def of_images(report):
    return {check.name for check in report.checks if "images" in check.name}


@pytest.mark.parametrize(("name", "dtype"), in_turn(MODELS, DTYPES), ids=str)
def test_a_patched_model_passes(name, dtype):
    model = made(name, dtype, "all")
    patch_model(model)
    report = verify(model, documents=SHORT if name in TILED else None)
    assert report.passed, report
    assert len(of_images(report)) == 3


SHORT = [[5, 6, 7], [8, 9]]  # of text: its checks are not what is looked at here
TRAINING = {"use_cache": False}  # with a cache transformers keeps no documents apart, however described


def all_four(lengths, axes):
    return {"position_ids": torch.cat([positions_of(lengths)[None, None], axes]), **TRAINING}


def with_mask(lengths, axes):
    return all_four(lengths, axes) | {"attention_mask": torch.ones(1, sum(lengths), dtype=torch.int64)}


def axes_alone(lengths, axes):
    return {"position_ids": axes, **TRAINING}


def time_as_text(lengths, axes):
    return {"position_ids": torch.cat([axes[:1], axes]), **TRAINING}


def text_for_all(lengths, axes):
    return {"position_ids": positions_of(lengths)[None], **TRAINING}


@each_model
def test_plain_transformers_with_all_four_positions_passes(name):
    report = verify(made(name), describe=all_four, documents=SHORT)
    assert not failed(report) & of_images(report), report


# Models whose images come without grids: as tiles or with sizes


def nothing(lengths):
    return TRAINING


def positions(lengths):
    return {"position_ids": positions_of(lengths)[None], **TRAINING}


def positions_and_mask(lengths):
    return positions(lengths) | {"attention_mask": torch.ones(1, sum(lengths), dtype=torch.int64)}


WRONG = [with_mask, axes_alone, time_as_text, text_for_all]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*in_turn(GRIDS, WRONG), *in_turn(TILED, [nothing, positions_and_mask])],
    ids=name_of,
)
def test_each_wrong_description_of_plain_transformers_is_found(name, wrong):
    report = verify(made(name), describe=wrong, documents=SHORT)
    assert failed(report) & of_images(report), report


def blocks_across_documents(row):
    visual = row.visual if row.both_ways and row.visual is not None else np.zeros(0, dtype=np.int64)
    return np.array([[visual[0], visual[-1] + 1]]) if len(visual) else np.zeros((0, 2), dtype=np.int64)


def no_blocks(row):
    return np.zeros((0, 2), dtype=np.int64)


@pytest.mark.parametrize("wrong", [blocks_across_documents, no_blocks], ids=lambda wrong: wrong.__name__)
def test_wrong_blocks_of_gemma_3_are_found(wrong, monkeypatch):
    model = made("gemma3")
    patch_model(model)
    monkeypatch.setattr(PackedRow, "blocks", property(wrong))
    report = verify(model, documents=SHORT)
    assert failed(report) & of_images(report), report


@pytest.mark.parametrize("lost", ["rows", "tokens"])
def test_swapped_features_are_found(lost, monkeypatch):
    """Images that reach another document, or other tokens of their own."""
    from unsloth_pack.layers.vision import vision_lm

    model, right = made("internvl"), vision_lm.encode_images
    patch_model(model)

    def swapped(*args):
        features = right(*args)
        order = torch.arange(len(features.by_token))
        order = order.flip(0) if lost == "rows" else order.view(-1, 2).flip(1).flatten()
        return type(features)(features.by_token[order], features.sizes, features.by_layer)

    monkeypatch.setattr(vision_lm, "encode_images", swapped)
    report = verify(model, documents=SHORT)
    assert failed(report) & of_images(report), report


def late_windows(monkeypatch):
    """Windows of the tower's attention end a patch late."""
    right = vision_utils.get_vision_window_index

    def late(*args, **kwargs):
        index, ends = right(*args, **kwargs)
        ends = ends.clone()
        ends[1:-1] += 1
        return index, ends

    monkeypatch.setattr(vision_utils, "get_vision_window_index", late)


def late_deepstack(monkeypatch):
    """The features of the tower's middle layers are added one layer late."""
    right = decoder.take_visual_by_layer

    def late(row, kwargs):
        by_layer = right(row, kwargs)
        return [torch.zeros_like(by_layer[0]), *by_layer] if by_layer else []

    monkeypatch.setattr(decoder, "take_visual_by_layer", late)


@pytest.mark.parametrize("planted", [late_windows, late_deepstack])
def test_what_comes_late_is_found(planted, monkeypatch):
    """Windows of the tower that end a patch late, and DeepStack one layer late."""
    model = made("qwen2_5_vl" if planted is late_windows else "qwen3_vl")
    patch_model(model)
    planted(monkeypatch)
    report = verify(model, documents=SHORT)
    assert failed(report) & of_images(report), report
