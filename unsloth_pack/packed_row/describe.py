"""From what a model call says of its row to the one `PackedRow` of the step.

The same row may be described by `packed_seq_lengths`, by TRL's and transformers' `cu_seq_lens_q/k`,
`max_length_q/k` and `seq_idx`, by the `seq_lengths` column of TRL's packed data sets, or by `position_ids`
that restart. All are read on the host, in one transfer. Two that disagree are an error, on every step.

A trainer that knows the row beforehand passes it as `packed_row`, and nothing is read from the device.
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

# The keywords of a model call that describe a packed row, and names that are nearly one of them.

# What a model call may carry beside position_ids and attention_mask
ROW_KEYWORDS = (
    "packed_seq_lengths",
    "seq_lengths",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
_ELSEWHERE = dict.fromkeys(("segment_ids", "document_ids", "doc_ids", "sequence_ids"), "seq_idx")
_NEAR = 0.75  # of 1, how alike two names are


@lru_cache
def closest_keyword(name: str) -> str | None:
    """The row keyword that `name` seems to stand for, or None.

    transformers ignores keywords that it does not know, so a misspelt one would make the row one document.
    """
    if name in ROW_KEYWORDS:
        return None
    return _ELSEWHERE.get(name) or next(iter(get_close_matches(name, ROW_KEYWORDS, 1, _NEAR)), None)


# Each way to describe a packed row, read as the lengths of its documents.
#
#     packed_seq_lengths  [3, 4, 2]              or one such list a row
#     seq_lengths         [3, 4, 2]              TRL's column; the lists of joined examples follow each other
#     cu_seq_lens_q       [0, 3, 7, 9]           0 and the running sum
#     seq_idx             0 0 0 1 1 1 1 2 2      the number of each token's document
#     position_ids        0 1 2 0 1 2 3 0 1      restart with every document
#     attention_mask      1 1 1 2 2 2 2 3 3      some packers number documents there
#
# A reading gives one list of lengths a row.

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


_MAX_LENGTHS = ("max_length_q", "max_length_k")
LAST_POSITION = 2**24  # angles are computed in float32, which skips whole numbers above


def row_from_call(
    inputs: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    unpad: Callable[[PaddedBatch | None], PaddedBatch | None],
) -> PackedRow | PaddedBatch | None:
    """The packed row of a model call, or None where the call is an ordinary batch that keeps its padding.

    Args:
        inputs: the decoder's named arguments.
        kwargs: the call's other arguments. `packed_row`, where there is one, is the row itself, or says where
            an ordinary batch has padding; otherwise those of `ROW_KEYWORDS` describe the row.
        unpad: finds the padding of an ordinary batch that is to lose it, or takes what is known of it.

    Raises:
        InputError: as `describe_row` raises it; documents that continue a cache; input ids that are no
            `[B, T]`; a keyword that is nearly one of `ROW_KEYWORDS`.
    """
    for name in kwargs:
        if (meant := closest_keyword(name)) is not None:
            raise InputError(f"{name} is no argument of the model; do you mean {meant}?")
    input_ids = inputs["input_ids"]
    attention_mask, past_key_values = inputs["attention_mask"], inputs["past_key_values"]
    if input_ids is not None and getattr(input_ids, "ndim", 0) != 2:
        found = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise InputError(f"input_ids is {found}; give a tensor [B, T], of a packed row [1, T]")
    tokens = input_ids if input_ids is not None else inputs["inputs_embeds"]
    if tokens is None:
        return None
    shape = (tokens.shape[0], tokens.shape[1])
    position_ids, axes = _along_text(inputs["position_ids"], shape)
    known = kwargs.get("packed_row")
    if known is not None and not isinstance(known, PaddedBatch):
        return _row_itself(known, shape, tokens.device)
    given = {name: kwargs[name] for name in ROW_KEYWORDS if kwargs.get(name) is not None}
    if not given:
        if known is not None and known.shape != shape:
            raise _of_other_tokens(known.shape, shape)
        if (batch := unpad(known)) is not None:
            return batch
    if not given and (position_ids is None or shape[1] == 1 or getattr(position_ids, "ndim", 0) > 2):
        return None  # positions on three axes describe no row by themselves: those of an image repeat
    if not given and isinstance(attention_mask, dict):
        return None  # masks that `generate` has made beforehand, one for each type of layer
    if past_key_values is not None:
        continues = past_key_values.get_seq_length() > 0
        if continues and given:
            raise InputError("packed documents cannot continue a cache; pass past_key_values=None")
        # `generate` makes the masks beforehand where the cache is static; they say who sees whom
        if continues or (not given and _is_ready_mask(attention_mask)):
            return None
    return describe_row(
        shape, tokens.device, position_ids=position_ids, attention_mask=attention_mask, axes=axes, **given
    )


def describe_row(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: Any = None,
    axes: Tensor | None = None,
    **descriptions: Any,
) -> PackedRow | None:
    """The packed row that these descriptions mean, or None where they mean an ordinary batch.

    Args:
        shape: (B, T) of the input ids. Several rows become one flattened row.
        device: where the model computes.
        attention_mask: `[B, T]`; zeros must be padding at the end of a packed row. A mask that numbers the
            documents from 1, as some packers write it, has to agree with the other descriptions.
        axes: `[3, B, T]`; rotary positions in time, height and width, from 0 in every document.
        descriptions: None counts as not given.

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
        InputError: lengths that are negative or exceed T, two descriptions that disagree, or a mask that does
            not fit a packed row.
    """
    given = _given(descriptions)
    max_lengths: dict[str, Any] = {name: given.pop(name) for name in _MAX_LENGTHS if name in given}
    if max_lengths and not given:
        (name, value), *_ = max_lengths.items()
        raise InputError(f"{name} is {value} and nothing says where documents end; give cu_seq_lens_q too")
    if not given:
        return None
    has_row_mask = isinstance(attention_mask, Tensor) and attention_mask.shape == shape
    beside = {"attention_mask": attention_mask} if has_row_mask else {}
    host = on_host(given | beside | ({} if axes is None else {"axes": axes}))
    axes_on_host = host.pop("axes", None)
    host |= {
        name: one_a_token(name, host[name], shape) for name in ("seq_idx", "position_ids") if name in host
    }
    positions, real = host.get("position_ids"), _real_tokens(host.get("attention_mask"))
    documents = documents_by_description(host, shape)
    if positions is not None and positions.size and positions.max() > LAST_POSITION:
        raise InputError(
            f"position_ids reach {positions.max()}; give positions up to {LAST_POSITION}, as far as "
            "float32 tells them apart"
        )
    if list(documents) == ["position_ids"] and not max_lengths and _is_ordinary_batch(positions, real):
        return None
    if attention_mask is not None and not has_row_mask:
        raise InputError(
            f"attention_mask is {_form_of(attention_mask)}, the packed row {list(shape)}; leave it out: "
            "documents are kept apart without it"
        )
    if real is not None:
        if not real.any():
            raise InputError("attention_mask keeps no token of any row; leave it out, or give 1 for tokens")
        documents = {name: without_padding(name, rows, real) for name, rows in documents.items()}
    rows = _agreed(documents, max_lengths)
    row = _made_of(rows, positions, shape, device)
    return row if axes_on_host is None else with_axes(row, axes_on_host)


def with_axes(row: PackedRow, axes: np.ndarray) -> PackedRow:
    """The row with positions on three axes, `[3, B, T]`; padding gets those of the row.

    Raises:
        InputError: a document does not start at 0 on all of them; one is negative, or beyond what float32
            tells apart.
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
    """Refuse a mask that holds document ids where nothing else describes documents: they would be one.

    Raises:
        InputError: the mask holds numbers above 1.
    """
    is_of_tokens = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if is_of_tokens and not is_tracing(attention_mask) and (attention_mask > 1).any():
        raise InputError(
            f"attention_mask holds document ids, up to {int(attention_mask.max())}, which alone do not "
            "separate documents; give packed_seq_lengths, or position_ids that restart"
        )


def _along_text(position_ids: Any, shape: tuple[int, int]) -> tuple[Any, Tensor | None]:
    """Positions along the text, and `[3, B, T]` those on three axes: `[4, B, T]` and `[3, B, T]` hold both
    and the latter, as transformers has them for vision and language."""
    if not isinstance(position_ids, Tensor) or position_ids.shape[1:] != shape:
        return position_ids, None
    if len(position_ids) == 4:
        return position_ids[0], position_ids[1:]
    return (None, position_ids) if len(position_ids) == 3 else (position_ids, None)


def _row_itself(row: Any, shape: tuple[int, int], device: torch.device) -> PackedRow:
    if not isinstance(row, PackedRow):
        raise InputError(f"packed_row is a {type(row).__name__}; give a PackedRow, or packed_seq_lengths")
    if row.shape != shape:
        raise _of_other_tokens(row.shape, shape)
    return row.on(device)


def _of_other_tokens(described: tuple[int, int], shape: tuple[int, int]) -> InputError:
    return InputError(
        f"packed_row describes {list(described)} tokens, the input ids are {list(shape)}; give their own"
    )


def _given(descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """The descriptions that are there, in the order in which one of them decides where padding begins.

    Raises:
        InputError: a tensor of something else than whole numbers.
    """
    order = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "packed_seq_lengths", "seq_lengths", "position_ids")
    unknown = set(descriptions) - {*ROW_KEYWORDS, "position_ids"}
    if unknown:
        raise TypeError(f"describe_row takes no {', '.join(sorted(unknown))}")
    names = (*order, *_MAX_LENGTHS)
    given = {name: descriptions[name] for name in names if descriptions.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            raise InputError(f"{name} is a tensor of {value.dtype}; give whole numbers")
    whole = {name: value for name, value in given.items() if not _is_cut(name, value)}
    return whole if whole.keys() - {*_MAX_LENGTHS} else given


def _is_cut(name: str, value: Any) -> bool:
    """Whether accelerate's dispatcher of streamed rows has cut it to as many numbers as rows: one."""
    return name.startswith("cu_seq_lens") and isinstance(value, Tensor) and value.shape == (1,)


def _real_tokens(mask: np.ndarray | None) -> np.ndarray | None:
    """The mask, 0 on padding; None where it masks nothing.

    Raises:
        InputError: it holds negative numbers.
    """
    if mask is not None and (mask < 0).any():
        raise InputError(
            f"attention_mask holds {np.unique(mask)[:8].tolist()}; give 1 for tokens and 0 for padding"
        )
    return None if mask is None or mask.all() else mask


def _is_ordinary_batch(positions: np.ndarray | None, real: np.ndarray | None) -> bool:
    """Whether the tokens that the mask leaves form one run in every row, as in a padded batch.

    A mask that leaves none tells nothing: then all tokens count.
    """
    assert positions is not None
    if real is not None and not real.any():
        real = None
    for number, row in enumerate(positions):
        kept = row if real is None else row[real[number] != 0]
        if (np.diff(kept) != 1).any():
            return False
    return True


def _is_ready_mask(attention_mask: Any) -> bool:
    """Whether a mask is what attention takes, `[B, 1, T, S]` or one for each type of layer."""
    return isinstance(attention_mask, dict) or getattr(attention_mask, "ndim", 2) == 4


def _form_of(mask: Any) -> str:
    return f"of shape {list(mask.shape)}" if hasattr(mask, "shape") else f"a {type(mask).__name__}"


def _agreed(
    documents: Mapping[str, Sequence[Sequence[int]]], max_lengths: Mapping[str, Any]
) -> Sequence[Sequence[int]]:
    """The lengths of the documents, row by row, which all descriptions give.

    Raises:
        InputError: two descriptions disagree, or a document is longer than its given maximum.
    """
    (first, rows), *others = documents.items()
    for name, other_rows in others:
        for number, (row, other) in enumerate(zip(rows, other_rows, strict=True)):
            # What stands at each token numbers the padding too, in runs of its own
            if row != (other[: len(row)] if name in PER_TOKEN else other):
                raise InputError(
                    f"{first} and {name} disagree on row {number}: documents of {row[:8]} tokens against "
                    f"{other[:8]}; give one of them, or make them agree"
                )
    longest = max(max(row, default=0) for row in rows)
    for name, given in max_lengths.items():
        if not (isinstance(given, int | np.integer) or (isinstance(given, Tensor) and given.numel() == 1)):
            raise InputError(f"{name} is {given!r}; give the length of the longest document")
        if int(given) < longest:
            raise InputError(
                f"{name} is {int(given)} but {first} holds a document of {longest} tokens; "
                "give the length of the longest document"
            )
    return rows


def _made_of(
    rows: Sequence[Sequence[int]],
    positions: np.ndarray | None,
    shape: tuple[int, int],
    device: torch.device,
) -> PackedRow:
    """The row of these documents; what they leave of each row is padding, whose positions restart."""
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
