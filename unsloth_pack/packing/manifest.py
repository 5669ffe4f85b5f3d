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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.rows import IMAGES, image_field
from unsloth_pack.data.sources import PACK_FILES
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError


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


if TYPE_CHECKING:
    import pyarrow as pa

FILE_NAME = PACK_FILES[0]
VERSION = 1
_FORMAT = "unsloth_pack packs"


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


def _manifest_of(values: dict[str, Any]) -> PackManifest:
    values["ledger"] = TokenLedger(**values["ledger"])
    if values.get("images") is not None:
        values["images"] = PackedImages(**values["images"])
    values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
    return PackManifest(**values)
