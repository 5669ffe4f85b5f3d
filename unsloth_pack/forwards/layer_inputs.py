"""What some layers get beside the hidden state: embeddings of their own, keys and values of other layers.

Shapes: B rows of T tokens, C features, L layers, P features of a layer's own embeddings.
"""

from collections import UserDict
from typing import Any

from torch import Tensor

from unsloth_pack.errors import InputError

_OF_ASSISTANTS = ("shared_kv_states", "return_shared_kv_states")


class SharedKeysAndValues(UserDict[str, tuple[Tensor, Tensor]]):
    """Keys and values by the type of the layer that has stored them.

    No dict and with a `to`: FSDP2 copies dicts on the way into a layer, accelerate all that moves not itself.
    """

    def to(self, device: Any, **how: Any) -> "SharedKeysAndValues":
        """Move all to a device, in place."""
        self.data = {name: (k.to(device, **how), v.to(device, **how)) for name, (k, v) in self.data.items()}
        return self


def inputs_by_layer(
    decoder: Any, input_ids: Tensor | None, hidden_BTC: Tensor, kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """Keywords for each layer of a decoder, for a packed row.

    Args:
        decoder: a `FastDecoder`.
        hidden_BTC: the embeddings.
        kwargs: of the call. What is not meant for the layers is taken out.

    Raises:
        InputError: the call hands over or asks for keys and values that layers share; checkpointing would
            lose their gradients; `per_layer_inputs` come with `input_ids`.
    """
    by_layer: list[dict[str, Any]] = [{} for _ in decoder.layers]
    if decoder.spec.kv_sharing:
        _refuse_what_breaks_sharing(decoder, kwargs)
        shared = SharedKeysAndValues()
        for inputs in by_layer:
            inputs["shared_kv_states"] = shared
    if decoder.spec.per_layer_inputs:
        own_BTLP = _per_layer_inputs(decoder, input_ids, hidden_BTC, kwargs.pop("per_layer_inputs", None))
        for number, inputs in enumerate(by_layer):
            inputs["per_layer_input"] = None if own_BTLP is None else own_BTLP[:, :, number]
    return by_layer


def own_embeddings(decoder: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """The keywords by which a packed row of embeddings gives what a decoder makes of token ids itself.

    Without them it would look every embedding up among those of the whole vocabulary.
    """
    if not (decoder.spec.per_layer_inputs and decoder.config.hidden_size_per_layer_input):
        return {}
    return {"per_layer_inputs": decoder.get_per_layer_inputs(input_ids, None)}


def _per_layer_inputs(
    decoder: Any, input_ids: Tensor | None, hidden_BTC: Tensor, given_BTLP: Tensor | None
) -> Tensor | None:
    """`[B, T, L, P]`, or None where the model has none; by transformers' own methods, which work by token."""
    if not decoder.config.hidden_size_per_layer_input:
        return None
    if given_BTLP is None:
        given_BTLP = decoder.get_per_layer_inputs(input_ids, hidden_BTC)
    elif input_ids is not None:
        raise InputError("per_layer_inputs come with input_ids; give them with inputs_embeds only")
    return decoder.project_per_layer_inputs(hidden_BTC, given_BTLP)


def _refuse_what_breaks_sharing(decoder: Any, kwargs: dict[str, Any]) -> None:
    for name in _OF_ASSISTANTS:
        if kwargs.pop(name, None):
            raise InputError(f"{name} comes with a packed row; give such a call unpacked")
    if decoder.training and any(map(_is_reentrant, decoder.layers)):
        raise InputError(
            "use_reentrant=True loses the gradients of keys and values that layers share; set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def _is_reentrant(layer: Any) -> bool:
    """Whether a layer is checkpointed so that only its output has gradients, not what it stores beside it."""
    options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    return layer.gradient_checkpointing and bool(options.get("use_reentrant"))
