"""Declare what may differ between architectures, as data: shared forwards branch on these fields alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


@dataclass(frozen=True)
class ArchSpec:
    """Declares how one transformers architecture departs from the plain decoder.

    Norm placement, MLP, experts and residual multipliers are not declared: the patch runs transformers' own
    layers, or the same computation (`layers/layer.py`). Declared is what the attention, the decoder's entry
    and the loss need. Config fields and attributes stand by name.
    """

    model_type: str  # `config.model_type` of the text model
    attention: str = "attention"  # the mixer of the layers that attend
    # for other types in `config.layer_types`, their mixers with spaces between; "" for an MLP
    mixers: Mapping[str, str] = field(default_factory=dict)
    # names of modules by those in Llama (`rotary_emb` is "" where nothing rotates), of mixers by their
    # `attribute`, and of the argument by which a layer passes on `packed_row`
    names: Mapping[str, str] = field(default_factory=dict)
    # linear layers with an adapter by default, beside those of `lora.targets`
    projections: tuple[str, ...] = ()
    # linear layers that PEFT does not adapt here; "all-linear" leaves them out
    refused_by_peft: tuple[str, ...] = ()
    # where the window stands: on the attention module ("layer"), or in the config (for all, or `is_sliding`)
    window: Literal["none", "config", "layer", "is_sliding"] = "none"
    fused_qkv: bool = False  # one `qkv_proj` holds q, k and v
    output_gate: bool = False  # `q_proj` computes q and, behind each head, the gate of the head's output
    activation: str | None = None  # the MLP's, as `kernels.gated` names it, if the MLP has no module for it
    # RMS norm of q and k, per head or over all heads, before the rotation; a model may leave it out
    qk_norm: Literal["head", "flat"] | None = None
    qk_norm_after_rope: bool = False  # that norm comes after the rotation
    # layers that rotate q and k: all, those with `use_rope`, or those with a window (if any has one)
    rope_layers: Literal["all", "use_rope", "windowed", "windowed_if_any"] = "all"
    # dimensions of a head that rotate together: i and i + R/2 of R, or 2i and 2i + 1
    rotary: Literal["halves", "pairs"] = "halves"
    # how pairs turn by time, height or width: in blocks of `mrope_section` pairs, or interleaved
    axes: Literal["blocks", "interleaved"] | None = None
    # how transformers' tables hold the angles of R/2 pairs: twice, each twice side by side, or once
    angles: Literal["twice", "side_by_side", "once"] = "twice"
    query_scale: bool = False  # q grows with the logarithm of a token's position, see `layers/rotary.py`
    sinks: bool = False  # each head has a learned logit to which a query attends beside its keys
    norm: Literal["rms", "layer"] = "rms"  # the decoder's norms: RMS norms, or layer norms without bias
    norm_offset: float = 0.0  # added to the weight of RMS norms (Gemma stores weights around 0)
    norm_keeps_dtype: bool = False  # norms return the dtype of their input, even under a wider weight
    softcap: str | None = None  # config field of the attention logit softcap
    kv_sharing: bool = False  # layers take `shared_kv_states`: some read the keys and values of others
    per_layer_inputs: bool = False  # layers may take embeddings of their own
    rotary_per_layer_type: bool = False  # sliding and full layers rotate with different bases
    embedding_multiplier: str | None = None  # config field that multiplies the embeddings on entry
    token_multiplier: str | None = None  # likewise, but not embeddings that come as `inputs_embeds`
    key_multiplier: str | None = None  # config field that multiplies keys
    mlp_multipliers: tuple[str, str] | None = None  # attributes of the MLP that multiply gate and the output
    logit_divisor: str | None = None  # config field that divides the head's logits
    logit_multiplier: str | None = None  # config field that multiplies the head's logits
    logit_softcap: str | None = None  # config field of the softcap of the head's logits
    unread: tuple[str, ...] = ()  # attributes of the attention module that no forward reads
    # attributes of the attention module or config fields, each with its only supported value
    only: Mapping[str, Any] = field(default_factory=dict)
    # config fields of image tokens and the like, which a model around the text model reads as padding
    placeholders: tuple[str, ...] = ()
    wrapper_has_softcap: bool = False  # a model around the text model caps its logits too
    stands_alone: bool = True  # else it is a text model inside another

    def name(self, usual: str) -> str:
        """Return what this architecture calls a module that has this name in Llama."""
        return self.names.get(usual, usual)

    def mixers_of(self, config: PreTrainedConfig, layer: int) -> tuple[str, ...]:
        """Return what a layer, counted from 0, does between tokens: keys of `layers.mixers.MIXERS`."""
        if not self.mixers:
            return (self.attention,)
        return tuple(self.mixers.get(config.layer_types[layer], self.attention).split())

    def head_sizes(self, config: PreTrainedConfig) -> set[tuple[int, int]]:
        """Return the head sizes of the layers: of q and k, and of v."""
        if self.attention == "latent_attention":
            return {(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)}
        layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
        usual = config.hidden_size // config.num_attention_heads
        sizes = {getattr(layer, "head_dim", None) or usual for layer in layers}
        return {(size, size) for size in sizes}

    def read_logit_divisor(self, config: PreTrainedConfig) -> float:
        """Return the divisor of the head's logits, 1 by default."""
        if self.logit_multiplier:
            return 1.0 / float(getattr(config, self.logit_multiplier))
        return float(getattr(config, self.logit_divisor)) if self.logit_divisor else 1.0

    def read_logit_softcap(self, config: PreTrainedConfig) -> float | None:
        """Return the softcap of the head's logits, or None."""
        return getattr(config, self.logit_softcap) if self.logit_softcap else None


TOKEN_TYPES = "token_type_ids"  # 1 at the tokens of images
MODALITIES = "mm_token_type_ids"  # the same, from all processors but Gemma's
DEEPSTACK = "deepstack_visual_embeds"  # what a decoder adds to image tokens after its first layers


@dataclass(frozen=True)
class VisionSpec:
    """Declares how a model of vision and language puts images into the rows of its text model."""

    model_type: str  # `config.model_type` of the whole model
    tower: str = "visual"  # path of the tower, which turns pixels into features, below the base model
    # paths of the modules that turn the tower's features into the text model's
    aligner: tuple[str, ...] = ("visual.merger",)
    # what the layers of the tower attend within: `grids` or `sizes` of images in one row of patches, or
    # entries of a `batch` of images or tiles of one size
    attends: Literal["grids", "sizes", "batch"] = "grids"
    token: str = "image_token_id"  # config field of the placeholder token of images
    # the argument with `[images, 3]`, patches in time, height and width, which give image tokens positions on
    # three axes; None where positions are ordinary
    grid: str | None = "image_grid_thw"
    sizes: str | None = None  # the argument with `[images, 2]`, height and width of every image in pixels
    options: tuple[str, ...] = ()  # other arguments of a call that reach the tower
    of_documents: str | None = None  # the argument with the number of images of every document
    dimensions: tuple[int, ...] = (2,)  # how many dimensions `pixel_values` may have
    side: str | None = None  # config field of the tower: height and width of every image, if fixed
    alike: bool = False  # every entry of the tower's batch becomes the same number of tokens
    drops_zeros: bool = False  # an image of zeros is padding, which the model leaves out
    # config field of the tower, or with `sizes` of the whole model: patches a side that become one token
    merge: str = "spatial_merge_size"
    # config field of the tower that lists layers whose features join the first layers of the text model
    deepstack: str | None = None
    windows: bool = False  # most layers of the tower attend within windows of an image
    both_ways: bool = False  # adjacent image tokens see each other; a call marks them in `TOKEN_TYPES`
    interpolates: bool = False  # the tower resamples a table of learned positions to the grid of every image
    rms_norms: tuple[str, ...] = ()  # the names of the tower's RMS norms
    gated_mlp: str | None = None  # the name of a gated MLP in the layers of the tower, or None

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the arguments without which pixels mean nothing."""
        return tuple(name for name in (self.grid, self.sizes) if name is not None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return all arguments of a call that describe its pixels."""
        return (*self.needed, *self.options)
