"""What may differ between architectures, as data. The shared forwards branch only on these fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ArchSpec:
    """How one transformers architecture departs from the plain decoder.

    Norm placement, MLP, experts and residual multipliers are not declared: the patch runs transformers' own
    layers, or what computes the same (`layers/layer.py`). Declared is what the attention, the decoder's
    entry and the loss need.

    Args:
        model_type: `config.model_type` of the text model.
        attention: the mixer of the layers that attend.
        mixers: for layer types of `config.layer_types` that do not attend alone, which mixer they have, or
            which several with spaces between; "" where a layer is an MLP alone.
        names: what modules are called here, by their names in Llama: of the decoder (`norm`, `rotary_emb`;
            "" where nothing rotates), of its layers (`self_attn`, `mlp`), inside attention (`o_proj`,
            `q_norm`) and the MLP (`gate_proj`). Also mixers, by the `attribute` that they have elsewhere, and
            the argument by which a layer hands on the packed row (`packed_row`).
        projections: linear layers that an adapter goes on by default, beside those of `api.PROJECTIONS`.
        refused_by_peft: linear layers that PEFT does not adapt here; "all-linear" leaves them out.
        window: where a layer's sliding window stands: nowhere, in the config, on the attention module, or in
            the config for those modules whose `is_sliding` is true.
        fused_qkv: one `qkv_proj` holds q, k and v.
        output_gate: `q_proj` makes q and, for every head behind it, what gates the output of the head.
        activation: the MLP's, as `kernels.gated` calls it, where the MLP has no module of it.
        qk_norm: RMS norm of q and k, per head or over all heads at once, before the rotation. A model may
            leave it out, as GLM 4.5 Air does.
        qk_norm_after_rope: that norm comes after the rotation.
        rope_layers: which layers rotate q and k: all, those whose `use_rope` is true, those with a sliding
            window, or the latter only where the model has a window at all.
        rotary: which two dimensions of a head rotate together: i and i + R/2 of R, or 2i and 2i + 1.
        axes: rotary positions on three axes, in time, height and width: which pairs of dimensions turn by
            which axis. In blocks of `mrope_section` pairs each, or one after another until the sections of
            height and width are used up. None: one axis.
        angles: how transformers' own tables hold the angles of R/2 pairs: all of them twice, each of them
            twice side by side, or once.
        query_scale: q grows with the logarithm of a token's position, see `layers/rotary.py`.
        sinks: the attention has a learned logit for each head, to which a query attends beside its keys.
        norm: the decoder's norms: RMS norms, or layer norms without bias.
        norm_offset: what RMS norms add to their weight (Gemma stores weights around 0).
        norm_keeps_dtype: norms return the dtype of their input under a weight of a wider one, too.
        softcap: config field of the attention logit softcap.
        kv_sharing: layers take `shared_kv_states`, through which some read the keys and values of others.
        per_layer_inputs: layers take embeddings of their own, where `config.hidden_size_per_layer_input` is
            not 0.
        rotary_per_layer_type: sliding and full layers rotate with different bases.
        embedding_multiplier: config field by which the embeddings are multiplied on entry.
        token_multiplier: the same, where embeddings that come as `inputs_embeds` are taken as they are.
        key_multiplier: config field by which keys are multiplied.
        mlp_multipliers: attributes of the MLP by which gate and what comes down are multiplied.
        logit_divisor: config field by which the head's logits are divided.
        logit_multiplier: config field by which the head's logits are multiplied.
        logit_softcap: config field of the softcap of the head's logits.
        unread: attributes of the attention module that transformers' own forward does not read either.
        only: attributes of the attention module or fields of its config, each with the only value that the
            shared forward computes.
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
    names: Mapping[str, str] = field(default_factory=dict)
    projections: tuple[str, ...] = ()
    refused_by_peft: tuple[str, ...] = ()
    window: Literal["none", "config", "layer", "is_sliding"] = "none"
    fused_qkv: bool = False
    output_gate: bool = False
    activation: str | None = None
    qk_norm: Literal["head", "flat"] | None = None
    qk_norm_after_rope: bool = False
    rope_layers: Literal["all", "use_rope", "windowed", "windowed_if_any"] = "all"
    rotary: Literal["halves", "pairs"] = "halves"
    axes: Literal["blocks", "interleaved"] | None = None
    angles: Literal["twice", "side_by_side", "once"] = "twice"
    query_scale: bool = False
    sinks: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_keeps_dtype: bool = False
    softcap: str | None = None
    kv_sharing: bool = False
    per_layer_inputs: bool = False
    rotary_per_layer_type: bool = False
    embedding_multiplier: str | None = None
    token_multiplier: str | None = None
    key_multiplier: str | None = None
    mlp_multipliers: tuple[str, str] | None = None
    logit_divisor: str | None = None
    logit_multiplier: str | None = None
    logit_softcap: str | None = None
    unread: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    wrapper_has_softcap: bool = False
    stands_alone: bool = True
    tiny: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def name(self, usual: str) -> str:
        """What this architecture calls a module that has this name in Llama."""
        return self.names.get(usual, usual)

    def mixers_of(self, config: Any, layer: int) -> tuple[str, ...]:
        """What a layer, counted from 0, does between tokens: keys of `forwards.mixers.MIXERS`."""
        if not self.mixers:
            return (self.attention,)
        return tuple(self.mixers.get(config.layer_types[layer], self.attention).split())

    def head_sizes(self, config: Any) -> set[tuple[int, int]]:
        """The head sizes that the layers have: of q and k, and of v."""
        if self.attention == "latent_attention":
            return {(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)}
        layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
        usual = config.hidden_size // config.num_attention_heads
        sizes = {getattr(layer, "head_dim", None) or usual for layer in layers}
        return {(size, size) for size in sizes}

    def divisor_of_logits(self, config: Any) -> float:
        """What the head's logits are divided by; 1 where nothing is declared."""
        if self.logit_multiplier:
            return 1.0 / getattr(config, self.logit_multiplier)
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


# What may differ between models of vision and language around a text model, as data.

TOKEN_TYPES = "token_type_ids"  # 1 at the tokens of images
MODALITIES = "mm_token_type_ids"  # likewise, as all processors but Gemma's call it
DEEPSTACK = "deepstack_visual_embeds"  # what a decoder adds to tokens of images behind its first layers


@dataclass(frozen=True)
class VisionSpec:
    """How one model of vision and language puts images into the rows of its text model.

    Args:
        model_type: `config.model_type` of the whole model.
        tower: where its base model holds the tower, which turns pixels into features.
        aligner: modules that turn the tower's features into the text model's, by their paths below the base
            model.
        attends: how the tower's layers attend. Within the `grids` of images, whose patches lie in one row;
            within `sizes` of images, which it cuts into patches and lays in one row; or within each entry of
            a `batch` of images or tiles of one size.
        token: config field of the token that stands for each token of an image.
        grid: the argument of a call that holds `[images, 3]`, the patches of every image in time, height and
            width. By these the tokens of images have positions on three axes, see `row.images`. None: they
            have ordinary positions, and how many an image has is known once the tower has seen it.
        sizes: the argument of a call that holds `[images, 2]`, height and width of every image in pixels.
        options: other arguments of a call that reach the tower.
        of_documents: the one of these that holds how many images every document has. The tower reads it as
            one image a document where it is not given.
        dimensions: how many dimensions `pixel_values` may have.
        side: config field of the tower: height and width of every image in pixels; None where they are free.
        alike: every entry of the tower's batch becomes the same number of tokens.
        drops_zeros: an image of zeros is padding, which the model leaves out.
        merge: config field of the tower, or with `sizes` of the whole model: patches a side that become one
            token. Only where images have a size of their own.
        deepstack: config field of the tower that lists its layers whose features join the first layers of the
            text model; None where only its last ones come in.
        windows: most layers of the tower attend within windows of an image.
        both_ways: the tokens of images that stand side by side in a document see each other in both
            directions, which a call marks by 1 in `TOKEN_TYPES`.
        interpolates: the tower resamples a table of learned positions to the grid of every image.
        rms_norms: the names of the tower's RMS norms.
        gated_mlp: the name of a gated MLP in the layers of the tower; None where they have none.
    """

    model_type: str
    tower: str = "visual"
    aligner: tuple[str, ...] = ("visual.merger",)
    attends: Literal["grids", "sizes", "batch"] = "grids"
    token: str = "image_token_id"
    grid: str | None = "image_grid_thw"
    sizes: str | None = None
    options: tuple[str, ...] = ()
    of_documents: str | None = None
    dimensions: tuple[int, ...] = (2,)
    side: str | None = None
    alike: bool = False
    drops_zeros: bool = False
    merge: str = "spatial_merge_size"
    deepstack: str | None = None
    windows: bool = False
    both_ways: bool = False
    interpolates: bool = False
    rms_norms: tuple[str, ...] = ()
    gated_mlp: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """The arguments without which pixels mean nothing."""
        return tuple(name for name in (self.grid, self.sizes) if name is not None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """All arguments of a call that describe its pixels."""
        return (*self.needed, *self.options)
