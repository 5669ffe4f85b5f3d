"""Check that no document of a packed row reaches another. On dense models no check needs a tolerance.

A change of a document must change no bit of another's logits. The loss of one document must have a gradient
of exactly 0 at the input embeddings of another. A number outside a computation does not change its rounding
either.

In some models a neighbour changes the rounding: GEMMs of experts depend on their number of tokens, int8
scales on all tokens. That rounding is measured between rows of an ordinary batch, where nothing can leak;
that of kernels with a varying order of sums in two equal runs; that of kernels that sum over several
documents (`FastStateLayer`) in a document alone with perturbed layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import LeakFound
from unsloth_pack.layers.leak_probe import (
    PARENT,
    change_tokens,
    find_leaking_layer,
    find_visible,
    look_for_leaks,
    random_documents,
    record_layers,
    side_effect_free_pass,
)
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.verification.subject import Describe, Description, Gradients, Subject, changed_inputs

SLACK = 3.0  # between two samples of one kind of rounding error
_SAMPLES = 12  # of rounding, before a larger difference fails
_LONGER = 7  # extra tokens of a neighbour in an ordinary batch, so that there is padding

Document = TypeVar("Document")


@dataclass(frozen=True)
class Check:
    """One verdict."""

    name: str
    value: float  # the measured error; 0 if exact
    allowed: float  # the limit of `value`: 0, or a rounding error measured on the same model
    detail: str  # where the value occurred, or the meaning of 0
    passed: bool  # True if `value` is at most `allowed`, and the check could have failed

    @classmethod
    def of(cls, name: str, value: float, allowed: float, detail: str) -> "Check":
        return cls(name, value, allowed, detail, value <= allowed)  # NaN never passes

    def __str__(self) -> str:
        measured = f"found {self.value:.2g}, allowed {self.allowed:.2g}"
        return f"{'passed' if self.passed else 'FAILED'}  {self.name}: {self.detail} ({measured})"


@torch.inference_mode(False)
@torch.enable_grad()  # in any mode of the caller
def probe(model: Any, describe: Description | Describe | None = None) -> None:
    """Refuse a model in which documents of a packed row reach each other, in two short steps.

    The loss of half of the documents is propagated to the input embeddings of all, then that of the others.
    Mode, gradients, random states and captured graphs of the model stay as they are. A patched model that
    passes skips its own probe before the first packed row in training.

    Args:
        model, describe: as for `verify`.

    Raises:
        InputError: `model` is no causal language model of transformers.
        LeakFound: names the attention backend, and the first layer that lets a document through.
    """
    subject = Subject(model, describe)
    with side_effect_free_pass(model):
        for probed in [subject, *([subject.with_branches(PARENT)] if subject.takes_branches else [])]:
            if why_not := look_for_leaks(probed):
                raise LeakFound(f"{why_not}; nothing can be probed")
    if (patch := patch_of(model)) is not None:
        patch.skip_probe()


def check_logits(subject: Subject, documents: Sequence[Tensor], generator: torch.Generator) -> Check:
    """Change every token of one document at a time and compare the logits of the others."""
    name = "leak into logits" if subject.parent is None else "leak between branches"
    may_move = find_visible(subject.parent, len(documents)).T
    with torch.no_grad():
        change = partial(change_tokens, vocab_size=subject.vocab_size, generator=generator)
        noise, moved = change_in_turn(subject.packed_outputs, documents, change)
        value, source, victim = worst_pair(moved, may_move)
        if (blind := np.argwhere(may_move & (moved <= noise))).size:
            detail = "document {} does not change the logits of document {}".format(*blind[0])
            return Check(name, value, noise, detail, False)
        if value == 0:
            return Check.of(name, value, 0.0, "no bit of any other document's logits changes")
        allowed = SLACK * noise
        if subject.rounds_together:
            perturbed = (difference(subject.logits_alone(x), subject.logits_perturbed(x)) for x in documents)
            allowed = max(allowed, SLACK * max(perturbed))
        for document, pair in _beside(documents, subject.vocab_size, generator):
            allowed = max(allowed, SLACK * difference(*(subject.logits_beside(document, x) for x in pair)))
            if value <= allowed:
                return Check.of(name, value, allowed, "others move by no more than rounding does")
        where = find_leaking_layer(subject, documents, source, generator)
    return Check.of(name, value, allowed, f"document {source} changes document {victim}, first in {where}")


def change_in_turn(
    run: Callable[[Sequence[Document]], Sequence[Tensor]],
    documents: Sequence[Document],
    change: Callable[[Document], Document | None],
) -> tuple[float, np.ndarray]:
    """Change one document after another, unless `change` returns None, and compare the outputs of all.

    Returns the difference of two equal runs, and `[source, victim]` by how much each output moves.
    """
    before = run(documents)
    noise = max(map(difference, before, run(documents)))
    moved = np.diag([np.inf] * len(documents))
    for source, document in enumerate(documents):
        if (changed := change(document)) is not None:
            row = [*documents[:source], changed, *documents[source + 1 :]]
            moved[source] = [*map(difference, before, run(row))]
    return noise, moved


def worst_pair(matrix: np.ndarray, is_expected: np.ndarray | None = None) -> tuple[float, int, int]:
    """Return the largest entry off the diagonal, or a NaN, with its row and column; no expected one."""
    others = matrix.copy()
    others[np.eye(len(matrix), dtype=bool) if is_expected is None else is_expected] = 0
    row, column = np.unravel_index(others.argmax(), others.shape)
    return float(others[row, column]), int(row), int(column)


def check_gradients(
    subject: Subject, documents: Sequence[Tensor], reached: Sequence[list[float]], generator: torch.Generator
) -> Check:
    """Check that the gradient of a document's loss is exactly 0 at the embeddings of every other.

    `reached` holds, for each document's loss, the largest gradient at every document's embeddings.
    """
    name = "leak into gradients" if subject.parent is None else "leak into gradients between branches"
    matrix, visible = np.array(reached), find_visible(subject.parent, len(documents))
    for victim, source in np.argwhere(visible):
        if not (own := matrix[victim, source]) > 0:
            detail = f"document {victim} has no gradient of its own"
            detail = detail if victim == source else f"the loss of document {victim} does not reach {source}"
            return Check(name, float(own), 0.0, detail, False)
    value, victim, source = worst_pair(matrix, visible)
    if value == 0:
        return Check.of(name, value, 0.0, "exactly 0 at the embeddings of every other document")
    where = find_leaking_layer(subject, documents, source, generator)
    detail = f"the loss of document {victim} reaches document {source}, first in {where}"
    return Check.of(name, value, 0.0, detail)


def moved_by_others(
    subject: Subject, documents: Sequence[Tensor], victim: int, before: Gradients, generator: torch.Generator
) -> float:
    """Return the relative change of a document's gradients in the row when all others change."""
    mixed = [change_tokens(other, subject.vocab_size, generator) for other in documents]
    mixed[victim] = documents[victim]
    after = subject.gradients(documents[victim], lambda: subject.packed_outputs(mixed)[victim])
    return relative_error(list(after.trained.values()), list(before.trained.values()))


def check_trained_gradients(
    subject: Subject, documents: Sequence[Tensor], moved: Sequence[float], generator: torch.Generator
) -> Check:
    """Check that a document's gradients of the trained weights do not change with the other documents.

    `moved` is their relative change, by document.
    """
    name = "leak into trained gradients"
    value = float(np.max(moved))  # NaN, if one is
    if value == 0:
        return Check.of(name, value, 0.0, "no bit of any changes with the tokens of other documents")

    def moved_between(document: Tensor, *forwards: Callable[[], Tensor]) -> float:
        first, second = (subject.gradients(document, forward).trained for forward in forwards)
        return relative_error(list(second.values()), list(first.values()))

    rounding = [
        moved_between(document, *[lambda n=n: subject.packed_outputs(documents)[n]] * 2)
        for n, document in enumerate(documents)
    ]
    if subject.rounds_together:
        runs = (subject.logits_alone, subject.logits_perturbed)
        rounding += [moved_between(x, *(partial(each, x) for each in runs)) for x in documents]
    for document, pair in _beside(documents, subject.vocab_size, generator):
        rounding.append(moved_between(document, *(partial(subject.logits_beside, document, x) for x in pair)))
        # In 16 bits a sample may round exactly by chance: allow at least one unit of rounding
        allowed = max(SLACK * float(np.max(rounding)), torch.finfo(subject.dtype).eps)
        if value <= allowed:
            return Check.of(name, value, allowed, "they move by no more than rounding does")
    detail = f"those of document {np.argmax(moved)} change with the tokens of others"
    return Check.of(name, value, allowed, detail)


def check_reach(subject: Subject, documents: Sequence[Tensor]) -> Check:
    """Compare how far back the last token of every document attends, by layer, packed and alone.

    This detects a sliding window that is off by one key, in any precision.
    """
    name = "reach of attention"
    with side_effect_free_pass(subject.model, training=False):
        packed_KT = _reach(subject, lambda: subject.packed_outputs(documents), documents)
        alone = [_reach(subject, partial(subject.logits_alone, d), [d]) for d in documents]
    packed = packed_KT.split([len(document) for document in documents], dim=1)
    longest = max(map(len, documents))
    for number, (seen_KL, expected_KL) in enumerate(zip(packed, alone, strict=True)):
        ours, theirs = (_tokens_back(x) for x in (seen_KL, expected_KL))
        if ours != theirs:
            layer = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            value = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            detail = f"layer {layer}: the last token of document {number} sees {ours[layer]} tokens"
            return Check.of(name, value, 0.0, f"{detail}, alone {theirs[layer]}")
    beyond = sorted(window for window in subject.windows if window >= longest)
    detail = f"in each of {len(packed_KT)} layers as far as alone"
    detail += f"; no document is longer than the window of {beyond[0]:,}" if beyond else ""
    return Check.of(name, 0.0, 0.0, detail)


def _reach(subject: Subject, forward: Callable[[], object], documents: Sequence[Tensor]) -> Tensor:
    """Return `[layers, T]` bool: the inputs of each layer that the documents' last tokens attend to in it."""
    inputs: list[Tensor] = []

    def detach(hidden: Tensor) -> Tensor:
        inputs.append(hidden.detach().requires_grad_())
        return inputs[-1]

    with changed_inputs(detach, subject.layers), record_layers(subject.layers) as outputs:
        forward()
    last = torch.tensor([len(document) for document in documents], device="cpu").cumsum(0) - 1
    weights = torch.randn(outputs[0].shape[-1], generator=torch.Generator().manual_seed(0), device="cpu")
    total = torch.stack([(out[last] * weights.to(out)).sum() for out in outputs]).sum()
    return torch.stack([(g[0] != 0).any(dim=-1) for g in torch.autograd.grad(total, inputs)]).cpu()


def _tokens_back(seen_KL: Tensor) -> list[int]:
    """Count, for every layer, the tokens from the first attended one to the end."""
    return (seen_KL.shape[1] - seen_KL.int().argmax(dim=1)).tolist()


def _beside(
    documents: Sequence[Tensor], vocab_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Draw samples of two neighbours for each document in an ordinary batch.

    The first are longer than the document, the others as long as another document of the row: an expert's
    GEMM may round otherwise with one token more or less.
    """
    for document in documents:
        yield document, neighbours(document, vocab_size, generator)
    for sample in range(1, _SAMPLES):
        for number, document in enumerate(documents):
            length = len(documents[(number + sample) % len(documents)])
            yield document, random_documents([length] * 2, vocab_size, generator)


def neighbours(document: Tensor, vocab_size: int, generator: torch.Generator) -> list[Tensor]:
    """Draw two slightly longer neighbours for an ordinary batch."""
    return random_documents([len(document) + _LONGER] * 2, vocab_size, generator)


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the relative error of all tensors as one vector, in the Euclidean norm; 0 if no bit differs."""
    pairs = [(x.float(), y.float()) for x, y in zip(got, expected, strict=True)]
    if not pairs:
        return 0.0
    error = torch.stack([(x - y).norm() for x, y in pairs]).norm()
    return float(error / torch.stack([y.norm() for _, y in pairs]).norm()) if error != 0 else 0.0


def difference(x: Tensor, y: Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    return float((x - y).abs().max())
