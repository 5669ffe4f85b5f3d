"""Run the tower whose images come with their sizes: all of them in one attention call a layer.

transformers keeps images apart by a mask of all patches by all patches.

Shapes: P patches of all images, H heads, D head size, C features.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from unsloth_pack.attention import AttentionOptions, attend
from unsloth_pack.cuda_graphs.tower import Patches
from unsloth_pack.errors import InputError
from unsloth_pack.kernels import rope_qk
from unsloth_pack.layers.vision.tower import CapturedTower, tower_gradients
from unsloth_pack.modules import no_compile
from unsloth_pack.packed_row.row import PackedRow


class FastVariableSizeTower(CapturedTower):
    """Replaces the class of a tower that cuts images into patches, without a mask over all of them.

    A frozen one keeps nothing for a backward pass, and may be replayed from CUDA graphs.
    """

    patch_size: int
    patch_conv: nn.Conv2d
    ln_pre: nn.Module
    patch_positional_embedding: nn.Module
    transformer: nn.Module

    @no_compile
    def forward(self, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any) -> Any:
        """Return the features of all patches, `[1, P, C]`.

        Args:
            pixel_values: `[images, channels, height, width]`, padded behind each image.
            image_sizes: `[images, 2]`, height and width of every image; on the host it spares a wait for the
                device. None: none is padded.

        Raises:
            InputError: an image is larger than its pixels.
        """
        with tower_gradients(self, pixel_values):
            patches = self._cut_patches(pixel_values, image_sizes)
            if torch.is_grad_enabled():
                return self._encode(patches, **kwargs)
            return self._replay(lambda patches: self._encode(patches, **kwargs), patches, kwargs)

    @merge_with_config_defaults
    @capture_outputs
    def _encode(self, patches: Patches, **kwargs: Any) -> Any:
        hidden_1PC, (row,) = self.ln_pre(patches.pixels[None]), patches.rows
        angles = self.patch_positional_embedding(hidden_1PC, patches.by_patch["places"])
        return self.transformer(
            hidden_1PC, attention_mask=None, position_embeddings=angles, tower_rows=row, **kwargs
        )

    def _cut_patches(self, pixel_values: Tensor, image_sizes: Any) -> Patches:
        """Cut images into patches: features `[P, C]` and places `[P, 2]`."""
        side, shape = self.patch_size, tuple(pixel_values.shape[-2:])
        sizes = [shape] * len(pixel_values) if image_sizes is None else image_sizes
        sizes = np.array(sizes.tolist() if isinstance(sizes, Tensor) else sizes)
        if (sizes > shape).any():
            image = int(np.flatnonzero((sizes > shape).any(axis=1))[0])
            raise InputError(
                f"image {image} has {sizes[image].tolist()} pixels by image_sizes, pixel_values holds "
                f"{list(shape)} of it; give the sizes that the model's processor has made"
            )
        grids = sizes // side
        patches = self.patch_conv(pixel_values.to(self.patch_conv.weight.dtype))
        images = [
            one[:, :height, :width].flatten(1) for one, (height, width) in zip(patches, grids, strict=True)
        ]
        row = PackedRow.of_lengths(tuple(grids.prod(axis=1).tolist()), patches.device)
        places = np.concatenate([np.indices(grid).reshape(2, -1) for grid in grids], axis=1)
        return Patches(torch.cat(images, dim=1).T, {"places": row.upload(places.T)}, rows=[row], axis=1)


class FastVariableSizeAttention(nn.Module):
    """Replaces the class of that tower's attention, in which no image sees another."""

    attn_backend: str
    num_heads: int
    head_dim: int
    scaling: float
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module

    @no_compile
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        tower_rows: PackedRow | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `[1, P, C]` from `[1, P, C]`.

        Args:
            position_embeddings: `cos` and `sin`, `[P, D]`.
            tower_rows: the images.
        """
        if tower_rows is None or position_embeddings is None:
            return super().forward(hidden_states, attention_mask, position_embeddings, **kwargs)
        q_PHD, k_PHD, v_PHD = (
            projection(hidden_states).view(-1, self.num_heads, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_PHD, k_PHD = rope_qk(q_PHD, k_PHD, *position_embeddings)
        options = AttentionOptions(self.scaling, causal=False)
        out = attend(q_PHD, k_PHD, v_PHD, tower_rows, options, self.attn_backend)
        return self.o_proj(out.flatten(1)[None]), None
