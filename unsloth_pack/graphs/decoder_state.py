"""What a graph takes for granted of a decoder: where its parameters lie and what its modules do."""

from itertools import chain
from operator import attrgetter

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, UntypedStorage

from unsloth_pack.graphs.protocols import CapturableDecoder
from unsloth_pack.graphs.recomputed_layers import why_not_recomputed
from unsloth_pack.modules.hooks import HOOKS, is_harmless

_IS_TRAINED = attrgetter("requires_grad")
_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")  # attributes of layers
_DROPOUTS = ("p", "attention_dropout")  # attributes of modules that hold a dropout probability


class DecoderState:
    """A decoder as it was when this was made. Graphs that were captured then are right while it matches.

    Attributes:
        bytes_of_gradients: of all trained parameters.
    """

    def __init__(self, decoder: CapturableDecoder):
        modules = list(decoder.modules())
        self._decoder = decoder
        self._hooks = [getattr(m, name) for m in modules for name in HOOKS]
        self._children = [m._modules for m in modules if m._modules]
        self._children_seen = [dict(held) for held in self._children]
        self._holders = [m._parameters for m in modules if m._parameters]
        self._kept_alive = self._parameters()  # so that no other parameter gets the id of one of these
        self._memory: list[UntypedStorage] = []
        self._adapted = [m for m in modules if isinstance(m, BaseTunerLayer)]
        scalings = (getattr(m, "scaling", None) for m in self._adapted)  # IA³ has none
        self._scalings: list[dict[str, float]] = [scaling for scaling in scalings if scaling is not None]
        self._dropouts = [(vars(m), name) for m in modules for name in _DROPOUTS if name in vars(m)]
        self._layers = [vars(layer) for layer in decoder.layers]
        self.bytes_of_gradients = sum(
            p.numel() * p.element_size() for p in decoder.parameters() if p.requires_grad
        )
        self._seen, self._dropouts_seen = self._look(), self._look_at_dropouts()

    def keep_memory(self) -> None:
        """Keep the memory of the parameters while this lives, even where they get other memory.

        Graphs may be launched before anybody looks whether the parameters lie there still.
        """
        self._memory = [p.untyped_storage() for p in self._kept_alive]

    def matches(self, decoder: CapturableDecoder) -> bool:
        """Whether nothing but dropout has changed. Called every step, so it compares little of a module."""
        return (
            self._decoder is decoder and self._children == self._children_seen and self._look() == self._seen
        )

    def dropout_matches(self) -> bool:
        """Whether every dropout has the same probability, and is on or off as it was."""
        return self._look_at_dropouts() == self._dropouts_seen

    def why_not_captured(self) -> str | None:
        """Why no row of this step is captured, or None."""
        if not self._decoder.training:
            return "the model is not training"
        if why := why_not_recomputed(self._decoder):
            return why
        if any(not is_harmless(hook) for held in filter(None, self._hooks) for hook in held.values()):
            return "modules have hooks"
        return None

    def _parameters(self) -> list[Tensor]:
        held = chain.from_iterable(map(dict.values, self._holders))
        return [p for p in held if p is not None]

    def _look(self) -> list[list[object]]:
        """Of parameters and adapters, mostly in C: it reads thousands of objects."""
        parameters = self._parameters()
        adapters = [(m._disable_adapters, m._active_adapter, *m.merged_adapters) for m in self._adapted]
        return [
            list(map(id, parameters)),
            list(map(Tensor.data_ptr, parameters)),
            list(map(_IS_TRAINED, parameters)),
            adapters,
            list(chain.from_iterable(map(dict.values, self._scalings))),
            [layer.get(name) for layer in self._layers for name in _CHECKPOINTING],
        ]

    def _look_at_dropouts(self) -> list[tuple[float, bool]]:
        return [(held[name], held["training"]) for held, name in self._dropouts]
