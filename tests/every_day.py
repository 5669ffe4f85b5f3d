"""Which combinations of a test's options run every day, and which nightly."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()


def combinations(*axes: Iterable | Mapping[str, Any], daily: Iterable[tuple]) -> list:
    """All combinations of the axes' values as parameters, marked nightly unless named in `daily`.

    On a GPU a kernel takes milliseconds, and all of them run every day.

    Args:
        axes: values, or values by the names that tell them apart in a test's id and in `daily`.
        daily: combinations that together use every value that a fault could hide behind.

    Raises:
        ValueError: one of `daily` is no combination.
    """
    named = [list(axis.items()) if isinstance(axis, Mapping) else [(x, x) for x in axis] for axis in axes]
    left, params = list(daily), []
    for combination in product(*named):
        names, values = zip(*combination, strict=True)
        is_daily = names in left
        if is_daily:
            left.remove(names)
        marks = [] if is_daily or ON_GPU else [pytest.mark.nightly]
        params.append(pytest.param(*values, marks=marks, id="-".join(map(_name, names))))
    if left:
        raise ValueError(f"not among the combinations: {left}")
    return params


def _name(value: Any) -> str:
    return getattr(value, "__name__", str(value))
