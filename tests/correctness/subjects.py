"""What a case is about: a model of text or one with images, its documents, and how each is run."""

import copy
from dataclasses import dataclass
from functools import partial

import image_models
import tiny
import torch
from tiny import MIXED_LENGTHS, random_documents

from .cases import DTYPES
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
