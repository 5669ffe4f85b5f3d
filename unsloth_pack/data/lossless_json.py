"""Turns Python rows into a `datasets.Dataset` that gives back exactly the same values.

`datasets` has two ways of storing objects, and neither is exact. A struct gets a null for every key that only
other rows have, one order of keys for all rows, and one type for whole numbers and fractions. `datasets.Json`
reads 0.6 back as 0.6000000000000001. Here all but strings is stored as JSON text, which Python's own parser
reads back.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import datasets
import pyarrow as pa


def _to_json(value: object) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


class ExactJson(datasets.Json):  # type: ignore[misc]  # datasets has no types
    """`datasets.Json`, read and written by Python's own JSON module."""

    def encode_example(self, example_data: object) -> str | None:
        return _to_json(example_data)

    def decode_example(self, example_data: str | None, token_per_repo_id: object = None) -> Any:
        return None if example_data is None else json.loads(example_data)


def to_dataset(rows: list[dict[str, object]]) -> datasets.Dataset:
    """A dataset of these rows, with the types that hold them exactly; a key that a row lacks is null."""
    return read_exactly(datasets.Dataset(exact_table(rows)))


def exact_table(rows: list[dict[str, object]], schema: pa.Schema | None = None) -> pa.Table:
    """The rows as Arrow holds them exactly, see `to_dataset`; `schema` is of `joined_schema`."""
    names = schema.names if schema else dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}

    def are_strings(name: str) -> bool:
        if schema:
            return bool(schema.field(name).type == pa.string())
        return all(value is None or isinstance(value, str) for value in columns[name])

    return pa.table(
        {
            name: pa.array(values, pa.string()) if are_strings(name) else json_array(values)
            for name, values in columns.items()
        }
    )


def json_array(values: Sequence[object]) -> pa.Array:
    """Values as the Arrow array of an `ExactJson` column."""
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(map(_to_json, values), pa.string()))


def joined_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The types that hold the rows of several exact tables: JSON text where one of them has it."""
    kinds: dict[str, pa.DataType] = {}
    for field in (field for schema in schemas for field in schema):
        if kinds.get(field.name) != pa.json_():
            kinds[field.name] = field.type
    return pa.schema(kinds)


def read_exactly(dataset: datasets.Dataset) -> datasets.Dataset:
    """The same dataset, whose JSON texts are read by Python's own JSON module."""
    return read_as(dataset, datasets.Json, ExactJson())


def read_as(dataset: datasets.Dataset, kind: type[object], other: object) -> datasets.Dataset:
    """The same dataset with `other` for each feature of a kind, also inside of lists and objects."""

    def changed(feature: object) -> Any:
        if isinstance(feature, dict):
            return {name: changed(inner) for name, inner in feature.items()}
        if isinstance(feature, datasets.List | datasets.LargeList):
            return replace(feature, feature=changed(feature.feature))
        return other if isinstance(feature, kind) else feature

    copied = dataset.with_format(None)  # which has its own types
    copied.info.features = datasets.Features(changed(dict(dataset.features)))
    return copied
