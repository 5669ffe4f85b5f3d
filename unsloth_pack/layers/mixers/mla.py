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
from transformers import Cache

from unsloth_pack.kernels import rope_qk
from unsloth_pack.layers.mixers.attention import AttentionMixer, SoftmaxAttention
from unsloth_pack.layers.mixers.contract import Mixer, Report
from unsloth_pack.lora.linear import project
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import no_compile
from unsloth_pack.packed_row.row import PackedRow


class FastLatentAttention(SoftmaxAttention):
    """Replaces the class of a transformers latent attention module."""

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
        position_embeddings: tuple[Tensor, ...],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        packed_row: PackedRow | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Run the self-attention of one layer; arguments and result as those of `FastAttention`."""
        q_BTHD, latent_BTL, k_rope_BTR = self._project(hidden_states)
        q_nope_BTHP, q_rope_BTHR = q_BTHD.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q, k = (self._lay_out(x, packed_row) for x in (q_rope_BTHR, k_rope_BTR[:, :, None]))
        q, k = rope_qk(q, k, *position_embeddings, interleaved=bool(self.config.rope_interleave))
        q_rope_BTHR, k_rope_BT1R = (
            x.transpose(1, 2) if packed_row is None else x.unflatten(0, hidden_states.shape[:2])
            for x in (q, k)
        )
        q_BTHD = torch.cat([q_nope_BTHP, q_rope_BTHR], dim=-1)
        if past_key_values is not None:
            new = latent_BTL[:, None], k_rope_BT1R.transpose(1, 2)
            latent_B1SL, k_rope_B1SR = past_key_values.update(*new, self.layer_idx)
            latent_BTL, k_rope_BT1R = latent_B1SL[:, 0], k_rope_B1SR.transpose(1, 2)
        k_BSHD, v_BSHV = self._expand_latent(latent_BTL, k_rope_BT1R)
        q, k, v = (self._lay_out(x, packed_row) for x in (q_BTHD, k_BSHD, v_BSHV))
        out = self._attend(q, k, v, packed_row, attention_mask, kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:2], -1)), None

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

    def _expand_latent(self, latent_BSL: Tensor, k_rope_BS1R: Tensor) -> tuple[Tensor, Tensor]:
        """Compute k `[B, S, H, D]` and v `[B, S, H, V]`."""
        sizes = [self.qk_nope_head_dim, self.v_head_dim]
        kv_BSHX = self.kv_b_proj(latent_BSL).unflatten(-1, (-1, sum(sizes)))
        k_nope_BSHP, v_BSHV = kv_BSHX.split(sizes, dim=-1)
        k_rope_BSHR = k_rope_BS1R.expand(-1, -1, k_nope_BSHP.shape[2], -1)
        return torch.cat([k_nope_BSHP, k_rope_BSHR], dim=-1), v_BSHV


class LatentAttentionMixer(AttentionMixer):
    """Multi-head latent attention by the backends of `unsloth_pack.attention`."""

    forward: type[nn.Module] = FastLatentAttention
    known_names = """
        config layer_idx hidden_size num_heads num_key_value_groups is_causal scaling attention_dropout
        q_lora_rank kv_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim q_proj q_a_proj
        q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj
        """

    def head_sizes(self, module: Any) -> tuple[int, int]:
        return module.qk_head_dim, module.v_head_dim

    def what_is_fused(self, module: Any, spec: ArchSpec, how: str) -> tuple[Report, Report]:
        attention = "documents kept apart; the projections of the input as one autograd node"
        return {"attention": attention, "rotary embedding": f"of part of each head {how}"}, {}

    def known(self, spec: ArchSpec) -> frozenset[str]:
        return Mixer.known(self, spec)
