"""Run softmax attention: the mixer, and the forward that all architectures with it share.

Shapes: B rows of T tokens, N = B * T, H query heads, K key and value heads, D head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, PreTrainedConfig

from unsloth_pack.attention import BACKENDS, AttentionOptions, attend, attend_dense, choose_backend
from unsloth_pack.attention.backends import why_not_captured
from unsloth_pack.attention.options import AttentionNeed
from unsloth_pack.errors import InputError
from unsloth_pack.kernels import QKNorm, rope_qk
from unsloth_pack.layers.layer import norm_eps
from unsloth_pack.layers.mixers.contract import Choice, Mixer, Report, Request
from unsloth_pack.layers.rotary import double_angles, scale_queries
from unsloth_pack.lora.linear import project
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import has_hooks, is_gathered_by_module, no_compile
from unsloth_pack.packed_row.row import PackedRow


class SoftmaxAttention(nn.Module):
    """Attends within the documents of a packed row, or over an ordinary batch."""

    spec: ArchSpec
    attn_backend: str
    output_name: str  # of the projection behind the attention
    # Of transformers' module
    config: PreTrainedConfig
    layer_idx: int
    scaling: float
    sinks: Tensor

    def _lay_out(self, x_BTHD: Tensor, row: PackedRow | None) -> Tensor:
        """Return `[N, H, D]` for a packed row, `[B, H, T, D]` for an ordinary batch."""
        return x_BTHD.transpose(1, 2) if row is None else x_BTHD.flatten(0, 1)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row: PackedRow | None,
        mask: Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        """Attend from q to k and v, laid out, where `kwargs` are the other arguments of the layer's call."""
        is_wanted = kwargs.get("output_attentions")
        if self.config.output_attentions if is_wanted is None else is_wanted:
            raise InputError(
                "output_attentions=True: a patched model builds no attention weights; set it to False"
            )
        options = read_attention_options(self, self.spec)
        sinks = self.sinks if self.spec.sinks else None
        if self.spec.query_scale:
            q = scale_queries(q, kwargs["position_ids"] if row is None else row.position_ids, self.config)
        if row is None:
            return attend_dense(q, k, v, mask, options, sinks)
        return attend(q, k, v, row, options, self.attn_backend, sinks)


class FastAttention(SoftmaxAttention):
    """Replaces the class of a transformers attention module; its parameters and attributes stay."""

    head_dim: int
    num_key_value_heads: int
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    qkv_proj: nn.Module
    residual_dropout: float = 0.0

    @no_compile
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        packed_row: PackedRow | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Run `[B, T, hidden]` through the self-attention of one layer; attention weights are never built.

        `position_embeddings` are `cos` and `sin`: for a packed row a table and each token's row of it, else
        `[B, T, R]` from transformers' rotary module; None where nothing rotates.
        """
        tables = position_embeddings if rotates(self, self.spec) else None
        q_BTHD, k_BTKD, v_BTKD, gate, qk_norm = self._project(hidden_states, tables is not None)
        q, k, v = (self._lay_out(x, packed_row) for x in (q_BTHD, k_BTKD, v_BTKD))
        if tables is not None:
            if packed_row is None:
                tables = tuple(double_angles(table, self.spec) for table in tables)
            q, k = self._rotate(q, k, *tables, qk_norm=qk_norm)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        out = self._attend(q, k, v, packed_row, attention_mask, kwargs)
        if gate is not None:
            out = out.reshape(gate.shape) * torch.sigmoid(gate)
        out = getattr(self, self.output_name)(out.reshape(*hidden_states.shape[:2], -1))
        if self.residual_dropout:
            out = F.dropout(out, self.residual_dropout, self.training)
        return out, None

    def _rotate(self, q: Tensor, k: Tensor, *tables: Tensor, qk_norm: QKNorm | None) -> tuple[Tensor, Tensor]:
        q, k = rope_qk(q, k, *tables, qk_norm=qk_norm, interleaved=self.spec.rotary == "pairs")
        if self.spec.qk_norm_after_rope:
            q_norm, k_norm = get_qk_norms(self, self.spec)
            q, k = q_norm(q), k_norm(k)
        return q, k

    def _project(
        self, hidden_states: Tensor, rotates: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, QKNorm | None]:
        """Compute q, k, v `[B, T, heads, D]`, the output's gate, and the norm left to the rotary kernel."""
        by_head = (*hidden_states.shape[:2], -1, self.head_dim)
        if self.spec.fused_qkv:
            heads = self.config.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads
            q, k, v = self.qkv_proj(hidden_states).split([n * self.head_dim for n in heads], dim=-1)
        else:
            q, k, v = project(hidden_states, (self.q_proj, self.k_proj, self.v_proj))
        gate = None
        if self.spec.output_gate:
            q, gate = q.view(*by_head[:-1], 2 * self.head_dim).chunk(2, dim=-1)
        qk_norm = None
        if has_qk_norm(self, self.spec) and not self.spec.qk_norm_after_rope:
            q_norm, k_norm = get_qk_norms(self, self.spec)
            qk_norm = fuse_norms(q_norm, k_norm, self.spec) if rotates else None
            if qk_norm is None:
                if self.spec.qk_norm == "head":
                    q, k = q.view(by_head), k.view(by_head)
                q, k = q_norm(q), k_norm(k)
        return q.view(by_head), k.view(by_head), v.view(by_head), gate, qk_norm


def read_attention_options(attention: SoftmaxAttention, spec: ArchSpec) -> AttentionOptions:
    """Read what an attention module needs of a backend, where its spec declares it."""
    config = attention.config
    key_scale = getattr(config, spec.key_multiplier) if spec.key_multiplier else 1.0
    return AttentionOptions(
        scale=attention.scaling * key_scale,
        window=read_window(attention, spec),
        softcap=getattr(config, spec.softcap) if spec.softcap else None,
        dropout=getattr(attention, "attention_dropout", 0.0) if attention.training else 0.0,
        sinks=spec.sinks,
    )


def read_window(attention: SoftmaxAttention, spec: ArchSpec) -> int | None:
    """Return how many keys a query of this layer sees, its own included; None for all up to its own."""
    if spec.window == "none" or (spec.window == "is_sliding" and not attention.is_sliding):
        return None
    return getattr(attention if spec.window == "layer" else attention.config, "sliding_window", None)


def rotates(attention: SoftmaxAttention, spec: ArchSpec) -> bool:
    """Return whether this layer rotates q and k, in a decoder that has tables to rotate by."""
    if spec.rope_layers == "use_rope":
        return bool(attention.use_rope)
    if spec.rope_layers == "windowed_if_any" and attention.config.sliding_window is None:
        return True
    return spec.rope_layers == "all" or read_window(attention, spec) is not None


def has_qk_norm(attention: nn.Module, spec: ArchSpec) -> bool:
    """Return whether this layer norms q and k, which some configurations of an architecture leave out."""
    return spec.qk_norm is not None and hasattr(attention, spec.name("q_norm"))


def get_qk_norms(attention: nn.Module, spec: ArchSpec) -> tuple[Any, Any]:
    """Return the norms of q and k, whatever their names."""
    return getattr(attention, spec.name("q_norm")), getattr(attention, spec.name("k_norm"))


def fuse_norms(q_norm: Any, k_norm: Any, spec: ArchSpec) -> QKNorm | None:
    """Return these norms for the rotary kernel, or None if something wraps, shards or hooks them."""
    if "weight" not in q_norm._parameters or "weight" not in k_norm._parameters:
        return None
    if is_gathered_by_module(q_norm.weight) or has_hooks(q_norm, k_norm):
        return None
    return QKNorm(q_norm.weight, k_norm.weight, norm_eps(q_norm), spec.norm_offset, spec.qk_norm == "flat")


class AttentionMixer(Mixer):
    """Softmax attention by the backends of `unsloth_pack.attention`."""

    attribute = "self_attn"
    forward: type[nn.Module] = FastAttention
    takes_branches = True
    known_names = """
        config layer_idx layer_type attention_type hidden_size head_dim num_heads num_attention_heads
        num_key_value_heads num_key_value_groups scaling is_causal attention_dropout residual_dropout
        rope_parameters o_proj
        """

    def choose(self, module: Any, spec: ArchSpec, request: Request) -> Choice:
        options = read_attention_options(module, spec)
        of_q, of_v = self.head_sizes(module)
        need = AttentionNeed(request.device_type, request.dtype, of_q, options, of_v)
        name, reason = choose_backend(request.backend, need, request.source)
        return Choice(name, reason, why_not_captured(name), BACKENDS[name].room_is_free)

    def head_sizes(self, module: Any) -> tuple[int, int]:
        """Return the head sizes of q and k, and of v."""
        return module.head_dim, module.head_dim

    def known(self, spec: ArchSpec) -> frozenset[str]:
        names = [*super().known(spec), *filter(None, (spec.softcap, spec.key_multiplier))]
        names += ["qkv_proj"] if spec.fused_qkv else ["q_proj", "k_proj", "v_proj"]
        if spec.window != "none":
            names += ["sliding_window", "is_sliding", "sliding_window_pattern"]
        if spec.qk_norm is not None:
            names += ["q_norm", "k_norm", "use_qk_norm"]
        if spec.rope_layers == "use_rope":
            names.append("use_rope")
        if spec.sinks:
            names.append("sinks")
        return frozenset({*spec.only, *spec.unread, *names, *map(spec.name, names)})

    def attributes(self, spec: ArchSpec, backend: str, choice: Choice) -> dict[str, Any]:
        return {"spec": spec, "attn_backend": backend, "output_name": spec.name("o_proj")}

    def what_is_fused(self, module: Any, spec: ArchSpec, how: str) -> tuple[Report, Report]:
        fused = {"attention": "documents kept apart"}
        if not spec.name("rotary_emb") or not rotates(module, spec):
            return fused, {}
        fused["rotary embedding"] = f"of q and k {how}"
        if not has_qk_norm(module, spec) or spec.qk_norm_after_rope:
            return fused, {}
        if fuse_norms(*get_qk_norms(module, spec), spec) is None:
            return fused, {"QK norm": "wrapped by modules_to_save, or with hooks"}
        return fused | {"QK norm": "with the rotary embedding"}, {}
