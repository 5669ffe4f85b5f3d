"""A forecast of packing a set of documents: lengths, rows, steps, and the padding that it saves."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.packing.planner import as_lengths, check_positive, padded_slots, plan_packs

PADDED_BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class PackForecast:
    """One epoch of the documents, packed into rows of `capacity` tokens."""

    capacity: int
    overlong: int  # documents above `capacity`, which are cut to it
    tokens_cut: int  # that these lose
    packs: int  # rows
    documents_per_pack: float
    fill: float  # the share of the rows that holds tokens, 0 to 1
    steps_per_epoch: int  # micro-batches that every rank runs
    accumulation: int  # micro-batches of an update, as `plan_accumulation` suggests
    optimizer_steps: int  # updates of an epoch
    effective_batch: float  # documents of an update on average
    # Batch size -> the share of slots, 0 to 1, that would be padding without packing: in batches padded to
    # their longest document, with the documents in one random order
    padding: dict[int, float]


@dataclass(frozen=True)
class LengthReport:
    """Lengths of documents in tokens, and a forecast for each capacity."""

    count: int  # documents with tokens, of which all numbers but `empty` are
    empty: int
    tokens: int
    mean: float
    median: float
    p95: float
    p99: float
    min: int
    max: int
    bin_size: int
    histogram: list[tuple[int, int, int]]  # (from, to, documents) of each bin; `to` is not included
    forecasts: list[PackForecast]


def plan_accumulation(
    target_effective: int, samples_per_pack: float, world_size: int = 1, per_device_batch: int = 1
) -> int:
    """Micro-batches of an update: `ceil(target / (samples_per_pack * world_size * per_device_batch))`.

    Args:
        target_effective: documents that an update should see.
        samples_per_pack: documents of a row on average.
        world_size: ranks.
        per_device_batch: rows of a micro-batch.

    Raises:
        InputError: an argument is not above 0.
    """
    target_effective = check_positive("target_effective", target_effective)
    rows = check_positive("world_size", world_size) * check_positive("per_device_batch", per_device_batch)
    if not 0 < samples_per_pack < math.inf:
        raise InputError(f"samples_per_pack is {samples_per_pack!r}; give the documents of a row, above 0")
    ratio = target_effective / (samples_per_pack * rows)
    return max(1, math.ceil(ratio * (1 - 1e-12)))  # a rounding error of the average adds no micro-batch


def length_report(
    lengths: object,
    capacities: Iterable[int] = (),
    world_size: int = 1,
    per_device_batch: int = 1,
    target_effective: int = 32,
    bin_size: int = 512,
) -> LengthReport:
    """Summarise document lengths, and forecast packing them at each capacity.

    Args:
        lengths: tokens of every document: a list, array or CPU tensor of integers.
        capacities: tokens of a row, each with a forecast of its own.
        world_size, per_device_batch: ranks, and rows of a micro-batch on each.
        target_effective: documents that an update should see.
        bin_size: tokens of a bin of the histogram.

    Raises:
        InputError: no document has tokens, or an argument is out of range.
    """
    every = as_lengths(lengths)
    bin_size = check_positive("bin_size", bin_size)
    documents = every[every > 0].astype(np.int64)
    if not documents.size:
        raise InputError(f"none of {len(every)} documents has tokens; give lengths of at least 1")
    median, p95, p99 = np.percentile(documents, (50, 95, 99)).tolist()
    in_bins = np.bincount(documents // bin_size).tolist()
    return LengthReport(
        count=len(documents),
        empty=len(every) - len(documents),
        tokens=int(documents.sum()),
        mean=float(documents.mean()),
        median=median,
        p95=p95,
        p99=p99,
        min=int(documents.min()),
        max=int(documents.max()),
        bin_size=bin_size,
        histogram=[(i * bin_size, (i + 1) * bin_size, number) for i, number in enumerate(in_bins)],
        forecasts=[
            _forecast(documents, capacity, world_size, per_device_batch, target_effective)
            for capacity in capacities
        ],
    )


def _forecast(
    documents: np.ndarray, capacity: int, world_size: int, per_device_batch: int, target_effective: int
) -> PackForecast:
    capacity = check_positive("capacity", capacity)
    lengths = np.minimum(documents, capacity)
    plan = plan_packs(lengths, capacity)
    per_pack = plan.n_documents / plan.n_bins
    accumulation = plan_accumulation(target_effective, per_pack, world_size, per_device_batch)
    steps = math.ceil(plan.n_bins / (world_size * per_device_batch))
    order = np.random.default_rng(0).permutation(lengths)
    return PackForecast(
        capacity=capacity,
        overlong=int((documents > capacity).sum()),
        tokens_cut=int((documents - lengths).sum()),
        packs=plan.n_bins,
        documents_per_pack=per_pack,
        fill=plan.efficiency,
        steps_per_epoch=steps,
        accumulation=accumulation,
        optimizer_steps=math.ceil(steps / accumulation),
        effective_batch=per_pack * world_size * per_device_batch * accumulation,
        padding={batch: 1 - plan.tokens / padded_slots(order, batch) for batch in PADDED_BATCHES},
    )


def vision_tokens(height: int, width: int, patch: int = 16, merge: int = 2) -> int:
    """Merged vision tokens of an image of `height` by `width` pixels.

    One token stands for `merge` by `merge` patches of `patch` by `patch` pixels; a partial token at an edge
    counts as a whole one. Markers around the image and a resize before the encoder are not included.

    Raises:
        InputError: an argument is not a whole number of at least 1.
    """
    sizes = {"height": height, "width": width, "patch": patch, "merge": merge}
    height, width, patch, merge = (check_positive(name, size) for name, size in sizes.items())
    side = patch * merge
    return -(-height // side) * -(-width // side)
