"""Weights written into safetensors files one at a time, so that no more than one of them is held.

safetensors writes a file from all of its tensors at once. Names, shapes and types are known beforehand here,
and with them the place of every weight: the headers are written first, then each weight as it comes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

_NAMES = "model{suffix}.safetensors"
_INDEX = "model.safetensors.index.json"
SHARD = "5GB"  # the largest file
_DTYPES = {  # as a header names them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    expected: Mapping[str, Tensor],
    about: Mapping[str, str],
) -> None:
    """Write weights into one safetensors file, or into several and an index.

    Args:
        weights: name and tensor, on the CPU, in any order. A tensor may be freed once the next is asked for.
        expected: meta tensors of the same names, shapes and types.
        about: goes into the header of the one file, else into the index.

    Raises:
        KeyError: a weight that was not expected, or one that did not come.
    """
    plan = split_torch_state_dict_into_shards(
        {name: weight.contiguous() for name, weight in expected.items()},
        filename_pattern=_NAMES,
        max_shard_size=SHARD,
    )
    header = {"format": "pt", **({} if plan.is_sharded else about)}
    places: dict[str, tuple[Path, int]] = {}
    for file, names in plan.filename_to_tensors.items():
        starts = _write_header(folder / file, {name: expected[name] for name in names}, header)
        places |= {name: (folder / file, start) for name, start in starts.items()}
    for name, weight in weights:
        path, start = places.pop(name)
        with path.open("r+b") as written:
            written.seek(start)
            written.write(weight.contiguous().flatten().view(torch.uint8).numpy().data)
    if places:
        raise KeyError(f"weights that were expected and did not come: {', '.join(sorted(places))}")
    if plan.is_sharded:
        index = {"metadata": {**plan.metadata, **about}, "weight_map": plan.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_header(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> dict[str, int]:
    """Write the beginning of a file; returns the byte at which each weight starts.

    The format: the length of the header in 8 bytes, the header as JSON, then all weights. Wide numbers come
    first, so that each starts at a multiple of its size.
    """
    in_order = sorted(weights.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    header: dict[str, object] = {"__metadata__": dict(about)}
    ends = 0
    for name, weight in in_order:
        begins, ends = ends, ends + weight.numel() * weight.element_size()
        shape = list(weight.shape)
        header[name] = {"dtype": _DTYPES[weight.dtype], "shape": shape, "data_offsets": [begins, ends]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + ends)
    entries: dict[str, Any] = header
    return {name: 8 + len(text) + entries[name]["data_offsets"][0] for name in weights}


def converted_apart(
    expected: Mapping[str, Tensor], convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, str]:
    """Which weights have to be converted together: the name of a group for each.

    Args:
        expected: meta tensors by name.
        convert: gives weights other names, takes some apart or joins some.
    """
    wanted = _shapes(convert(dict(expected)))
    for group_of in (lambda name: name, _layer_of):
        groups: dict[str, dict[str, Tensor]] = {}
        for name, weight in expected.items():
            groups.setdefault(group_of(name), {})[name] = weight
        found: dict[str, tuple[int, ...]] = {}
        for group in groups.values():
            found |= _shapes(convert(group))
        if found == wanted:
            return {name: group_of(name) for name in expected}
    return dict.fromkeys(expected, "")


def _layer_of(name: str) -> str:
    """The path to the numbered layer that a weight lies in, or its own name."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}
