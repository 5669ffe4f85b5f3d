"""Each way to describe a packed row, read as the lengths of its documents.

    packed_seq_lengths  [3, 4, 2]              or one such list a row
    seq_lengths         [3, 4, 2]              TRL's column; the lists of joined examples follow each other
    cu_seq_lens_q       [0, 3, 7, 9]           0 and the running sum
    seq_idx             0 0 0 1 1 1 1 2 2      the number of each token's document
    position_ids        0 1 2 0 1 2 3 0 1      restart with every document
    attention_mask      1 1 1 2 2 2 2 3 3      some packers number documents there

A reading gives one list of lengths a row.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import InputError

PER_TOKEN = {"seq_idx": 0, "position_ids": 1, "attention_mask": 0}  # what each token of a document adds
_OF_LENGTHS = ("packed_seq_lengths", "seq_lengths")


def on_host(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every description as numpy or nested lists; those on a device come in one transfer."""
    host: dict[str, Any] = {}
    remote: dict[str, Tensor] = {}
    for name, value in given.items():
        if is_remote(value):
            remote[name] = value
        else:
            host[name] = value.detach().numpy().astype(np.int64) if isinstance(value, Tensor) else value
    if remote:
        flat = torch.cat([value.reshape(-1).to(torch.int32) for value in remote.values()]).cpu().numpy()
        for name, value in remote.items():
            host[name], flat = flat[: value.numel()].reshape(value.shape), flat[value.numel() :]
    return host


def is_remote(value: Any) -> bool:
    """Whether a value is a tensor on a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def one_a_token(name: str, values: Any, shape: tuple[int, int]) -> np.ndarray:
    """`[B, T]` whole numbers, from as many or from one row for all.

    Raises:
        InputError: another shape, or something else than whole numbers.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths
        array = np.asarray(values, dtype=object)
    if array.dtype.kind not in "iub":
        raise InputError(f"{name} is {reprlib.repr(values)}; give one whole number a token")
    if array.shape not in (shape, (1, shape[1]), shape[1:]):
        raise InputError(
            f"{name} has shape {list(array.shape)}, the input ids {list(shape)}; give one number a token"
        )
    return np.broadcast_to(array, shape)


def documents_by_description(host: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, list[list[int]]]:
    """The lengths of the documents, row by row, as each description has them.

    Args:
        host: the descriptions, as `on_host` gives them; those per token as `one_a_token` does.
        shape: (B, T) of the input ids.

    Raises:
        InputError: lengths that are none, or that do not fit the shape.
    """
    documents: dict[str, list[list[int]]] = {}
    for name in _OF_LENGTHS:
        if name in host:
            rows = _nested(name, host[name])
            if name == "seq_lengths" and shape[0] == 1:  # of several examples, joined to one row
                rows = [[length for row in rows for length in row]]
            elif name == "seq_lengths" and len(rows[0]) == shape[0] and "attention_mask" in host:
                rows = [[length] for length in rows[0]]  # of a column of numbers; the mask has to agree
            documents[name] = _checked_lengths(name, rows, shape)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in host:
            documents[name] = [_from_running_sum(name, host[name], shape)]
    for name, step in PER_TOKEN.items():
        if name in host and (name != "attention_mask" or (host[name] > 1).any()):
            documents[name] = _from_runs(host[name], step)
    return documents


def without_padding(name: str, rows: list[list[int]], real: np.ndarray) -> list[list[int]]:
    """The documents of every row without the padding that the attention mask `real` marks at its end.

    Raises:
        InputError: the mask cuts a document, or keeps tokens behind padding.
    """
    kept = []
    for number, lengths in enumerate(rows):
        n_real = (real[number] != 0).sum()
        ends = np.cumsum([0, *lengths])
        # Lengths leave padding out; the other descriptions number it too, as documents of its own
        may_end = ends[-1:] if name in _OF_LENGTHS else ends
        if (real[number][:n_real] == 0).any() or n_real not in may_end:
            raise InputError(
                f"attention_mask keeps {n_real} tokens of row {number}, {name} has {lengths[:8]}; "
                "leave it out, or mask only the padding at the end of the row"
            )
        kept.append([length for length, end in zip(lengths, ends[1:], strict=True) if end <= n_real])
    return kept


def _nested(name: str, values: Any) -> list[list[Any]]:
    """One list of Python numbers a row, from such lists or from that of a single row."""
    if isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim):
        try:
            rows = [np.asarray(row).tolist() for row in values]
        except ValueError:  # lists of several depths
            rows = []
        n_lists = sum(isinstance(row, list) for row in rows)
        if rows and n_lists in (0, len(rows)):
            return rows if n_lists else [rows]
    raise InputError(f"{name} is {reprlib.repr(values)}; give the length of each document")


def _checked_lengths(name: str, rows: list[list[Any]], shape: tuple[int, int]) -> list[list[int]]:
    if len(rows) != shape[0]:
        raise InputError(f"{name} describes {len(rows)} rows of {shape[0]}; give one list a row")
    for number, row in enumerate(rows):
        if not all(map(_is_length, row)):
            raise InputError(f"{name} of row {number} are {row[:8]}; lengths are whole numbers of tokens")
        if sum(row) > shape[1]:
            raise InputError(
                f"{name} of row {number} sum to {sum(row)}, more than its {shape[1]} tokens; "
                "give the lengths of this very row"
            )
    if not any(map(sum, rows)):
        raise InputError(f"{name} {rows[0][:8]} hold no token; give the length of each document")
    return [[int(length) for length in row if length] for row in rows]


def _is_length(value: Any) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool) and value >= 0


def _from_running_sum(name: str, values: Any, shape: tuple[int, int]) -> list[int]:
    try:
        cu = np.asarray(values).reshape(-1)
    except ValueError:  # lists of several depths
        cu = np.asarray(values, dtype=object).reshape(-1)
    is_whole = np.issubdtype(cu.dtype, np.integer)
    if shape[0] != 1:
        raise InputError(f"{name} describes one row, the input ids have {shape[0]}; flatten them to [1, T]")
    if not is_whole or not cu.size or cu[0] != 0 or (np.diff(cu) < 0).any() or not 0 < cu[-1] <= shape[1]:
        raise InputError(
            f"{name} is {cu[:8].tolist()} for {shape[1]} tokens; give 0 and the running sum of the lengths"
        )
    return [int(length) for length in np.diff(cu) if length]


def _from_runs(rows: np.ndarray, step: int) -> list[list[int]]:
    """For every row, the lengths of the runs in which each value is the one before it plus `step`."""
    lengths = []
    for row in rows:
        cuts = np.flatnonzero(np.diff(row) != step) + 1
        lengths.append(np.diff(np.concatenate([[0], cuts, [len(row)]])).tolist())
    return lengths
