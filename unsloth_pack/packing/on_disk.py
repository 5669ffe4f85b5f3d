"""Packed rows in a folder: write_packs and read_packs.

packs.json               the manifest, written last
shard-00000.arrow, ...   tables with one packed row in each row:

    input_ids  [7 7 7 8 8 9]   list of int32
    labels     [. 7 7 . 8 .]   list of int32 of the same length; -100 (here .) means no loss
    cu_lengths [0 3 5 6]       list of int32: where each document starts, and the end of the last
    max_length 3               int32: tokens of the longest document
    images     [...]           only where there are some: a list of objects, see `data/rows.py`
    parts      [0 1 2 0 1 2]   only of preferences: list of int32, see `data/rows.py`
    teacher_..., reference_... only where a model was asked: see `model_columns.py`

The shards are in Arrow's stream format, uncompressed. `datasets` memory-maps such a file directly, so a run
starts without a copy, and RAM holds only the rows in use. Parquet would be smaller, but must first be decoded
into a cache of the full size.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.checkpoints.atomic import atomic_dir, holds
from unsloth_pack.data.cache import digest, scan
from unsloth_pack.data.rows import IMAGES, PARTS, image_field, update_with_images
from unsloth_pack.data.sources import PACK_FILES
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.data.tokenize import IGNORE_INDEX
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError
from unsloth_pack.packing.dataset import DOCUMENTS_A_BATCH, check_columns, plan_rows
from unsloth_pack.packing.model_columns import (
    BYTES,
    TEACHER_COLUMNS,
    PackedReference,
    PackedTeacher,
    RowModel,
    add_model_columns,
    types_of,
)
from unsloth_pack.packing.planner import check_positive

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_MANIFEST = PACK_FILES[0]
_FORMAT, _VERSION = "unsloth_pack packs", 1
_NEWER = {"teacher": None, "objective": "sft", "reference": None}  # 0.2.0 reads packs without these
_LAST_ID = 2**31 - 1  # of int32
_BYTES_A_SHARD, _BYTES_A_TOKEN = 2**28, 8  # of ids and labels


@dataclass(frozen=True)
class PackedImages:
    """The images of packs."""

    images: int  # in all rows
    vision_tokens: int
    are_paths: bool  # whether files of images are referred to by their paths, not held
    placeholder: int  # the token that stands for images
    least_pixels: int | None  # to which smaller images are resized; None where the model has no such limit
    most_pixels: int | None  # to which larger images are resized
    processor: str  # SHA-256 of all settings of the image processor that made the tokens


@dataclass(frozen=True)
class Shard:
    """A file of packed rows, with the SHA-256 of its bytes."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PackManifest:
    """The data that was packed, how it was packed, and for which tokenizer."""

    capacity: int  # tokens that a row may hold
    strategy: str  # as for `plan_packs`
    seed: int | None  # of the random order in which documents were planned; None if they kept their order
    train_on_responses_only: bool  # whether only assistant turns have labels
    model_name: str  # the model whose tokenizer was used, by its name at that time
    tokenizer_hash: str  # of that tokenizer, see `unsloth_pack.data.tokenizer_hash`
    data_fingerprint: str  # SHA-256 of ids, labels and boundaries; the same for any size of shards
    rows: int  # in all shards, as the next two
    documents: int
    tokens: int
    ledger: TokenLedger  # accounts for every token that was read, from the data to the shards
    shards: tuple[Shard, ...]
    images: PackedImages | None = None  # of the rows; None where they have none
    teacher: PackedTeacher | None = None  # whose most likely tokens the rows hold; None where they hold none
    objective: str = "sft"  # what the documents are for
    reference: PackedReference | None = None  # whose log-probabilities the rows hold, likewise

    @property
    def more_types(self) -> dict[str, pa.DataType]:
        """The types of the columns that not all packs have."""
        import pyarrow as pa

        types = {IMAGES: image_field(is_packed=True).type} if self.images is not None else {}
        types |= {PARTS: pa.list_(pa.int32())} if self.objective != "sft" else {}
        model = self.teacher or self.reference
        return types if model is None else types | types_of(model)

    @property
    def schema(self) -> pa.Schema:
        """The columns of a shard."""
        import pyarrow as pa

        tokens = pa.list_(pa.int32())
        types = {"input_ids": tokens, "labels": tokens, "cu_lengths": tokens, "max_length": pa.int32()}
        return pa.schema((types | self.more_types).items())


def find_packs(dataset: str) -> Path | None:
    """The folder, if `dataset` names one that holds packs or a part of them; else None."""
    folder = Path(os.path.expanduser(dataset))
    if dataset in BUNDLED_MODELS or not os.path.isdir(folder):
        return None
    return folder if any((folder / name).exists() for name in PACK_FILES) else None


def read_manifest(folder: Path) -> PackManifest:
    """The manifest of a folder of packs; InputError if it is missing, incomplete or of another version."""
    path = folder / _MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        stated = values.pop("format"), values.pop("version")
        if stated != (_FORMAT, _VERSION):
            raise ValueError(f"it is of {stated}, this release reads {(_FORMAT, _VERSION)}")
        values["ledger"] = TokenLedger(**values["ledger"])
        kinds = {"images": PackedImages, "teacher": PackedTeacher, "reference": PackedReference}
        for name, kind in kinds.items():
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
        return PackManifest(**values)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{path}: not a whole manifest ({error}); pack the data anew") from None


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
    objective: str = "sft",
    model: RowModel | None = None,
) -> PackManifest:
    """Pack tokenised documents into a new folder, and return the manifest. RAM holds a few hundred rows.

    The files are written aside, and get their place once they are complete: see `atomic_dir`. So an
    interrupted run leaves nothing that could be mistaken for packs.

    Args:
        documents: `input_ids` and `labels`, as `unsloth_pack.data.tokenize.tokenize` gives them, `images`
            where there are some, and `parts` where they are preferences.
        folder: new, or empty.
        capacity, strategy: as for `pack_dataset`; the rows are the same, in the same order.
        tokenizer_hash: from `unsloth_pack.data.tokenizer_hash`.
        ledger: of the documents' tokens, also from `tokenize`.
        seed: plan over the documents in a random order, which changes the documents that share a row; None
            keeps their order.
        train_on_responses_only, model_name: noted in the manifest.
        rows_per_shard: None for shards of about 256 MiB of tokens and images.
        images: what the manifest says of the images; needed where documents have a column of them.
        objective: what the documents are for; dpo, orpo or kto where they have parts.
        model: a teacher or reference, whose columns are stored beside those of the rows.

    Raises:
        InputError: `folder` holds something, the disk is full, or the documents cannot be packed, see
            `pack_dataset`; an id is not from 0 to 2**31 - 1; or a label is neither -100 nor its token.
    """
    import pyarrow as pa
    from datasets.utils import tqdm

    target = Path(os.path.expanduser(folder)).resolve()
    if target.exists() and (not target.is_dir() or holds(target)):
        raise InputError(f"{folder}: not an empty folder; give a new one for the packs")
    if rows_per_shard is not None:
        check_positive("rows_per_shard", rows_per_shard)
    if images is None and IMAGES in check_columns(documents):
        raise InputError("the documents have images; say how they were prepared, in images")
    columns = ["input_ids", "labels", *([IMAGES] if images else []), *([PARTS] if objective != "sft" else [])]
    documents = documents.select_columns(columns)
    documents = documents if seed is None else documents.shuffle(seed)
    plan, builder = plan_rows(documents, capacity, strategy)
    packed = None if model is None else model.packed
    manifest = PackManifest(
        capacity=int(capacity),
        strategy=strategy,
        seed=None if seed is None else int(seed),
        train_on_responses_only=train_on_responses_only,
        model_name=model_name,
        tokenizer_hash=tokenizer_hash,
        data_fingerprint="",  # once the rows are written, and the shards
        rows=plan.n_bins,
        documents=plan.n_documents,
        tokens=plan.tokens,
        ledger=ledger,
        shards=(),
        images=images,
        teacher=packed if isinstance(packed, PackedTeacher) else None,
        objective=objective,
        reference=packed if isinstance(packed, PackedReference) else None,
    )
    bytes_a_row = max(_BYTES_A_TOKEN * capacity, builder.bytes_a_row)
    bytes_a_row += 0 if manifest.teacher is None else BYTES * manifest.teacher.top_k * capacity
    n_rows = rows_per_shard or max(1, _BYTES_A_SHARD // bytes_a_row)
    _check_tokens(documents)
    schema = manifest.schema
    hashes = {name: hashlib.sha256() for name in schema.names if name != "max_length"}
    shards: list[Shard] = []
    whole = atomic_dir(target, last=[_MANIFEST], may_replace=False)
    with whole as aside, tqdm(total=plan.n_bins, desc="Packing", unit=" rows") as bar:
        for first in range(0, plan.n_bins, n_rows):
            path, end = aside / f"shard-{len(shards):05d}.arrow", min(first + n_rows, plan.n_bins)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
                tables = builder.tables(first, end)
                for rows in tables if model is None else add_model_columns(tables, model):
                    table = _with_boundaries(rows, schema)
                    stream.write_table(table)
                    _update(hashes, table)
                    bar.update(len(table))
            shards.append(Shard(path.name, end - first, path.stat().st_size, digest(path)))
        fingerprint = hashlib.sha256(b"".join(one.digest() for one in hashes.values())).hexdigest()
        manifest = replace(manifest, data_fingerprint=fingerprint, shards=tuple(shards))
        values = asdict(manifest)
        for name, default in _NEWER.items():
            if values[name] == default:
                del values[name]
        text = json.dumps({"format": _FORMAT, "version": _VERSION, **values}, indent=1)
        (aside / _MANIFEST).write_text(text + "\n", encoding="utf-8")
    return manifest


def _check_tokens(documents: datasets.Dataset) -> None:
    """Refuse ids and labels that a shard cannot hold, or that `read_packs` would refuse."""
    import pyarrow.compute as pc

    row = 0
    for table in scan(documents, ["input_ids", "labels"], DOCUMENTS_A_BATCH):
        ids, labels = (pc.list_flatten(table[name]).to_numpy() for name in ("input_ids", "labels"))
        is_bad = (ids < 0) | (ids > _LAST_ID) | ((labels != IGNORE_INDEX) & (labels != ids))
        if is_bad.any():
            at = int(np.argmax(is_bad))
            row += pc.list_parent_indices(table["input_ids"].combine_chunks())[at].as_py()
            raise InputError(
                f"row {row}: token {ids[at]} with label {labels[at]}; give ids from 0 to {_LAST_ID}, and as "
                f"labels the tokens themselves, not shifted, or {IGNORE_INDEX}"
            )
        row += len(table)


def _with_boundaries(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with `cu_lengths` and `max_length` instead of `seq_lengths`."""
    import pyarrow as pa

    lengths = table["seq_lengths"].to_pylist()
    columns = {name: table[name] for name in table.schema.names} | {
        "cu_lengths": [np.cumsum([0, *of_row]) for of_row in lengths],
        "max_length": [max(of_row) for of_row in lengths],
    }
    return pa.table({name: columns[name] for name in schema.names}).cast(schema)


def _update(hashes: dict[str, Any], table: pa.Table) -> None:
    """Feed the numbers of a table of a shard to the hash of each column."""
    for name, one in hashes.items():
        if name == IMAGES:
            update_with_images(one, table[name])
        else:
            one.update(table[name].combine_chunks().flatten().to_numpy())


def read_packs(
    folder: str | Path, tokenizer_hash: str, *, reads_teacher: bool = False
) -> tuple[PackManifest, datasets.Dataset]:
    """The rows that `write_packs` wrote, memory-mapped; RAM holds only 4 bytes per document.

    They are ready to train on: give them to `SFTTrainer` with `SFTConfig(packing=False, padding_free=True,
    max_length=None)`, whose collator turns `seq_lengths` into positions that restart at each document. It
    also masks the label of the first token of every document.

    Args:
        tokenizer_hash: from `unsloth_pack.data.tokenizer_hash`.
        reads_teacher: the rows get the columns of the packs' teacher too, as arrays.

    Returns:
        The manifest, and a `datasets.Dataset` of `input_ids`, `labels` and `seq_lengths`, and of `images`
        or `parts` where there are some, as `pack_dataset` would give them; and the reference's column.

    Raises:
        InputError: the packs are for another tokenizer; a shard is missing, cut or not what was written; or
            boundaries contradict the rows. The error names the file and the row.
    """
    import datasets
    from datasets.utils import tqdm

    folder = Path(os.path.expanduser(folder))
    manifest = read_manifest(folder)
    if tokenizer_hash != manifest.tokenizer_hash:
        raise InputError(
            f"{folder}: packed with another tokenizer, that of {manifest.model_name or 'another model'} "
            f"({manifest.tokenizer_hash[:12]}, the model's is {str(tokenizer_hash)[:12]}); pack the data anew"
        )
    shards = []
    unread = () if reads_teacher else TEACHER_COLUMNS
    columns = ["input_ids", "labels", *(name for name in manifest.more_types if name not in unread)]
    for shard in tqdm(manifest.shards, desc="Verifying packs", unit=" shards"):
        path = folder / shard.file
        lengths = _checked_lengths(path, shard, manifest)
        tokens = datasets.Dataset.from_file(str(path)).select_columns(columns)
        shards.append(tokens.add_column("seq_lengths", lengths, new_fingerprint=shard.sha256))
    if (n_rows := sum(map(len, shards))) != manifest.rows:
        raise InputError(
            f"{folder}: {n_rows} rows where the manifest has {manifest.rows}; pack the data anew"
        )
    rows = datasets.concatenate_datasets(shards)
    if reads_teacher:  # arrays: as Python's numbers they would take longer to read than a step
        rows = rows.with_format("numpy", columns=[*TEACHER_COLUMNS], output_all_columns=True)
    return manifest, rows


def _checked_lengths(path: Path, shard: Shard, manifest: PackManifest) -> pa.ChunkedArray:
    """The document lengths of every row of a shard, after checks of all its bytes and rows."""
    import pyarrow as pa

    lengths, row = [], 0
    try:
        if digest(path) != shard.sha256:
            raise InputError(f"{path}: its checksum differs from the manifest's; copy it again, or pack anew")
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            if stream.schema.remove_metadata() != manifest.schema:
                raise InputError(f"{path}: its columns are not those of packs; pack the data anew")
            for batch in filter(len, stream):
                lengths.append(_lengths_of(batch, manifest.capacity, f"{path} row", row))
                row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy it again, or pack anew") from None
    return pa.chunked_array(lengths, pa.list_(pa.int32()))


def _lengths_of(batch: pa.RecordBatch, capacity: int, where: str, first_row: int) -> pa.ListArray:
    """The document lengths of every row of a batch; boundaries that contradict the tokens are refused."""
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
