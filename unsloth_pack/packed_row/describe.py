"""Read the one `PackedRow` of a step from what a model call says of it.

These describe the same row. Each is read as one list of document lengths a row, in one transfer from the
device:

    packed_seq_lengths  [3, 4, 2]              or one such list a row
    seq_lengths         [3, 4, 2]              TRL's column; the lists of joined examples follow each other
    cu_seq_lens_q       [0, 3, 7, 9]           0 and the running sum, with max_length_q
    seq_idx             0 0 0 1 1 1 1 2 2      the number of each token's document
    position_ids        0 1 2 0 1 2 3 0 1      restart with every document
    attention_mask      1 1 1 2 2 2 2 3 3      some packers number documents there

`parents` may come with `packed_seq_lengths`: for each document the one that it continues, by its number in
the row, or -1. Documents that continue one follow it directly.

Two that disagree are an error, on every step.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import is_tracing

from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.row import PackedRow, count_tokens_above, find_misplaced

# What a model call may carry beside position_ids and attention_mask
_LENGTH_KEYWORDS = ("packed_seq_lengths", "seq_lengths")
_RUNNING_SUMS = ("cu_seq_lens_q", "cu_seq_lens_k")
_MAX_LENGTHS = ("max_length_q", "max_length_k")
ROW_KEYWORDS = (*_LENGTH_KEYWORDS, *_RUNNING_SUMS, *_MAX_LENGTHS, "seq_idx", "parents")
_PER_TOKEN = {"seq_idx": 0, "position_ids": 1, "attention_mask": 0}  # how it grows within a document
# The first of these that a call has says where the padding is
_DESCRIPTIONS = (*_LENGTH_KEYWORDS, *_RUNNING_SUMS, "seq_idx", "position_ids")
LAST_POSITION = 2**24  # angles are computed in float32, which skips whole numbers above


def describe_call(
    inputs: Mapping[str, Any], descriptions: Mapping[str, object], tokens: Tensor
) -> PackedRow | None:
    """Return the packed row of a model call, or None for an ordinary batch.

    Args:
        inputs: the decoder's named arguments; positions alone may describe a row.
        descriptions: the call's arguments of `ROW_KEYWORDS` that are not None.
        tokens: its ids `[B, T]` or embeddings `[B, T, C]`.

    Raises:
        InputError: as `describe_row`; documents that continue a cache.
    """
    shape, mask, cache = (
        (tokens.shape[0], tokens.shape[1]),
        inputs["attention_mask"],
        inputs["past_key_values"],
    )
    positions, axes = _split_axes(inputs["position_ids"], shape)
    if not descriptions:
        # Positions on three axes describe no row by themselves: those of an image repeat
        if positions is None or shape[1] == 1 or getattr(positions, "ndim", 0) > 2:
            return None
        # `generate` builds such masks, also for a static cache; they say who sees whom
        if isinstance(mask, dict) or (cache is not None and getattr(mask, "ndim", 2) == 4):
            return None
    if cache is not None and cache.get_seq_length() > 0:
        if descriptions:
            raise InputError("packed documents cannot continue a cache; pass past_key_values=None")
        return None
    return describe_row(
        shape, tokens.device, position_ids=positions, attention_mask=mask, axes=axes, **descriptions
    )


def _split_axes(position_ids: object, shape: tuple[int, int]) -> tuple[Any, Tensor | None]:
    """Split `[4, B, T]` into positions along the text and on three axes; `[3, B, T]` are the axes alone."""
    if not isinstance(position_ids, Tensor) or position_ids.shape[1:] != shape:
        return position_ids, None
    if len(position_ids) == 4:
        return position_ids[0], position_ids[1:]
    return (None, position_ids) if len(position_ids) == 3 else (position_ids, None)


def describe_row(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: object = None,
    axes: Tensor | None = None,
    parents: object = None,
    **descriptions: object,
) -> PackedRow | None:
    """Return the packed row that these descriptions mean, or None for an ordinary batch.

    Args:
        shape: (B, T) of the input ids. Several rows become one flattened row.
        device: where the model computes.
        attention_mask: `[B, T]`; zeros must be padding at the end of a packed row. A mask that numbers the
            documents from 1 has to agree with the other descriptions.
        axes: `[3, B, T]`; rotary positions in time, height and width, from 0 in every document.
        parents: one list a row, or one list for one row: see above.
        descriptions: see above; tensors, arrays or lists of whole numbers, or None. For several rows
            `packed_seq_lengths` and `seq_lengths` are lists of lists, or `[B, n]` padded with 0; a sum below
            T leaves a padded tail. `seq_idx` and `position_ids` are `[B, T]`, `[1, T]` or `[T]`; a document
            starts wherever positions do not continue by one.

    Raises:
        InputError: lengths are negative or exceed T, two descriptions disagree, the mask does not fit a
            packed row, or `parents` are no preorder of the documents.
    """
    present = {name: descriptions[name] for name in _DESCRIPTIONS if descriptions.get(name) is not None}
    max_lengths = {name: descriptions[name] for name in _MAX_LENGTHS if descriptions.get(name) is not None}
    # accelerate's dispatcher of streamed rows cuts a running sum to one number
    cut = {name for name in _RUNNING_SUMS if getattr(present.get(name), "shape", None) == (1,)}
    present = {name: x for name, x in present.items() if name not in cut} or present
    names = [*present, *([] if axes is None else ["position_ids"])]
    if parents is not None and names != ["packed_seq_lengths"]:
        raise InputError(f"parents come with {', '.join(names) or 'nothing'}; give packed_seq_lengths alone")
    if not present:
        for name, value in max_lengths.items():
            raise InputError(
                f"{name} is {value} and nothing says where documents end; give cu_seq_lens_q too"
            )
        return None
    has_row_mask = isinstance(attention_mask, Tensor) and attention_mask.shape == shape
    others = {"attention_mask": attention_mask if has_row_mask else None, "axes": axes, "parents": parents}
    host = copy_to_host(present | {name: value for name, value in others.items() if value is not None})
    for name in ("seq_idx", "position_ids"):
        if name in host:
            host[name] = _broadcast_per_token(name, host[name], shape)
    positions, mask = host.get("position_ids"), host.get("attention_mask")
    real = None if mask is None or mask.all() else mask != 0
    numbering = ["attention_mask"] if mask is not None and (mask > 1).any() else []
    documents = {n: _read_documents(n, host[n], shape, mask is not None) for n in [*present, *numbering]}
    if [*documents] == ["position_ids"] and not max_lengths and is_ordinary_batch(host["position_ids"], real):
        return None
    if attention_mask is not None and not has_row_mask:
        form = list(getattr(attention_mask, "shape", [])) or type(attention_mask).__name__
        raise InputError(f"attention_mask is {form}, the packed row {list(shape)}; leave it out")
    first = next(iter(documents))
    if real is not None:
        documents[first] = _drop_padding(first, documents[first], real)
    rows = _check_agreement(documents, max_lengths)
    row = _build_row(rows, positions, shape, device)
    if parents is not None:
        return _add_parents(row, rows, host["parents"])
    return row if axes is None else add_axes(row, host["axes"])


def copy_to_host(descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """Copy every description to the host, as numpy or nested lists, in one transfer from the device."""
    host = dict(descriptions)
    for name, value in host.items():
        if isinstance(value, Tensor) and name not in ("attention_mask", "axes") and value.is_floating_point():
            raise InputError(f"{name} is a tensor of {value.dtype}; give whole numbers")
        if isinstance(value, Tensor) and not is_remote(value):
            host[name] = value.detach().numpy().astype(np.int64)
    remote = {name: value for name, value in host.items() if is_remote(value)}
    if remote:
        flat = torch.cat([value.reshape(-1).to(torch.int32) for value in remote.values()]).cpu().numpy()
        for name, value in remote.items():
            host[name], flat = flat[: value.numel()].reshape(value.shape), flat[value.numel() :]
    return host


def is_remote(value: object) -> bool:
    """Return whether a value is a tensor on a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _read_whole(name: str, values: object, remedy: str) -> np.ndarray:
    """Return whole numbers, int64; refuse all else, and lists of several depths."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.array(None)
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"{name} is {reprlib.repr(values)}; {remedy}")
    return array.astype(np.int64)


def _read_rows(name: str, values: Any, remedy: str) -> list[np.ndarray]:
    """Return the whole numbers of every row; a list that is not nested is that of one row."""
    has_items = (isinstance(values, Sequence) or getattr(values, "ndim", 0) > 0) and len(values) > 0
    is_nested = has_items and bool(getattr(values[0], "ndim", isinstance(values[0], Sequence)))
    return [_read_whole(name, row, remedy) for row in (values if is_nested else [values])]


def _broadcast_per_token(name: str, values: object, shape: tuple[int, int]) -> np.ndarray:
    """Broadcast whole numbers to `[B, T]`; one row may stand for all."""
    array = _read_whole(name, values, "give one whole number a token")
    if array.shape not in (shape, (1, shape[1]), shape[1:]):
        raise InputError(
            f"{name} has shape {list(array.shape)}, the input ids {list(shape)}; give one number a token"
        )
    return np.broadcast_to(array, shape)


def _read_documents(name: str, values: Any, shape: tuple[int, int], has_mask: bool) -> list[list[int]]:
    """Read the document lengths of every row from a description."""
    if name in _PER_TOKEN:
        return _measure_runs(values, _PER_TOKEN[name])
    if name in _RUNNING_SUMS:
        remedy = "give 0 and the running sum of the lengths of one row"
        cu = _read_whole(name, values, remedy).reshape(-1)
        if (
            shape[0] != 1
            or not cu.size
            or cu[0] != 0
            or (cu[1:] < cu[:-1]).any()
            or not 0 < cu[-1] <= shape[1]
        ):
            raise InputError(f"{name} is {cu[:8].tolist()} for {list(shape)} tokens; {remedy}")
        return [[length for length in np.diff(cu).tolist() if length]]
    remedy = "give the length of each document"
    rows = _read_rows(name, values, remedy)
    if name == "seq_lengths" and shape[0] == 1:  # of several examples, joined to one row
        rows = [np.concatenate([row.reshape(-1) for row in rows])]
    elif name == "seq_lengths" and rows[0].shape == shape[:1] and has_mask:
        rows = list(rows[0][:, None])  # of a column of numbers; the mask has to agree
    if len(rows) != shape[0]:
        raise InputError(f"{name} describes {len(rows)} rows of {shape[0]}; give one list a row")
    for number, row in enumerate(rows):
        if row.ndim != 1 or (row < 0).any() or sum(row.tolist()) > shape[1]:
            problem = f"{name} of row {number} are {row.reshape(-1)[:8].tolist()}, of {shape[1]} tokens"
            raise InputError(f"{problem}; {remedy}")
    if not any(map(np.any, rows)):
        raise InputError(f"{name} {rows[0][:8].tolist()} hold no token; {remedy}")
    return [row[row > 0].tolist() for row in rows]


def _measure_runs(rows: np.ndarray, step: int) -> list[list[int]]:
    """Return, for every row, the lengths of the runs in which each value grows by `step`."""
    cuts = [np.flatnonzero(np.diff(row) != step) + 1 for row in rows]
    return [np.diff(np.concatenate([[0], cut, [rows.shape[1]]])).tolist() for cut in cuts]


def _drop_padding(name: str, rows: list[list[int]], real: np.ndarray) -> list[list[int]]:
    """Drop the padding at the end of every row, False in `real` `[B, T]`, from its document lengths."""
    documents = []
    for number, lengths in enumerate(rows):
        n_real = real[number].sum()
        ends = np.cumsum([0, *lengths])
        # Lengths leave padding out; the other descriptions count it as documents of its own
        may_end = ends[-1:] if name in _LENGTH_KEYWORDS else ends
        if not real[number][:n_real].all() or n_real not in may_end or not real.any():
            raise InputError(
                f"attention_mask keeps {n_real} tokens of row {number}, {name} has {lengths[:8]}; "
                "leave it out, or mask only the padding at the end of the row"
            )
        documents.append([length for length, end in zip(lengths, ends[1:], strict=True) if end <= n_real])
    return documents


def is_ordinary_batch(positions: np.ndarray, real: np.ndarray | None) -> bool:
    """Return whether positions `[B, T]` rise by one over the unmasked tokens of every row."""
    if real is None or not real.any():  # a mask that leaves no token says nothing
        real = np.ones_like(positions, dtype=bool)
    return all((np.diff(row[mask]) == 1).all() for row, mask in zip(positions, real, strict=True))


def _check_agreement(
    documents: Mapping[str, list[list[int]]], max_lengths: Mapping[str, object]
) -> list[list[int]]:
    """Return the document lengths, row by row, on which all descriptions agree."""
    (first, rows), *others = documents.items()
    for name, other_rows in others:
        for number, (row, other) in enumerate(zip(rows, other_rows, strict=True)):
            # Descriptions per token number the padding too, in runs of its own
            if row != (other[: len(row)] if name in _PER_TOKEN else other):
                raise InputError(
                    f"{first} and {name} disagree on row {number}: documents of {row[:8]} tokens against "
                    f"{other[:8]}; give one of them, or make them agree"
                )
    longest = max(max(row, default=0) for row in rows)
    for name, value in max_lengths.items():
        remedy = "give the length of the longest document"
        stated = _read_whole(name, value.cpu() if isinstance(value, Tensor) else value, remedy)
        if stated.size != 1 or stated.item() < longest:
            raise InputError(f"{name} is {value} but {first} holds a document of {longest} tokens; {remedy}")
    return rows


def _build_row(
    rows: list[list[int]], positions: np.ndarray | None, shape: tuple[int, int], device: torch.device
) -> PackedRow:
    """Build the row of these documents; the rest of each row is padding, whose positions restart."""
    lengths: list[int] = []
    is_padding: list[bool] = []
    for row in rows:
        tail = shape[1] - sum(row)
        lengths += [*row, tail] if tail else row
        is_padding += [False] * len(row) + [True] * bool(tail)
    restarting = np.concatenate([np.arange(length) for length in lengths])
    if positions is not None:
        restarting = np.where(np.repeat(is_padding, lengths), restarting, positions.reshape(-1))
        _check_range(restarting)
    return PackedRow(tuple(lengths), tuple(is_padding), restarting, shape, device)


def _add_parents(row: PackedRow, rows: list[list[int]], parents: object) -> PackedRow:
    """Return the row whose documents continue others; `rows` are the document lengths row by row."""
    by_row = _read_rows("parents", parents, "give one whole number a document, -1 for none")
    if len(by_row) != len(rows):
        raise InputError(f"parents describe {len(by_row)} rows of {len(rows)}; give one list a row")
    all_parents: list[int] = []
    for number, (own, lengths) in enumerate(zip(by_row, rows, strict=True)):
        where, n = f"parents of row {number}", len(lengths)
        if own.shape != (n,):
            raise InputError(f"{where} are {own.size} for {n} documents; give one a document, -1 for none")
        if (unknown := np.flatnonzero((own < -1) | (own >= n))).size:
            document = unknown[0]
            raise InputError(f"{where}: document {document} continues {own[document]}; give -1 to {n - 1}")
        if (wrong := find_misplaced(own.tolist())) is not None:
            problem = f"{where}: document {wrong} does not follow {own[wrong]}, which it continues"
            raise InputError(f"{problem}; put a document's branches directly behind it")
        first = len(all_parents)
        all_parents += [parent + first if parent >= 0 else -1 for parent in own.tolist()]
        all_parents += [-1] * (sum(lengths) < row.shape[1])  # the padding
    positions = row.positions + np.repeat(count_tokens_above(row.lengths, all_parents), row.lengths)
    _check_range(positions)
    return replace(row, parent=tuple(all_parents), positions=positions, _built={})


def _check_range(positions: np.ndarray) -> None:
    if positions.min() < 0 or positions.max() > LAST_POSITION:
        raise InputError(
            f"position_ids reach from {positions.min()} to {positions.max()}; start each document at 0, and "
            f"give positions up to {LAST_POSITION}"
        )


def add_axes(row: PackedRow, axes: np.ndarray) -> PackedRow:
    """Return the row with rotary positions `[3, B, T]` on three axes; padding keeps the row's own.

    Raises:
        InputError: a document does not start at 0 on all axes, or a position is out of range.
    """
    axes = axes.reshape(3, -1).astype(np.int64)
    axes = np.where(np.repeat(row.is_padding, row.lengths), row.positions, axes)
    starts = axes[:, row.starts]
    if starts.any():
        document = int(np.flatnonzero(starts.any(axis=0))[0])
        raise InputError(
            f"position_ids of document {document} start at {starts[:, document].tolist()} in time, height "
            "and width; let every document start at 0"
        )
    _check_range(axes)
    return replace(row, axes=axes, _built={})


def refuse_document_ids(attention_mask: object) -> None:
    """Refuse a mask of document ids that nothing else explains: all would count as one document."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2 or is_tracing(attention_mask):
        return
    if (attention_mask > 1).any():
        raise InputError(
            f"attention_mask holds document ids, up to {int(attention_mask.max())}, which alone do not "
            "separate documents; give packed_seq_lengths, or position_ids that restart"
        )
