"""Checkpointing that offloads the inputs of decoder layers or follows a plan, while it is switched off."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OwnCheckpointing:
    """A mode of this package, as `enable_checkpointing` has put it on a decoder.

    Args:
        functions: by which its layers are checkpointed; None for one that is not.
        plan: the decoder's `recompute_plan`.
    """

    functions: tuple[Any, ...]
    plan: Any

    @classmethod
    def of(cls, decoder: Any) -> "OwnCheckpointing | None":
        """That of a decoder whose layers run so now, or None."""
        functions = tuple(
            layer._gradient_checkpointing_func if layer.gradient_checkpointing else None
            for layer in decoder.layers
        )
        is_own = any(hasattr(function, "recomputes") for function in functions)
        return cls(functions, decoder.recompute_plan) if is_own else None

    def restore(self, decoder: Any) -> None:
        """Let the layers run so again."""
        decoder.recompute_plan = self.plan
        for layer, function in zip(decoder.layers, self.functions, strict=True):
            layer.gradient_checkpointing = function is not None
            if function is not None:
                layer._gradient_checkpointing_func = function
