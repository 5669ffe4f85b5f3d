"""`verify`: every check on one model."""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import LAST_SEED, InputError, require_whole
from unsloth_pack.layers.leak_probe import greatest_by_document, random_documents, side_effect_free_pass
from unsloth_pack.verification import agreement, leaks
from unsloth_pack.verification import agreement as images
from unsloth_pack.verification.report import VerifyReport
from unsloth_pack.verification.subject import Describe, Description, Subject

_LENGTHS = (1, 33, 2, 64, 1, 19)
_BEYOND_TILE = 129  # tokens: kernels of attention work on up to 128 at a time
_BEYOND_WINDOW = 9  # tokens by which a document is longer than the sliding window
_DEFAULT_ROW = 8192


@torch.inference_mode(False)
@torch.enable_grad()  # whatever mode the caller is in
def verify(
    model: Any,
    tokenizer: Any = None,
    *,
    documents: Sequence[str | Sequence[int]] | None = None,
    describe: Description | Describe | None = None,
    collate: agreement.Collate | None = None,
    max_seq_length: int | None = None,
    seed: int = 3407,
    progress: Callable[[str], Any] = lambda step: None,
) -> VerifyReport:
    """Verify on this very model that documents of a packed row do not mix and come out as they do alone.

    The model runs as in training, with its adapter, backend, dtype and checkpointing, but without dropout and
    without CUDA graphs. Modes, gradients and random states stay as they were.

    Args:
        model: a causal language model of transformers, or a PEFT model of one; patched or not.
        tokenizer: for `documents` that are texts.
        documents: two or more texts, or token ids. None: random tokens in documents of 1 to 129 tokens, and
            one longer than each sliding window that fits into the row. A model that takes images gets a row
            of random ones, too.
        describe: how calls describe the row: "packed_seq_lengths", "position_ids", "trl" for all that TRL's
            collator gives, or a function from the list of lengths to keyword arguments. With images one that
            takes `axes`, too, gets `[3, 1, T]`, positions in time, height and width. None:
            "packed_seq_lengths" where the model is patched, else "position_ids".
        collate: the trainer's collator, from rows with `seq_lengths` to a batch. None: TRL's.
        max_seq_length: tokens of the row at most. None: what the model was loaded with, else 8192.
        seed: of the random tokens.
        progress: is called with the name of every step as it begins.

    Returns:
        The report; `report.passed` is the verdict.

    Raises:
        InputError: `model` is no causal language model of transformers; documents that are too few, empty,
            too long, or neither texts nor token ids of this model; texts without a tokenizer; a
            `max_seq_length` or `seed` that cannot be.
    """
    require_whole("seed", seed, 0, LAST_SEED)
    if max_seq_length is not None:
        require_whole("max_seq_length", max_seq_length, 1)
    subject = Subject(model, describe)
    room = max_seq_length or getattr(model, "max_seq_length", None) or _DEFAULT_ROW
    generator = torch.Generator().manual_seed(int(seed))
    if documents is None:
        row = random_documents(_lengths(subject, room), subject.vocab_size, generator)
    else:
        row = _encoded(documents, tokenizer, room, subject)
    if collate is None:
        from unsloth_pack.training.trainer import row_collator

        collate = row_collator()
    with side_effect_free_pass(model):
        measured = []
        for number in range(len(row)):
            progress(f"document {number + 1} of {len(row)} in the row and alone")
            measured.append(_measure(subject, row, number, generator))
        reached, moved, packed, rounded = map(list, zip(*measured, strict=True))
        progress("rounding of every document")
        against_alone = agreement.check_alone(subject, row, packed, rounded, generator)
        progress("leaks into trained gradients")
        trained = leaks.check_trained_gradients(subject, row, moved, generator)
        progress("leaks into logits and reach of attention")
        checks = [
            leaks.check_logits(subject, row, generator),
            leaks.check_gradients(subject, row, reached, generator),
            trained,
            leaks.check_reach(subject, row),
            *against_alone,
        ]
        progress("counted tokens")
        checks += agreement.check_counting(subject, row, collate, against_alone)
        progress("images")
        checks += images.check_images(subject, generator)
    return VerifyReport(
        model_type=subject.config.model_type,
        attn_backend=subject.attn_backend,
        dtype=str(subject.dtype).removeprefix("torch."),
        checkpointing=subject.is_checkpointing,
        lengths=tuple(map(len, row)),
        checks=tuple(checks),
    )


def _measure(
    subject: Subject, row: Sequence[Tensor], number: int, generator: torch.Generator
) -> tuple[list[float], float, agreement.Errors, agreement.Errors]:
    """Measure one document of the row: the gradient of its loss at all embeddings, how far changes of all
    other documents move its gradients, and the errors of its packed and of a rounded pass.

    At most two of the passes' gradients are held at a time.
    """
    document, start = row[number], sum(map(len, row[:number]))
    alone = subject.gradients(document, lambda: subject.logits_alone(document))
    rounded = agreement.rounded_errors(subject, document, alone)
    packed = subject.gradients(document, lambda: subject.packed_outputs(row)[number])
    own = packed.embeddings[0, start : start + len(document)]
    errors = agreement.Errors.of(packed, alone, own)
    del alone
    reached = greatest_by_document(packed.embeddings[0], row)
    return reached, leaks.moved_by_others(subject, row, number, packed, generator), errors, rounded


def _lengths(subject: Subject, room: int) -> list[int]:
    """Short documents, and before the last of them one beyond a kernel's tile and each sliding window."""
    lengths = [*_LENGTHS]
    for longer in (_BEYOND_TILE, *(window + _BEYOND_WINDOW for window in sorted(subject.windows))):
        if sum(lengths) + longer <= room:
            lengths.insert(-1, longer)
    if sum(lengths) > room:
        raise InputError(f"max_seq_length is {room}; give {sum(lengths)} or more, for a row to verify")
    return lengths


def _encoded(
    documents: Sequence[str | Sequence[int]], tokenizer: Any, room: int, subject: Subject
) -> list[Tensor]:
    encoded = []
    for document in [documents] if isinstance(documents, str) else documents:
        if isinstance(document, str):
            if tokenizer is None:
                raise InputError("documents hold texts; give the tokenizer too, or token ids")
            document = tokenizer(document)["input_ids"]
        ids = np.asarray(document)
        if ids.ndim != 1 or not (ids.dtype.kind in "iu" or not len(ids)):
            raise InputError(f"documents hold {reprlib.repr(document)}; give texts, or lists of token ids")
        if (
            len(ids) and not 0 <= ids.min() <= ids.max() < subject.vocab_size
        ):  # on a GPU an assert would say less
            raise InputError(
                f"documents hold token ids from {ids.min()} to {ids.max()}, the model knows 0 to "
                f"{subject.vocab_size - 1}; give the tokenizer's of this model"
            )
        if subject.image_token in ids:
            raise InputError(
                f"documents hold token {subject.image_token}, which stands for images; give texts, or None: "
                "images are drawn beside them"
            )
        encoded.append(torch.as_tensor(ids, dtype=torch.int64, device="cpu"))
    lengths = [len(document) for document in encoded]
    if len(lengths) < 2 or min(lengths) == 0:
        raise InputError(f"documents have {lengths[:8]} tokens; give two or more, none of them empty")
    if sum(lengths) > room:
        raise InputError(f"documents have {sum(lengths)} tokens, the row {room}; give fewer")
    return encoded
