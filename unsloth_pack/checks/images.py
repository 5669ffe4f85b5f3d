"""Do the images of a packed row reach the tokens of their own document, and no others?"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.checks.leaks import SLACK, largest, relative_error
from unsloth_pack.checks.pictured import Pictured, PicturedSubject
from unsloth_pack.checks.report import Check
from unsloth_pack.checks.subject import Subject
from unsloth_pack.models import vision_spec_of

_SAMPLES = 6  # of rounding, before a difference is held to be more than that


def check_images(subject: Subject, generator: torch.Generator) -> list[Check]:
    """The checks of images; none where a model takes none, or none in packed rows."""
    spec = vision_spec_of(subject.model.config.model_type)
    if spec is None:
        return []
    pictured = PicturedSubject(subject, spec)
    documents = pictured.documents(generator)
    return [
        _check_logits(pictured, documents),
        _check_gradients(pictured, documents),
        _check_alone(pictured, documents),
    ]


def _check_logits(pictured: PicturedSubject, documents: Sequence[Pictured]) -> Check:
    """Change the images of one document at a time; what do the logits of all do?"""
    name = "images leak into logits"
    worst = (0.0, 0, 0)
    with torch.no_grad():
        before = pictured.logits(documents)
        noise = max(map(_difference, before, pictured.logits(documents)))
        for source, document in enumerate(documents):
            if not len(document.images.pixels):
                continue
            mixed = [*documents]
            mixed[source] = document.negative()
            moved = list(map(_difference, before, pictured.logits(mixed)))
            if moved[source] <= noise:
                return Check(name, 0.0, noise, f"those of document {source} do not change its own", False)
            worst = max(worst, *((m, source, n) for n, m in enumerate(moved) if n != source))
    value, source, victim = worst
    if value <= noise:
        return Check.of(name, value, noise, "no bit of any other document's logits changes")
    return Check.of(name, value, noise, f"the images of document {source} change document {victim}")


def _check_gradients(pictured: PicturedSubject, documents: Sequence[Pictured]) -> Check:
    """Is the gradient of a document's logits exactly 0 at the pixels of every other?"""
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


def _check_alone(pictured: PicturedSubject, documents: Sequence[Pictured]) -> Check:
    """The logits of every document in the row, against the document alone."""
    errors, yardsticks = [], []
    with torch.no_grad():
        packed = pictured.logits(documents)
        alone = [pictured.logits_alone(document) for document in documents]
        errors = [relative_error([a], [b]) for a, b in zip(packed, alone, strict=True)]
        for _ in range(_SAMPLES):
            with pictured.subject.rounded_otherwise():
                moved = [pictured.logits_alone(document) for document in documents]
            yardsticks += [relative_error([a], [b]) for a, b in zip(moved, alone, strict=True)]
    value, yardstick = largest(errors), largest(yardsticks)
    luck = max(torch.finfo(pictured.subject.dtype).eps, SLACK * torch.finfo(torch.float32).eps)
    detail = f"off by {value:.1e} at most, in document {errors.index(value)}; rounding makes {yardstick:.1e}"
    return Check.of("logits with images against alone", value, max(SLACK * yardstick, luck), detail)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())
