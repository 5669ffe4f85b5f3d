"""`verify`: every check on one model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unsloth_pack.errors import LAST_SEED, InputError, require_whole
from unsloth_pack.layers.leak_probe import greatest_by_document, random_documents, side_effect_free_pass
from unsloth_pack.verification import agreement, leaks
from unsloth_pack.verification.leaks import Check
from unsloth_pack.verification.subject import Describe, Description, Subject

_LENGTHS = (1, 33, 2, 64, 1, 19)
_BEYOND_TILE = 129  # tokens: attention kernels have tiles of up to 128
_BEYOND_WINDOW = 9  # extra tokens of a document beyond the sliding window
_DEFAULT_ROW = 8192


@dataclass(frozen=True)
class VerifyReport:
    """All verdicts on one model. `print(report)` shows them as lines."""

    model_type: str  # of the text model
    attn_backend: str  # of the patch, else transformers' attention implementation
    dtype: str  # of the weights
    checkpointing: bool  # True if layers are recomputed in the backward pass
    lengths: tuple[int, ...]  # tokens of the documents in the row
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        model = f"{self.model_type}, attention {self.attn_backend}, {self.dtype}"
        checkpointing = "on" if self.checkpointing else "off"
        lengths = ", ".join(map(str, self.lengths))
        head = f"{model}, checkpointing {checkpointing}; documents of {lengths} tokens"
        n_failed = sum(not check.passed for check in self.checks)
        verdict = f"{n_failed} of {len(self.checks)} checks failed" if n_failed else "all checks passed"
        return "\n".join([head, *map(str, self.checks), verdict])


@torch.inference_mode(False)
@torch.enable_grad()  # in any mode of the caller
def verify(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    documents: Sequence[str | Sequence[int]] | None = None,
    describe: Description | Describe | None = None,
    collate: agreement.Collate | None = None,
    max_seq_length: int | None = None,
    seed: int = 3407,
    progress: Callable[[str], object] = lambda step: None,
) -> VerifyReport:
    """Verify on this very model that documents of a packed row do not mix and equal the documents alone.

    The model runs as in training, with its adapter, backend, dtype and checkpointing, but without dropout and
    CUDA graphs. Modes, gradients and random states stay as they were.

    Args:
        model: a causal language model of transformers, or a PEFT model of one; patched or not.
        tokenizer: for texts in `documents`.
        documents: two or more texts, or token ids. None: random tokens in documents of 1 to 129 tokens, and
            one longer than each sliding window that fits into the row. A model with images also gets a row of
            random images.
        describe: the description of the row in calls: "packed_seq_lengths", "position_ids", "trl" for TRL's
            collator, or a function from the list of lengths to keyword arguments. With images, a function
            with an argument `axes` gets the positions in time, height and width, `[3, 1, T]`. None:
            "packed_seq_lengths" for a patched model, else "position_ids".
        collate: the trainer's collator, from rows with `seq_lengths` to a batch. None: TRL's.
        max_seq_length: tokens of the row at most. None: the model's, else 8192.
        seed: of the random tokens.
        progress: called with the name of every step at its beginning.

    Returns:
        The report; `report.passed` is the verdict.

    Raises:
        InputError: `model` is no causal language model of transformers; documents are too few, empty, too
            long, or hold ids that the model lacks; texts without a tokenizer; a wrong `max_seq_length`.
    """
    require_whole("seed", seed, 0, LAST_SEED)
    subject = Subject(model, describe)
    room = max_seq_length or getattr(model, "max_seq_length", None) or _DEFAULT_ROW
    require_whole("max_seq_length", room, 1)
    generator = torch.Generator().manual_seed(int(seed))
    if documents is None:
        row = random_documents(_choose_lengths(subject, room), subject.vocab_size, generator)
    else:
        row = _encode(documents, tokenizer, room, subject)
    if collate is None:
        from unsloth_pack.training.trl_setup import row_collator

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
        progress("branches")
        checks += agreement.check_branches(subject, room, generator)
        progress("images")
        checks += agreement.check_images(subject, generator)
    return VerifyReport(
        model_type=subject.config.model_type,
        attn_backend=subject.attn_backend,
        dtype=str(subject.dtype).removeprefix("torch."),
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        lengths=tuple(map(len, row)),
        checks=tuple(checks),
    )


def _measure(
    subject: Subject, row: Sequence[Tensor], number: int, generator: torch.Generator
) -> tuple[list[float], float, list[float], list[float]]:
    """Measure one document of the row, with the gradients of at most two passes in memory.

    Returns the gradient of its loss at all documents' embeddings, the change of its gradients when all other
    documents change, and the errors of its packed and of a perturbed pass.
    """
    document = row[number]
    alone = subject.gradients(document, lambda: subject.logits_alone(document))
    perturbed = subject.gradients(document, lambda: subject.logits_perturbed(document))
    rounded = agreement.compare(perturbed, alone)
    del perturbed
    packed = subject.gradients(document, lambda: subject.packed_outputs(row)[number])
    errors = agreement.compare(packed, alone, first=sum(map(len, row[:number])))
    del alone
    reached = greatest_by_document(packed.embeddings[0], row)
    return reached, leaks.moved_by_others(subject, row, number, packed, generator), errors, rounded


def _choose_lengths(subject: Subject, room: int) -> list[int]:
    """Choose short documents, and one beyond a kernel's tile and each sliding window before the last."""
    lengths = [*_LENGTHS]
    for longer in (_BEYOND_TILE, *(window + _BEYOND_WINDOW for window in sorted(subject.windows))):
        if sum(lengths) + longer <= room:
            lengths.insert(-1, longer)
    if sum(lengths) > room:
        raise InputError(f"max_seq_length is {room}; give {sum(lengths)} or more, for a row to verify")
    return lengths


def _encode(
    documents: Sequence[str | Sequence[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    room: int,
    subject: Subject,
) -> list[Tensor]:
    encoded = []
    for document in [documents] if isinstance(documents, str) else documents:
        if isinstance(document, str):
            if tokenizer is None:
                raise InputError("documents hold texts; give the tokenizer too, or token ids")
            document = tokenizer(document)["input_ids"]
        ids = np.asarray(document, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < subject.vocab_size:
            problem = f"documents hold token ids from {ids.min()} to {ids.max()}, the model knows 0 to"
            raise InputError(f"{problem} {subject.vocab_size - 1}; give the tokenizer's of this model")
        encoded.append(torch.from_numpy(ids))
    lengths = [len(document) for document in encoded]
    if len(lengths) < 2 or min(lengths) == 0:
        raise InputError(f"documents have {lengths[:8]} tokens; give two or more, none of them empty")
    if sum(lengths) > room:
        raise InputError(f"documents have {sum(lengths)} tokens, the row {room}; give fewer")
    return encoded
