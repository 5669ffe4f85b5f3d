"""The data sets that options name: as a path, or as a list of objects, see `config.values.DataSets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unsloth_pack.config.options import DataOptions
from unsloth_pack.data.sources import DataSet
from unsloth_pack.errors import InputError

Named = str | Sequence[Mapping[str, Any]]


def data_sets_of(
    named: Named,
    columns: Mapping[str, str | None] | None = None,
    split: str | None = None,
    *,
    are_shared: bool = False,
    option: str = "dataset",
) -> list[DataSet]:
    """The data sets.

    Args:
        named: by the option `option`.
        columns, split: of those that have none of their own. A single file has no splits, and is read whole
            beside others.
        are_shared: whether data sets elsewhere have these columns too.
    """
    items: Sequence[Mapping[str, Any]] = [{"path": named}] if isinstance(named, str) else named
    without = [item for item in items if "columns" not in item]
    shared = {"columns": columns or {}, "shares_columns": are_shared or len(without) > 1}
    options = [option] if isinstance(named, str) else [f"{option}.{number}" for number in range(len(items))]
    sets = [
        DataSet(**{**({} if "columns" in item else shared), **item, "option": name})
        for item, name in zip(items, options, strict=True)
    ]
    have_splits = [each for each in sets if each.has_splits] or sets
    return [replace(each, split=each.split or split) if each in have_splits else each for each in sets]


def training_sets(data: DataOptions) -> list[DataSet]:
    """What a run trains on."""
    return data_sets_of(data.dataset, data.columns, data.split)


def evaluation_sets(data: DataOptions) -> list[DataSet]:
    """What a run evaluates on, beside what it holds out of the training.

    Columns that the training data has may be missing here: the data may have a format already.
    """
    if data.eval_dataset is None:
        return []
    named = data_sets_of(data.eval_dataset, data.columns, are_shared=True, option="eval_dataset")
    return [first_rows(each, data.sample_limit) for each in named]


def first_rows(data_set: DataSet, most: int | None) -> DataSet:
    """The data set with no more rows than `most`."""
    limits = [limit for limit in (data_set.limit, most) if limit is not None]
    return replace(data_set, limit=min(limits, default=None))


def check_data(data: DataOptions) -> Iterator[InputError]:
    """Refuse to mix a single data set, whose documents come as they are, and columns that no data set has."""
    if data.mixture != DataOptions().mixture and len(paths_of(data.dataset)) == 1:
        yield InputError(
            f"mixture is {data.mixture!r}, and there is one data set, {name_of(data.dataset)}; leave out "
            "--mixture, or name several in dataset",
            about="mixture",
        )
    named = (data.dataset, data.eval_dataset or [])
    is_used = any(isinstance(each, str) or any("columns" not in item for item in each) for each in named)
    if data.columns and not is_used:
        yield InputError(
            "columns is set, and every item of dataset has columns of its own; leave out --columns",
            about="columns",
        )


def paths_of(named: Named | None) -> list[str]:
    """The paths of the data sets."""
    if named is None:
        return []
    return [named] if isinstance(named, str) else [item["path"] for item in named]


def name_of(named: Named | None) -> str:
    """What the data is called in a message."""
    return ", ".join(paths_of(named))


def with_paths(named: Named, change: Callable[[str], str]) -> Named:
    """The same data sets, where they lie now."""
    if isinstance(named, str):
        return change(named)
    return [{**item, "path": change(item["path"])} for item in named]
