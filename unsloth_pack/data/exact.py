"""Turns Python rows into a `datasets.Dataset` that gives back exactly the same values.

`datasets` has two ways of storing objects, and neither is exact. A struct gets a null for every key that only
other rows have, one order of keys for all rows, and one type for whole numbers and fractions. `datasets.Json`
reads 0.6 back as 0.6000000000000001. Here objects are stored as JSON text, which Python's own parser reads
back. Only turns of two strings, which most conversations consist of, are stored as structs.
"""

import json
from dataclasses import replace
from typing import Any

import datasets
import pyarrow as pa

from unsloth_pack.data.fields import PLAIN_TURNS

_PLAIN_TURNS = [pa.struct({name: pa.string() for name in names}) for names in PLAIN_TURNS]


class ExactJson(datasets.Json):
    """`datasets.Json`, read and written by Python's own JSON module."""

    def encode_example(self, example_data: Any) -> str | None:
        return None if example_data is None else json.dumps(example_data, ensure_ascii=False)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else json.loads(example_data)


def to_dataset(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """A dataset of these rows, with the types that hold them exactly; a key that a row lacks is null.

    Raises:
        UnicodeEncodeError: a string holds half of a surrogate pair.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _exact_array([row.get(name) for row in rows]) for name in names})
    return read_exactly(datasets.Dataset(table))


def read_exactly(dataset: datasets.Dataset) -> datasets.Dataset:
    """The same dataset, whose JSON texts are read by Python's own JSON module."""
    exact = dataset.with_format(None)  # a copy that has its own types
    exact.info.features = datasets.Features({name: _exact(kind) for name, kind in dataset.features.items()})
    return exact


def json_array(texts: list[str | None]) -> pa.Array:
    """JSON texts as the Arrow array of an `ExactJson` column."""
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def _exact(feature: Any) -> Any:
    if isinstance(feature, dict):
        return {name: _exact(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_exact(feature.feature))
    return ExactJson() if isinstance(feature, datasets.Json) else feature


def _exact_array(values: list[Any]) -> pa.Array:
    try:
        array = pa.array(values)
        if pa.types.is_string(array.type):
            return array
        if _holds_no_objects(array.type) and json.dumps(array.to_pylist()) == json.dumps(values):
            return array
    except (pa.ArrowException, OverflowError):  # strings among numbers, integers past 64 bits, ...
        pass
    return json_array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values])


def _holds_no_objects(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return kind.value_type in _PLAIN_TURNS or _holds_no_objects(kind.value_type)
    return not pa.types.is_struct(kind)
