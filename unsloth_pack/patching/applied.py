"""A patch on a model: the modules that it swapped, its report, its undo."""

from collections.abc import Sequence
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForQuestionAnswering, GenericForTokenClassification

from unsloth_pack.forwards.causal_lm import FastCausalLM
from unsloth_pack.forwards.door import forget
from unsloth_pack.forwards.experts import FastExperts, FastExpertsLora
from unsloth_pack.forwards.unpadding import Unpadding
from unsloth_pack.graphs.step_graphs import StepGraphs
from unsloth_pack.lora.layers import FastLoraLinear
from unsloth_pack.lora.stacks import is_experts
from unsloth_pack.patching.classes import subclass
from unsloth_pack.patching.decoder_parts import mixers_by_layer
from unsloth_pack.patching.report import (
    PatchReport,
    say,
    say_experts,
    say_loras,
    say_loss,
    say_padding,
    say_step,
)

PATCH = "unsloth_pack_patch"  # where a patched model holds its Patch
_FAST_LORAS = (FastLoraLinear, FastExpertsLora)
_SCORE_PADDING = (GenericForQuestionAnswering, GenericForTokenClassification)


class Patch:
    """A patch on a model. `undo()` takes it off; used as a context manager, leaving the context does.

    Args:
        model: the patched transformers model.
        attn_backend: the attention backend that was asked for, "auto" included.
        unpad: whether padded batches lose their padding.
        report: what patching did.
    """

    def __init__(self, model: PreTrainedModel, attn_backend: str, unpad: bool, report: PatchReport):
        self.attn_backend = attn_backend
        self.unpad = unpad
        self.unpadding = Unpadding(_why_never(model, unpad))
        self._report = report
        self._model = model
        self._decoder = model.get_decoder()
        self._swapped: list[tuple[nn.Module, type, tuple[str, ...]]] = []
        self._attn_implementation = self._decoder.config._attn_implementation

    @property
    def report(self) -> PatchReport:
        """What is fused in the model as it is now: adapters may have come or gone since the patch."""
        if self._swapped:
            # Of what `modules_to_save` has copied, the copy computes
            modules = [one for path, one in self._decoder.named_modules() if ".original_module" not in path]
            say_experts(self._report, [(m, isinstance(m, FastExperts)) for m in modules if is_experts(m)])
            loras = [module for module in modules if isinstance(module, LoraLayer)]
            say_loras(
                self._report,
                [lora for lora in loras if isinstance(lora, _FAST_LORAS)],
                [lora for lora in loras if not isinstance(lora, _FAST_LORAS)],
            )
            say_loss(self._report, self._model)
            say_padding(self._report, self.unpadding)
        return self._report

    def swap(self, module: Any, fast: type, later: Sequence[str] = (), **attributes: Any) -> None:
        """Make `module` an instance of `fast` over its own class, with these instance attributes.

        Args:
            later: names of attributes that it may get while it is patched, and loses with the patch.
        """
        if isinstance(module, fast):  # layers may share it
            return
        self._swapped.append((module, type(module), (*attributes, *later)))
        original: Any = type(module)
        module.__class__ = subclass(fast, original)
        module.__dict__.update(attributes)

    def skip_probe(self) -> None:
        """Do not probe the model for leaks before its first packed row in training."""
        self._decoder.leak_probe = None

    @property
    def kinds(self) -> dict[type, tuple[type, tuple[str, ...]]]:
        """Each class that this patch put in, with the one it replaced and the attributes of its instances."""
        return {type(module): (original, attributes) for module, original, attributes in self._swapped}

    def undo(self) -> None:
        """Restore the model that came in, bit for bit.

        Copies that PEFT has made of patched modules since, for `modules_to_save`, are restored too, and
        forwards that trainers have set on the model are removed. Undoing twice is harmless.
        """
        kinds = self.kinds
        for module in [*(module for module, *_ in self._swapped), *self._model.modules()]:
            if type(module) not in kinds:
                continue
            module.__class__, attributes = kinds[type(module)]
            for name in attributes:
                module.__dict__.pop(name, None)
        self._swapped.clear()
        forget(self._model, FastCausalLM.forward)
        if self._model.__dict__.get(PATCH) is self:
            del self._model.__dict__[PATCH]
            self._decoder.config._attn_implementation = self._attn_implementation

    def capture_nothing(self, why: str) -> None:
        """Capture no steps from now on, and report why."""
        self._decoder.step_graphs = StepGraphs(why)
        say_step(self.report, self._decoder.step_graphs)

    def adapt_to_sharding(self, how: str) -> None:
        """Adapt to parameters that were sharded after patching, and report it.

        Args:
            how: what shards them, for the report.
        """
        self.capture_nothing(f"{how} shards the parameters")
        for mixer, module in mixers_by_layer(self._decoder, self._decoder.spec):
            _, not_fused = mixer.what_is_fused(module, self._decoder.spec, "")
            for kind in not_fused.keys() & self._report.fused.keys():
                say(self._report, kind, None, f"{how} gathers it by itself")

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _why_never(base: nn.Module, unpad: bool) -> str | None:
    """Why padded batches keep their padding, or None."""
    if not unpad:
        return "unpad=False"
    if isinstance(base, _SCORE_PADDING):
        return f"a {type(base).__name__} scores every place of a row, padding too"
    return None
