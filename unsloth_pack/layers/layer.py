"""Run decoder layers that norm the inputs of their mixer and their MLP, and build what layers take beside.

Some 70 decoder layers in transformers have Llama's forward, word for word. They run fused: a residual is
added and normed in one launch. Any other layer keeps transformers' forward.

Shapes: B rows of T tokens, C features, L layers, P features of a layer's own embeddings.
"""

import inspect
from collections import UserDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import add_rms_norm, rms_norm
from unsloth_pack.lora.linear import with_recipe
from unsloth_pack.modules import has_hooks, is_gathered_by_module, no_compile

if TYPE_CHECKING:
    from unsloth_pack.layers.decoder import FastDecoder


class FastRMSNorm(nn.Module):
    """Replaces the class of a transformers RMS norm."""

    norm_offset: float
    norm_keeps_dtype: bool
    weight: nn.Parameter

    @no_compile
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise `[..., C]` over the last dimension.

        On a GPU the result carries a `recipe`, so that a projection need not keep it beside the norm's input.
        """
        compute = self._compute
        return with_recipe(compute(hidden_states, self.weight), compute, (hidden_states, self.weight))

    def add_and_norm(self, residual: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return residual + added and its norm, both `[..., C]`, in one launch.

        Replace the residual by the returned one: the norm's backward pass then adds the gradients of both.
        """
        total, normed = add_rms_norm(residual, added, self.weight, norm_eps(self), self.norm_offset)
        normed = normed.to(total.dtype) if self.norm_keeps_dtype else normed
        return total, with_recipe(normed, self._compute, (total, self.weight))

    @property
    def _compute(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the norm as a function of its input and the weight."""
        eps, offset, keeps_dtype = norm_eps(self), self.norm_offset, self.norm_keeps_dtype

        def compute(x: Tensor, weight: Tensor) -> Tensor:
            normed = rms_norm(x, weight, eps, offset)
            return normed.to(x.dtype) if keeps_dtype else normed

        return compute


class FastLayerNorm(nn.Module):
    """Replaces the class of a transformers layer norm without bias."""

    weight: nn.Parameter

    @no_compile
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise `[..., C]` over the last dimension; computed in float32 and rounded once."""
        x, dtype = hidden_states, hidden_states.dtype
        # In 16 bits torch sums a trained weight's gradient in them too
        wide = torch.promote_types(dtype, torch.float32) if self.weight.requires_grad else dtype
        return F.layer_norm(x.to(wide), x.shape[-1:], self.weight.to(wide), None, norm_eps(self)).to(dtype)


NORMS: dict[str, type[nn.Module]] = {"rms": FastRMSNorm, "layer": FastLayerNorm}


def norm_eps(norm: Any) -> float:
    """Return the epsilon of a transformers norm, whatever its name."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


class FastLayer(nn.Module):
    """Replaces the class of a decoder layer for which `is_plain` holds."""

    input_layernorm: FastRMSNorm  # or any module, which is called then
    self_attn: nn.Module
    post_attention_layernorm: FastRMSNorm
    mlp: Callable[[Tensor], Tensor]

    @no_compile
    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run `[B, T, C]` through the layer; a packed row fused, with the results of `_plain_forward`."""
        before, between = self.input_layernorm, self.post_attention_layernorm
        if args or kwargs.get("packed_row") is None or not (_runs_fused(before) and _runs_fused(between)):
            plain: Tensor = super().forward(hidden_states, *args, **kwargs)
            return plain
        residual, normed = before.add_and_norm(hidden_states, None)
        mixed, _ = self.self_attn(hidden_states=normed, **kwargs)
        residual, normed = between.add_and_norm(residual, mixed)
        return residual + self.mlp(normed)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer's forward is `_plain_forward`, instruction for instruction."""
    forward = inspect.unwrap(type(layer).forward)
    return "forward" not in vars(layer) and _instructions(forward) == _instructions(_plain_forward)


def _runs_fused(norm: nn.Module) -> bool:
    return isinstance(norm, FastRMSNorm) and not (has_hooks(norm) or is_gathered_by_module(norm.weight))


def _instructions(function: Callable[..., object]) -> tuple[object, ...]:
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants, function.__defaults__


def _plain_forward(
    self: FastLayer,
    hidden_states: Tensor,
    attention_mask: object = None,
    position_ids: object = None,
    past_key_values: object = None,
    use_cache: object = False,
    position_embeddings: object = None,
    **kwargs: object,
) -> Tensor:
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
    return hidden_states  # noqa: RET504 - the instructions are compared


class SharedKeysAndValues(UserDict[str, tuple[Tensor, Tensor]]):
    """Keys and values by the type of the layer that stored them.

    It is no dict and has a `to`: FSDP2 copies dicts on the way into a layer, and so does accelerate all that
    cannot move itself.
    """

    def to(self, device: torch.device, **how: Any) -> "SharedKeysAndValues":
        """Move all to a device, in place."""
        self.data = {name: (k.to(device, **how), v.to(device, **how)) for name, (k, v) in self.data.items()}
        return self


def build_layer_inputs(
    decoder: "FastDecoder", input_ids: Tensor | None, hidden_BTC: Tensor, kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """Build the keywords of each layer for a packed row; those that are not for layers leave `kwargs`."""
    by_layer: list[dict[str, Any]] = [{} for _ in decoder.layers]
    if decoder.spec.kv_sharing:
        _refuse_reentrant_sharing(decoder)
        for name in ("shared_kv_states", "return_shared_kv_states"):  # of an assistant; None in other calls
            kwargs.pop(name, None)
        shared = SharedKeysAndValues()
        for inputs in by_layer:
            inputs["shared_kv_states"] = shared
    if decoder.spec.per_layer_inputs:
        own_BTLP = _per_layer_inputs(decoder, input_ids, hidden_BTC, kwargs.pop("per_layer_inputs", None))
        for number, inputs in enumerate(by_layer):
            inputs["per_layer_input"] = None if own_BTLP is None else own_BTLP[:, :, number]
    return by_layer


def embed_per_layer(decoder: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """Return the layers' own embeddings of token ids, else looked up by embedding in the whole vocabulary."""
    if not (decoder.spec.per_layer_inputs and decoder.config.hidden_size_per_layer_input):
        return {}
    return {"per_layer_inputs": decoder.get_per_layer_inputs(input_ids, None)}


def _per_layer_inputs(
    decoder: "FastDecoder", input_ids: Tensor | None, hidden_BTC: Tensor, embeddings_BTLP: Tensor | None
) -> Tensor | None:
    """Return `[B, T, L, P]` by transformers' own methods, which work by token, or None."""
    if not decoder.config.hidden_size_per_layer_input:
        return None
    if embeddings_BTLP is None:
        embeddings_BTLP = decoder.get_per_layer_inputs(input_ids, hidden_BTC)
    elif input_ids is not None:
        raise InputError("per_layer_inputs come with input_ids; give them with inputs_embeds only")
    return decoder.project_per_layer_inputs(hidden_BTC, embeddings_BTLP)


def _refuse_reentrant_sharing(decoder: "FastDecoder") -> None:
    """Refuse checkpointing that keeps gradients for a layer's output alone, not for what it stores."""
    for layer in decoder.layers if decoder.training else ():
        options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
        if layer.gradient_checkpointing and options.get("use_reentrant"):
            raise InputError(
                "use_reentrant=True loses the gradients of keys and values that layers share; set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )


_UNTRAINED = -1


class FastTrainedTokens(nn.Module):
    """Replaces the class of a `TrainableTokensWrapper` around input embeddings.

    PEFT puts the trained rows into a copy of the whole matrix at every call, which no graph can capture. Here
    they are looked up in their own small matrix.
    """

    token_adapter: Any
    disable_adapters: bool
    placed: tuple[int, ...] | None = None
    places: Tensor  # `[V]`, the row of each token in the trained matrix, for the tokens in `placed`; else -1

    @no_compile
    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return `[..., C]` for token ids `[...]`."""
        if args or kwargs or not self._runs_fused():
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        layer = self.token_adapter
        (name,) = layer.active_adapters
        embeddings: Tensor = layer.base_layer(x)
        trained = layer.trainable_tokens_delta[name].to(layer.base_layer.weight.dtype)
        place = self._find_places(layer.token_indices[name], x.device)[x]
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

    def _find_places(self, tokens: list[int], device: torch.device) -> Tensor:
        if self.placed != tuple(tokens) or self.places.device != device:
            places = torch.full((self.token_adapter.base_layer.num_embeddings,), _UNTRAINED)
            places[torch.tensor(tokens)] = torch.arange(len(tokens))
            self.__dict__.update(places=places.to(device), placed=tuple(tokens))
        return self.places


def trains_tokens(embeddings: nn.Module) -> bool:
    """Return whether PEFT trains a few rows of input embeddings."""
    return isinstance(embeddings, TrainableTokensWrapper)
