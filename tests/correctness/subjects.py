"""What a case is about: a model of text or one with images, its documents, and how each is run."""

import copy
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import image_models
import numpy as np
import tiny
import torch
from exactness import divergences
from tiny import MIXED_LENGTHS, random_documents
from torch.nn.utils.rnn import pad_sequence

from unsloth_pack.lora.base_model import base_model
from unsloth_pack.losses.distillation import DistillationLoss, model_teacher
from unsloth_pack.packed_row.padded_batch import PaddedBatch
from unsloth_pack.packed_row.prefixes import first_differences, share_prefixes

from .cases import DIVERGENCES, DTYPES
from .judge import on_the_same_row
from .models import NotApplicable, build, build_exact, copy_dequantised, in_nf4, to_patch


@dataclass(frozen=True)
class Text:
    """A language model."""

    arch: str
    window: str
    variant: str

    run_alone = staticmethod(tiny.run_alone)
    run_packed = staticmethod(tiny.run_packed)
    on_the_same_row = staticmethod(on_the_same_row)

    def build(self, dtype):
        return build(self.arch, self.window, self.variant, dtype)

    def build_exact(self, quantised=None):
        return build_exact(self.arch, self.window, self.variant, quantised)

    def to_patch(self, model):
        return to_patch(model, self.variant)

    @staticmethod
    def documents(seed, turned=False):
        return random_documents(MIXED_LENGTHS[::-1] if turned else MIXED_LENGTHS, seed)


# Tokens of prompts, and of the answers to each; a window of 24 reaches into them
_ANSWERED = {64: (1, 33, 7), 129: (31, 2), 40: (5,)}


class Branches(Text):
    """A language model on a padded batch whose rows begin alike."""

    @staticmethod
    def documents(seed, turned=False):
        prompts, documents = random_documents(_ANSWERED, seed), []
        for number, (prompt, lengths) in enumerate(zip(prompts, _ANSWERED.values(), strict=True)):
            answers = random_documents(lengths, 100 * seed + number)
            documents += [torch.cat([prompt, answer]) for answer in answers]
        return documents[::-1] if turned else documents

    @staticmethod
    def run_packed(model, documents, routes=None):
        ids = pad_sequence(documents, batch_first=True)
        mask = pad_sequence([torch.ones_like(document) for document in documents], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 0] = -100
        if routes is not None and model.get_decoder().unpadding.why_no_sharing is None:
            whole = PaddedBatch.of_mask(mask.numpy() == 1, torch.device("cpu"))
            shared = share_prefixes(whole, first_differences(ids, mask).numpy())
            computed = torch.from_numpy(np.searchsorted(whole.places, shared.places))
            routes = {name: experts[computed] for name, experts in routes.items()}
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        model.zero_grad()
        with tiny.exactly(model), tiny.routing(model, routes) as seen:
            out = model(**{name: x.to(model.device) for name, x in batch.items()})
            out.loss.backward()
        return tiny.as_outcome(model, out.logits[mask.to(out.logits.device) == 1], out.loss, seen)


_KL, _CE = 1.0, 0.3  # weights, at which neither gradient hides the other


class Distillation(Text):
    """A language model that learns from its base beside the labels.

    The base's tokens go to the experts that the student chooses for them.
    """

    def run_alone(self, model, documents, routes=None):
        groups = [torch.stack([*group]) for _, group in groupby(documents, key=len)]
        return self._run_plain(model, documents, groups, routes)

    def run_packed(self, model, documents, routes=None, **describe):
        """Patched; plain where positions describe the row."""
        if describe:
            return self._run_plain(model, documents, [torch.cat(documents)[None]], routes, **describe)
        teacher = partial(model_teacher, within=partial(base_model, model))
        loss = DistillationLoss(teacher, DIVERGENCES[self.variant], kl_weight=_KL, ce_weight=_CE)
        model.get_base_model().training_loss = loss
        return tiny.run_packed(model, documents, routes)

    def on_the_same_row(self, model, documents, routes=None):
        return on_the_same_row(model, documents, routes, runs=self)

    def _run_plain(self, model, documents, batches, routes, **describe):
        describe["use_cache"] = False

        def logits():
            outputs = [model(input_ids=ids.to(model.device), **describe).logits for ids in batches]
            return torch.cat([output.flatten(0, 1) for output in outputs])

        model.zero_grad()
        with tiny.exactly(model):
            with tiny.routing(model, routes) as seen:
                ours = logits()
            routes = routes or {name: torch.cat(parts) for name, parts in seen.items()}
            with tiny.routing(model, routes), model.disable_adapter(), torch.no_grad():
                theirs = logits()
            loss = self._loss(ours, theirs, documents)
            loss.backward()
        return tiny.as_outcome(model, ours, loss, seen)

    def _loss(self, ours, theirs, documents):
        """The mean over all tokens but the first of each document, in float32 at least."""
        before_next = torch.cat([torch.arange(len(d)) < len(d) - 1 for d in documents]).to(ours.device)
        wide = torch.promote_types(ours.dtype, torch.float32)
        log_p, log_q = (x[before_next].to(wide).log_softmax(-1) for x in (ours, theirs))
        labels = torch.cat([document[1:] for document in documents]).to(ours.device)
        divergence = divergences(log_p, log_q)[DIVERGENCES[self.variant]]
        return _KL * divergence.mean() - _CE * log_p.gather(1, labels[:, None]).mean()


@dataclass(frozen=True)
class WithImages:
    """A model of vision and language, of which what `variant` says trains; see `image_models.made`.

    The gradients of its pixels are compared too.
    """

    arch: str
    variant: str

    def build(self, dtype):
        if dtype == "nf4" and self.variant == "all":
            raise NotApplicable("quantised weights have no gradient")
        model = image_models.made(self.arch, DTYPES[dtype], self.variant)
        if dtype != "nf4":
            return model
        return in_nf4(model, partial(image_models.adapted, trained=self.variant), "language_model|text_model")

    def build_exact(self, quantised=None):
        model = image_models.made(self.arch, torch.float64, self.variant)
        if quantised is not None:
            copy_dequantised(quantised, model)
        return model

    def to_patch(self, model):
        return copy.deepcopy(model)

    def documents(self, seed, turned=False):
        parts = image_models.parts_of(self.arch)
        return image_models.documents(self.arch, parts[::-1] if turned else parts, seed)

    def run_alone(self, model, documents, routes=None):
        return image_models.run_alone(self.arch, model, documents, routes)

    def run_packed(self, model, documents, routes=None, **describe):
        return image_models.run_packed(self.arch, model, documents, routes, **describe)

    def on_the_same_row(self, model, documents, routes=None):
        """Plain transformers on the row. Where its documents leak into each other, it judges nothing."""
        positions = image_models.plain_positions(self.arch, documents)
        return self.run_packed(model, documents, routes, position_ids=positions)
