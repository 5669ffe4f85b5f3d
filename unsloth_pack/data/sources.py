"""Rows from what `--dataset` may name: a local file, a folder, a hub dataset, or the bundled demo."""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.columns import renamed
from unsloth_pack.data.files import SUFFIXES, kind_of, read_files
from unsloth_pack.data.rows import ColumnMapping, telling_names
from unsloth_pack.data.streaming import FileRows, IterableRows, Place, RawBlock, RowSource
from unsloth_pack.data.text_files import COMPRESSED, plain_name
from unsloth_pack.demo import HELDOUT_FILE, TRAIN_FILE
from unsloth_pack.errors import InputError, first_line

if TYPE_CHECKING:
    import datasets

_DEMO_FILES = {"train": TRAIN_FILE, "test": HELDOUT_FILE}
PACK_FILES = ("packs.json", "shard-00000.arrow")  # of a folder of packed rows: its manifest, its first rows
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # of a data set or a model
_UNREAD = {".lz4", ".zip"}  # compressions
_MEDIA = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".mp4", ".wav", ".mp3", ".flac"}


def load_rows(dataset: str, split: str = "train", num_proc: int | None = None) -> datasets.Dataset:
    """Load the rows that `dataset` names, with their own columns.

    Args:
        dataset: a json, jsonl, csv, parquet or txt file, the text formats also compressed (.gz, .zst, .xz,
            .bz2); a folder of such files of one format, or one that `datasets.save_to_disk` wrote; "demo" or
            "vision-demo"; else a hub name.
        split: which part of a folder, a demo ("train" or "test") or a hub dataset. A single file is read
            whole for every split.
        num_proc: processes that read large files; None for as many as there are cores.

    Returns:
        The rows. Those of large files lie in the data set cache, where the next call finds them, as long as
        the files hold the same.

    Raises:
        InputError: nothing is there, it cannot be read, it lacks the split, it holds no rows, or it is a
            folder with archives or with images, which would not be read.
    """
    local = _find_local(dataset, split)
    if local is None:
        from unsloth_pack.data.lossless_json import read_exactly

        check_there(dataset)
        rows = read_exactly(_load_hub(dataset, split))
    else:
        rows = read_files(local, num_proc) if isinstance(local, list) else local
    if not len(rows):
        raise InputError(f"{dataset}: 0 rows; give a dataset with at least one")
    return rows


def open_stream(dataset: str, split: str = "train") -> RowSource:
    """The rows that `dataset` names, to be read as they are needed and never as a whole.

    Args:
        dataset: as for `load_rows`; a pattern such as `data/*.jsonl.gz` stands for all files that match it.
    """
    local = _find_local(dataset, split)
    path = Path(os.path.expanduser(dataset))
    if local is None and glob.has_magic(dataset):
        local = _match(dataset)
        path = Path(os.path.commonpath([file.parent for file in local]))
    if isinstance(local, list):
        return FileRows(dataset, local, path if path in local[0].parents else local[0].parent)
    if local is not None:
        return IterableRows(dataset, local.to_iterable_dataset())
    check_there(dataset)
    return IterableRows(dataset, _load_hub(dataset, split, streaming=True))


def _find_local(dataset: str, split: str) -> list[Path] | datasets.Dataset | None:
    """The files, or the saved rows, that `dataset` names; None where it is no path and no demo."""
    _check_named(dataset)
    if dataset == "vision-demo":
        import datasets

        from unsloth_pack.demo.pictures import SPLITS, dense_rows

        _check_split("vision-demo", split, [*SPLITS])
        return datasets.Dataset.from_list(dense_rows(split))
    if dataset == "demo":
        _check_split(dataset, split, list(_DEMO_FILES))
        return [_DEMO_FILES[split]]
    path = Path(os.path.expanduser(dataset))
    if os.path.isdir(path):  # unlike Path.is_dir, it raises nothing for names too long for a path
        return _load_saved(path, split) if _is_saved(path) else _files_of(path, split)
    return [path] if os.path.exists(path) else None


def check_there(dataset: str, is_stream: bool = False) -> None:
    """Refuse a path at which nothing lies, or a file of an unknown suffix. What may be a name on the hub is
    not looked up.

    Args:
        is_stream: whether a pattern stands for several files.
    """
    _check_named(dataset)
    path = os.path.expanduser(dataset)
    if os.path.isfile(path):
        kind_of(Path(path))
    elif os.path.exists(path):
        return
    elif glob.has_magic(dataset):
        if not is_stream:
            raise InputError(
                f"{dataset}: file not found; give --streaming, by which a pattern stands for all its files, "
                "or a folder, or the files with commas between them"
            )
        _match(dataset)
    elif "://" in dataset:
        raise InputError(f"{dataset}: file not found; give a file, or of a hub data set its OWNER/NAME alone")
    elif not HUB_NAME.fullmatch(dataset) or plain_name(Path(dataset)).suffix[1:].isalpha():
        # "teknium/OpenHermes-2.5" is a hub name, "data/rows.jsnl" is not
        raise InputError(f"{dataset}: file not found; check the path, which is relative to {Path.cwd()}")


def _match(pattern: str) -> list[Path]:
    """The files that match a pattern."""
    names = glob.glob(os.path.expanduser(pattern), recursive=True)
    if files := sorted(Path(name) for name in names if os.path.isfile(name)):
        return files
    raise InputError(f"{pattern}: no file matches it; check the pattern, relative to {Path.cwd()}")


def _check_named(dataset: object) -> None:
    if not isinstance(dataset, str) or not dataset.strip():
        raise InputError(f"dataset is {dataset!r}; give a file, a folder, a hub name or 'demo'")


def _load_hub(name: str, split: str, streaming: bool = False) -> Any:
    """A `datasets.Dataset`, or if `streaming`, an `IterableDataset`."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(name, split=split, **({"streaming": True} if streaming else {}))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{name}: no such file or folder, and split {split!r} of a hub dataset of that name did not load "
            f"({reason}); check the name and the network, or give a local file"
        ) from None


def _is_saved(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` has written a folder; packed rows are refused."""
    if any((folder / name).exists() for name in PACK_FILES):
        raise InputError(
            f"{folder}: packed rows, but documents are needed here; give the data they were packed from"
        )
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _load_saved(folder: Path, split: str) -> datasets.Dataset:
    import datasets

    from unsloth_pack.data.lossless_json import read_exactly

    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{folder}: not a complete saved dataset ({error}); save it again") from None
    if isinstance(saved, datasets.DatasetDict):
        _check_split(folder, split, list(saved))
        saved = saved[split]
    return read_exactly(saved)


def _check_split(dataset: str | Path, split: str, available: list[str]) -> None:
    if split not in available:
        raise InputError(f"{dataset}: no split {split!r}; choose one of {', '.join(sorted(available))}")


# The data files of a folder, and its splits, as `datasets` finds them.

_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")


def _files_of(folder: Path, split: str) -> list[Path]:
    """The data files in a folder that belong to a split."""
    paths = [(file, file.relative_to(folder)) for file in sorted(folder.rglob("*"))]
    shown = [file for file, path in paths if not any(part.startswith(".") for part in path.parts)]
    _check_files(folder, shown)
    files = [file for file in shown if plain_name(file).suffix.lower() in SUFFIXES and file.is_file()]
    splits = _splits_of(folder, files)
    if not splits:
        raise InputError(f"{folder}: no {', '.join(SUFFIXES)} file in this folder; give one that has some")
    _check_split(folder, split, list(splits))
    return splits[split]


def _check_files(folder: Path, files: list[Path]) -> None:
    """Refuse a folder whose archives or images would not be read."""
    for file in files:
        *_, inner, last = ("", "", *(suffix.lower() for suffix in file.suffixes))
        if inner in SUFFIXES and last in _UNREAD:
            raise InputError(
                f"{file}: files in {last} are not read, only in {', '.join(COMPRESSED)}; unpack it, or move "
                "it elsewhere"
            )
    captions = [file for file in files if file.stem == "metadata" and file.suffix.lower() in SUFFIXES]
    media = [file for file in files if file.suffix.lower() in _MEDIA]
    if captions and media:
        raise InputError(
            f"{folder}: {captions[0].name} describes images, video or sound ({media[0].name}), which are not "
            "supported; give the file itself to train on its text alone"
        )


def _splits_of(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Sort the data files of a folder into splits.

    The splits are those that the folder's README declares. Otherwise they are `train`, `validation` and
    `test`, by the words in the names of a file's folders, or else in its own name. Files without such a word
    are of `train` where no other file is.
    """
    from datasets.data_files import FILES_TO_IGNORE

    root, declared = _declared_splits(folder)
    names = {
        file.relative_to(root).as_posix(): file
        for file in files
        if file.is_relative_to(root) and file.name not in FILES_TO_IGNORE
    }
    if declared:
        matches = {
            split: [file for name, file in names.items() if pattern.match(name)]
            for split, pattern in declared.items()
        }
        if any(matches.values()):
            return {split: of_split for split, of_split in matches.items() if of_split}
        raise InputError(f"{folder}: no file is here that its README declares; name the files instead")
    splits: dict[str, list[Path]] = {}
    for name, file in names.items():
        splits.setdefault(_split_of(name, file), []).append(file)
    others = splits.pop("", [])
    if others and "train" in splits:
        raise InputError(f"{others[0]}: in no split, beside files of train; put train in its name or move it")
    return splits | ({"train": others} if others else {})


def _declared_splits(folder: Path) -> tuple[Path, dict[str, re.Pattern[str]]]:
    """The folder of the data files, and the patterns of their names by split, as the README declares them."""
    import yaml
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from fsspec.utils import glob_translate
    from huggingface_hub import metadata_load

    paths = [folder / name for name in ("README.md", ".huggingface.yaml") if (folder / name).is_file()]
    card: dict[str, Any] = {}
    try:
        for path in paths:
            card |= (metadata_load(path) if path.suffix == ".md" else yaml.safe_load(path.read_text())) or {}
        configs = MetadataConfigs.from_dataset_card_data(card)
        default = configs.get_default_config_name()
        config = configs.get(default, {})
        declared = {
            split: re.compile("|".join(glob_translate(posixpath.normpath(pattern)) for pattern in patterns))
            for split, patterns in sanitize_patterns(config.get("data_files") or {}).items()
        }
    except (OSError, ValueError, TypeError, LookupError, yaml.YAMLError) as error:
        raise InputError(f"{paths[-1]}: {first_line(error)}; correct the splits that it declares") from None
    if configs and default is None:
        raise InputError(f"{folder}: its README declares {', '.join(configs)}; give the files of one")
    return folder / str(config.get("data_dir") or ""), declared


def _split_of(name: str, file: Path) -> str:
    """The split that a file's path in the folder names; empty where it names none."""
    from datasets.data_files import SPLIT_KEYWORDS

    if shard := _SHARD.match(name):
        return shard[1]
    for part in posixpath.split(name.lower()):
        words = {*re.split(r"[^a-z]+", part)}
        splits = [str(split) for split, keywords in SPLIT_KEYWORDS.items() if words & {*keywords}]
        if len(splits) > 1:
            raise InputError(f"{file}: named as of the splits {' and '.join(splits)}; rename or move it")
        if splits:
            return splits[0]
    return ""


class ChosenRows:
    """Rows of another source, under other column names, or its first rows alone.

    Args:
        columns: what their columns are called here, see `renamed`.
        limit: how many are read in a pass; None for all.
    """

    def __init__(self, source: RowSource, columns: ColumnMapping, limit: int | None):
        self.name, self._source, self._columns, self._limit = source.name, source, columns, limit
        self.parts: tuple[RowSource, ...] = (self,)
        if len(source.parts) > 1:
            self.parts = tuple(ChosenRows(part, columns, limit) for part in source.parts)

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        if self._limit is not None and place.seen >= self._limit:
            return
        yield from self._blocks(place)

    def _blocks(self, place: Place) -> Iterator[RawBlock]:
        for block in self._source.one_pass(place):
            if self._columns:
                block = replace(block, read=partial(self._renamed, block), columns=self._columns)
            if self._limit is not None and block.end.seen >= self._limit:
                rows = self._limit - block.begin.seen
                yield replace(block, n_rows=rows, end=replace(block.end, seen=self._limit))
                return
            yield block

    def _renamed(self, block: RawBlock, chosen: range) -> datasets.Dataset:
        """Those of the first block have to have the columns; a few rows of any block may lack them."""
        rows = block.n_rows if self._limit is None else min(self._limit, block.n_rows)
        is_first = block.begin.seen == 0 and len(chosen) == rows
        return renamed(block.read(chosen), self._columns, may_lack=not is_first)


@dataclass(frozen=True)
class DataSet:
    """One of the data sets of a run: its place, the part to take, and the meaning of its columns."""

    path: str  # as for `load_rows`
    weight: float = 1.0  # of its documents in a mixture, see `mixture`
    split: str | None = None  # which part of a folder or a hub data set; None for the usual one
    limit: int | None = None  # its first rows alone; None for all
    columns: ColumnMapping = field(default_factory=dict)  # what its columns are called here, see `renamed`
    shares_columns: bool = False  # whether other data sets have the same `columns`, and use what fits them

    @property
    def name(self) -> str:
        return f"{self.path} ({self.split})" if self.split else self.path

    def for_rows_with(self, names: Sequence[str]) -> DataSet:
        """The same without the shared columns that its rows, with columns of these names, lack."""
        if not self.shares_columns:
            return self
        return replace(self, columns={name: to for name, to in self.columns.items() if name in names})

    def read(self, split: str = "train", num_proc: int | None = None) -> datasets.Dataset:
        """Its rows under their own column names, as `load_rows` reads them; `split` where it names none."""
        self._check_split()
        return load_rows(self.path, self.split or split, num_proc)

    def chosen(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Of the rows that were read those that are taken, under the column names that it gives them."""
        try:
            with telling_names(self.columns, are_shared=self.shares_columns):
                rows = renamed(rows, self.columns)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        return rows if self.limit is None else rows.select(range(min(self.limit, len(rows))))

    def check_there(self, is_stream: bool = False) -> None:
        """Refuse a path at which nothing lies, and a split of a file."""
        check_there(self.path, is_stream)
        self._check_split()

    def check(self, is_stream: bool = False) -> None:
        """Refuse what the first rows tell: as `check_there`, and a column that is not among theirs."""
        self.check_there(is_stream)
        if self.columns and not self.shares_columns and os.path.exists(os.path.expanduser(self.path)):
            rows = None
            with suppress(InputError, OSError):  # what cannot be read is refused when all of it is read
                rows = next(
                    (block.read(range(block.n_rows)) for block in self.open().one_pass(Place())), None
                )
            if rows is not None:
                self.chosen(rows)

    def open(self) -> RowSource:
        """Its rows under their own column names, to be read as they are needed."""
        self._check_split()
        return open_stream(self.path, self.split or "train")

    def chosen_of(self, source: RowSource) -> RowSource:
        """Of a source that was opened the rows that are taken, under the column names that it gives them."""
        return ChosenRows(source, self.columns, self.limit)

    @property
    def has_splits(self) -> bool:
        """Whether it is neither a file, nor a pattern of files, nor a saved data set without splits."""
        path = os.path.expanduser(self.path)
        if os.path.isdir(path):
            return not os.path.isfile(os.path.join(path, "state.json"))
        return not (os.path.exists(path) or glob.has_magic(path))

    def _check_split(self) -> None:
        if self.split is not None and not self.has_splits:
            raise InputError(
                f"{self.path}: split is {self.split!r}, and it has no splits; leave it out or give the folder"
            )
