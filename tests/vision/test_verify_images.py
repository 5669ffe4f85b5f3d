"""`verify` of models of vision and language: right descriptions pass, each wrong one is found."""

import pytest
import torch
from vision_models import MODELS, made

from unsloth_pack import patch_model, verify

each_model = pytest.mark.parametrize("name", MODELS)


def failed(report):
    return {check.name for check in report.checks if not check.passed}


def of_images(report):
    return {check.name for check in report.checks if "images" in check.name}


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_patched_model_passes(name, dtype):
    model = made(name, dtype, "all")
    patch_model(model)
    report = verify(model)
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


@each_model
@pytest.mark.parametrize(
    "wrong",
    [with_mask, axes_alone, axes_with_ends, time_as_text, text_for_all, text_for_all_with_mask],
    ids=lambda wrong: wrong.__name__,
)
def test_each_wrong_description_of_plain_transformers_is_found(name, wrong):
    report = verify(made(name), describe=wrong, documents=SHORT)
    assert failed(report) & of_images(report), report
