"""Does one document of a packed row reach another? On a dense model no check here needs a tolerance.

Changing a document must change no bit of another's logits. The loss of one document must have a gradient of
exactly 0 at the input embeddings of another. A number that takes no part in a computation does not change its
rounding either.

In some models documents share more than a row: the GEMMs of experts depend on how many tokens they get, int8
scales on all tokens. There a neighbour changes the rounding. How far it does is measured between the rows of
an ordinary batch, where nothing can leak. A kernel may also sum in another order every time; two equal runs
show that. And some kernels sum over several documents on the way (`FastStateLayer`), which a document alone
shows whose layers round otherwise. The gradient at another document is exactly 0 there, too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.errors import LeakFound
from unsloth_pack.layers.leak_probe import (
    change_tokens,
    find_leaking_layer,
    look_for_leaks,
    random_documents,
    record_layers,
    side_effect_free_pass,
)
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.verification.report import Check
from unsloth_pack.verification.subject import Describe, Description, Gradients, Subject, layers_given

SLACK = 3.0  # between two samples of one kind of rounding error
_SAMPLES = 12  # of rounding, before a difference is held to be more than that
_LONGER = 7  # tokens by which a neighbour in an ordinary batch is longer, so that there is padding

Found = tuple[float, int, int]  # how much, of which document, reaches which other


@torch.inference_mode(False)
@torch.enable_grad()  # whatever mode the caller is in
def probe(model: Any, describe: Description | Describe | None = None) -> None:
    """Refuse a model in which documents of a packed row reach each other. This takes two short steps.

    The loss of half of the documents is sent back to the input embeddings of all, then that of the others.
    Mode, gradients, random states and captured graphs of the model stay as they are. A patched model that
    passes does not look again by itself before its first packed row in training.

    Args:
        model: as `verify` takes it.
        describe: likewise.

    Raises:
        InputError: `model` is no causal language model of transformers.
        LeakFound: names the documents, the attention backend, and the first layer that lets one through.
    """
    subject = Subject(model, describe)
    with side_effect_free_pass(model):
        if why_not := look_for_leaks(subject):
            raise LeakFound(f"{why_not}; nothing can be probed")
    if (patch := patch_of(model)) is not None:
        patch.skip_probe()


def check_logits(subject: Subject, documents: Sequence[Tensor], generator: torch.Generator) -> Check:
    """Change every token of one document at a time; what do the logits of the others do?"""
    name = "leak into logits"
    found: list[Found] = []
    blind = []
    with torch.no_grad():
        before = subject.packed_outputs(documents)
        noise = max(map(_difference, before, subject.packed_outputs(documents)))
        for source, document in enumerate(documents):
            mixed = [*documents]
            mixed[source] = change_tokens(document, subject.vocab_size, generator)
            moved = list(map(_difference, before, subject.packed_outputs(mixed)))
            blind += [source] if moved[source] <= noise else []
            found += [(moved[victim], source, victim) for victim in _others(documents, source)]
        value, source, victim = _worst(found)
        if blind:
            return Check(name, value, noise, f"document {blind[0]} does not change its own logits", False)
        if value == 0:
            return Check.of(name, value, 0.0, "no bit of any other document's logits changes")
        allowed = SLACK * noise
        if subject.rounds_together:
            allowed = max(allowed, SLACK * max(_moved_by_rounding(subject, each) for each in documents))
        for beside in _in_batches(documents, subject.vocab_size, generator):
            moved = [_moved_by_neighbours(subject, document, pair) for document, pair in beside]
            allowed = max(allowed, SLACK * max(moved))
            if value <= allowed:
                than = "rounding does" if subject.rounds_together else "between rows of a batch"
                return Check.of(name, value, allowed, f"others move by no more than {than}")
        where = find_leaking_layer(subject, documents, source, generator)
    return Check.of(name, value, allowed, f"document {source} changes document {victim}, first in {where}")


def check_gradients(
    subject: Subject, documents: Sequence[Tensor], reached: Sequence[list[float]], generator: torch.Generator
) -> Check:
    """Is the gradient of a document's loss exactly 0 at the input embeddings of every other?

    Args:
        reached: by each document's loss, the greatest gradient at every document's embeddings.
    """
    name = "leak into gradients"
    found: list[Found] = []
    for victim, at in enumerate(reached):
        if not at[victim] > 0:
            return Check(name, at[victim], 0.0, f"document {victim} has no gradient of its own", False)
        found += [(at[source], source, victim) for source in _others(documents, victim)]
    value, source, victim = _worst(found)
    if value == 0:
        return Check.of(name, value, 0.0, "exactly 0 at the embeddings of every other document")
    where = find_leaking_layer(subject, documents, source, generator)
    return Check.of(
        name, value, 0.0, f"the loss of document {victim} reaches document {source}, first in {where}"
    )


def moved_by_others(
    subject: Subject, documents: Sequence[Tensor], victim: int, before: Gradients, generator: torch.Generator
) -> float:
    """The relative change of a document's gradients in the row, `before`, where all others are changed."""
    mixed = [change_tokens(other, subject.vocab_size, generator) for other in documents]
    mixed[victim] = documents[victim]
    after = subject.gradients(documents[victim], lambda: subject.packed_outputs(mixed)[victim])
    return relative_error(list(after.trained.values()), list(before.trained.values()))


def check_trained_gradients(
    subject: Subject, documents: Sequence[Tensor], moved: Sequence[float], generator: torch.Generator
) -> Check:
    """What do the gradients that a document gives the trained weights do where all others are changed?

    Args:
        moved: how far they do, by document.
    """
    name = "leak into trained gradients"
    value = largest(moved)
    if value == 0:
        return Check.of(name, value, 0.0, "no bit of any changes with the tokens of other documents")

    def run_of(place: int) -> Callable[[], Tensor]:
        return lambda: subject.packed_outputs(documents)[place]

    rounding = [
        _moved_gradients(subject, document, [run_of(number)] * 2) for number, document in enumerate(documents)
    ]
    if subject.rounds_together:
        for document in documents:
            ways = [partial(subject.logits_alone, document), partial(_rounded_otherwise, subject, document)]
            rounding.append(_moved_gradients(subject, document, ways))
    for beside in _in_batches(documents, subject.vocab_size, generator):
        for document, pair in beside:
            in_batch = [partial(subject.logits_beside, document, neighbour) for neighbour in pair]
            rounding.append(_moved_gradients(subject, document, in_batch))
        # Whether a sum is rounded otherwise is luck in 16 bits: one unit of rounding is allowed in any case.
        allowed = max(SLACK * largest(rounding), torch.finfo(subject.dtype).eps)
        if value <= allowed:
            return Check.of(name, value, allowed, "they move by no more than rounding does")
    detail = f"those of document {moved.index(value)} change with the tokens of others"
    return Check.of(name, value, allowed, detail)


def check_reach(subject: Subject, documents: Sequence[Tensor]) -> Check:
    """How far back does the last token of every document see, layer by layer, packed and alone?

    This finds a sliding window that is off by one key at any precision.
    """
    name = "reach of attention"
    with side_effect_free_pass(subject.model, training=False):
        packed_KT = _reach(subject, lambda: subject.packed_outputs(documents), documents)
        alone = [
            _reach(subject, partial(subject.logits_alone, document), [document]) for document in documents
        ]
    packed = packed_KT.split([len(document) for document in documents], dim=1)
    longest = max(map(len, documents))
    for number, (seen_KL, expected_KL) in enumerate(zip(packed, alone, strict=True)):
        ours, theirs = (_tokens_back(x) for x in (seen_KL, expected_KL))
        if ours != theirs:
            layer = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            value = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            detail = (
                f"layer {layer}: the last token of document {number} sees {ours[layer]} tokens, "
                f"alone {theirs[layer]}"
            )
            return Check.of(name, value, 0.0, detail)
    beyond = sorted(window for window in subject.windows if window >= longest)
    detail = f"in each of {len(packed_KT)} layers as far as alone"
    detail += f"; no document is longer than the window of {beyond[0]:,}" if beyond else ""
    return Check.of(name, 0.0, 0.0, detail)


def _reach(subject: Subject, forward: Callable[[], Any], documents: Sequence[Tensor]) -> Tensor:
    """`[layers, T]` bool: the inputs of each layer that the last tokens of the documents look at in it."""
    inputs: list[Tensor] = []

    def cut(hidden: Tensor) -> Tensor:
        inputs.append(hidden.detach().requires_grad_())
        return inputs[-1]

    with layers_given(cut, subject.layers), record_layers(subject.layers) as outputs:
        forward()
    last = torch.tensor([len(document) for document in documents], device="cpu").cumsum(0) - 1
    weights = torch.randn(outputs[0].shape[-1], generator=torch.Generator().manual_seed(0), device="cpu")
    total = torch.stack([(out[last] * weights.to(out)).sum() for out in outputs]).sum()
    return torch.stack([(g[0] != 0).any(dim=-1) for g in torch.autograd.grad(total, inputs)]).cpu()


def _tokens_back(seen_KL: Tensor) -> list[int]:
    """For every layer, how many tokens lie between the first one that is seen and the end."""
    return (seen_KL.shape[1] - seen_KL.int().argmax(dim=1)).tolist()


def _in_batches(
    documents: Sequence[Tensor], vocab_size: int, generator: torch.Generator
) -> Iterator[list[tuple[Tensor, list[Tensor]]]]:
    """Samples of what may stand beside each document in an ordinary batch: two neighbours of one length.

    At first they are longer than the document. Of short documents an expert gets so few tokens that one more
    or less changes how its GEMM rounds, and mostly it does not; the further samples have the lengths that the
    row has.
    """
    yield [(document, neighbours(document, vocab_size, generator)) for document in documents]
    for sample in range(1, _SAMPLES):
        lengths = [len(documents[(number + sample) % len(documents)]) for number in range(len(documents))]
        pairs = [random_documents([length] * 2, vocab_size, generator) for length in lengths]
        yield list(zip(documents, pairs, strict=True))


def _moved_by_neighbours(subject: Subject, document: Tensor, pair: Sequence[Tensor]) -> float:
    """How far another row of an ordinary batch moves a document's logits."""
    return _difference(*(subject.logits_beside(document, other) for other in pair))


def _moved_by_rounding(subject: Subject, document: Tensor) -> float:
    """How far a document's logits move alone, where the inputs of its layers are rounded otherwise."""
    return _difference(subject.logits_alone(document), _rounded_otherwise(subject, document))


def _rounded_otherwise(subject: Subject, document: Tensor) -> Tensor:
    with subject.rounded_otherwise():
        return subject.logits_alone(document)


def _moved_gradients(subject: Subject, document: Tensor, forwards: Sequence[Callable[[], Tensor]]) -> float:
    """The relative change of a document's gradients between two forward passes."""
    first, second = (subject.gradients(document, forward).trained for forward in forwards)
    return relative_error(list(second.values()), list(first.values()))


def neighbours(document: Tensor, vocab_size: int, generator: torch.Generator) -> list[Tensor]:
    """Two documents to stand beside this one in an ordinary batch, both a little longer."""
    return random_documents([len(document) + _LONGER] * 2, vocab_size, generator)


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of all tensors as one vector, in the Euclidean norm; 0 where no bit differs."""
    pairs = [(x.float(), y.float()) for x, y in zip(got, expected, strict=True)]
    if not pairs:
        return 0.0
    difference = torch.stack([(x - y).norm() for x, y in pairs]).norm()
    return float(difference / torch.stack([y.norm() for _, y in pairs]).norm()) if difference != 0 else 0.0


def _difference(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())


def _others(documents: Sequence[Tensor], one: int) -> list[int]:
    return [number for number in range(len(documents)) if number != one]


def _worst(found: Sequence[Found]) -> Found:
    return max(found, key=lambda leak: math.inf if math.isnan(leak[0]) else leak[0])


def largest(values: Sequence[float]) -> float:
    """The greatest value, NaN before all; 0 of none."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value, default=0.0)
