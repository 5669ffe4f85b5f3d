"""Run softmax attention whose last layers read the keys and values of an earlier layer.

    q = rope(norm(W_q x))     k = rope(norm(W_k x))     v = norm(W_v x), the norm without a weight

Without W_v, W_k stands for it. Some layers store their k and v. Later ones have neither W_k nor W_v, and read
what the layer of their type stored. Layers may differ in head size and in their key heads.

Shapes: B rows of T tokens, N = B * T, H query heads, K key and value heads, D head size of the layer.
"""

from collections import UserDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from unsloth_pack.kernels import rms_norm, rope_qk
from unsloth_pack.layers.mixers.attention import AttentionMixer, SoftmaxAttention, fuse_norms
from unsloth_pack.layers.mixers.contract import Mixer, Report
from unsloth_pack.lora.linear import project
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import has_hooks, no_compile
from unsloth_pack.packed_row.row import PackedRow


class SharedKeysAndValues(UserDict[str, tuple[Tensor, Tensor]]):
    """Keys and values by the type of the layer that stored them.

    It is no dict and has a `to`: FSDP2 copies dicts on the way into a layer, and so does accelerate all that
    cannot move itself.
    """

    def to(self, device: torch.device, **how: Any) -> "SharedKeysAndValues":
        """Move all to a device, in place."""
        self.data = {name: (k.to(device, **how), v.to(device, **how)) for name, (k, v) in self.data.items()}
        return self


class FastSharedKVAttention(SoftmaxAttention):
    """Replaces the class of a transformers attention module that may share keys and values."""

    layer_type: str
    head_dim: int
    is_kv_shared_layer: bool
    store_full_length_kv: bool
    q_proj: nn.Module
    q_norm: nn.Module
    o_proj: nn.Module
    # Absent where it reuses keys and values
    k_proj: nn.Module
    v_proj: nn.Module | None
    k_norm: nn.Module
    v_norm: nn.Module

    @no_compile
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, ...],
        attention_mask: Tensor | None = None,
        *,
        shared_kv_states: SharedKeysAndValues,
        past_key_values: Cache | None = None,
        packed_row: PackedRow | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Run the self-attention of one layer; arguments and result as those of `FastAttention`.

        `shared_kv_states` are twice `[N, K, D]` for a packed row, else twice `[B, K, S, D]`.
        """
        if self.is_kv_shared_layer:
            (q,) = self._project_by_head(hidden_states, (self.q_proj,))
            q = self._rotate_queries(self._lay_out(q, packed_row), position_embeddings)
            k, v = shared_kv_states[self.layer_type]
        else:
            projections = filter(None, (self.q_proj, self.k_proj, self.v_proj))
            q, k, *own_v = self._project_by_head(hidden_states, projections)
            v = own_v[0] if own_v else k
            q, k, v = (self._lay_out(x, packed_row) for x in (q, k, self._norm_values(v)))
            q, k = self._rotate(q, k, position_embeddings)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = k, v
        out = self._attend(q, k, v, packed_row, attention_mask, kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:2], -1)), None

    def _project_by_head(self, hidden_states: Tensor, projections: Iterable[nn.Module]) -> list[Tensor]:
        """Compute `[B, T, heads, D]` of each."""
        return [x.unflatten(-1, (-1, self.head_dim)) for x in project(hidden_states, (*projections,))]

    def _rotate(self, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        norms = fuse_norms(self.q_norm, self.k_norm, self.spec)
        if norms is None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rope_qk(q, k, *position_embeddings, qk_norm=norms)

    def _rotate_queries(self, q: Tensor, position_embeddings: tuple[Tensor, ...]) -> Tensor:
        """Rotate q as `_rotate` does, with a copy of one head for the keys, which are rotated already."""
        norms = fuse_norms(self.q_norm, self.q_norm, self.spec)
        if norms is None:
            q = self.q_norm(q)
        return rope_qk(q, q[:, :1].detach(), *position_embeddings, qk_norm=norms)[0]

    def _norm_values(self, v_BTKD: Tensor) -> Tensor:
        eps = vars(self.v_norm).get("eps")
        if eps is None or has_hooks(self.v_norm):  # `modules_to_save` wraps it
            normed: Tensor = self.v_norm(v_BTKD)
            return normed
        return rms_norm(v_BTKD, v_BTKD.new_zeros(self.head_dim), eps, offset=1.0)


class SharedKVAttentionMixer(AttentionMixer):
    """Attention with shared keys and values by the backends of `unsloth_pack.attention`."""

    forward: type[nn.Module] = FastSharedKVAttention
    known_names = """
        config layer_idx layer_type head_dim num_key_value_groups is_causal scaling is_sliding sliding_window
        attention_dropout use_alternative_attention is_kv_shared_layer store_full_length_kv q_proj k_proj
        v_proj o_proj q_norm k_norm v_norm
        """

    def what_is_fused(self, module: Any, spec: ArchSpec, how: str) -> tuple[Report, Report]:
        fused = {"attention": "documents kept apart", "rotary embedding": f"of q and k {how}"}
        if fuse_norms(module.q_norm, getattr(module, "k_norm", module.q_norm), spec) is None:
            return fused, {"QK norm": "wrapped by modules_to_save, or with hooks"}
        return fused | {"QK norm": "with the rotary embedding"}, {}

    def known(self, spec: ArchSpec) -> frozenset[str]:
        return Mixer.known(self, spec)
