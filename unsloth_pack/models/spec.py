"""What may differ between architectures, as data. The shared forwards branch only on these fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ArchSpec:
    """How one transformers architecture departs from the plain decoder.

    Norm placement, MLP, experts and residual multipliers are not declared: the patch runs transformers' own
    layers. Declared is what the attention, the decoder's entry and the loss need.

    Args:
        model_type: `config.model_type` of the text model.
        attention: the mixer of the layers that attend.
        mixers: for layer types of `config.layer_types` that do not attend, which mixer they have.
        projections: linear layers that an adapter goes on by default, beside those of `api.PROJECTIONS`.
        window: where a layer's sliding window stands: nowhere, in the config, or on the attention module.
        fused_qkv: one `qkv_proj` holds q, k and v.
        qk_norm: RMS norm of q and k, per head or over all heads at once, before the rotation.
        query_scale: queries grow with the logarithm of their position, past the length that
            `config.rope_parameters` names as the original one.
        norm_offset: what RMS norms add to their weight (Gemma stores weights around 0).
        norm_keeps_dtype: norms return the dtype of their input under a weight of a wider one, too.
        softcap: config field of the attention logit softcap.
        kv_sharing: layers take `shared_kv_states`, through which some read the keys and values of others.
        per_layer_inputs: layers take embeddings of their own, where `config.hidden_size_per_layer_input` is
            not 0.
        rotary_per_layer_type: sliding and full layers rotate with different bases.
        embedding_multiplier: config field by which the embeddings are multiplied on entry.
        logit_divisor: config field by which the head's logits are divided.
        logit_softcap: config field of the softcap of the head's logits.
        placeholders: config fields of a model around the text model, with the tokens that stand for images
            and the like: it reads them as padding.
        wrapper_has_softcap: a model around the text model, as of vision and language, caps its logits too.
        stands_alone: whether transformers has a causal language model of it; otherwise it is the text model
            inside another, as of vision and language.
        tiny: overrides that make the smallest config which still has all of the above.
    """

    model_type: str
    attention: str = "attention"
    mixers: Mapping[str, str] = field(default_factory=dict)
    projections: tuple[str, ...] = ()
    window: Literal["none", "config", "layer"] = "none"
    fused_qkv: bool = False
    qk_norm: Literal["head", "flat"] | None = None
    query_scale: bool = False
    norm_offset: float = 0.0
    norm_keeps_dtype: bool = False
    softcap: str | None = None
    kv_sharing: bool = False
    per_layer_inputs: bool = False
    rotary_per_layer_type: bool = False
    embedding_multiplier: str | None = None
    logit_divisor: str | None = None
    logit_softcap: str | None = None
    placeholders: tuple[str, ...] = ()
    wrapper_has_softcap: bool = False
    stands_alone: bool = True
    tiny: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def mixer_of(self, config: Any, layer: int) -> str:
        """What a layer, counted from 0, does between tokens: a key of `forwards.mixers.MIXERS`."""
        return self.mixers.get(config.layer_types[layer], self.attention) if self.mixers else self.attention

    def head_sizes(self, config: Any) -> set[tuple[int, int]]:
        """The head sizes that the layers have: of q and k, and of v."""
        if self.attention == "latent_attention":
            return {(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)}
        layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
        usual = config.hidden_size // config.num_attention_heads
        sizes = {getattr(layer, "head_dim", None) or usual for layer in layers}
        return {(size, size) for size in sizes}

    def divisor_of_logits(self, config: Any) -> float:
        """What the head's logits are divided by; 1 where none is declared."""
        return getattr(config, self.logit_divisor) if self.logit_divisor else 1.0

    def softcap_of_logits(self, config: Any) -> float | None:
        """The softcap of the head's logits; None where none is declared."""
        return getattr(config, self.logit_softcap) if self.logit_softcap else None

    def tiny_config(self, **overrides: Any):
        """A transformers config of this architecture, small enough for a test to train.

        Args:
            overrides: config fields to set beside those that `tiny` declares.
        """
        from transformers import AutoConfig

        plain = dict(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.08,
        )
        return AutoConfig.for_model(self.model_type, **{**plain, **self.tiny, **overrides})
