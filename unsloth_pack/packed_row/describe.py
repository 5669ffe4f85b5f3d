"""Read the one `PackedRow` of a step from a model call.

These describe the same row. Each is read as one list of document lengths a row, in one transfer from the
device:

    packed_seq_lengths  [3, 4, 2]              or one such list a row
    seq_lengths         [3, 4, 2]              TRL's column; the lists of joined examples follow each other
    cu_seq_lens_q       [0, 3, 7, 9]           0 and the running sum, with max_length_q
    seq_idx             0 0 0 1 1 1 1 2 2      the number of each token's document
    position_ids        0 1 2 0 1 2 3 0 1      restart with every document
    attention_mask      1 1 1 2 2 2 2 3 3      some packers number documents there

Two that disagree are an error, on every step. A trainer that knows the row beforehand passes it as
`packed_row`, and nothing is read from the device.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import is_tracing

from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.labels import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow

# What a model call may carry beside position_ids and attention_mask
_LENGTH_KEYWORDS = ("packed_seq_lengths", "seq_lengths")
_MAX_LENGTHS = ("max_length_q", "max_length_k")
ROW_KEYWORDS = (*_LENGTH_KEYWORDS, "cu_seq_lens_q", "cu_seq_lens_k", *_MAX_LENGTHS, "seq_idx")
PER_TOKEN = {"seq_idx": 0, "position_ids": 1, "attention_mask": 0}  # how it grows within a document
LAST_POSITION = 2**24  # angles are computed in float32, which skips whole numbers above
_SYNONYMS = dict.fromkeys(("segment_ids", "document_ids", "doc_ids", "sequence_ids"), "seq_idx")
_SIMILARITY = 0.75  # of difflib, from 0 to 1


@lru_cache
def find_closest_keyword(name: str) -> str | None:
    """Return the row keyword that `name` seems to stand for, or None.

    transformers ignores unknown keywords, so a misspelt one would turn the row into one document.
    """
    if name in ROW_KEYWORDS:
        return None
    return _SYNONYMS.get(name) or next(iter(get_close_matches(name, ROW_KEYWORDS, 1, _SIMILARITY)), None)


def copy_to_host(descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """Copy every description to the host, as numpy or nested lists, in one transfer from the device."""
    host: dict[str, Any] = {}
    remote: dict[str, Tensor] = {}
    for name, value in descriptions.items():
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
    """Return whether a value is a tensor on a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def broadcast_per_token(name: str, values: Any, shape: tuple[int, int]) -> np.ndarray:
    """Broadcast whole numbers to `[B, T]`; one row may stand for all.

    Raises:
        InputError: the shape is another, or they are no whole numbers.
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


def read_documents(host: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, list[list[int]]]:
    """Read the document lengths of every row from each description.

    Args:
        host: the descriptions, as `copy_to_host` returns them; those per token broadcast to `[B, T]`.
        shape: (B, T) of the input ids.

    Raises:
        InputError: they are no lengths, or do not fit the shape.
    """
    documents: dict[str, list[list[int]]] = {}
    for name in _LENGTH_KEYWORDS:
        if name in host:
            rows = _list_rows(name, host[name])
            if name == "seq_lengths" and shape[0] == 1:  # of several examples, joined to one row
                rows = [[length for row in rows for length in row]]
            elif name == "seq_lengths" and len(rows[0]) == shape[0] and "attention_mask" in host:
                rows = [[length] for length in rows[0]]  # of a column of numbers; the mask has to agree
            documents[name] = _check_lengths(name, rows, shape)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in host:
            documents[name] = [_read_running_sum(name, host[name], shape)]
    for name, step in PER_TOKEN.items():
        if name in host and (name != "attention_mask" or (host[name] > 1).any()):
            documents[name] = _measure_runs(host[name], step)
    return documents


def drop_padding(name: str, rows: list[list[int]], real: np.ndarray) -> list[list[int]]:
    """Drop the padding at the end of every row from its document lengths.

    Args:
        real: `[B, T]`, 0 on padding.

    Raises:
        InputError: the mask cuts a document, or keeps tokens behind padding.
    """
    documents = []
    for number, lengths in enumerate(rows):
        n_real = (real[number] != 0).sum()
        ends = np.cumsum([0, *lengths])
        # Lengths leave padding out; the other descriptions count it as documents of its own
        may_end = ends[-1:] if name in _LENGTH_KEYWORDS else ends
        if (real[number][:n_real] == 0).any() or n_real not in may_end:
            raise InputError(
                f"attention_mask keeps {n_real} tokens of row {number}, {name} has {lengths[:8]}; "
                "leave it out, or mask only the padding at the end of the row"
            )
        documents.append([length for length, end in zip(lengths, ends[1:], strict=True) if end <= n_real])
    return documents


def _list_rows(name: str, values: Any) -> list[list[Any]]:
    """Return one list of Python numbers a row; the input may be the list of a single row."""
    if isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim):
        try:
            rows = [np.asarray(row).tolist() for row in values]
        except ValueError:  # lists of several depths
            rows = []
        n_lists = sum(isinstance(row, list) for row in rows)
        if rows and n_lists in (0, len(rows)):
            return rows if n_lists else [rows]
    raise InputError(f"{name} is {reprlib.repr(values)}; give the length of each document")


def _check_lengths(name: str, rows: list[list[Any]], shape: tuple[int, int]) -> list[list[int]]:
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


def _read_running_sum(name: str, values: Any, shape: tuple[int, int]) -> list[int]:
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


def _measure_runs(rows: np.ndarray, step: int) -> list[list[int]]:
    """Return, for every row, the lengths of the runs in which each value grows by `step`."""
    lengths = []
    for row in rows:
        cuts = np.flatnonzero(np.diff(row) != step) + 1
        lengths.append(np.diff(np.concatenate([[0], cuts, [len(row)]])).tolist())
    return lengths


def row_from_call(
    inputs: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    unpad: Callable[[PaddedBatch | None], PaddedBatch | None],
) -> PackedRow | PaddedBatch | None:
    """Return the packed row of a model call, or None for an ordinary batch that keeps its padding.

    Args:
        inputs: the decoder's named arguments.
        kwargs: the call's other arguments: `packed_row` (the row itself, or where the padding of an ordinary
            batch stands), or those of `ROW_KEYWORDS`.
        unpad: returns the `PaddedBatch` of an ordinary batch that is to lose its padding; takes what is known
            of it.

    Raises:
        InputError: as `describe_row`; documents that continue a cache; input ids that are not `[B, T]`; a
            keyword that is nearly one of `ROW_KEYWORDS`.
    """
    for name in kwargs:
        if (keyword := find_closest_keyword(name)) is not None:
            raise InputError(f"{name} is no argument of the model; do you mean {keyword}?")
    input_ids = inputs["input_ids"]
    attention_mask, past_key_values = inputs["attention_mask"], inputs["past_key_values"]
    if input_ids is not None and getattr(input_ids, "ndim", 0) != 2:
        actual = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise InputError(f"input_ids is {actual}; give a tensor [B, T], of a packed row [1, T]")
    tokens = input_ids if input_ids is not None else inputs["inputs_embeds"]
    if tokens is None:
        return None
    shape = (tokens.shape[0], tokens.shape[1])
    position_ids, axes = _split_axes(inputs["position_ids"], shape)
    known = kwargs.get("packed_row")
    if known is not None and not isinstance(known, PaddedBatch):
        return _check_row(known, shape, tokens.device)
    descriptions = {name: kwargs[name] for name in ROW_KEYWORDS if kwargs.get(name) is not None}
    if not descriptions:
        if known is not None and known.shape != shape:
            raise _wrong_shape_error(known.shape, shape)
        if (batch := unpad(known)) is not None:
            return batch
        if position_ids is None or shape[1] == 1 or getattr(position_ids, "ndim", 0) > 2:
            return None  # positions on three axes describe no row by themselves: those of an image repeat
        if isinstance(attention_mask, dict):
            return None  # masks that `generate` builds beforehand, one for each type of layer
    if past_key_values is not None:
        continues = past_key_values.get_seq_length() > 0
        if continues and descriptions:
            raise InputError("packed documents cannot continue a cache; pass past_key_values=None")
        # `generate` builds such masks for a static cache; they say who sees whom
        if continues or (not descriptions and _is_ready_mask(attention_mask)):
            return None
    return describe_row(
        shape,
        tokens.device,
        position_ids=position_ids,
        attention_mask=attention_mask,
        axes=axes,
        **descriptions,
    )


def describe_row(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: Any = None,
    axes: Tensor | None = None,
    **descriptions: Any,
) -> PackedRow | None:
    """Return the packed row that these descriptions mean, or None for an ordinary batch.

    Args:
        shape: (B, T) of the input ids. Several rows become one flattened row.
        device: where the model computes.
        attention_mask: `[B, T]`; zeros must be padding at the end of a packed row. A mask that numbers the
            documents from 1 has to agree with the other descriptions.
        axes: `[3, B, T]`; rotary positions in time, height and width, from 0 in every document.
        descriptions: None means absent.

            - packed_seq_lengths: int tensor or list `[n]`; for several rows a list of lists, or `[B, n]`
                padded with 0. A sum below T leaves a padded tail.
            - seq_lengths: likewise; the lists of several examples that were joined to one row follow each
                other.
            - cu_seq_lens_q, cu_seq_lens_k: int tensor or list `[n + 1]`, 0 and the running sum of lengths.
            - max_length_q, max_length_k: int, at least the longest document.
            - seq_idx: `[B, T]`, the number of each token's document.
            - position_ids: `[B, T]`, `[1, T]` or `[T]`; a document starts wherever they do not continue by
                one.

    Raises:
        InputError: lengths are negative or exceed T, two descriptions disagree, or the mask does not fit a
            packed row.
    """
    descriptions = _select_present(descriptions)
    max_lengths = {name: descriptions.pop(name) for name in _MAX_LENGTHS if name in descriptions}
    if max_lengths and not descriptions:
        (name, value), *_ = max_lengths.items()
        raise InputError(f"{name} is {value} and nothing says where documents end; give cu_seq_lens_q too")
    if not descriptions:
        return None
    has_row_mask = isinstance(attention_mask, Tensor) and attention_mask.shape == shape
    others = {"attention_mask": attention_mask if has_row_mask else None, "axes": axes}
    host = copy_to_host(descriptions | {name: value for name, value in others.items() if value is not None})
    axes_on_host = host.pop("axes", None)
    host |= {
        name: broadcast_per_token(name, host[name], shape)
        for name in ("seq_idx", "position_ids")
        if name in host
    }
    positions, real = host.get("position_ids"), _real_tokens(host.get("attention_mask"))
    documents = read_documents(host, shape)
    if positions is not None and positions.size and positions.max() > LAST_POSITION:
        raise InputError(f"position_ids reach {positions.max()}; give positions up to {LAST_POSITION}")
    if list(documents) == ["position_ids"] and not max_lengths and _is_ordinary_batch(positions, real):
        return None
    if attention_mask is not None and not has_row_mask:
        raise InputError(
            f"attention_mask is {_name_form(attention_mask)}, the packed row {list(shape)}; leave it out"
        )
    if real is not None:
        if not real.any():
            raise InputError("attention_mask keeps no token of any row; leave it out, or give 1 for tokens")
        documents = {name: drop_padding(name, rows, real) for name, rows in documents.items()}
    rows = _check_agreement(documents, max_lengths)
    row = _build_row(rows, positions, shape, device)
    return row if axes_on_host is None else add_axes(row, axes_on_host)


def add_axes(row: PackedRow, axes: np.ndarray) -> PackedRow:
    """Return the row with rotary positions `[3, B, T]` on three axes; padding keeps the row's own.

    Raises:
        InputError: a document does not start at 0 on all axes, or a position is negative or too large for
            float32.
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
    if axes.min() < 0 or axes.max() > LAST_POSITION:
        raise InputError(
            f"position_ids reach from {axes.min()} to {axes.max()}; give positions from 0 to {LAST_POSITION}"
        )
    return replace(row, axes=axes, _built={})


def refuse_document_ids(attention_mask: Any) -> None:
    """Refuse a mask of document ids that nothing else explains: all would count as one document.

    Raises:
        InputError: the mask holds numbers above 1.
    """
    is_of_tokens = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if is_of_tokens and not is_tracing(attention_mask) and (attention_mask > 1).any():
        raise InputError(
            f"attention_mask holds document ids, up to {int(attention_mask.max())}, which alone do not "
            "separate documents; give packed_seq_lengths, or position_ids that restart"
        )


def _split_axes(position_ids: Any, shape: tuple[int, int]) -> tuple[Any, Tensor | None]:
    """Split position ids into those along the text and those on three axes, `[3, B, T]`.

    transformers' models of vision and language pass `[4, B, T]` with both, or `[3, B, T]` with the axes
    alone.
    """
    if not isinstance(position_ids, Tensor) or position_ids.shape[1:] != shape:
        return position_ids, None
    if len(position_ids) == 4:
        return position_ids[0], position_ids[1:]
    return (None, position_ids) if len(position_ids) == 3 else (position_ids, None)


def _check_row(row: Any, shape: tuple[int, int], device: torch.device) -> PackedRow:
    if not isinstance(row, PackedRow):
        raise InputError(f"packed_row is a {type(row).__name__}; give a PackedRow, or packed_seq_lengths")
    if row.shape != shape:
        raise _wrong_shape_error(row.shape, shape)
    return row.on(device)


def _wrong_shape_error(described: tuple[int, int], shape: tuple[int, int]) -> InputError:
    return InputError(
        f"packed_row describes {list(described)} tokens, the input ids are {list(shape)}; give their own"
    )


def _select_present(descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the descriptions that are present, in the order in which they decide where padding begins.

    Raises:
        InputError: a tensor does not hold whole numbers.
    """
    order = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "packed_seq_lengths", "seq_lengths", "position_ids")
    unknown = set(descriptions) - {*ROW_KEYWORDS, "position_ids"}
    if unknown:
        raise TypeError(f"describe_row takes no {', '.join(sorted(unknown))}")
    names = (*order, *_MAX_LENGTHS)
    present = {name: descriptions[name] for name in names if descriptions.get(name) is not None}
    for name, value in present.items():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            raise InputError(f"{name} is a tensor of {value.dtype}; give whole numbers")
    whole = {name: value for name, value in present.items() if not _is_cut(name, value)}
    return whole if whole.keys() - {*_MAX_LENGTHS} else present


def _is_cut(name: str, value: Any) -> bool:
    """Return whether accelerate's dispatcher of streamed rows has cut it to one number."""
    return name.startswith("cu_seq_lens") and isinstance(value, Tensor) and value.shape == (1,)


def _real_tokens(mask: np.ndarray | None) -> np.ndarray | None:
    """Return the mask, 0 on padding, or None if it masks nothing.

    Raises:
        InputError: it holds negative numbers.
    """
    if mask is not None and (mask < 0).any():
        raise InputError(
            f"attention_mask holds {np.unique(mask)[:8].tolist()}; give 1 for tokens and 0 for padding"
        )
    return None if mask is None or mask.all() else mask


def _is_ordinary_batch(positions: np.ndarray | None, real: np.ndarray | None) -> bool:
    """Return whether the unmasked tokens of every row form one run, as in a padded batch."""
    assert positions is not None
    if real is None or not real.any():  # a mask that leaves no token says nothing
        real = np.ones_like(positions)
    return all((np.diff(row[mask != 0]) == 1).all() for row, mask in zip(positions, real, strict=True))


def _is_ready_mask(attention_mask: Any) -> bool:
    """Return whether a mask is ready for attention: `[B, 1, T, S]`, or one for each type of layer."""
    return isinstance(attention_mask, dict) or getattr(attention_mask, "ndim", 2) == 4


def _name_form(mask: Any) -> str:
    return f"of shape {list(mask.shape)}" if hasattr(mask, "shape") else f"a {type(mask).__name__}"


def _check_agreement(
    documents: Mapping[str, Sequence[Sequence[int]]], max_lengths: Mapping[str, Any]
) -> Sequence[Sequence[int]]:
    """Return the document lengths, row by row, on which all descriptions agree.

    Raises:
        InputError: two descriptions disagree, or a document exceeds its stated maximum.
    """
    (first, rows), *others = documents.items()
    for name, other_rows in others:
        for number, (row, other) in enumerate(zip(rows, other_rows, strict=True)):
            # Descriptions per token number the padding too, in runs of its own
            if row != (other[: len(row)] if name in PER_TOKEN else other):
                raise InputError(
                    f"{first} and {name} disagree on row {number}: documents of {row[:8]} tokens against "
                    f"{other[:8]}; give one of them, or make them agree"
                )
    longest = max(max(row, default=0) for row in rows)
    for name, value in max_lengths.items():
        if not (isinstance(value, int | np.integer) or (isinstance(value, Tensor) and value.numel() == 1)):
            raise InputError(f"{name} is {value!r}; give the length of the longest document")
        if int(value) < longest:
            raise InputError(
                f"{name} is {int(value)} but {first} holds a document of {longest} tokens; "
                "give the length of the longest document"
            )
    return rows


def _build_row(
    rows: Sequence[Sequence[int]], positions: np.ndarray | None, shape: tuple[int, int], device: torch.device
) -> PackedRow:
    """Build the row of these documents; the rest of each row is padding, whose positions restart."""
    lengths: list[int] = []
    is_padding: list[bool] = []
    for row in rows:
        tail = shape[1] - sum(row)
        lengths += [*row, tail] if tail else row
        is_padding += [False] * len(row) + [True] * bool(tail)
    restarting = np.concatenate([np.arange(length) for length in lengths])
    if positions is None:
        positions = restarting
    else:
        positions = np.where(np.repeat(is_padding, lengths), restarting, positions.reshape(-1))
        if positions.min() < 0:
            raise InputError(f"position_ids reach down to {positions.min()}; start each document at 0")
    return PackedRow(tuple(lengths), tuple(is_padding), positions, shape, device)
