"""Check that a packed row equals its documents alone, counts the right tokens, and keeps images apart.

A document's results in a row and alone differ by rounding, which is measured on this model and dtype: the
document runs alone again with random changes of every layer's input by up to one unit in the last place. On
dense models in float32 and bfloat16, packed logits and gradients differ from those alone by 0 to 1.5 times as
much.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.layers.leak_probe import greatest_by_document, random_documents
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_row
from unsloth_pack.packed_row.row import IGNORE_INDEX
from unsloth_pack.verification import leaks
from unsloth_pack.verification.leaks import (
    SLACK,
    Check,
    change_in_turn,
    neighbours,
    relative_error,
    worst_pair,
)
from unsloth_pack.verification.subject import Gradients, ImageSubject, Pictured, Subject, build_example

_SAMPLES = 6  # of rounding, before a larger difference fails
_FOREST_LENGTHS, _FOREST = (33, 1, 19, 64, 129, 7), (-1, 0, 0, 2, -1, 4)
_BEHIND = 9  # tokens of a branch of a document as long as the sliding window

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


_ERRORS = ("loss", "logits", "embedding gradients", "trained gradients")


def compare(got: Gradients, alone: Gradients, first: int = 0) -> list[float]:
    """Return the relative errors of one document, from its token `first` of a row, against itself alone."""
    embeddings = got.embeddings[0, first : first + len(alone.logits)]
    return [
        abs(got.loss - alone.loss) / abs(alone.loss),
        relative_error([got.logits], [alone.logits]),
        relative_error([embeddings], [alone.embeddings[0]]),
        relative_error(list(got.trained.values()), list(alone.trained.values())),
    ]


def check_alone(
    subject: Subject,
    documents: Sequence[Tensor],
    packed: list[list[float]],
    rounded: list[list[float]],
    generator: torch.Generator,
) -> list[Check]:
    """Check loss, logits and gradients of every document in the row against the document alone.

    Rounding is random, and rare but large if it changes a token's expert. So a check fails only against
    several samples of it, of which `rounded` is the first. The second is an ordinary batch: GEMMs of a single
    token have kernels of their own, whose rounding trained models can amplify tenfold.
    """
    for sample in range(_SAMPLES):
        for document in documents if sample else ():
            forward = partial(subject.logits_perturbed, document)
            if sample == 1:
                neighbour = neighbours(document, subject.vocab_size, generator)[0]
                forward = partial(subject.logits_beside, document, neighbour)
            alone = subject.gradients(document, partial(subject.logits_alone, document))
            rounded = [*rounded, compare(subject.gradients(document, forward), alone)]
        by_error = zip(_ERRORS, zip(*packed, strict=True), zip(*rounded, strict=True), strict=True)
        checks = [_check_errors(f"{name} against alone", p, r, subject.dtype) for name, p, r in by_error]
        if all(check.passed for check in checks):
            break
    return checks if any(p.requires_grad for p in subject.model.parameters()) else checks[:-1]


def _check_errors(name: str, errors: Sequence[float], rounded: Sequence[float], dtype: torch.dtype) -> Check:
    """Check the errors of all documents against samples of rounding.

    One unit of rounding is always allowed, because a sample may round exactly.
    """
    value, yardstick = float(np.max(errors)), float(np.max(rounded))  # NaN, if one is
    allowed = max(SLACK * yardstick, torch.finfo(dtype).eps, SLACK * torch.finfo(torch.float32).eps)
    where = f"off by {value:.1e} at most, in document {np.argmax(errors)}"
    return Check.of(name, value, allowed, f"{where}; rounding alone makes {yardstick:.1e}")


def check_counting(
    subject: Subject, documents: Sequence[Tensor], collate: Collate, against_alone: Sequence[Check]
) -> list[Check]:
    """Check positions, labels and counts of the collator, and with the same allowances the model's loss."""
    lengths = [len(document) for document in documents]
    ids = torch.cat(list(documents))
    labels = ids.clone()
    starts = np.cumsum([0, *lengths[:-1]])
    for start, length in zip(starts, lengths, strict=True):
        labels[start : start + length // 3] = IGNORE_INDEX  # as a prompt
    batch = collate([build_example(lengths, ids, labels)])
    collated = batch["labels"].reshape(-1).cpu()
    if len(collated) < len(ids):
        raise InputError(f"collate cuts {len(ids)} tokens to {len(collated)}; give one that cuts no row")
    own = sum(int((part[1:] != IGNORE_INDEX).sum()) for part in labels.split(lengths))
    at_starts = int((collated[torch.from_numpy(starts)] != IGNORE_INDEX).sum())
    counted = int((collated != IGNORE_INDEX).sum())
    return [
        _check_positions(lengths, batch),
        Check.of("boundary labels", at_starts, 0, f"on {at_starts} of {len(lengths)} first tokens"),
        Check.of("token count", abs(counted - own), 0, f"{counted} counted, {own} in the documents alone"),
        *_check_counted_loss(subject, documents, collated[: len(ids)], against_alone),
    ]


def _check_positions(lengths: Sequence[int], batch: Mapping[str, Any]) -> Check:
    name = "positions"
    described = {k: v for k, v in batch.items() if k in (*ROW_KEYWORDS, "position_ids", "attention_mask")}
    try:
        row = describe_row(tuple(batch["input_ids"].shape), torch.device("cpu"), **described)
    except InputError as refusal:
        return Check(name, 1, 0, str(refusal), False)
    if row is None or row.lengths[: len(lengths)] != tuple(lengths):  # padding may follow
        described_row = "none" if row is None else f"those of {list(row.lengths[:8])} tokens"
        return Check(name, 1, 0, f"of the documents, the collator's batch describes {described_row}", False)
    expected = np.concatenate([np.arange(length) for length in lengths])
    off = int((row.positions[: len(expected)] != expected).sum())
    return Check.of(name, off, 0, f"{off} of {len(expected)} do not restart with their document")


def _check_counted_loss(
    subject: Subject, documents: Sequence[Tensor], labels: Tensor, against_alone: Sequence[Check]
) -> list[Check]:
    """Check the model's own loss on the row, called as in training, against the mean over documents alone."""
    split_labels = labels.split([len(document) for document in documents])
    count = sum(int((own[1:] != IGNORE_INDEX).sum()) for own in split_labels)
    error = gradient_error = 0.0
    if count:

        def mean_alone() -> Tensor:
            pairs = zip(documents, split_labels, strict=True)
            return torch.stack([_sum_loss(subject.logits_alone(d), own) for d, own in pairs]).sum() / count

        expected, embeddings_alone, trained_alone = subject.backward(mean_alone)
        loss, embeddings, trained = subject.backward(
            lambda: subject.packed(documents, labels=labels[None].to(subject.device)).loss
        )
        error = abs(loss / expected - 1)
        got = list(trained.values()) or [embeddings]
        gradient_error = relative_error(got, list(trained_alone.values()) or [embeddings_alone])
    detail = f"the model's own, of {count} labels, is off by {error:.1e}"
    gradients = f"of the model's own, off by {gradient_error:.1e}"
    return [
        Check.of("counted loss", error, against_alone[0].allowed, detail),
        Check.of("gradients of the counted loss", gradient_error, against_alone[-1].allowed, gradients),
    ]


def _sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32))
    targets = labels[1:].to(logits.device)
    return F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def check_branches(subject: Subject, room: int, generator: torch.Generator) -> list[Check]:
    """Check that documents that continue others see those alone, and equal themselves behind them.

    No check for a model whose rows have no branches.
    """
    if not subject.takes_branches:
        return []
    lengths, parent = [*_FOREST_LENGTHS], [*_FOREST]
    for window in sorted(subject.windows):
        if sum(lengths) + window + _BEHIND <= room:  # it begins in the first and ends in the second
            parent += [-1, len(parent)]
            lengths += [window, _BEHIND]
    forest = subject.with_branches(parent)
    documents = random_documents(lengths, subject.vocab_size, generator)
    reached = []
    for number, document in enumerate(documents):
        packed = forest.gradients(document, partial(_packed_output, forest, documents, number))
        reached.append(greatest_by_document(packed.embeddings[0], documents))
    return [
        leaks.check_logits(forest, documents, generator),
        leaks.check_gradients(forest, documents, reached, generator),
        _check_branches_alone(forest, documents),
    ]


def _packed_output(subject: Subject, documents: Sequence[Tensor], number: int) -> Tensor:
    return subject.packed_outputs(documents)[number]


def _check_branches_alone(forest: Subject, documents: Sequence[Tensor]) -> Check:
    """Compare the logits of every document in the row with those behind its ancestors alone."""
    paths = [torch.cat([documents[i] for i in path]) for path in forest.paths(len(documents))]

    def run(logits_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [logits_of(path)[-len(document) :] for document, path in zip(documents, paths, strict=True)]

    return _compare_logits(
        "branches against alone",
        forest.packed_outputs(documents),
        partial(run, forest.logits_alone),
        partial(run, forest.logits_perturbed),
        forest.dtype,
    )


def check_images(subject: Subject, generator: torch.Generator) -> list[Check]:
    """Check that images reach the tokens of their own document only; no check for a model without images."""
    if subject.vision is None:
        return []
    pictured = ImageSubject(subject, subject.vision)
    documents = pictured.documents(generator)
    return [
        _check_image_logits(pictured, documents),
        _check_image_gradients(pictured, documents),
        _check_images_alone(pictured, documents),
    ]


def _check_image_logits(pictured: ImageSubject, documents: Sequence[Pictured]) -> Check:
    """Change the images of one document at a time and compare the logits of all."""
    name = "images leak into logits"
    with torch.no_grad():
        noise, moved = change_in_turn(pictured.logits, documents, Pictured.negative)
    value, source, victim = worst_pair(moved)
    if (blind := np.flatnonzero(moved.diagonal() <= noise)).size:
        return Check(name, 0.0, noise, f"those of document {blind[0]} do not change its own", False)
    if value <= noise:
        return Check.of(name, value, noise, "no bit of any other document's logits changes")
    return Check.of(name, value, noise, f"the images of document {source} change document {victim}")


def _check_image_gradients(pictured: ImageSubject, documents: Sequence[Pictured]) -> Check:
    """Check that the gradient of a document's logits is exactly 0 at the pixels of every other."""
    name = "images leak into gradients"
    counts = [len(document.pixels) for document in documents]
    reached = np.zeros((len(documents), len(documents)))
    for victim in range(len(documents)):
        pixels = pictured.pixels(documents).requires_grad_()
        own = pictured.logits(documents, pixels)[victim]
        (gradient,) = torch.autograd.grad(own.float().square().mean(), pixels, materialize_grads=True)
        by_document = gradient.abs().float().split(counts)
        reached[victim] = [float(part.max()) if len(part) else 0.0 for part in by_document]
        if counts[victim] and not reached[victim, victim]:
            return Check(name, 0.0, 0.0, f"document {victim} has no gradient at its own pixels", False)
    value, victim, source = worst_pair(reached)
    if value == 0:
        return Check.of(name, value, 0.0, "exactly 0 at the pixels of every other document")
    return Check.of(name, value, 0.0, f"document {victim} reaches the pixels of document {source}")


def _check_images_alone(pictured: ImageSubject, documents: Sequence[Pictured]) -> Check:
    """Compare the logits of every document in the row with the document alone."""

    def run() -> list[Tensor]:
        return [pictured.logits_alone(document) for document in documents]

    def run_perturbed() -> list[Tensor]:
        with pictured.subject.perturbed_layers():
            return run()

    name, dtype = "logits with images against alone", pictured.subject.dtype
    return _compare_logits(name, pictured.logits(documents), run, run_perturbed, dtype)


@torch.no_grad()
def _compare_logits(
    name: str,
    packed: Sequence[Tensor],
    alone: Callable[[], list[Tensor]],
    perturbed: Callable[[], list[Tensor]],
    dtype: torch.dtype,
) -> Check:
    """Check the logits of the documents in a row against those alone, and samples of their rounding."""
    truth = alone()

    def errors(logits: Sequence[Tensor]) -> list[float]:
        return [relative_error([got], [expected]) for got, expected in zip(logits, truth, strict=True)]

    yardsticks = [error for _ in range(_SAMPLES) for error in errors(perturbed())]
    return _check_errors(name, errors(packed), yardsticks, dtype)
