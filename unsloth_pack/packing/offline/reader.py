"""read_packs: packed rows from disk, all of them checked before training begins."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.data.image_columns import IMAGES
from unsloth_pack.data.tokenize import IGNORE_INDEX
from unsloth_pack.errors import InputError
from unsloth_pack.packing.offline.images import check_images
from unsloth_pack.packing.offline.manifest import PackManifest, Shard, read_manifest, schema, sha256_of

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


def read_packs(folder: str | Path, tokenizer_hash: str) -> tuple[PackManifest, datasets.Dataset]:
    """The rows that `write_packs` wrote, memory-mapped; RAM holds only 4 bytes per document.

    They are ready to train on: give them to `SFTTrainer` with `SFTConfig(packing=False, padding_free=True,
    max_length=None)`, whose collator turns `seq_lengths` into positions that restart at each document. It
    also masks the label of the first token of every document.

    Args:
        tokenizer_hash: of the model's tokenizer, from `unsloth_pack.data.tokenizer_hash`.

    Returns:
        The manifest, and a `datasets.Dataset` of `input_ids`, `labels` and `seq_lengths`, and of `images`
        where there are some, as `pack_dataset` would give them.

    Raises:
        InputError: the packs are for another tokenizer; a shard is missing, cut or not what was written; or
            boundaries contradict the rows. The error names the file, the row and the contradiction.
    """
    import datasets
    import pyarrow.compute as pc
    from datasets.utils import tqdm

    folder = Path(os.path.expanduser(folder))
    manifest = read_manifest(folder)
    if tokenizer_hash != manifest.tokenizer_hash:
        raise InputError(
            f"{folder}: packed with another tokenizer, that of {manifest.model_name or 'another model'} "
            f"({manifest.tokenizer_hash[:12]}, the model's is {str(tokenizer_hash)[:12]}); pack the data anew"
        )
    shards, counts = [], np.zeros(3, np.int64)
    for shard in tqdm(manifest.shards, desc="Verifying packs", unit=" shards"):
        path = folder / shard.file
        _check_bytes(path, shard)
        lengths = _checked_lengths(path, manifest)
        columns = ["input_ids", "labels", *([IMAGES] if manifest.images else [])]
        tokens = datasets.Dataset.from_file(str(path)).select_columns(columns)
        shards.append(tokens.add_column("seq_lengths", lengths, new_fingerprint=shard.sha256))
        of_documents = pc.list_flatten(lengths)
        counts += (len(lengths), len(of_documents), pc.sum(of_documents).as_py() or 0)
    promised = [manifest.rows, manifest.documents, manifest.tokens]
    if counts.tolist() != promised or not shards:
        raise InputError(
            f"{folder}: {counts.tolist()} rows, documents and tokens where the manifest has {promised}; "
            "pack the data anew"
        )
    return manifest, datasets.concatenate_datasets(shards)


def _check_bytes(path: Path, shard: Shard) -> None:
    """Refuse a file if any byte differs from the file that was written."""
    try:
        size = path.stat().st_size
        digest = sha256_of(path) if size == shard.bytes else None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); copy it again, or pack anew") from None
    if digest is None:
        raise InputError(f"{path}: {size} bytes of {shard.bytes}; copy it again, or pack anew")
    if digest != shard.sha256:
        raise InputError(f"{path}: its checksum differs from the manifest's; copy it again, or pack anew")


def _checked_lengths(path: Path, manifest: PackManifest) -> pa.ChunkedArray:
    """The document lengths of every row of a shard, after checks of all its rows."""
    import pyarrow as pa

    kind = pa.list_(pa.int32())
    lengths, row = [], 0
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            if stream.schema.remove_metadata() != schema(manifest.images is not None):
                columns = ", ".join(f"{field.name} ({field.type})" for field in stream.schema)
                raise InputError(f"{path}: the columns {columns} are not those of packs; pack the data anew")
            for batch in filter(len, stream):
                lengths.append(_lengths_of(batch, manifest, f"{path} row", row))
                row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not an Arrow stream ({error}); pack the data anew") from None
    return pa.chunked_array(lengths, kind)


def _lengths_of(batch: pa.RecordBatch, manifest: PackManifest, where: str, first_row: int) -> pa.ListArray:
    """The document lengths of every row of a batch.

    Raises:
        InputError: boundaries, labels, images or sizes contradict the tokens of a row.
    """
    import pyarrow as pa

    capacity = manifest.capacity

    def refuse(is_wrong: np.ndarray, complaint: Callable[[int], str]) -> None:
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            raise InputError(f"{where} {first_row + row}: {complaint(row)}; pack the data anew")

    if any(column.null_count or _values(column).null_count for column in batch.columns):
        raise InputError(
            f"{where} {first_row} or one of the next {len(batch)} holds null; pack the data anew"
        )
    names = ("input_ids", "labels", "cu_lengths")
    ids, labels, cu = (_values(batch[name]).to_numpy() for name in names)
    n_ids, n_labels, n_cu = (np.diff(batch[name].offsets) for name in names)
    cu = cu.astype(np.int64)  # differences of int32 could overflow
    refuse(n_labels != n_ids, lambda row: f"{n_labels[row]} labels for {n_ids[row]} tokens")
    refuse(n_ids > capacity, lambda row: f"{n_ids[row]} tokens in a row of {capacity}")
    refuse(n_cu < 2, lambda row: f"cu_lengths {batch['cu_lengths'][row].as_py()} bounds no document")
    ends = np.cumsum(n_cu)  # of the rows in cu
    first, last = cu[ends - n_cu], cu[ends - 1]
    refuse(
        (first != 0) | (last != n_ids),
        lambda row: f"cu_lengths runs from {first[row]} to {last[row]}, the row from 0 to {n_ids[row]}",
    )
    lengths = np.delete(np.diff(cu), ends[:-1] - 1)  # without the steps from a row to the next
    offsets = np.concatenate([[0], np.cumsum(n_cu - 1)])
    refuse(
        np.minimum.reduceat(lengths, offsets[:-1]) < 1,
        lambda row: f"cu_lengths does not increase: {reprlib.repr(batch['cu_lengths'][row].as_py())}",
    )
    longest, said = np.maximum.reduceat(lengths, offsets[:-1]), batch["max_length"].to_numpy()
    refuse(
        longest != said,
        lambda row: f"max_length is {said[row]}, and its longest document has {longest[row]} tokens",
    )
    is_strange = (labels != IGNORE_INDEX) & (labels != ids)
    refuse(
        np.logical_or.reduceat(is_strange, np.cumsum(n_ids) - n_ids),
        lambda row: f"a label that is neither {IGNORE_INDEX} nor its token",
    )
    found = pa.ListArray.from_arrays(*(pa.array(n.astype(np.int32)) for n in (offsets, lengths)))
    if manifest.images is not None:
        check_images(batch, ids, found, manifest.images.placeholder, refuse)
    return found


def _values(column: pa.Array) -> pa.Array:
    """The numbers of a column; a column of lists is flattened."""
    import pyarrow as pa

    return column.flatten() if isinstance(column, pa.ListArray) else column
