"""Check that a packed row equals its documents alone, counts the right tokens, and keeps images apart.

A document's results in a row and alone differ by rounding, which is measured on this model and dtype: the
document runs alone again with random changes of every layer's input by up to one unit in the last place. On
dense models in float32 and bfloat16, packed logits and gradients differ from those alone by 0 to 1.5 times as
much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.models import vision_spec_for
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_row
from unsloth_pack.packed_row.row import IGNORE_INDEX
from unsloth_pack.verification.image_subject import ImageSubject, Pictured
from unsloth_pack.verification.leaks import SLACK, difference, largest, neighbours, relative_error
from unsloth_pack.verification.report import Check
from unsloth_pack.verification.subject import Gradients, Subject, build_example

_SAMPLES = 6  # of rounding, before a larger difference fails

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


@dataclass(frozen=True)
class Errors:
    """Relative errors of one document against itself alone."""

    loss: float
    logits: float
    embedding_gradients: float
    trained_gradients: float

    @classmethod
    def compare(cls, got: Gradients, alone: Gradients, embeddings: Tensor) -> "Errors":
        return cls(
            abs(got.loss - alone.loss) / abs(alone.loss),
            relative_error([got.logits], [alone.logits]),
            relative_error([embeddings], [alone.embeddings[0]]),
            relative_error(list(got.trained.values()), list(alone.trained.values())),
        )


def rounded_errors(subject: Subject, document: Tensor, alone: Gradients | None = None) -> Errors:
    """Measure rounding: a document alone with perturbed layers, against `alone`."""
    run_alone = partial(subject.logits_alone, document)
    alone = alone or subject.gradients(document, run_alone)
    with subject.perturbed_layers():
        got = subject.gradients(document, run_alone)
    return Errors.compare(got, alone, got.embeddings[0])


def _errors_in_batch(subject: Subject, document: Tensor, generator: torch.Generator) -> Errors:
    """Measure rounding: a document in an ordinary batch of two, where nothing can leak, against it alone."""
    neighbour = neighbours(document, subject.vocab_size, generator)[0]
    alone = subject.gradients(document, lambda: subject.logits_alone(document))
    got = subject.gradients(document, lambda: subject.logits_beside(document, neighbour))
    return Errors.compare(got, alone, got.embeddings[0, : len(document)])


def check_alone(
    subject: Subject,
    documents: Sequence[Tensor],
    packed: list[Errors],
    rounded: list[Errors],
    generator: torch.Generator,
) -> list[Check]:
    """Check loss, logits and gradients of every document in the row against the document alone.

    Rounding is random, and rare but large if it changes a token's expert. So a check fails only against
    several samples of it. The second sample is an ordinary batch: GEMMs of a single token have kernels of
    their own, whose rounding trained models can amplify tenfold.

    Args:
        packed: of each document in the row.
        rounded: a first sample of rounding for each.
    """
    for sample in range(_SAMPLES):
        if sample == 1:
            rounded = rounded + [_errors_in_batch(subject, document, generator) for document in documents]
        elif sample:
            rounded = rounded + [rounded_errors(subject, document) for document in documents]
        checks = [_check_errors(field.name, packed, rounded, subject.dtype) for field in fields(Errors)]
        if all(check.passed for check in checks):
            break
    return checks if any(p.requires_grad for p in subject.model.parameters()) else checks[:-1]


def _check_errors(
    field: str, packed: Sequence[Errors], rounded: Sequence[Errors], dtype: torch.dtype
) -> Check:
    errors, yardsticks = ([getattr(error, field) for error in run] for run in (packed, rounded))
    value, yardstick = largest(errors), largest(yardsticks)
    where = f"off by {value:.1e} at most, in document {errors.index(value)}"
    name, detail = field.replace("_", " "), f"{where}; rounding alone makes {yardstick:.1e}"
    return Check.of(f"{name} against alone", value, _allow(yardstick, dtype), detail)


def _allow(yardstick: float, dtype: torch.dtype) -> float:
    """Return the largest allowed error; at least one unit of rounding, because a sample may round exactly."""
    return max(SLACK * yardstick, torch.finfo(dtype).eps, SLACK * torch.finfo(torch.float32).eps)


def check_counting(
    subject: Subject, documents: Sequence[Tensor], collate: Collate, against_alone: Sequence[Check]
) -> list[Check]:
    """Check positions, boundary labels and token counts of the trainer's collator, and the model's own loss.

    Args:
        against_alone: the checks of `check_alone`, whose allowances serve the model's own loss too.
    """
    lengths = [len(document) for document in documents]
    ids = torch.cat(list(documents))
    labels = ids.clone()
    starts = np.cumsum([0, *lengths[:-1]])
    for start, length in zip(starts, lengths, strict=True):
        labels[start : start + length // 3] = IGNORE_INDEX  # as a prompt
    batch = collate([build_example(lengths, ids, labels)])
    is_batch = isinstance(batch, Mapping)
    if not is_batch or not all(isinstance(batch.get(name), Tensor) for name in ("input_ids", "labels")):
        kind = sorted(batch) if is_batch else type(batch).__name__
        remedy = "give a collator whose batches hold input_ids and labels, as tensors"
        raise InputError(f"collate gives {kind}; {remedy}")
    collated = batch["labels"].reshape(-1).cpu()
    if len(collated) < len(ids):
        problem = f"collate gives {len(collated)} labels for {len(ids)} tokens"
        raise InputError(f"{problem}; give a collator that cuts no row")
    own = sum(int((part[1:] != IGNORE_INDEX).sum()) for part in labels.split(lengths))
    at_starts = int((collated[torch.from_numpy(starts)] != IGNORE_INDEX).sum())
    counted = int((collated != IGNORE_INDEX).sum())
    checks = [
        _check_positions(lengths, batch),
        Check.of("boundary labels", at_starts, 0, f"on {at_starts} of {len(lengths)} first tokens"),
        Check.of("token count", abs(counted - own), 0, f"{counted} counted, {own} in the documents alone"),
    ]
    return [*checks, *_check_counted_loss(subject, documents, collated[: len(ids)], against_alone)]


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
    """Check the model's own loss on the row, and its gradients, against the mean over all documents alone.

    The call is as in training, where the loss may be computed without logits.
    """
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


def check_images(subject: Subject, generator: torch.Generator) -> list[Check]:
    """Check that images reach the tokens of their own document only; no check for a model without images."""
    spec = vision_spec_for(subject.model.config.model_type)
    if spec is None:
        return []
    pictured = ImageSubject(subject, spec)
    documents = pictured.documents(generator)
    return [
        _check_logits(pictured, documents),
        _check_gradients(pictured, documents),
        _check_alone(pictured, documents),
    ]


def _check_logits(pictured: ImageSubject, documents: Sequence[Pictured]) -> Check:
    """Change the images of one document at a time and compare the logits of all."""
    name = "images leak into logits"
    worst = (0.0, 0, 0)
    with torch.no_grad():
        before = pictured.logits(documents)
        noise = max(map(difference, before, pictured.logits(documents)))
        for source, document in enumerate(documents):
            if not len(document.images.pixels):
                continue
            mixed = [*documents]
            mixed[source] = document.negative()
            moved = list(map(difference, before, pictured.logits(mixed)))
            if moved[source] <= noise:
                return Check(name, 0.0, noise, f"those of document {source} do not change its own", False)
            worst = max(worst, *((m, source, n) for n, m in enumerate(moved) if n != source))
    value, source, victim = worst
    if value <= noise:
        return Check.of(name, value, noise, "no bit of any other document's logits changes")
    return Check.of(name, value, noise, f"the images of document {source} change document {victim}")


def _check_gradients(pictured: ImageSubject, documents: Sequence[Pictured]) -> Check:
    """Check that the gradient of a document's logits is exactly 0 at the pixels of every other."""
    name = "images leak into gradients"
    owner = np.repeat(np.arange(len(documents)), [len(document.images.pixels) for document in documents])
    worst = (0.0, 0, 0)
    for victim in range(len(documents)):
        pixels = pictured.pixels(documents).requires_grad_()
        own = pictured.logits(documents, pixels)[victim]
        (gradient,) = torch.autograd.grad(own.float().square().mean(), pixels, materialize_grads=True)
        reached = gradient.abs().float().flatten(1).amax(dim=-1).cpu().numpy()
        if (owner == victim).any() and not reached[owner == victim].any():
            return Check(name, 0.0, 0.0, f"document {victim} has no gradient at its own pixels", False)
        others = np.where(owner == victim, 0.0, reached)
        place = int(others.argmax())
        worst = max(worst, (float(others[place]), victim, int(owner[place])))
    value, victim, source = worst
    if value == 0:
        return Check.of(name, value, 0.0, "exactly 0 at the pixels of every other document")
    return Check.of(name, value, 0.0, f"document {victim} reaches the pixels of document {source}")


def _check_alone(pictured: ImageSubject, documents: Sequence[Pictured]) -> Check:
    """Compare the logits of every document in the row with the document alone."""
    yardsticks: list[float] = []
    with torch.no_grad():
        packed = pictured.logits(documents)
        alone = [pictured.logits_alone(document) for document in documents]
        errors = [relative_error([a], [b]) for a, b in zip(packed, alone, strict=True)]
        for _ in range(_SAMPLES):
            with pictured.subject.perturbed_layers():
                moved = [pictured.logits_alone(document) for document in documents]
            yardsticks += [relative_error([a], [b]) for a, b in zip(moved, alone, strict=True)]
    value, yardstick = largest(errors), largest(yardsticks)
    allowed = _allow(yardstick, pictured.subject.dtype)
    detail = f"off by {value:.1e} at most, in document {errors.index(value)}; rounding makes {yardstick:.1e}"
    return Check.of("logits with images against alone", value, allowed, detail)
