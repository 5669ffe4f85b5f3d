"""Run multi-head latent attention: the keys and values of all heads come from one small latent a token.

    x -> q_a -> norm -> q_b -> q of each head (or x -> q_proj)
    x -> kv_a -> [latent, k_rope]        latent -> norm -> kv_b -> k_nope and v of each head
    k of a head = [k_nope, k_rope]       only the rope part of q and k turns, and all heads share k_rope

Shapes: B rows of T tokens, N = B * T, S keys, H heads, L latent size. A head of q and k has D = P + R dims,
of which the last R turn; a head of v has V.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from unsloth_pack.attention import attend, attend_dense
from unsloth_pack.attention.options import AttentionNeed
from unsloth_pack.kernels import rope_qk
from unsloth_pack.layers.mixers.attention import (
    AttentionMixer,
    choose_for,
    read_attention_options,
    refuse_attention_weights,
)
from unsloth_pack.layers.mixers.contract import Choice, Request
from unsloth_pack.layers.rotary import scale_queries
from unsloth_pack.lora.linear import project
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import no_compile
from unsloth_pack.packed_row.row import PackedRow

_KNOWN = frozenset({
    "config", "layer_idx", "hidden_size", "num_heads", "num_key_value_groups", "is_causal", "scaling",
    "attention_dropout", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
    "kv_b_proj", "o_proj",
})  # fmt: skip


class FastLatentAttention(nn.Module):
    """Replaces the class of a transformers latent attention module."""

    spec: ArchSpec
    attn_backend: str
    # Of transformers' module
    config: PreTrainedConfig
    layer_idx: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    o_proj: nn.Module

    @no_compile
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        packed_row: PackedRow | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Run the self-attention of one layer; arguments and result as those of `FastAttention`.

        The cache holds the latent and the shared part of the keys, as in transformers.
        """
        refuse_attention_weights(self.config, kwargs)
        batch, length = hidden_states.shape[:2]
        options = read_attention_options(self, self.spec)
        q_BTHD, latent_BTL, k_rope_BTR = self._project(hidden_states)
        q_nope_BTHP, q_rope_BTHR = q_BTHD.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        assert position_embeddings is not None
        q_rope_BTHR, k_rope_BT1R = self._rotate(q_rope_BTHR, k_rope_BTR[:, :, None], position_embeddings)
        q_BTHD = torch.cat([q_nope_BTHP, q_rope_BTHR], dim=-1)
        if packed_row is not None:
            k_BTHD, v_BTHV = self._expand_latent(latent_BTL, k_rope_BT1R)
            q_NHD, k_NHD, v_NHV = (x.flatten(0, 1) for x in (q_BTHD, k_BTHD, v_BTHV))
            if self.spec.query_scale:
                q_NHD = scale_queries(q_NHD, packed_row.position_ids, self.config)
            out = attend(q_NHD, k_NHD, v_NHV, packed_row, options, self.attn_backend)
        else:
            if past_key_values is not None:
                new = latent_BTL[:, None], k_rope_BT1R.transpose(1, 2)
                latent_B1SL, k_rope_B1SR = past_key_values.update(*new, self.layer_idx)
                latent_BTL, k_rope_BT1R = latent_B1SL[:, 0], k_rope_B1SR.transpose(1, 2)
            k_BSHD, v_BSHV = self._expand_latent(latent_BTL, k_rope_BT1R)
            q_BHTD, k_BHSD, v_BHSV = (x.transpose(1, 2) for x in (q_BTHD, k_BSHD, v_BSHV))
            if self.spec.query_scale:
                q_BHTD = scale_queries(q_BHTD, kwargs["position_ids"], self.config)
            out = attend_dense(q_BHTD, k_BHSD, v_BHSV, attention_mask, options)
        return self.o_proj(out.reshape(batch, length, -1)), None

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q `[B, T, H, D]`, the normed latent `[B, T, L]` and k_rope `[B, T, R]`, not rotated."""
        is_direct = self.q_lora_rank is None
        first = self.q_proj if is_direct else self.q_a_proj
        q, kv_a = project(hidden_states, (first, self.kv_a_proj_with_mqa))
        if not is_direct:
            q = self.q_b_proj(self.q_a_layernorm(q))
        latent_BTL, k_rope_BTR = kv_a.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_BTHD = q.view(*q.shape[:2], -1, self.qk_head_dim)
        return q_BTHD, self.kv_a_layernorm(latent_BTL), k_rope_BTR

    def _rotate(
        self, q_BTHR: Tensor, k_BT1R: Tensor, position_embeddings: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        is_packed = len(position_embeddings) == 3
        q, k = (x.flatten(0, 1) if is_packed else x.transpose(1, 2) for x in (q_BTHR, k_BT1R))
        q, k = rope_qk(q, k, *position_embeddings, interleaved=bool(self.config.rope_interleave))
        if is_packed:
            return q.view(q_BTHR.shape), k.view(k_BT1R.shape)
        return q.transpose(1, 2), k.transpose(1, 2)

    def _expand_latent(self, latent_BSL: Tensor, k_rope_BS1R: Tensor) -> tuple[Tensor, Tensor]:
        """Compute k `[B, S, H, D]` and v `[B, S, H, V]`."""
        sizes = [self.qk_nope_head_dim, self.v_head_dim]
        kv_BSHX = self.kv_b_proj(latent_BSL).unflatten(-1, (-1, sum(sizes)))
        k_nope_BSHP, v_BSHV = kv_BSHX.split(sizes, dim=-1)
        k_rope_BSHR = k_rope_BS1R.expand(-1, -1, k_nope_BSHP.shape[2], -1)
        return torch.cat([k_nope_BSHP, k_rope_BSHR], dim=-1), v_BSHV


class LatentAttentionMixer(AttentionMixer):
    """Multi-head latent attention by the backends of `unsloth_pack.attention`: a `Mixer`."""

    forward: type[nn.Module] = FastLatentAttention

    def choose(self, module: Any, spec: ArchSpec, request: Request) -> Choice:
        options = read_attention_options(module, spec)
        sizes = module.qk_head_dim, module.v_head_dim
        need = AttentionNeed(request.device_type, request.dtype, sizes[0], options, sizes[1])
        return choose_for(need, request)

    def what_is_fused(self, module: Any, spec: ArchSpec, how: str) -> tuple[dict[str, str], dict[str, str]]:
        attention = "documents kept apart; the projections of the input as one autograd node"
        return {"attention": attention, "rotary embedding": f"of part of each head {how}"}, {}

    def known(self, spec: ArchSpec) -> frozenset[str]:
        return _KNOWN
