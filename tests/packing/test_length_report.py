"""length_report, plan_accumulation and vision_tokens: numbers worked out by hand."""

import math

import pytest
import torch
from tables import table

from unsloth_pack.errors import InputError
from unsloth_pack.packing import length_report, plan_accumulation, vision_tokens


@table(
    ("arguments", "updates"),
    [
        ((64, 4.0, 1, 1), 16),
        ((65, 4.0, 8, 2), 2),
        ((1, 100.0, 8, 4), 1),
        ((21, 0.7 * 3, 10, 1), 1),  # 0.7 * 3 is a hair below 2.1
    ],
)
def test_accumulation(arguments, updates):
    assert plan_accumulation(*arguments) == updates


def test_lengths():
    report = length_report([0, 1, 2, 3, 4, 1000], bin_size=512)
    assert (report.count, report.empty, report.tokens) == (5, 1, 1010)
    assert (report.mean, report.median, report.min, report.max) == (202.0, 3.0, 1, 1000)
    assert (report.p95, report.p99) == pytest.approx((800.8, 960.16))
    assert report.histogram == [(0, 512, 4), (512, 1024, 1)]
    assert report.forecasts == []


def test_forecast():
    report = length_report(
        torch.tensor([6, 2, 5, 3, 9, 4]), [8], world_size=2, per_device_batch=1, target_effective=6
    )
    (forecast,) = report.forecasts
    assert (forecast.capacity, forecast.overlong, forecast.tokens_cut) == (8, 1, 1)
    assert forecast.packs == 4  # 8 | 6 2 | 5 3 | 4
    assert forecast.documents_per_pack == 1.5
    assert forecast.fill == 28 / 32
    assert forecast.steps_per_epoch == 2
    assert forecast.accumulation == 2  # 6 / (1.5 * 2 * 1)
    assert forecast.optimizer_steps == 1
    assert forecast.effective_batch == 6.0
    assert forecast.padding[1] == 0.0
    assert forecast.padding[8] == forecast.padding[32] == 1 - 28 / (6 * 8)


@table(
    ("function", "arguments", "says"),
    [
        (length_report, ([0, 0], [8]), "none of 2 documents has tokens"),
        (length_report, ([1], [0]), "capacity is 0"),
        (length_report, ([-1], [8]), "document 0 has -1 tokens"),
        (plan_accumulation, (64, math.nan, 1, 1), "samples_per_pack is nan"),
        (vision_tokens, (0, 32), "height is 0"),
    ],
)
def test_bad_arguments(function, arguments, says):
    with pytest.raises(InputError) as caught:
        function(*arguments)
    assert says in str(caught.value)


def test_vision_tokens():
    assert vision_tokens(32, 32) == 1
    assert vision_tokens(33, 32) == 2
    assert vision_tokens(1080, 1920) == 34 * 60
    assert vision_tokens(224, 224, patch=14, merge=1) == 256
