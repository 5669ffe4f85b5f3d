"""write_packs: pack tokenised documents into rows on disk, one shard after another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.image_columns import IMAGES, update_with_images
from unsloth_pack.data.ledger import TokenLedger
from unsloth_pack.data.mapped import scan
from unsloth_pack.data.tokenize import IGNORE_INDEX
from unsloth_pack.errors import LAST_SEED, InputError, require_whole
from unsloth_pack.files.whole_folders import holds, write_whole
from unsloth_pack.packing.dataset import DOCUMENTS_A_BATCH, RowBuilder, check_columns, plan_rows
from unsloth_pack.packing.lengths import check_positive
from unsloth_pack.packing.offline.images import PackedImages
from unsloth_pack.packing.offline.manifest import (
    FILE_NAME,
    PackManifest,
    Shard,
    check_can_be_read,
    schema,
    sha256_of,
    shard_name,
)

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

    The files are written aside, and get their place once they are complete: see `write_whole`. So an
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
            `pack_dataset`; an id does not fit into int32, or is negative; a label is neither -100 nor its
            token; or an argument does not fit into the manifest.
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
    check_can_be_read(manifest)
    _check_tokens(documents)
    hashed = ("input_ids", "labels", "cu_lengths", *([IMAGES] if images else []))
    hashes = {name: hashlib.sha256() for name in hashed}
    whole = write_whole(target, last=[FILE_NAME], may_replace=False)
    with whole as aside, tqdm(total=plan.n_bins, desc="Packing", unit=" rows") as bar:
        shards: list[Shard] = []
        for first in range(0, plan.n_bins, rows_per_shard):
            path = aside / shard_name(len(shards))
            rows = min(rows_per_shard, plan.n_bins - first)
            _write_shard(path, _batches(builder, first, rows, bar), hashes)
            shards.append(Shard(path.name, rows, path.stat().st_size, sha256_of(path)))
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
