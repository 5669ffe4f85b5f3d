"""The model under test: its calls, measurements, and the restoration of its state.

Shapes: T tokens of a row or L of a document, C channels, V words of the vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.layers.leak_probe import ProbeSubject, greatest_by_document
from unsloth_pack.layers.mixers.state_space import FastStateLayer
from unsloth_pack.models import vision_spec_for
from unsloth_pack.modules import require_model
from unsloth_pack.patching.patch import patch_of

Description = Literal["packed_seq_lengths", "position_ids", "trl"]
Describe = Callable[..., Mapping[str, Any]]  # from the lengths, and from `axes` if it has this argument


@dataclass(frozen=True)
class Gradients:
    """The loss of one document and its gradients.

    Args:
        loss: in nats a token.
        logits: `[L, V]` of the document.
        embeddings: gradients of all input embeddings, `[rows, T, C]`.
        trained: gradients of the trained parameters, by name.
    """

    loss: float
    logits: Tensor
    embeddings: Tensor
    trained: dict[str, Tensor]


class Subject(ProbeSubject):
    """A causal language model, and the description of its packed rows.

    Args:
        model: a transformers model, or a PEFT model of one, patched or not.
        describe: as for `verify`.

    Raises:
        InputError: the model is no module, not of transformers, or has no language model's head.
    """

    def __init__(self, model: Any, describe: Description | Describe | None):
        require_model(model)
        patch = patch_of(model)
        if model.get_output_embeddings() is None:
            problem = f"a {type(model).__name__} has no language model's head, whose logits are compared"
            raise InputError(f"{problem}; give a causal language model")
        self.model = model
        self.config = model.config.get_text_config()
        self.attn_backend = patch.report.attn_backend if patch else str(self.config._attn_implementation)
        embedding = model.get_input_embeddings().weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.vocab_size = min(self.config.vocab_size, len(embedding))
        vision_spec = vision_spec_for(model.config.model_type)
        self.image_token = None if vision_spec is None else int(getattr(model.config, vision_spec.token))
        if describe is None:
            describe = "position_ids" if patch is None else "packed_seq_lengths"
        self.description = describe
        self._describe = describe if callable(describe) else _get_description(describe)
        self._takes_axes = callable(describe) and "axes" in inspect.signature(describe).parameters

    @property
    def is_checkpointing(self) -> bool:
        return any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: the decoder's first, outermost list of modules."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        for module in decoder.modules():
            if isinstance(module, nn.ModuleList):
                return list(module)
        raise InputError(f"a {type(self.model).__name__} has no list of layers; give a decoder")

    @cached_property
    def rounds_together(self) -> bool:
        """True if a document's neighbours change how kernels round it, see `FastStateLayer`."""
        layers = [module for module in self.model.modules() if isinstance(module, FastStateLayer)]
        return any(layer.rounds_together for layer in layers if layer.boundaries is not None)

    @cached_property
    def windows(self) -> set[int]:
        """The sliding windows of the layers, in tokens."""
        holders = [self.config, *self.model.modules()]
        return {w for holder in holders if isinstance(w := getattr(holder, "sliding_window", None), int)}

    def packed(self, documents: Sequence[Tensor], **more: Any) -> Any:
        """Run the model on one row of all documents, `[1, T]`."""
        described = self.described([len(document) for document in documents])
        ids = self._to_text(torch.cat(list(documents)))[None]
        return self.model(input_ids=ids, **described, **more)

    def _to_text(self, ids: Tensor) -> Tensor:
        """Move ids to the device, with another id in place of the image token."""
        ids = ids.to(self.device)
        if self.image_token is None:
            return ids
        return ids.masked_fill(ids == self.image_token, (self.image_token + 1) % self.vocab_size)

    def described(self, lengths: list[int], axes: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments of a call beside the ids.

        Args:
            axes: `[3, 1, T]`, positions in time, height and width. None: those of text.
        """
        more = {}
        if self._takes_axes:
            more["axes"] = _restarting_positions(lengths)[None].expand(3, 1, -1) if axes is None else axes
        described = self._describe(lengths, **more)
        if not isinstance(described, Mapping):
            remedy = "give a function from the list of lengths to keyword arguments"
            raise InputError(f"describe gives a {type(described).__name__}; {remedy}")
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in described.items()}

    def packed_outputs(self, documents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the logits `[L, V]` of every document in one row."""
        return self.packed(documents).logits[0].split([len(document) for document in documents])

    def logits_alone(self, document: Tensor) -> Tensor:
        """Return the logits `[L, V]` of a document alone."""
        return self.model(input_ids=self._to_text(document)[None], use_cache=False).logits[0]

    def logits_beside(self, document: Tensor, neighbour: Tensor) -> Tensor:
        """Return the logits `[L, V]` of a document in an ordinary batch of two, the shorter one padded.

        Rows of a batch never attend to each other, nor to padding on the right: the difference to the
        document alone is rounding. With a mask, a patched model would run the two as one packed row.
        """
        ids = torch.zeros(2, max(len(document), len(neighbour)), dtype=torch.int64, device="cpu")
        ids[0, : len(document)], ids[1, : len(neighbour)] = document, neighbour
        return self.model(input_ids=self._to_text(ids), use_cache=False).logits[0, : len(document)]

    def gradients(self, document: Tensor, forward: Callable[[], Tensor]) -> Gradients:
        """Compute loss and gradients of `document`, whose logits `[L, V]` `forward` returns.

        The last token predicts the first one, so that a document of one token has a loss too.
        """
        logits: list[Tensor] = []

        def loss() -> Tensor:
            logits.append(forward())
            return compute_loss(logits[0], document)

        value, embeddings, trained = self.backward(loss)
        return Gradients(value / len(document), logits[0].detach(), embeddings, trained)

    def backward(self, loss: Callable[[], Tensor]) -> tuple[float, Tensor, dict[str, Tensor]]:
        """Return a loss, its gradients at the input embeddings of all its passes, joined `[rows, T, C]`, and
        those of the trained parameters, by name."""
        with self.recorded_embeddings() as seen:
            value = loss()
            value.backward()
        trained = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                trained[name], parameter.grad = parameter.grad, None
        reached = [torch.zeros_like(x) if x.grad is None else x.grad for x in seen]
        return float(value.detach()), torch.cat(reached, dim=1), trained

    def reached_embeddings(self, documents: Sequence[Tensor], scored: Sequence[int]) -> list[float]:
        """Return the largest gradient at every document's embeddings, of the loss of some of them."""
        with self.recorded_embeddings() as seen:
            logits = self.packed_outputs(documents)
            torch.stack([compute_loss(logits[i], documents[i]) for i in scored]).sum().backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        gradient = torch.zeros_like(seen[0]) if seen[0].grad is None else seen[0].grad
        return greatest_by_document(gradient[0], documents)

    @contextmanager
    def perturbed_layers(self) -> Iterator[None]:
        """Perturb the inputs of all layers by up to one unit in the last place, at random."""
        eps = torch.finfo(self.dtype).eps

        def move(hidden: Tensor) -> Tensor:
            noise = 2 * torch.rand_like(hidden, dtype=torch.float32) - 1
            return (hidden * (1 + eps * noise)).to(hidden.dtype)

        with changed_inputs(move, self.layers):
            yield

    @contextmanager
    def recorded_embeddings(self) -> Iterator[list[Tensor]]:
        """Record the outputs of the input embedding, with their gradients.

        A model with a hook is not captured into CUDA graphs, so this leaves no trace there.
        """
        seen: list[Tensor] = []

        def record(module: nn.Module, args: Any, output: Tensor) -> None:
            if not output.requires_grad:
                output.requires_grad_()
            output.retain_grad()
            seen.append(output)

        hook = self.model.get_input_embeddings().register_forward_hook(record)
        try:
            yield seen
        finally:
            hook.remove()


@contextmanager
def changed_inputs(change: Callable[[Tensor], Tensor], layers: Sequence[nn.Module]) -> Iterator[None]:
    """Apply `change` to the hidden states `[1, T, C]` of every layer's input."""

    def give(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    hooks = [layer.register_forward_pre_hook(give, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compute_loss(logits: Tensor, document: Tensor) -> Tensor:
    """Compute the summed cross-entropy of a document `[L]` as a ring, in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, document.roll(-1).to(logits.device), reduction="sum")


def _get_description(name: str) -> Describe:
    if name == "packed_seq_lengths":
        return lambda lengths: {"packed_seq_lengths": list(lengths)}
    if name == "position_ids":
        return lambda lengths: {"position_ids": _restarting_positions(lengths)}
    if name == "trl":
        from unsloth_pack.training.trainer import row_collator

        def describe(lengths: list[int]) -> dict[str, Any]:
            batch = row_collator()([build_example(lengths)])
            return {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}

        return describe
    raise InputError(f"describe is {name!r}; choose packed_seq_lengths, position_ids, trl, or a function")


def _restarting_positions(lengths: Sequence[int]) -> Tensor:
    """Return positions `[1, T]` that restart with every document."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def build_example(lengths: Sequence[int], ids: Tensor | None = None, labels: Tensor | None = None) -> dict:
    """Build a row of a packed data set for TRL's collator."""
    row = [0] * sum(lengths) if ids is None else ids.tolist()
    return {"input_ids": row, "labels": row if labels is None else labels.tolist(), "seq_lengths": [*lengths]}
