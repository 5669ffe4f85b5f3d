"""The forward of decoder layers that norm what goes into their mixer and into their MLP.

Some 70 decoder layers in transformers have the same forward, Llama's, word for word. They run fused: a
residual is added and normed in one launch. Any other layer keeps transformers' own forward.
"""

import inspect
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.layers.norm import FastRMSNorm
from unsloth_pack.modules.hooks import has_hooks, no_compile
from unsloth_pack.modules.sharding import is_gathered_by_module


class FastLayer(nn.Module):
    """Takes the place of the class of a decoder layer for which `is_plain` is true."""

    input_layernorm: Any
    self_attn: nn.Module
    post_attention_layernorm: Any
    mlp: nn.Module

    @no_compile
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`[B, T, C]` through the layer; of a packed row fused, with the results of `_plain_forward`.

        Args:
            kwargs: as transformers' layer takes them, and `packed_row`.
        """
        before, between = self.input_layernorm, self.post_attention_layernorm
        if args or kwargs.get("packed_row") is None or not (_runs_fused(before) and _runs_fused(between)):
            return super().forward(hidden_states, *args, **kwargs)
        residual, normed = before.of_sum(hidden_states, None)
        mixed, _ = self.self_attn(hidden_states=normed, **kwargs)
        residual, normed = between.of_sum(residual, mixed)
        return residual + self.mlp(normed)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer's forward is `_plain_forward`, instruction for instruction."""
    forward: Any = inspect.unwrap(type(layer).forward)
    return "forward" not in vars(layer) and _instructions(forward) == _instructions(_plain_forward)


def _runs_fused(norm: nn.Module) -> bool:
    return isinstance(norm, FastRMSNorm) and not (has_hooks(norm) or is_gathered_by_module(norm.weight))


def _instructions(function: Any) -> tuple[Any, ...]:
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants, function.__defaults__


def _plain_forward(
    self: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    use_cache: Any = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states  # noqa: RET504 - as there: the instructions are compared


# What some layers get beside the hidden state: embeddings of their own, keys and values of other layers.
#
# Shapes: B rows of T tokens, C features, L layers, P features of a layer's own embeddings.

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


# Checkpointing that offloads the inputs of decoder layers or follows a plan, while it is switched off.


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


# Input embeddings of which a few rows are trained (PEFT's `trainable_token_indices`).
#
# PEFT copies the whole matrix at every call to put the trained rows into it, and its gradient is as large.
# Here
# the frozen rows are looked up as they are, and the trained ones in their own small matrix.

_UNTRAINED = -1


class FastTrainedTokens(nn.Module):
    """Takes the place of the class of a `TrainableTokensWrapper` around input embeddings.

    Calls that differ from PEFT's plain one go through PEFT's own forward.

    Args:
        places: for the tokens that `placed` lists, the row of each in the trained matrix, `[V]`.
    """

    token_adapter: Any
    disable_adapters: bool
    placed: tuple[int, ...] | None = None
    places: Tensor

    @no_compile
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., C]` for token ids `[...]`."""
        if args or kwargs or not self._runs_fused():
            return super().forward(x, *args, **kwargs)
        layer = self.token_adapter
        (name,) = layer.active_adapters
        embeddings: Tensor = layer.base_layer(x)
        trained = layer.trainable_tokens_delta[name].to(layer.base_layer.weight.dtype)
        place = self._places_of(layer.token_indices[name], x.device)[x]
        rows = F.embedding(place.clamp(min=0), trained)
        if (scale := layer._get_embed_scale()) is not None:
            rows = rows * scale.to(rows.dtype)
        return torch.where((place != _UNTRAINED)[..., None], rows, embeddings)

    def _runs_fused(self) -> bool:
        layer = self.token_adapter
        base = layer.base_layer
        if self.disable_adapters or layer.disable_adapters or layer.merged or has_hooks(layer, base):
            return False
        names = layer.active_adapters
        if len(names) != 1 or names[0] not in layer.trainable_tokens_delta:
            return False
        is_plain = isinstance(base, nn.Embedding) and base.max_norm is None and not base.scale_grad_by_freq
        return is_plain and base.padding_idx not in layer.token_indices[names[0]]

    def _places_of(self, tokens: list[int], device: torch.device) -> Tensor:
        if self.placed != tuple(tokens) or self.places.device != device:
            places = torch.full((self.token_adapter.base_layer.num_embeddings,), _UNTRAINED)
            places[torch.tensor(tokens)] = torch.arange(len(tokens))
            self.__dict__.update(places=places.to(device), placed=tuple(tokens))
        return self.places


def trains_tokens(embeddings: nn.Module) -> bool:
    """Whether PEFT trains a few rows of input embeddings."""
    return isinstance(embeddings, TrainableTokensWrapper)
