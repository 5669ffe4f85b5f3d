"""pack_sequences and concatenate_and_pack: pack token sequences in memory into padded rows.

[1 2 3] [4 5] [6 7 8 9] [10 11 12]   rows of 8, padded with 0
1 2 3 4 5 0 0 0
6 7 8 9 10 11 12 0
"""

import warnings
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.packing.containers import (
    WHOLE_COLUMNS,
    Kind,
    Layout,
    as_filler,
    check_values,
    fill_array,
    fill_lists,
    no_garbage_collection,
    read_sequences,
)
from unsloth_pack.packing.lengths import check_positive
from unsloth_pack.packing.overlong import CutCounts, PackingWarning, check_overlong, pieces_of
from unsloth_pack.packing.plan import plan_packs


@no_garbage_collection()
def pack_sequences(
    sequences: Any,
    max_length: int,
    pad_token_id: Any,
    *,
    strategy: str = "next_fit",
    return_boundaries: bool = False,
    sep_token_id: Any = None,
    overlong: str = "error",
    return_counts: bool = False,
) -> Any:
    """Pack whole sequences into rows of `max_length`, padded at the end.

    The rows depend only on the lengths of the sequences, so ids and labels packed in two calls stay aligned.

    Args:
        sequences: lists, numpy arrays or torch tensors of any lengths, one for each document: token ids, or
            other numbers for each token, such as labels or weights.
        strategy: as for `plan_packs`; "next_fit" keeps the order of the documents.
        sep_token_id: is put between two documents of a row, never at its end.
        overlong: how to handle a sequence longer than a row: "error", "truncate" (its end is lost), "drop",
            or "split" (into documents of a row's length, the last perhaps shorter).
        return_boundaries: also return `(row, start, end)` of every document in input order, without its
            separators. A dropped sequence has none, a split one has several.
        return_counts: also return `CutCounts`: how many sequences were empty (those are dropped), truncated,
            dropped or split. Without it, a `PackingWarning` gives these counts.

    Returns:
        The kind that came in: a list of lists, or a `[rows, max_length]` array or tensor of the same type and
        device. With boundaries or counts a tuple, in this order.

    Raises:
        InputError: `max_length` is below 1; a sequence is over-long, is not flat or holds a null; kinds are
            mixed; or the padding or separator is not a number that the sequences' type can hold.
    """
    max_length = check_positive("max_length", max_length)
    sequences, kind = read_sequences("sequences", sequences)
    check_values(sequences, "sequences[{}]".format, whole=False)
    pad = as_filler("pad_token_id", pad_token_id, kind)
    separator = None if sep_token_id is None else as_filler("sep_token_id", sep_token_id, kind)
    lengths = list(map(len, sequences))
    pieces, counts = _cut("sequences", lengths, max_length, overlong)
    if pieces is not None:
        sequences = _apply(pieces, sequences)
        lengths = list(map(len, sequences))
    layout = _layout(lengths, max_length, strategy, gap=separator is not None)
    rows = _fill(layout, sequences, kind, pad, separator)
    if counts and not return_counts:
        warnings.warn(f"pack_sequences: {counts}", PackingWarning, stacklevel=3)
    extras: list[Any] = []
    if return_boundaries:
        extras.append([(row, start, end) for _, row, start, end in sorted(layout.places)])
    if return_counts:
        extras.append(counts)
    return (rows, *extras) if extras else rows


@no_garbage_collection()
def concatenate_and_pack(
    input_ids: Any,
    labels: Any,
    attention_masks: Any,
    *,
    max_length: int,
    pad_token_id: Any,
    label_pad_id: Any = -100,
    overlong: str = "error",
    return_counts: bool = False,
) -> tuple[Any, ...]:
    """Pack ids, labels and masks side by side into rows of `max_length`, in the order of the documents.

    Each column keeps its kind, as in `pack_sequences`. Masks are padded with 0. All rows have the full width,
    so the results of several calls can be concatenated.

    Args:
        input_ids, labels, attention_masks: lists, numpy arrays or torch tensors, one for each document; the
            three of a document have the same length.
        overlong, return_counts: as for `pack_sequences`.

    Returns:
        Rows of ids, of labels and of masks; with `return_counts`, the counts as a fourth item.

    Raises:
        InputError: the columns differ in their number of documents or in lengths; ids or labels are not whole
            numbers; or as for `pack_sequences`.
    """
    max_length = check_positive("max_length", max_length)
    columns = {"input_ids": input_ids, "labels": labels, "attention_masks": attention_masks}
    read = {name: read_sequences(name, column) for name, column in columns.items()}
    for name, (column, _) in read.items():
        check_values(column, f"{name}[{{}}]".format, whole=name in WHOLE_COLUMNS)
    kinds = [kind for _, kind in read.values()]
    fillers = {"pad_token_id": pad_token_id, "label_pad_id": label_pad_id, "mask padding": 0}
    pads = [as_filler(*filler, kind) for filler, kind in zip(fillers.items(), kinds, strict=True)]
    packed = [column for column, _ in read.values()]
    lengths = _common_lengths(dict(zip(read, packed, strict=True)))
    pieces, counts = _cut("input_ids", lengths, max_length, overlong)
    if pieces is not None:
        packed = [_apply(pieces, column) for column in packed]
        lengths = list(map(len, packed[0]))
    layout = _layout(lengths, max_length, "next_fit")
    rows = [_fill(layout, column, kind, pad) for column, kind, pad in zip(packed, kinds, pads, strict=True)]
    if counts and not return_counts:
        warnings.warn(f"concatenate_and_pack: {counts}", PackingWarning, stacklevel=3)
    return (*rows, counts) if return_counts else tuple(rows)


def _common_lengths(columns: dict[str, list[Any]]) -> list[int]:
    (first, sequences), *others = columns.items()
    lengths = list(map(len, sequences))
    for name, column in others:
        if len(column) != len(lengths):
            raise InputError(
                f"{first} has {len(lengths)} documents and {name} has {len(column)}; give one a document"
            )
        if (theirs := list(map(len, column))) != lengths:
            i = next(i for i, pair in enumerate(zip(lengths, theirs, strict=True)) if pair[0] != pair[1])
            raise InputError(
                f"{first}[{i}] has {lengths[i]} tokens and {name}[{i}] has {theirs[i]}; give one a token"
            )
    return lengths


def _cut(
    name: str, lengths: list[int], max_length: int, overlong: str
) -> tuple[list[tuple[int, int, int]] | None, CutCounts]:
    """Pieces `(sequence, start, end)`, or None if all sequences are packed as they are; and the counts."""
    check_overlong(overlong)
    counts = CutCounts()
    if not lengths or (min(lengths) > 0 and max(lengths) <= max_length):
        return None, counts
    pieces = [
        (i, *piece)
        for i, length in enumerate(lengths)
        for piece in pieces_of(f"{name}[{i}]", length, max_length, overlong, counts)
    ]
    return pieces, counts


def _apply(pieces: list[tuple[int, int, int]], sequences: list[Any]) -> list[Any]:
    return [sequences[i][start:end] for i, start, end in pieces]


def _layout(lengths: list[int], max_length: int, strategy: str, gap: int = 0) -> Layout:
    # Planned with documents and rows that are longer by the gap, separators need no special case.
    sizes = np.array(lengths, np.int64) + gap
    plan = plan_packs(sizes, max_length + gap, strategy)
    return Layout(max_length, plan.order, plan.offsets, sizes[plan.order], gap)


def _fill(layout: Layout, sequences: list[Any], kind: Kind, pad: Any, separator: Any = None) -> Any:
    if kind.container == "list":
        return fill_lists(layout, sequences, pad, separator)
    return fill_array(layout, sequences, kind, pad, separator)
