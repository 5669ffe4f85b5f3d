"""From what a caller passes to the model to the one `PackedRow` of the step.

The same row may be described by `packed_seq_lengths`, by TRL's and transformers' `cu_seq_lens_q/k`,
`max_length_q/k` and `seq_idx`, by the `seq_lengths` column of TRL's packed data sets, or by `position_ids`
that restart. All are read, on the host, in one transfer; two that disagree are an error, on every step.
"""

import reprlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import is_tracing

from unsloth_pack.errors import InputError
from unsloth_pack.host_copy import HostCopy
from unsloth_pack.row.packed_row import IGNORE_INDEX, PackedRow

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
_OF_TOKENS = {"seq_idx": 0, "position_ids": 1, "attention_mask": 0}  # what a token of a document adds
_ELSEWHERE = dict.fromkeys(("segment_ids", "document_ids", "doc_ids", "sequence_ids"), "seq_idx")
_NEAR = 0.75  # of 1, for names that are alike
_LAST_POSITION = 2**24  # angles are computed in float32, which skips whole numbers above


def describe_row(
    shape: tuple[int, int],
    device: torch.device,
    *,
    packed_seq_lengths: Any = None,
    seq_lengths: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    seq_idx: Any = None,
    position_ids: Tensor | None = None,
    attention_mask: Any = None,
    labels: Tensor | None = None,
    labels_counted: bool = False,
) -> PackedRow | None:
    """The packed row that a model call describes, or None when it describes an ordinary batch.

    Args:
        shape: (B, T) of the input ids. Several rows become one flattened row.
        device: where the model computes.
        packed_seq_lengths: int tensor or list `[n]`; for several rows a list of lists, or `[B, n]` padded
            with 0. A sum below T leaves a padded tail.
        seq_lengths: likewise; the lists of several examples that were joined to one row follow each other.
        cu_seq_lens_q, cu_seq_lens_k: int tensor or list `[n + 1]`, 0 and the running sum of the lengths.
        max_length_q, max_length_k: at least the longest document.
        seq_idx: `[B, T]`, the number of each token's document.
        position_ids: `[B, T]`, `[1, T]` or `[T]`; a document starts wherever they do not continue by one.
        attention_mask: `[B, T]`; zeros must be padding at the end of a packed row. One that numbers the
            documents from 1, as some packers write it, has to agree with what else describes the row.
        labels: `[B, T]`.
        labels_counted: whether the labels were counted, for `num_items_in_batch`. Then those at document
            starts must be -100; of labels on a device see `CountedLabels`.

    Raises:
        InputError: lengths that are negative or exceed T, two descriptions that disagree, or a mask or labels
            that do not fit a packed row.
    """
    has_row_mask = isinstance(attention_mask, Tensor) and attention_mask.shape == shape
    given = _present(
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        seq_idx=seq_idx,
        packed_seq_lengths=packed_seq_lengths,
        seq_lengths=seq_lengths,
        position_ids=position_ids,
    )
    given = {name: value for name, value in given.items() if not _is_cut(name, value)} or given
    max_lengths = _present(max_length_q=max_length_q, max_length_k=max_length_k)
    if max_lengths and not given:
        (name, value), *_ = max_lengths.items()
        raise InputError(f"{name} is {value} and nothing says where documents end; give cu_seq_lens_q too")
    if not given:
        return None
    if has_row_mask:
        given["attention_mask"] = attention_mask
    host = _to_host(given)
    host |= {name: _as_rows(name, host[name], shape) for name in ("seq_idx", "position_ids") if name in host}
    documents = _documents(host, shape)
    positions = host.get("position_ids")
    if positions is not None and positions.size and positions.max() > _LAST_POSITION:
        raise InputError(
            f"position_ids reach {positions.max()}; give positions up to {_LAST_POSITION}, as far as float32 "
            "tells them apart"
        )

    real = host.get("attention_mask")
    if real is not None and (real < 0).any():
        raise InputError(
            f"attention_mask holds {np.unique(real)[:8].tolist()}; give 1 for tokens and 0 for padding"
        )
    if real is not None and real.all():
        real = None
    if list(documents) == ["position_ids"] and not max_lengths and _is_ordinary_batch(positions, real):
        return None
    if attention_mask is not None and not has_row_mask:
        raise InputError(
            f"attention_mask is {_form_of(attention_mask)}, the packed row {list(shape)}; leave it out: "
            "documents are kept apart without it"
        )
    if labels is not None and not isinstance(labels, Tensor):
        raise InputError(f"labels are {type(labels).__name__}; give a tensor [B, T]")
    if labels is not None and labels.shape != shape:
        raise InputError(
            f"labels have shape {list(labels.shape)}, the input ids {list(shape)}; give one label a token"
        )
    if real is not None:
        if not real.any():
            raise InputError("attention_mask keeps no token of any row; leave it out, or give 1 for tokens")
        documents = {name: _cut_padding(name, rows, real) for name, rows in documents.items()}
    row = _agree(documents, positions, shape, device, max_lengths)
    if labels is not None and labels_counted and not _is_remote(labels):
        _refuse_counted(row, labels.reshape(-1).numpy()[row.unscored_places])
    return row


@lru_cache
def keyword_meant(name: str) -> str | None:
    """The one of ROW_KEYWORDS that another name is elsewhere, or nearly: transformers passes over what it
    does not know.
    """
    if name in ROW_KEYWORDS:
        return None
    return _ELSEWHERE.get(name) or next(iter(get_close_matches(name, ROW_KEYWORDS, 1, _NEAR)), None)


def refuse_numbers(attention_mask: Any) -> None:
    """Refuse a mask that numbers documents where nothing else describes them: all of it would be one.

    Raises:
        InputError: it does.
    """
    is_of_tokens = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if is_of_tokens and not is_tracing(attention_mask) and (attention_mask > 1).any():
        raise InputError(
            f"attention_mask numbers documents, up to {int(attention_mask.max())}, and alone parts none; "
            "give packed_seq_lengths, or position_ids that restart"
        )


class CountedLabels:
    """Labels of a row, on a device, that were counted. Made before the decoder runs, see `HostCopy`."""

    def __init__(self, row: PackedRow, labels: Tensor):
        self._row = row
        self._unscored = HostCopy(labels.to(row.device).reshape(-1).index_select(0, row.unscored))

    def refuse(self) -> None:
        """To be called after the decoder.

        Raises:
            InputError: no loss sees one of them.
        """
        _refuse_counted(self._row, self._unscored.read().numpy())


def _refuse_counted(row: PackedRow, unscored: np.ndarray) -> None:
    """`unscored`: the labels at `row.unscored_places`, all counted."""
    is_counted = row.unscored_places % row.shape[1] != 0  # nothing predicts column 0: no trainer counts it
    if (unscored[is_counted] != IGNORE_INDEX).any():
        raise InputError(
            "labels at document starts are counted in num_items_in_batch but carry no loss; set them to "
            f"{IGNORE_INDEX} in the collator, as DataCollatorWithFlattening does"
        )


def _present(**values: Any) -> dict[str, Any]:
    """Those that are given.

    Raises:
        InputError: a tensor of something else than whole numbers.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            raise InputError(f"{name} is a tensor of {value.dtype}; give whole numbers")
    return given


def _is_cut(name: str, value: Any) -> bool:
    """Whether accelerate's dispatcher of streamed rows has taken as many numbers as there are rows: one."""
    return name.startswith("cu_seq_lens") and isinstance(value, Tensor) and value.shape == (1,)


def _documents(host: Mapping[str, Any], shape: tuple[int, int]) -> dict[str, list[list[int]]]:
    """The lengths of the documents, row by row, as each description has them.

    Args:
        host: the descriptions; `seq_idx` and `position_ids` are `[B, T]`.
    """
    documents: dict[str, list[list[int]]] = {}
    if "packed_seq_lengths" in host:
        documents["packed_seq_lengths"] = _rows_of_lengths(
            "packed_seq_lengths", host["packed_seq_lengths"], shape
        )
    if "seq_lengths" in host:
        rows = _nested("seq_lengths", host["seq_lengths"])
        joined = [[length for row in rows for length in row]] if shape[0] == 1 else rows
        documents["seq_lengths"] = _rows_of_lengths("seq_lengths", joined, shape)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in host:
            documents[name] = [_lengths_of_cu(name, host[name], shape)]
    for name, step in _OF_TOKENS.items():
        if name in host and (name != "attention_mask" or (host[name] > 1).any()):
            documents[name] = _runs(host[name], step)
    return documents


def _form_of(mask: Any) -> str:
    return f"of shape {list(mask.shape)}" if hasattr(mask, "shape") else f"a {type(mask).__name__}"


def _to_host(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every value as numpy or nested lists; what lies on a device comes in one transfer."""
    host: dict[str, Any] = {}
    remote: dict[str, Tensor] = {}
    for name, value in given.items():
        if _is_remote(value):
            remote[name] = value
        else:
            host[name] = _as_numpy(value) if isinstance(value, Tensor) else value
    if remote:
        flat = torch.cat([value.reshape(-1).to(torch.int32) for value in remote.values()]).cpu().numpy()
        for name, value in remote.items():
            host[name], flat = flat[: value.numel()].reshape(value.shape), flat[value.numel() :]
    return host


def _is_remote(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _as_numpy(value: Tensor) -> np.ndarray:
    return value.detach().numpy().astype(np.int64)


def _as_rows(name: str, values: Any, shape: tuple[int, int]) -> np.ndarray:
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


def _nested(name: str, values: Any) -> list[list[Any]]:
    """One list of Python's numbers a row, from those or from the list of a single row."""
    if isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim):
        try:
            rows = [np.asarray(row).tolist() for row in values]
        except ValueError:  # lists of several depths
            rows = []
        n_lists = sum(isinstance(row, list) for row in rows)
        if rows and n_lists in (0, len(rows)):
            return rows if n_lists else [rows]
    raise InputError(f"{name} is {reprlib.repr(values)}; give the length of each document")


def _is_length(value: Any) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and value >= 0


def _rows_of_lengths(name: str, values: Any, shape: tuple[int, int]) -> list[list[int]]:
    rows = _nested(name, values)
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


def _lengths_of_cu(name: str, values: Any, shape: tuple[int, int]) -> list[int]:
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


def _runs(rows: np.ndarray, step: int) -> list[list[int]]:
    """For every row, the lengths of the runs in which each value is its predecessor plus `step`."""
    lengths = []
    for row in rows:
        cuts = np.flatnonzero(np.diff(row) != step) + 1
        lengths.append(np.diff(np.concatenate([[0], cuts, [len(row)]])).tolist())
    return lengths


def _is_ordinary_batch(positions: np.ndarray | None, real: np.ndarray | None) -> bool:
    """Whether the tokens that the mask leaves form one run in every row, as in a padded batch."""
    assert positions is not None
    for number, row in enumerate(positions):
        kept = row if real is None else row[real[number] != 0]
        if (np.diff(kept) != 1).any():
            return False
    return True


def _cut_padding(name: str, rows: list[list[int]], real: np.ndarray) -> list[list[int]]:
    """The documents of every row without the padding that the attention mask marks at its end."""
    cut = []
    for number, lengths in enumerate(rows):
        n_real = (real[number] != 0).sum()
        ends = np.cumsum([0, *lengths])
        # Lengths leave padding out; the others number it too, as documents of its own
        may_end = ends[-1:] if name in ("packed_seq_lengths", "seq_lengths") else ends
        if (real[number][:n_real] == 0).any() or n_real not in may_end:
            raise InputError(
                f"attention_mask keeps {n_real} tokens of row {number}, {name} has {lengths[:8]}; "
                "leave it out, or mask only the padding at the end of the row"
            )
        cut.append([length for length, end in zip(lengths, ends[1:], strict=True) if end <= n_real])
    return cut


def _agree(
    documents: Mapping[str, Sequence[Sequence[int]]],
    positions: np.ndarray | None,
    shape: tuple[int, int],
    device: torch.device,
    max_lengths: Mapping[str, int],
) -> PackedRow:
    """The row that all descriptions mean; the first decides where the padded tail begins."""
    (first, rows), *others = documents.items()
    for name, other_rows in others:
        names_tokens = name in _OF_TOKENS  # they number the padding too, in runs of its own
        for number, (row, other) in enumerate(zip(rows, other_rows, strict=True)):
            if row != (other[: len(row)] if names_tokens else other):
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
