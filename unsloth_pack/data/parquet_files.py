"""Parquet files as Arrow tables, a few thousand rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unsloth_pack.data.file_parts import check_ordinary, check_same_columns
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROWS, _BYTES = 4096, 16 << 20  # read at a time


def parquet_schema(files: Sequence[Path]) -> pa.Schema:
    """The types that hold the rows of all files, which have the same columns.

    Raises:
        InputError: a file is not complete, repeats a column, or holds whole numbers where another has
            fractions; or there are types that do not go together.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = []
    for file in files:
        check_ordinary(file)
        try:
            schema = pq.ParquetFile(file).schema_arrow
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _incomplete(file, error) from None
        if len(set(schema.names)) < len(schema.names):
            raise InputError(f"{file}: a column is repeated in {schema.names}; rename it")
        schemas.append(schema)
    check_same_columns(files, [schema.names for schema in schemas])
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0]
    try:
        joined = pa.unify_schemas(schemas, promote_options="permissive").with_metadata(schemas[0].metadata)
    except (pa.ArrowException, NotImplementedError, ValueError) as error:
        raise unusable(files[0], error) from None
    for file, schema in zip(files, schemas, strict=True):
        for field in schema:
            if _makes_fractions(field.type, joined.field(field.name).type):
                raise InputError(
                    f"{file}: column {field.name!r} holds whole numbers where another file has fractions "
                    f"({field.type}); write both files with the same types"
                )
    return joined


def read_parquet(file: Path, schema: pa.Schema, first: int = 0) -> Iterator[pa.Table]:
    """The rows of a file from number `first` on, with the types of `schema`.

    Raises:
        InputError: the file is not complete, or its types cannot be used.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    a_row = sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups))
    rows = max(1, min(_ROWS, _BYTES * parquet.metadata.num_rows // max(1, a_row)))
    groups, passed_over = _groups_from(parquet, first)
    try:
        for batch in parquet.iter_batches(rows, row_groups=groups, use_threads=False):
            batch.validate(full=True)
            table = pa.Table.from_batches([batch])
            if passed_over:
                table, passed_over = table.slice(passed_over), max(0, passed_over - len(table))
            if table.schema != schema:
                table = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
            yield table.replace_schema_metadata(schema.metadata)
    except (NotImplementedError, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise unusable(file, error) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _incomplete(file, error) from None


def _groups_from(parquet: pq.ParquetFile, first: int) -> tuple[list[int], int]:
    """The row groups with row `first` and later ones, and how many of their rows come before it."""
    done, groups = 0, range(parquet.num_row_groups)
    for group in groups:
        rows = parquet.metadata.row_group(group).num_rows
        if first < done + rows:
            return list(groups[group:]), first - done
        done += rows
    return [], 0


def unusable(file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file}: column types that cannot be used ({error}); write strings, or lists of objects"
    )


def _incomplete(file: Path, error: Exception) -> InputError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return InputError(f"{file}: not a complete parquet file ({reason}); download or write it again")


def _makes_fractions(before: pa.DataType, after: pa.DataType) -> bool:
    """Whether whole numbers become fractions because another file has fractions in their place."""
    import pyarrow as pa

    if pa.types.is_struct(before) and pa.types.is_struct(after):
        return any(_makes_fractions(field.type, after.field(field.name).type) for field in before)
    if hasattr(before, "value_type") and hasattr(after, "value_type"):  # lists
        return _makes_fractions(before.value_type, after.value_type)
    return pa.types.is_integer(before) and pa.types.is_floating(after)
