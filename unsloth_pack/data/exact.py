"""Turns Python rows into a `datasets.Dataset` that gives back exactly the same values.

`datasets` has two ways of storing objects, and neither is exact: a struct gets a null for every key that only
other rows have, and `datasets.Json` reads 0.6 back as 0.6000000000000001. Here, values that a struct cannot
hold exactly are stored as JSON text, which Python's own parser reads back.
"""

import json
from typing import Any

import datasets
import pyarrow as pa


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
    inferred = datasets.Features.from_arrow_schema(table.schema)
    features = {
        name: ExactJson() if isinstance(feature, datasets.Json) else feature
        for name, feature in inferred.items()
    }
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=datasets.Features(features)))


def to_array(values: list[Any], feature: Any) -> pa.Array:
    """Values that are known to be of this `datasets` feature type, as an Arrow array."""
    if isinstance(feature, ExactJson):
        return _json_array(values)
    return pa.array(values, datasets.Features(column=feature).arrow_schema.field("column").type)


def _exact_array(values: list[Any]) -> pa.Array:
    try:
        array = pa.array(values)
        if not pa.types.is_nested(array.type) or array.to_pylist() == values:
            return array
    except (pa.ArrowException, OverflowError):  # strings among numbers, integers past 64 bits, ...
        pass
    return _json_array(values)


def _json_array(values: list[Any]) -> pa.Array:
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))
