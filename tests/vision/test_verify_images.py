"""`verify` of models of vision and language: right descriptions pass, each wrong one is found."""

from itertools import product

import numpy as np
import pytest
import torch
from image_models import GRIDS, IMAGE, MODELS, TILED, made
from late_parts import late_deepstack, late_windows

from unsloth_pack import patch_model, verify
from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.row import PackedRow


def in_turn(models, values):
    """Each model with each value; every day each model, and each value, with one or two."""
    n = max(len(models), len(values))
    daily = {(models[i % len(models)], values[i % len(values)]) for i in range(n)}
    return [
        pytest.param(*pair, marks=[] if pair in daily else [pytest.mark.nightly])
        for pair in product(models, values)
    ]


each_without_grids = pytest.mark.parametrize("name", TILED)
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


def along(lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def all_four(lengths, axes):
    return {"position_ids": torch.cat([along(lengths)[None], axes]), **TRAINING}


def with_mask(lengths, axes):
    return all_four(lengths, axes) | {"attention_mask": torch.ones(1, sum(lengths), dtype=torch.int64)}


def ends_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def axes_alone(lengths, axes):
    return {"position_ids": axes, **TRAINING}


def axes_with_ends(lengths, axes):
    ends = ends_of(lengths)
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return axes_alone(lengths, axes) | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends} | longest


def time_as_text(lengths, axes):
    return {"position_ids": torch.cat([axes[:1], axes]), **TRAINING}


def text_for_all(lengths, axes):
    return {"position_ids": along(lengths), **TRAINING}


def text_for_all_with_mask(lengths, axes):
    return text_for_all(lengths, axes) | {"attention_mask": torch.ones(1, sum(lengths), dtype=torch.int64)}


@each_model
def test_plain_transformers_with_all_four_positions_passes(name):
    report = verify(made(name), describe=all_four, documents=SHORT)
    assert not failed(report) & of_images(report), report


# Models whose images come without grids: as tiles or with sizes


def nothing(lengths):
    return TRAINING


def positions(lengths):
    return {"position_ids": along(lengths), **TRAINING}


def positions_and_mask(lengths):
    return positions(lengths) | {"attention_mask": torch.ones(1, sum(lengths), dtype=torch.int64)}


WRONG = [with_mask, axes_alone, axes_with_ends, time_as_text, text_for_all, text_for_all_with_mask]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*in_turn(GRIDS, WRONG), *in_turn(TILED, [nothing, positions_and_mask])],
    ids=name_of,
)
def test_each_wrong_description_of_plain_transformers_is_found(name, wrong):
    report = verify(made(name), describe=wrong, documents=SHORT)
    assert failed(report) & of_images(report), report


@each_without_grids
def test_plain_transformers_keeps_documents_apart_by_positions_but_gemma_3(name):
    """There an image that ends a document and one that begins the next see each other."""
    report = verify(made(name), describe=positions, documents=SHORT)
    found = of_images(report) if name == "gemma3" else set()
    assert failed(report) & of_images(report) == found, report


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


@pytest.mark.parametrize("planted", [late_windows, late_deepstack])
def test_what_comes_late_is_found(planted, monkeypatch):
    """Windows of the tower that end a patch late, and DeepStack one layer late."""
    model = made("qwen2_5_vl" if planted is late_windows else "qwen3_vl")
    patch_model(model)
    planted(monkeypatch)
    report = verify(model, documents=SHORT)
    assert failed(report) & of_images(report), report


def test_documents_with_image_tokens_are_refused():
    model = made("gemma3")
    with pytest.raises(InputError, match=f"documents hold token {IMAGE}, which stands for imag"):
        verify(model, documents=[[5, 6], [7, IMAGE]])
