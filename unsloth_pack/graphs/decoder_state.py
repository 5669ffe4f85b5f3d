"""What a graph takes for granted of a decoder: its parameters, its dropout and its checkpointing."""

from functools import partial

from unsloth_pack.graphs.module_state import ModuleState
from unsloth_pack.graphs.protocols import CapturableDecoder
from unsloth_pack.graphs.recomputed_layers import why_not_recomputed

_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")  # attributes of layers
_DROPOUTS = ("p", "attention_dropout")  # attributes of modules that hold a dropout probability


class DecoderState(ModuleState):
    """A decoder as it was when this was made. It matches, too, where nothing but dropout has changed.

    Attributes:
        bytes_of_gradients: of all trained parameters.
    """

    def __init__(self, decoder: CapturableDecoder):
        self._decoder = decoder
        self._dropouts = [(vars(m), name) for m in decoder.modules() for name in _DROPOUTS if name in vars(m)]
        self._layers = [vars(layer) for layer in decoder.layers]
        self.bytes_of_gradients = sum(
            p.numel() * p.element_size() for p in decoder.parameters() if p.requires_grad
        )
        self._dropouts_seen = self._look_at_dropouts()
        super().__init__(decoder)

    def dropout_matches(self) -> bool:
        """Whether every dropout has the same probability, and is on or off as it was."""
        return self._look_at_dropouts() == self._dropouts_seen

    def why_not_captured(self) -> str | None:
        """Why no row of this step is captured, or None."""
        if not self._decoder.training:
            return "the model is not training"
        if why := why_not_recomputed(self._decoder):
            return why
        return "modules have hooks" if self.has_hooks else None

    def look(self) -> list[list[object]]:
        checkpointing = [_alike(layer.get(name)) for layer in self._layers for name in _CHECKPOINTING]
        return [*super().look(), checkpointing]

    def _look_at_dropouts(self) -> list[tuple[float, bool]]:
        return [(held[name], held["training"]) for held, name in self._dropouts]


def _alike(value: object) -> object:
    """The value; of a partial its parts. TRL's DPO makes these anew in every step: their parts are equal."""
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else value
