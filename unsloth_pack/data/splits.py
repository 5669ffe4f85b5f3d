"""The splits of a folder of data files, as `datasets` finds them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError, first_line

_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")


def splits_of(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Sort the data files of a folder into splits.

    The splits are those that the folder's README declares. Otherwise they are `train`, `validation` and
    `test`, by the words in the names of a file's folders, or else in its own name. Files without such a word
    are of `train` where no other file is.

    Raises:
        InputError: the README cannot be read or declares several data sets, or a file has no one split.
    """
    from datasets.data_files import FILES_TO_IGNORE

    root, declared = _declared(folder)
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
            return {split: found for split, found in matches.items() if found}
        raise InputError(f"{folder}: no file is here that its README declares; name the files instead")
    splits: dict[str, list[Path]] = {}
    for name, file in names.items():
        splits.setdefault(_split_of(name, file), []).append(file)
    others = splits.pop("", [])
    if others and "train" in splits:
        raise InputError(f"{others[0]}: in no split, beside files of train; put train in its name or move it")
    return splits | ({"train": others} if others else {})


def _declared(folder: Path) -> tuple[Path, dict[str, re.Pattern[str]]]:
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
