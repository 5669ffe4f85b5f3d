"""The model under test: its calls and measurements on text, and on random documents with images.

Shapes: T tokens of a row or L of a document, C channels, V words of the vocabulary, P patches of all images,
S the side of an image or tile in pixels.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.layers.leak_probe import (
    ProbeSubject,
    find_visible,
    greatest_by_document,
    random_documents,
)
from unsloth_pack.layers.mixers.state_space import FastStateLayer
from unsloth_pack.layers.vision.vision_lm import PIXELS, Images, add_row, encode_images, shape_images
from unsloth_pack.models import vision_spec_for
from unsloth_pack.models.spec import TOKEN_TYPES, VisionSpec
from unsloth_pack.modules import base_of, require_model
from unsloth_pack.packed_row.images import RowImages
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.patching.patch import patch_of

Description = Literal["packed_seq_lengths", "position_ids", "trl"]
Describe = Callable[..., Mapping[str, Any]]  # from the lengths, and from `axes` if it has this argument
Size = tuple[int, int]  # tokens of an image in height and width, for models with free sizes

# Text, and images as tokens in height and width: last and first, so that images of two documents are
# neighbours; none; three of unequal size
_PICTURED: tuple[tuple[int | Size, ...], ...] = (
    (7, (4, 2)),
    ((2, 3), 5),
    (9,),
    (3, (1, 1), 2, (2, 4), 1, (3, 1), 6),
)
_LARGEST = (4, 4)  # in height and width, of these images
_MIN_TILES = 2  # of the only image of a document, if a model cuts it: the whole image and one tile


@dataclass(frozen=True)
class Gradients:
    """The loss of one document and its gradients."""

    loss: float  # in nats a token
    logits: Tensor  # `[L, V]`
    embeddings: Tensor  # gradients of all input embeddings, `[rows, T, C]`
    trained: dict[str, Tensor]  # gradients of the trained parameters, by name


class Subject(ProbeSubject):
    """A causal language model, and the description of its packed rows; arguments as for `verify`."""

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
        self.vision = vision_spec_for(model.config.model_type)
        self.image_token = None if self.vision is None else int(getattr(model.config, self.vision.token))
        self.description = describe or ("position_ids" if patch is None else "packed_seq_lengths")
        self.takes_branches = patch is not None and model.get_decoder().why_not_branched() is None

    def with_branches(self, parent: Sequence[int]) -> "Subject":
        """Return the subject of rows whose documents continue others."""
        other = copy(self)
        other.parent, other.description = parent, "packed_seq_lengths"
        return other

    def paths(self, n_documents: int) -> list[list[int]]:
        """Return the numbers of the documents that each sees, itself included, in order."""
        return [np.flatnonzero(seen).tolist() for seen in find_visible(self.parent, n_documents)]

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: the decoder's first, outermost list of modules."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        return list(next(module for module in decoder.modules() if isinstance(module, nn.ModuleList)))

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

    def packed(self, documents: Sequence[Tensor], **more: Tensor) -> Any:
        """Run the model on one row of all documents, `[1, T]`."""
        described = self.described([len(document) for document in documents])
        return self.model(input_ids=self._row_of(torch.cat(list(documents))), **described, **more)

    def as_text(self, ids: Tensor) -> Tensor:
        """Return ids with another one in place of the image token."""
        if self.image_token is None:
            return ids
        return ids.masked_fill(ids == self.image_token, (self.image_token + 1) % self.vocab_size)

    def _row_of(self, ids: Tensor) -> Tensor:
        return self.as_text(ids).to(self.device)[None]

    def described(self, lengths: list[int], axes: Tensor | None = None) -> dict[str, Any]:
        """Return the arguments of a call beside the ids; `axes` `[3, 1, T]` are those of text by default."""
        described: Mapping[str, Any]
        match self.description:
            case "packed_seq_lengths":
                parents = None if self.parent is None else list(self.parent)
                described = {"packed_seq_lengths": list(lengths), "parents": parents}
            case "position_ids":
                along = _restarting_positions(lengths)
                described = {"position_ids": along if axes is None else torch.cat([along[None], axes])}
            case "trl":
                from unsloth_pack.training.trl_setup import row_collator

                batch = row_collator()([build_example(lengths)])
                described = {name: batch[name] for name in batch if name not in ("input_ids", "labels")}
            case str(name):
                choices = "packed_seq_lengths, position_ids, trl, or a function"
                raise InputError(f"describe is {name!r}; choose {choices}")
            case function if "axes" in inspect.signature(function).parameters:
                text_axes = _restarting_positions(lengths)[None].expand(3, 1, -1)
                described = function(lengths, axes=text_axes if axes is None else axes)
            case function:
                described = function(lengths)
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in described.items()}

    def packed_outputs(self, documents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.split(self.packed(documents).logits[0], [*map(len, documents)])

    def logits_alone(self, document: Tensor) -> Tensor:
        """Return the logits `[L, V]` of a document alone."""
        logits: Tensor = self.model(input_ids=self._row_of(document), use_cache=False).logits
        return logits[0]

    def logits_perturbed(self, document: Tensor) -> Tensor:
        with self.perturbed_layers():
            return self.logits_alone(document)

    def logits_beside(self, document: Tensor, neighbour: Tensor) -> Tensor:
        """Return the logits `[L, V]` of a document in an ordinary batch of two, the shorter one padded.

        Without a mask, with which a patched model would run the two as one packed row.
        """
        ids = nn.utils.rnn.pad_sequence([document, neighbour], batch_first=True)
        ids = self.as_text(ids).to(self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits[0, : len(document)]

    def gradients(self, document: Tensor, forward: Callable[[], Tensor]) -> Gradients:
        """Compute loss and gradients of `document`, whose logits `[L, V]` `forward` returns."""
        logits: list[Tensor] = []

        def loss() -> Tensor:
            logits.append(forward())
            return _ring_loss(logits[0], document)

        value, embeddings, trained = self.backward(loss)
        return Gradients(value / len(document), logits[0].detach(), embeddings, trained)

    def backward(self, loss: Callable[[], Tensor]) -> tuple[float, Tensor, dict[str, Tensor]]:
        """Return a loss, its gradients at the input embeddings of all its passes, joined `[rows, T, C]`, and
        those of the trained parameters, by name. With its hook no model is captured into graphs."""
        seen: list[Tensor] = []

        def record(module: nn.Module, args: object, output: Tensor) -> None:
            output.requires_grad_().retain_grad()
            seen.append(output)

        with self.model.get_input_embeddings().register_forward_hook(record):
            value = loss()
            value.backward()
        trained = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                trained[name], parameter.grad = parameter.grad, None
        reached = [torch.zeros_like(x) if x.grad is None else x.grad for x in seen]
        return float(value.detach()), torch.cat(reached, dim=1), trained

    def reached_embeddings(self, documents: Sequence[Tensor], scored: Sequence[int]) -> list[float]:

        def loss() -> Tensor:
            logits = self.packed_outputs(documents)
            return torch.stack([_ring_loss(logits[i], documents[i]) for i in scored]).sum()

        return greatest_by_document(self.backward(loss)[1][0], documents)

    @contextmanager
    def perturbed_layers(self) -> Iterator[None]:
        """Perturb the inputs of all layers by up to one unit in the last place, at random."""
        eps = torch.finfo(self.dtype).eps

        def move(hidden: Tensor) -> Tensor:
            noise = 2 * torch.rand_like(hidden, dtype=torch.float32) - 1
            return (hidden * (1 + eps * noise)).to(hidden.dtype)

        with changed_inputs(move, self.layers):
            yield


@dataclass(frozen=True)
class Pictured:
    """A document with images."""

    ids: Tensor  # `[L]` int64, a placeholder for each token of an image
    pixels: Tensor  # float32; entries of `pixel_values` in the first dimension: patches, tiles or images
    described: Mapping[str, Sequence[Any]]  # further arguments of a call, one entry for each image

    def negative(self) -> "Pictured | None":
        """Invert the images; None if it has none."""
        return replace(self, pixels=-self.pixels) if len(self.pixels) else None


class ImageSubject:
    """A subject that takes images: its calls on documents with some.

    With positions on three axes, the description "position_ids" has those along the text, then the axes.
    """

    def __init__(self, subject: Subject, spec: VisionSpec):
        self.subject, self.spec = subject, spec
        self.config = subject.model.config
        self._token = getattr(self.config, spec.token)

    def documents(self, generator: torch.Generator) -> list[Pictured]:
        """Draw random documents. The model counts the tokens of images."""
        documents = []
        for parts in _PICTURED:
            sizes = [part for part in parts if isinstance(part, tuple)]
            shape, described = shape_images(self.spec, self.config, sizes, _LARGEST, _MIN_TILES)
            document = Pictured(torch.empty(0), torch.randn(shape, generator=generator), described)
            lengths = iter(self._count_tokens(document))
            ids = [
                torch.full((next(lengths),), self._token)
                if isinstance(part, tuple)
                else self.subject.as_text(random_documents([part], self.subject.vocab_size, generator)[0])
                for part in parts
            ]
            documents.append(replace(document, ids=torch.cat(ids)))
        return documents

    def _count_tokens(self, document: Pictured) -> list[int]:
        if not len(document.pixels):
            return []
        base = base_of(self.subject.model).base_model
        images = Images(add_row(self.spec, document.pixels), self._described_images([document]))
        with torch.no_grad():
            sizes: list[int] = encode_images(base, self.spec, images).sizes.tolist()
        return sizes

    def logits(self, documents: Sequence[Pictured], pixels: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the logits `[L, V]` of every document in one row."""
        lengths = [len(document.ids) for document in documents]
        axes = None if self.spec.grid is None else self._axes(documents)
        return torch.split(self._run(documents, pixels, self.subject.described(lengths, axes))[0], lengths)

    def logits_alone(self, document: Pictured) -> Tensor:
        """Return the logits `[L, V]` of a document alone."""
        device = self.subject.device
        axes = {} if self.spec.grid is None else {"position_ids": self._axes([document]).to(device)}
        return self._run([document], None, {"use_cache": False, **axes})[0]

    def _run(self, documents: Sequence[Pictured], pixels: Tensor | None, more: dict[str, Any]) -> Tensor:
        """Return the logits `[1, T, V]` of a row of all documents."""
        ids = torch.cat([document.ids for document in documents])[None]
        pixels = self.pixels(documents) if pixels is None else pixels
        arguments: dict[str, Tensor] = {}
        if len(pixels):
            described = self._described_images(documents)
            arguments = {name: torch.tensor(numbers) for name, numbers in described.items()}
            if self.spec.both_ways:
                arguments[TOKEN_TYPES] = (ids == self._token).int()
            arguments[PIXELS] = add_row(self.spec, pixels)
        on_device = {name: value.to(self.subject.device) for name, value in arguments.items()}
        output = self.subject.model(input_ids=ids.to(self.subject.device), **on_device, **more)
        logits: Tensor = output.logits
        return logits

    def pixels(self, documents: Sequence[Pictured]) -> Tensor:
        joined = torch.cat([document.pixels for document in documents])
        return joined.to(self.subject.device, self.subject.dtype)

    def _described_images(self, documents: Sequence[Pictured]) -> dict[str, list[Any]]:
        """Return the arguments of a call beside pixels."""
        names = documents[0].described
        described = {name: [n for each in documents for n in each.described[name]] for name in names}
        if self.spec.of_documents is not None:
            described[self.spec.of_documents] = [
                max(map(len, each.described.values()), default=len(each.pixels)) for each in documents
            ]
        return described

    def _axes(self, documents: Sequence[Pictured]) -> Tensor:
        """Compute positions in time, height and width, `[3, 1, T]`."""
        row = PackedRow.of_lengths(tuple(len(d.ids) for d in documents), torch.device("cpu"))
        merge = getattr(self.config.vision_config, self.spec.merge)
        described = self._described_images(documents)
        grids = np.array(described[self.spec.grid or ""], dtype=np.int64).reshape(-1, 3)
        token_grids = grids // [1, merge, merge]
        is_placeholder = torch.cat([d.ids for d in documents]) == self._token
        images = RowImages.locate(is_placeholder.numpy(), token_grids.prod(axis=1), row)
        return torch.from_numpy(images.axes(row, token_grids))[:, None]


@contextmanager
def changed_inputs(change: Callable[[Tensor], Tensor], layers: Sequence[nn.Module]) -> Iterator[None]:
    """Apply `change` to the hidden states `[1, T, C]` of every layer's input."""

    def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(give, with_kwargs=True))
        yield


def _ring_loss(logits: Tensor, document: Tensor) -> Tensor:
    """Sum the cross-entropy of a document `[L]` whose last token predicts the first, in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, document.roll(-1).to(logits.device), reduction="sum")


def _restarting_positions(lengths: Sequence[int]) -> Tensor:
    """Return positions `[1, T]` that restart with every document."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def build_example(
    lengths: Sequence[int], ids: Tensor | None = None, labels: Tensor | None = None
) -> dict[str, list[int]]:
    """Build a row of a packed data set for TRL's collator."""
    row = [0] * sum(lengths) if ids is None else ids.tolist()
    return {"input_ids": row, "labels": row if labels is None else labels.tolist(), "seq_lengths": [*lengths]}
