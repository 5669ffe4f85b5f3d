"""Rows from what `--dataset` may name: a local file, a folder, a hub dataset, or the bundled demo."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.columns import check_mapping, renamed
from unsloth_pack.data.files import SUFFIXES, kind_of, read_files
from unsloth_pack.data.rows import ColumnMapping
from unsloth_pack.data.streaming import FileRows, IterableRows, Place, RawBlock, RowSource
from unsloth_pack.data.text_files import plain_name
from unsloth_pack.demo import HELDOUT_FILE, TRAIN_FILE
from unsloth_pack.demo.pictures import dense_rows
from unsloth_pack.demo.preferences import feedback_rows, preference_rows
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

_DEMO_FILES = {"train": TRAIN_FILE, "test": HELDOUT_FILE}  # by split; other demos have the same splits
_DEMO_ROWS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "vision-demo": dense_rows,
    "demo-preferences": preference_rows,
    "demo-feedback": feedback_rows,
}
PACK_FILES = ("packs.json", "shard-00000.arrow")  # of a folder of packed rows: its manifest, its first rows
_ARCHIVES = (".zip", ".lz4")  # which are not read, and so refused
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # of a data set or a model


def load_rows(dataset: str, split: str = "train", num_proc: int | None = None) -> datasets.Dataset:
    """Load the rows that `dataset` names, with their own columns.

    Args:
        dataset: a json, jsonl, csv, parquet or txt file, the text formats also compressed (.gz, .zst, .xz,
            .bz2); a folder of such files of one format, or one that `datasets.save_to_disk` wrote; "demo",
            "vision-demo", "demo-preferences" or "demo-feedback"; else a hub name.
        split: which part of a folder, a demo ("train" or "test") or a hub dataset.
        num_proc: processes that read large files; None for as many as there are cores.

    Raises:
        InputError: nothing is there, it cannot be read, it lacks the split, or it holds no rows.
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
    local, path = _find_local(dataset, split), Path(os.path.expanduser(dataset))
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
    if dataset == "demo" or dataset in _DEMO_ROWS:
        import datasets

        _check_split(dataset, split, [*_DEMO_FILES])
        if dataset == "demo":
            return [_DEMO_FILES[split]]
        return datasets.Dataset.from_list(_DEMO_ROWS[dataset](split))
    path = Path(os.path.expanduser(dataset))
    if os.path.isdir(path):  # unlike Path.is_dir, it raises nothing for names too long for a path
        return _load_saved(path, split) if _is_saved(path) else _files_of(path, split)
    return [path] if os.path.exists(path) else None


def check_there(dataset: str, is_stream: bool = False) -> None:
    """Refuse a path at which nothing lies, or a file of an unknown suffix. No name is looked up on the hub.

    Args:
        is_stream: whether a pattern stands for several files.
    """
    path = os.path.expanduser(dataset)
    if os.path.isfile(path):
        kind_of(Path(path))
    elif is_stream and glob.has_magic(dataset):
        _match(dataset)
    elif os.path.exists(path):
        return
    elif not HUB_NAME.fullmatch(dataset) or plain_name(Path(dataset)).suffix[1:].isalpha():
        # "teknium/OpenHermes-2.5" is a hub name, "data/rows.jsnl" is not
        raise InputError(f"{dataset}: file not found; check the path, which is relative to {Path.cwd()}")


def _match(pattern: str) -> list[Path]:
    """The files that match a pattern."""
    names = glob.glob(os.path.expanduser(pattern), recursive=True)
    if files := sorted(Path(name) for name in names if os.path.isfile(name)):
        return files
    raise InputError(f"{pattern}: no file matches it; check the pattern, relative to {Path.cwd()}")


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


def _files_of(folder: Path, split: str) -> list[Path]:
    """The data files in a folder that belong to a split.

    The splits are those that `datasets` finds: those that the folder's README declares, or that the names of
    folders or files tell. It leaves out files that name no split where others do: these are of `train`.
    """
    import datasets
    import yaml
    from datasets.data_files import FILES_TO_IGNORE

    try:
        data_files = datasets.load_dataset_builder(str(folder)).config.data_files
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: no data files are found ({reason}); name the files instead") from None
    root = folder.resolve()
    splits = {
        str(name): sorted(folder / os.path.relpath(file, root) for file in files)
        for name, files in data_files.items()
    }
    readme = folder / "README.md"
    if not readme.is_file() or not re.search(r"(?m)^configs:", readme.read_text(errors="replace")):
        in_splits = {file for files in splits.values() for file in files}
        others = [
            file
            for file in sorted(folder.rglob("*"))
            if plain_name(file).suffix.lower() in {*SUFFIXES, *_ARCHIVES}
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)
            and file.name not in FILES_TO_IGNORE
            and file not in in_splits
        ]
        if others and "train" in splits:
            raise InputError(
                f"{others[0]}: in no split, beside files of train; put train in its name or move it"
            )
        splits |= {"train": others} if others else {}
    _check_split(folder, split, list(splits))
    return splits[split]


class ChosenRows:
    """Rows of another source, under other column names, or its first rows alone, see `DataSet`."""

    def __init__(self, source: RowSource, columns: ColumnMapping, limit: int | None):
        self.name, self._source, self._columns, self._limit = source.name, source, columns, limit
        self.parts: tuple[RowSource, ...] = (self,)
        if len(source.parts) > 1:
            self.parts = tuple(ChosenRows(part, columns, limit) for part in source.parts)

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        if self._limit is not None and place.seen >= self._limit:
            return
        for block in self._source.one_pass(place):
            if self._columns:
                block = replace(block, read=partial(self._read, block))
            if self._limit is not None and block.end.seen >= self._limit:
                rows = self._limit - block.begin.seen
                yield replace(block, n_rows=rows, end=replace(block.end, seen=self._limit))
                return
            yield block

    def _read(self, block: RawBlock, chosen: range) -> datasets.Dataset:
        return renamed(block.read(chosen), self._columns)


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
        """The same for rows with these columns: without shared ones that they lack."""
        columns = self.columns
        if self.shares_columns:
            columns = {name: to for name, to in columns.items() if name in names}
        check_mapping(columns, names, self.name)
        return replace(self, columns=columns)

    def read(self, split: str = "train", num_proc: int | None = None) -> datasets.Dataset:
        """Its rows under their own column names, as `load_rows` reads them; `split` where it names none."""
        self._check_split()
        return load_rows(self.path, self.split or split, num_proc)

    def chosen(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Of the rows that were read those that are taken, under the column names that it gives them."""
        rows = renamed(rows, self.columns)
        return rows if self.limit is None else rows.select(range(min(self.limit, len(rows))))

    def check_there(self, is_stream: bool = False) -> None:
        """Refuse a path at which nothing lies, and a split of a file."""
        check_there(self.path, is_stream)
        self._check_split()

    def open(self) -> RowSource:
        """Its rows under their own column names, to be read as they are needed."""
        self._check_split()
        return open_stream(self.path, self.split or "train")

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
