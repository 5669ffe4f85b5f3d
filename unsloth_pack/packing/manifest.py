"""The files in a folder of packs.

packs.json               the manifest, written last
shard-00000.arrow, ...   tables with one packed row in each row:

    input_ids  [7 7 7 8 8 9]   list of int32
    labels     [. 7 7 . 8 .]   list of int32 of the same length; -100 (here .) means no loss
    cu_lengths [0 3 5 6]       list of int32: where each document starts, and the end of the last
    max_length 3               int32: tokens of the longest document
    images     [...]           only where there are some: a list of objects, see `data.image_columns`

The shards are in Arrow's stream format, uncompressed. `datasets` memory-maps such a file directly, so a run
starts without a copy, and RAM holds only the rows in use. Parquet would be smaller, but must first be decoded
into a cache of the full size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import numpy as np

from unsloth_pack.data.rows import DOCUMENT, IMAGES, image_field
from unsloth_pack.data.sources import PACK_FILES
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError

# Images in packs on disk: what the manifest says of them, and the check of every row.

if TYPE_CHECKING:
    import pyarrow as pa

Refuse = Callable[[np.ndarray, Callable[[int], str]], None]


@dataclass(frozen=True)
class PackedImages:
    """The images of packs.

    Args:
        images, vision_tokens: in all rows.
        are_paths: whether files of images are referred to by their paths, not held.
        placeholder: the token that stands for images.
        least_pixels, most_pixels: to which smaller and larger images are resized; None where the model's
            images have no such limits.
        processor: SHA-256 of all settings of the image processor that made the tokens.
    """

    images: int
    vision_tokens: int
    are_paths: bool
    placeholder: int
    least_pixels: int | None
    most_pixels: int | None
    processor: str


def check_images(
    batch: pa.RecordBatch, ids: np.ndarray, lengths: pa.ListArray, placeholder: int, refuse: Refuse
) -> None:
    """Refuse rows whose images are not those that their tokens stand for.

    Args:
        ids: of all rows, one after the other.
        lengths: of the documents of every row.
        refuse: takes what is wrong, a flag for every row, and says so of the first.
    """
    column = batch[IMAGES]
    of_row = np.repeat(np.arange(len(batch)), np.diff(column.offsets))
    images = column.flatten()
    names = (DOCUMENT, "tokens", "height", "width")
    document, tokens, height, width = (images.field(name).fill_null(-1).to_numpy() for name in names)
    n_documents = lengths.value_lengths().to_numpy()
    is_held = images.field("bytes").is_valid().to_numpy(zero_copy_only=False)
    is_named = images.field("path").is_valid().to_numpy(zero_copy_only=False)
    is_wrong = (tokens < 1) | (height < 1) | (width < 1) | (is_held == is_named)
    is_wrong |= (document < 0) | (document >= n_documents[of_row])
    same_row = np.diff(of_row, prepend=-1) == 0
    is_wrong |= same_row & (np.diff(document, prepend=0) < 0)
    refuse(
        _by_row(is_wrong, of_row, len(batch)), lambda row: "an image without its size, content or document"
    )
    first = np.cumsum(n_documents) - n_documents
    sizes = lengths.flatten().to_numpy()
    starts = np.cumsum(sizes) - sizes
    found = np.add.reduceat(ids == placeholder, starts, dtype=np.int64)
    made = np.bincount(first[of_row] + document, weights=tokens, minlength=len(sizes)).astype(np.int64)
    row_of_document = np.repeat(np.arange(len(batch)), n_documents)

    def complaint(row: int) -> str:
        number = int(np.flatnonzero((found != made) & (row_of_document == row))[0])
        return (
            f"document {number - first[row]} holds {found[number]} image tokens, and its images make "
            f"{made[number]}"
        )

    refuse(_by_row(found != made, row_of_document, len(batch)), complaint)


def _by_row(is_wrong: np.ndarray, of_row: np.ndarray, n_rows: int) -> np.ndarray:
    return np.bincount(of_row[is_wrong], minlength=n_rows) > 0


if TYPE_CHECKING:
    import pyarrow as pa

FILE_NAME = PACK_FILES[0]
VERSION = 1
_FORMAT = "unsloth_pack packs"

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A file of packed rows, with the SHA-256 of its bytes."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PackManifest:
    """The data that was packed, how it was packed, and for which tokenizer.

    Args:
        capacity: tokens that a row may hold.
        strategy: as for `plan_packs`.
        seed: of the random order in which the documents were planned; None if they kept their order.
        train_on_responses_only: whether only assistant turns have labels.
        model_name: the model whose tokenizer was used, by its name at that time.
        tokenizer_hash: of that tokenizer, see `unsloth_pack.data.tokenizer_hash`.
        data_fingerprint: SHA-256 of ids, labels and boundaries; the same for any size of shards.
        rows, documents, tokens: in all shards.
        ledger: accounts for every token that was read, from the data to the shards.
        images: of the rows; None where they have none.
    """

    capacity: int
    strategy: str
    seed: int | None
    train_on_responses_only: bool
    model_name: str
    tokenizer_hash: str
    data_fingerprint: str
    rows: int
    documents: int
    tokens: int
    ledger: TokenLedger
    shards: tuple[Shard, ...]
    images: PackedImages | None = None

    def values(self) -> dict[str, Any]:
        """What is written down, by name."""
        return {name: value for name, value in asdict(self).items() if name != "images" or value is not None}

    def to_json(self) -> str:
        """The text of the manifest's file."""
        return json.dumps({"format": _FORMAT, "version": VERSION, **self.values()}, indent=1) + "\n"


def schema(has_images: bool = False) -> pa.Schema:
    """The columns of a shard."""
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    columns = {"input_ids": tokens, "labels": tokens, "cu_lengths": tokens, "max_length": pa.int32()}
    if has_images:
        columns[IMAGES] = image_field(is_packed=True).type
    return pa.schema(columns.items())


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.arrow"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_packs(dataset: str) -> Path | None:
    """The folder, if `dataset` names one that holds packs or a part of them; else None."""
    folder = Path(os.path.expanduser(dataset))
    if dataset in BUNDLED_MODELS or not os.path.isdir(folder):
        return None
    return folder if any((folder / name).exists() for name in PACK_FILES) else None


def read_manifest(folder: Path) -> PackManifest:
    """The manifest of a folder of packs; the shards are not read.

    Raises:
        InputError: it is missing, incomplete or of another version, or its fields are wrong.
    """
    path = folder / FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: packs without their {FILE_NAME}, which is written last; pack the data anew"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a whole manifest ({error}); pack the data anew") from None
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
        raise InputError(f"{path}: not a manifest of packs; pack the data anew")
    version = values.pop("version", None)
    if version != VERSION:
        raise InputError(
            f"{path}: packs of format version {version!r}, and this release reads version {VERSION}; "
            "pack the data anew, or change the release"
        )
    try:
        return _manifest_of(values)
    except (TypeError, KeyError) as error:
        raise InputError(f"{path}: not a whole manifest ({error}); pack the data anew") from None


def check_can_be_read(manifest: PackManifest) -> None:
    """Refuse, before any shard is written, what `read_manifest` would refuse.

    Raises:
        InputError: a field is of another type than it says.
    """
    try:
        values = json.loads(manifest.to_json())
        _manifest_of({name: value for name, value in values.items() if name not in ("format", "version")})
    except (TypeError, KeyError) as error:
        raise InputError(f"an argument does not fit into the manifest ({error}); give plain values") from None


def _manifest_of(values: dict[str, Any]) -> PackManifest:
    values["ledger"] = _typed(TokenLedger, values["ledger"])
    if values.get("images") is not None:
        values["images"] = _typed(PackedImages, values["images"])
    values["shards"] = tuple(_typed(Shard, shard) for shard in values["shards"])
    for number, shard in enumerate(values["shards"]):
        if shard.file != shard_name(number):
            raise TypeError(f"file is {shard.file!r}")
    return _typed(PackManifest, values)


def _typed(kind: type[T], values: Any) -> T:
    """A dataclass of these values.

    Raises:
        TypeError: there are more or fewer than it has fields, or one is of another type.
    """
    made = kind(**values)
    hints = get_type_hints(kind)
    for field in fields(made):  # type: ignore[arg-type]
        value = getattr(made, field.name)
        if field.name != "shards" and not isinstance(value, hints[field.name]):
            raise TypeError(f"{field.name} is {value!r}")
    return made
