"""write_packs: pack tokenised documents into rows on disk, one shard after another."""

from __future__ import annotations

import hashlib
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.checkpoints.atomic import atomic_dir, holds
from unsloth_pack.data.cache import scan
from unsloth_pack.data.rows import IMAGES, update_with_images
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.data.tokenize import IGNORE_INDEX
from unsloth_pack.errors import LAST_SEED, InputError, require_whole
from unsloth_pack.packing.dataset import DOCUMENTS_A_BATCH, RowBuilder, check_columns, plan_rows
from unsloth_pack.packing.manifest import (
    FILE_NAME,
    PackedImages,
    PackManifest,
    Shard,
    file_sha256,
    read_manifest,
    schema,
    shard_name,
)
from unsloth_pack.packing.planner import check_positive

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_LAST_ID = 2**31 - 1  # of int32
_BYTES_A_SHARD, _BYTES_A_TOKEN = 2**28, 8  # of ids and labels


def write_packs(
    documents: datasets.Dataset,
    folder: str | Path,
    capacity: int,
    *,
    tokenizer_hash: str,
    ledger: TokenLedger,
    strategy: str = "bfd",
    seed: int | None = None,
    train_on_responses_only: bool = False,
    model_name: str = "",
    rows_per_shard: int | None = None,
    images: PackedImages | None = None,
) -> PackManifest:
    """Pack tokenised documents into a new folder. RAM holds a few hundred rows at a time.

    The files are written aside, and get their place once they are complete: see `atomic_dir`. So an
    interrupted run leaves nothing that could be mistaken for packs.

    Args:
        documents: `input_ids` and `labels`, as `unsloth_pack.data.tokenize.tokenize` gives them, and `images`
            where there are some.
        folder: new, or empty.
        capacity, strategy: as for `pack_dataset`; the rows are the same, in the same order.
        tokenizer_hash: from `unsloth_pack.data.tokenizer_hash`.
        ledger: of the documents' tokens, also from `tokenize`.
        seed: plan over the documents in a random order, which changes the documents that share a row; None
            keeps their order.
        train_on_responses_only, model_name: noted in the manifest.
        rows_per_shard: None for shards of about 256 MiB of tokens and images.
        images: what the manifest says of the images; needed where documents have a column of them.

    Returns:
        The manifest.

    Raises:
        InputError: `folder` holds something, the disk is full, or the documents cannot be packed, see
            `pack_dataset`; an id does not fit into int32, or is negative; or a label is neither -100 nor its
            token.
    """
    from datasets.utils import tqdm

    target = Path(os.path.expanduser(folder)).resolve()
    if target.exists() and (not target.is_dir() or holds(target)):
        raise InputError(f"{folder}: not an empty folder; give a new one for the packs")
    if "labels" not in (columns := check_columns(documents)):
        raise InputError(f"no column 'labels' among {', '.join(columns)}; tokenise the rows")
    capacity = check_positive("capacity", capacity)
    if rows_per_shard is not None:
        rows_per_shard = check_positive("rows_per_shard", rows_per_shard)
    if seed is not None:
        require_whole("seed", seed, 0, LAST_SEED)
    if images is None and IMAGES in columns:
        raise InputError("the documents have images; say how they were prepared, in images")
    kept = ["input_ids", "labels", *([IMAGES] if images else [])]
    documents = documents.select_columns(kept)
    plan, builder = plan_rows(documents if seed is None else documents.shuffle(seed), capacity, strategy)
    if rows_per_shard is None:
        rows_per_shard = max(1, _BYTES_A_SHARD // max(_BYTES_A_TOKEN * capacity, builder.bytes_a_row))
    manifest = PackManifest(
        capacity=capacity,
        strategy=strategy,
        seed=None if seed is None else int(seed),
        train_on_responses_only=train_on_responses_only,
        model_name=model_name,
        tokenizer_hash=tokenizer_hash,
        data_fingerprint="",
        rows=plan.n_bins,
        documents=plan.n_documents,
        tokens=plan.tokens,
        ledger=ledger,
        shards=(),
        images=images,
    )
    _check_tokens(documents)
    hashed = ("input_ids", "labels", "cu_lengths", *([IMAGES] if images else []))
    hashes = {name: hashlib.sha256() for name in hashed}
    whole = atomic_dir(target, last=[FILE_NAME], may_replace=False)
    with whole as aside, tqdm(total=plan.n_bins, desc="Packing", unit=" rows") as bar:
        shards: list[Shard] = []
        for first in range(0, plan.n_bins, rows_per_shard):
            path = aside / shard_name(len(shards))
            rows = min(rows_per_shard, plan.n_bins - first)
            _write_shard(path, _batches(builder, first, rows, bar), hashes)
            shards.append(Shard(path.name, rows, path.stat().st_size, file_sha256(path)))
        fingerprint = hashlib.sha256(b"".join(one.digest() for one in hashes.values())).hexdigest()
        manifest = replace(manifest, data_fingerprint=fingerprint, shards=tuple(shards))
        (aside / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _check_tokens(documents: datasets.Dataset) -> None:
    """Refuse ids and labels that a shard cannot hold, or that `read_packs` would refuse."""
    import pyarrow.compute as pc

    row = 0
    for table in scan(documents, ["input_ids", "labels"], DOCUMENTS_A_BATCH):
        ids, labels = (pc.list_flatten(table[name]).to_numpy() for name in ("input_ids", "labels"))
        of_row = pc.list_parent_indices(table["input_ids"].combine_chunks())
        for is_wrong, complaint in (
            ((ids < 0) | (ids > _LAST_ID), f"a token id is not from 0 to {_LAST_ID}; tokenise the rows"),
            (
                (labels != IGNORE_INDEX) & (labels != ids),
                f"a label is neither {IGNORE_INDEX} nor its token; give labels that are not shifted",
            ),
        ):
            if is_wrong.any():
                at = int(np.argmax(is_wrong))
                values = f"token {ids[at]}, label {labels[at]}"
                raise InputError(f"row {row + of_row[at].as_py()}: {complaint} ({values})")
        row += len(table)


def _batches(builder: RowBuilder, first: int, rows: int, bar: Any) -> Iterator[pa.Table]:
    """The rows from `first` on, in the columns of a shard."""
    end = first + rows
    for start in range(first, end, builder.batch_size):
        table = builder.build(start, min(start + builder.batch_size, end))
        yield _with_boundaries(table)
        bar.update(len(table))


def _with_boundaries(table: pa.Table) -> pa.Table:
    """The table with `cu_lengths` and `max_length` instead of `seq_lengths`."""
    import pyarrow as pa

    column = table["seq_lengths"].combine_chunks()
    lengths, offsets = column.flatten().to_numpy(), column.offsets.to_numpy()
    starts = offsets + np.arange(len(offsets))  # in cu, where a row has one number more
    ends = np.concatenate([[0], np.cumsum(lengths)])
    cu = np.zeros(starts[-1], np.int32)
    tokens_before = np.repeat(ends[offsets[:-1]], np.diff(offsets))  # before the row of each document
    cu[np.delete(np.arange(len(cu)), starts[:-1])] = ends[1:] - tokens_before
    columns = {
        "input_ids": table["input_ids"],
        "labels": table["labels"],
        "cu_lengths": pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), pa.array(cu)),
        "max_length": np.maximum.reduceat(lengths, offsets[:-1]),
    }
    has_images = IMAGES in table.schema.names
    if has_images:
        columns[IMAGES] = table[IMAGES]
    return pa.table(columns).cast(schema(has_images))


def _write_shard(path: Path, tables: Iterator[pa.Table], hashes: Mapping[str, Any]) -> None:
    """Write the tables, and feed their numbers to the hash of each column."""
    import pyarrow as pa

    kind = schema(IMAGES in hashes)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, kind) as stream:
        for table in tables:
            stream.write_table(table)
            for name, digest in hashes.items():
                if name == IMAGES:
                    update_with_images(digest, table[name])
                else:
                    digest.update(table[name].combine_chunks().flatten().to_numpy())


# read_packs: packed rows from disk, all of them checked before training begins.


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
            boundaries contradict the rows. The error names the file and the row.
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
        digest = file_sha256(path) if size == shard.bytes else None
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
                lengths.append(_lengths_of(batch, manifest.capacity, f"{path} row", row))
                row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not an Arrow stream ({error}); pack the data anew") from None
    return pa.chunked_array(lengths, kind)


def _lengths_of(batch: pa.RecordBatch, capacity: int, where: str, first_row: int) -> pa.ListArray:
    """The document lengths of every row of a batch.

    Raises:
        InputError: boundaries contradict the tokens of a row.
    """
    import pyarrow as pa

    cu = batch["cu_lengths"].flatten().to_numpy().astype(np.int64)  # differences of int32 could overflow
    n_ids, n_labels, n_cu = (np.diff(batch[name].offsets) for name in ("input_ids", "labels", "cu_lengths"))
    is_wrong = (n_ids > capacity) | (n_labels != n_ids) | (n_cu < 2)
    if not is_wrong.any():
        ends = np.cumsum(n_cu)  # of the rows in cu
        lengths = np.delete(np.diff(cu), ends[:-1] - 1)  # without the steps from a row to the next
        offsets = np.concatenate([[0], np.cumsum(n_cu - 1)])
        is_wrong = (cu[ends - n_cu] != 0) | (cu[ends - 1] != n_ids)
        is_wrong |= np.minimum.reduceat(lengths, offsets[:-1]) < 1
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise InputError(
            f"{where} {first_row + row}: {n_ids[row]} tokens, {n_labels[row]} labels and the cu_lengths "
            f"{reprlib.repr(batch['cu_lengths'][row].as_py())}, in rows of {capacity}; pack the data anew"
        )
    return pa.ListArray.from_arrays(*(pa.array(each.astype(np.int32)) for each in (offsets, lengths)))
