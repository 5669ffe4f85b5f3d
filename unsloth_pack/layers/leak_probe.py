"""Probe whether one document of a packed row reaches another.

A patched decoder probes itself before its first packed row in training. Training does not notice: the probe
runs no hook, accumulates no gradient, draws no random number, and recomputes and captures nothing.

Shapes: T tokens of a row or L of a document, C channels.
"""

import inspect
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from unsloth_pack.cuda_graphs.protocols import CapturableDecoder, DecoderOutput
from unsloth_pack.errors import LeakFound
from unsloth_pack.modules import HOOKS, Walkable, attribute_set, sharded_by
from unsloth_pack.packed_row.row import PackedRow


@contextmanager
def side_effect_free_pass(model: Walkable, training: bool = True, dropout: bool = False) -> Iterator[None]:
    """Put the model in one mode without its own checks, then restore everything; `dropout` drops too."""
    modules = [*model.modules()]
    dropping = [] if dropout else [module for module in modules if isinstance(module, _DropoutNd)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    checks = ("has_checked_trained_weights", "has_checked_mask", "has_checked_boundary_labels")
    meanwhile = {"attention_dropout": 0.0, "leak_probe": None, **dict.fromkeys(checks, True)}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cuda = {p.device.index for p, _ in gradients if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(cuda)), ExitStack() as stack:
        stack.enter_context(attribute_set(modules, "training", training))
        stack.enter_context(attribute_set(dropping, "training", False))
        for name, value in meanwhile.items():
            stack.enter_context(attribute_set([m for m in modules if name in vars(m)], name, value))
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def bare_forward(decoder: CapturableDecoder) -> Iterator[None]:
    """Run no hook of a module, recompute no layer, and keep none of autocast's casts."""
    modules = [*decoder.modules()]
    kind = decoder.get_input_embeddings().weight.device.type
    uncached = torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)
    with uncached, ExitStack() as stack:
        for module, name in product(modules, HOOKS):
            stack.enter_context(attribute_set([module], name, OrderedDict()))
        recomputing = [module for module in modules if "gradient_checkpointing" in vars(module)]
        with attribute_set(recomputing, "gradient_checkpointing", False):
            yield


def packed_forward(decoder: CapturableDecoder, *args: object, **options: object) -> DecoderOutput:
    """Bypass transformers' recording of outputs, whose hooks `bare_forward` would lose."""
    output: DecoderOutput = inspect.unwrap(type(decoder)._packed_forward)(decoder, *args, **options)
    return output


_LENGTHS = 2 * (5, 1, 16, 2, 8)
# Direct neighbours differ in the first five documents, every second one in the others
_SCORED = (0, 2, 4, 7, 8)
PARENT = (-1, 0, 0, 0, 0, -1, 5, 5, 5, 8)  # where documents continue others

logger = logging.getLogger("unsloth_pack")


class ProbeSubject(Protocol):
    """A model or decoder to probe."""

    attn_backend: str  # for messages
    vocab_size: int  # token ids are smaller
    parent: Sequence[int] | None = None  # for each document the one that it continues, or -1; None for none

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    def packed_outputs(self, documents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return `[L, C]` of every document in one row of all."""

    def reached_embeddings(self, documents: Sequence[Tensor], scored: Sequence[int]) -> list[float]:
        """Return the greatest gradient at each document's embeddings, from a loss of the scored ones."""


def look_for_leaks(probed: ProbeSubject) -> str | None:
    """Send the loss of half of the documents back to the embeddings of all, then that of the other half.

    Returns why the result says nothing about this model, or None; raises LeakFound, also where a document
    does not see those that it continues.
    """
    generator = torch.Generator().manual_seed(0)
    documents = random_documents(_LENGTHS, probed.vocab_size, generator)
    for is_scored in (True, False):
        scored = [i for i in range(len(documents)) if (i in _SCORED) == is_scored]
        reached = probed.reached_embeddings(documents, scored)
        seen = {*np.argwhere(find_visible(probed.parent, len(documents))[scored])[:, 1].tolist()}
        leaks = [(reached[j], j) for j in range(len(documents)) if j not in seen and reached[j] > 0]
        if leaks:
            source = max(leaks)[1]
            where = find_leaking_layer(probed, documents, source, generator)
            raise LeakFound(
                f"documents of a packed row see each other, with attention {probed.attn_backend} first "
                f"in {where}; see `unsloth-pack verify`, or try another attn_backend"
            )
        if not all(map(math.isfinite, reached)):
            return "the gradients of a short packed row are not finite"
        if not all(reached[i] > 0 for i in scored):
            return "no gradient reaches a document's own embeddings"
        if not all(reached[j] > 0 for j in seen):
            if not attends(probed, documents, generator):  # projections that begin as zeros
                return "no token reaches a later one"
            problem = f"documents of a packed row do not see those they continue, with {probed.attn_backend}"
            raise LeakFound(f"{problem}; try another attn_backend, or share_prefixes=False")
    return None


def attends(probed: ProbeSubject, documents: Sequence[Tensor], generator: torch.Generator) -> bool:
    """Return whether the first token of some document changes the output of a later one."""
    changed = [torch.cat([change_tokens(x[:1], probed.vocab_size, generator), x[1:]]) for x in documents]
    with torch.no_grad():
        pairs = zip(probed.packed_outputs(documents), probed.packed_outputs(changed), strict=True)
        return any(bool((before[1:] != after[1:]).any()) for before, after in pairs)


def find_visible(parent: Sequence[int] | None, n_documents: int) -> np.ndarray:
    """Return `[documents, documents]` bool: True in the row of a document for itself and its ancestors."""
    visible = np.eye(n_documents, dtype=bool)
    for document, before in enumerate(parent or ()):
        if before >= 0:
            visible[document] |= visible[before]
    return visible


def find_leaking_layer(
    probed: ProbeSubject, documents: Sequence[Tensor], source: int, generator: torch.Generator
) -> str:
    """Name the first decoder layer in which changing one document changes another that does not see it."""
    mixed = [*documents]
    mixed[source] = change_tokens(documents[source], probed.vocab_size, generator)
    runs = []
    for row in (documents, mixed):
        with torch.no_grad(), record_layers(probed.layers) as outputs:
            probed.packed_outputs(row)
        runs.append(outputs)
    visible = find_visible(probed.parent, len(documents))
    may_differ = torch.from_numpy(np.repeat(visible[:, source], [*map(len, documents)]))
    for number, (before_TC, after_TC) in enumerate(zip(*runs, strict=True)):
        differs = (before_TC != after_TC).any(dim=-1)
        if (differs & ~may_differ.to(differs.device)).any():
            return f"layer {number} ({type(probed.layers[number]).__name__})"
    return "a module after the layers"


@contextmanager
def record_layers(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Record the outputs of the layers, `[T, C]` each."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((output if isinstance(output, Tensor) else output[0])[0])

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_hook(record))
        yield outputs


def random_documents(lengths: Sequence[int], vocab_size: int, generator: torch.Generator) -> list[Tensor]:
    """Draw `[L]` int64 of each length, on the CPU."""
    return [torch.randint(vocab_size, (length,), generator=generator, device="cpu") for length in lengths]


def change_tokens(document: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Draw another document of the same length, different at every token."""
    steps = torch.randint(1, vocab_size, document.shape, generator=generator, device="cpu")
    return (document + steps) % vocab_size


def greatest_by_document(gradient_TC: Tensor, documents: Sequence[Tensor]) -> list[float]:
    """Return the greatest magnitude in each document; waits for the device."""
    parts = gradient_TC.split([len(document) for document in documents])
    return torch.stack([part.abs().max() for part in parts]).tolist()


class DecoderProbe:
    """The probe of a patched decoder, once for rows without and once for rows with branches."""

    def __init__(self, attn_backend: str):
        self.attn_backend = attn_backend
        self._passed: set[bool] = set()

    def is_due(self, decoder: CapturableDecoder, row: PackedRow) -> bool:
        """Return whether this training row could leak, and the host may look now."""
        return (
            (row.parent is not None) not in self._passed
            and decoder.training
            and torch.is_grad_enabled()
            and row.is_padding.count(False) > 1
            and not torch.compiler.is_compiling()
            and not (row.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        )

    def look(self, decoder: CapturableDecoder, row: PackedRow) -> None:
        """Run `look_for_leaks` for rows like this on the last hidden state; log why if it says nothing."""
        # A forward pass would gather parameters from other processes, which may not be at this point
        why_not = "the parameters are sharded" if sharded_by(decoder) else None
        if why_not is None:
            with side_effect_free_pass(decoder), bare_forward(decoder):
                why_not = look_for_leaks(_Decoder(decoder, self.attn_backend, row))
        self._passed.add(row.parent is not None)
        if why_not is not None:
            logger.warning("not probed for leaks between documents: %s", why_not)

    def compile_kernels(self, decoder: CapturableDecoder, row: PackedRow, only: Collection[int]) -> None:
        """Run these layers as `look` does, without checking the result."""
        documents = random_documents(_LENGTHS, 1, torch.Generator().manual_seed(0))
        with side_effect_free_pass(decoder), bare_forward(decoder):
            _Decoder(decoder, self.attn_backend, row, only).reached_embeddings(documents, _SCORED)


class _Decoder(ProbeSubject):
    """A decoder from embeddings to hidden states. Its weights get no gradient; `only` these layers run.

    Its documents continue others if those of `row` do.
    """

    def __init__(
        self,
        decoder: CapturableDecoder,
        attn_backend: str,
        row: PackedRow,
        only: Collection[int] | None = None,
    ):
        self.attn_backend = attn_backend
        self.parent = None if row.parent is None else PARENT
        self.vocab_size = len(decoder.get_input_embeddings().weight)
        self._decoder, self._only = decoder, only

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self._decoder.layers)

    def packed_outputs(self, documents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self._run(self._embed(documents), documents)

    def reached_embeddings(self, documents: Sequence[Tensor], scored: Sequence[int]) -> list[float]:
        embeddings_1TC = self._embed(documents).requires_grad_()
        outputs = self._run(embeddings_1TC, documents)
        seeded = torch.Generator().manual_seed(0)
        weights_C = torch.randn(embeddings_1TC.shape[-1], generator=seeded, device="cpu")
        loss = torch.stack([(outputs[i] * weights_C.to(outputs[i].device)).sum() for i in scored])
        (gradient_1TC,) = torch.autograd.grad(loss.sum(), embeddings_1TC, materialize_grads=True)
        return greatest_by_document(gradient_1TC[0], documents)

    def _embed(self, documents: Sequence[Tensor]) -> Tensor:
        embedding = self._decoder.get_input_embeddings()
        with torch.no_grad():
            embedded: Tensor = embedding(torch.cat(list(documents)).to(embedding.weight.device)[None])
            return embedded

    def _run(self, embeddings_1TC: Tensor, documents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        lengths = tuple(map(len, documents))
        parent = None if self.parent is None else (*self.parent,)
        row = PackedRow.of_lengths(lengths, embeddings_1TC.device, parent)
        ids = torch.cat(list(documents)).to(embeddings_1TC.device)[None]
        inputs = self._decoder.embed_per_layer(ids)
        output = packed_forward(self._decoder, row, None, embeddings_1TC, only=self._only, **inputs)
        assert output.last_hidden_state is not None
        return torch.split(output.last_hidden_state[0], list(lengths))
