"""The tower that turns the patches of images into tokens: all images of a row in one attention call.

Shapes: P patches of all images, H heads, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import vision_utils

from unsloth_pack.attention import AttentionOptions, attend
from unsloth_pack.forwards.frozen_tower import CapturedTower
from unsloth_pack.graphs.tower_graphs import Patches
from unsloth_pack.kernels import rope_qk
from unsloth_pack.models.vision_spec import VisionSpec
from unsloth_pack.modules.eager import runs_eagerly
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.row.packed_row import PackedRow

_PLACES = "window_index"  # to which place each run of patches goes that becomes one token
_MADE_ON_HOST = ("cu_seqlens", "position_ids", _PLACES, "interp_indices")


@dataclass(frozen=True)
class TowerRows:
    """The segments within which a tower's layers attend.

    Args:
        images: the frames of all images.
        windows: the windows of all images; None where no layer has windows.
    """

    images: PackedRow
    windows: PackedRow | None = None

    def of(self, cu_seqlens: Tensor) -> PackedRow:
        """Those that a layer is given by their `cu_seqlens`."""
        is_of_windows = self.windows is not None and cu_seqlens is self.windows.cu_seqlens
        return self.windows if is_of_windows and self.windows is not None else self.images


class FastTower(CapturedTower):
    """Takes the place of a tower's class: makes what its layers share from the grids, once and on the host.

    What is frozen keeps nothing for a backward pass, whatever hooks a trainer has set on its embedding.
    """

    vision_spec: VisionSpec
    config: Any
    patch_embed: "FastPatchEmbed"
    num_grid_per_side: int
    interpolation_mode: str
    interpolation_align_corners: bool

    @runs_eagerly
    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """transformers' own, with one attention call a layer; replayed from CUDA graphs where all of it is
        frozen and launching it holds the GPU up.

        Args:
            hidden_states: `[P, pixels of a patch]`.
            grid_thw: `[images, 3]`, the patches of every image in time, height and width; on the host it
                spares a wait for the device.
        """
        of_transformers = super().forward
        trains = torch.is_grad_enabled() and (hidden_states.requires_grad or self._layers_train())
        self.patch_embed.is_frozen = not trains
        if any(name in kwargs for name in _MADE_ON_HOST):  # a caller who has made them knows the segments
            return of_transformers(hidden_states, grid_thw, **kwargs)

        def run(patches: Patches) -> Any:
            return of_transformers(patches.pixels, grid_thw, **_shared(patches), **kwargs)

        patches = self._described(hidden_states, grid_thw.to("cpu", torch.int64))
        if torch.is_grad_enabled() or kwargs.keys() - {"return_dict"}:
            return run(patches)
        return self.tower_graphs.output(self, run, patches)

    def _layers_train(self) -> bool:
        """Whether anything before the aligner does."""
        aligner = tuple(path.split(".", 1)[1] for path in self.vision_spec.aligner)
        return any(
            weight.requires_grad for name, weight in self.named_parameters() if not name.startswith(aligner)
        )

    def _described(self, pixels: Tensor, grids: Tensor) -> Patches:
        """The patches, with what transformers' forward would make of the grids on the device."""
        spec, merge = self.vision_spec, getattr(self.config, self.vision_spec.merge)
        frames = np.repeat((grids[:, 1] * grids[:, 2]).numpy(), grids[:, 0].numpy())
        rows = [PackedRow.of_lengths(tuple(frames.tolist()), pixels.device)]
        sizes = tuple(map(tuple, grids.tolist()))
        made = {"position_ids": np.concatenate([_positions(size, merge) for size in sizes])}
        if spec.windows:
            index, ends = vision_utils.get_vision_window_index(
                grids,
                spatial_merge_size=merge,
                window_size=self.config.window_size,
                patch_size=self.config.patch_size,
            )
            rows.append(PackedRow.of_lengths(tuple(ends.diff().tolist()), pixels.device))
            made[_PLACES] = index.numpy()
        if spec.interpolates:
            table = (self.num_grid_per_side, self.interpolation_mode, self.interpolation_align_corners)
            indices, weights = zip(*(_interpolation(size, merge, *table) for size in sizes), strict=True)
            made |= {"interp_indices": np.concatenate(indices), "interp_weights": np.concatenate(weights)}
        by_patch = {name: rows[0].upload(value) for name, value in made.items()}
        return Patches(pixels, by_patch, _PLACES if spec.windows else None, rows)


def _shared(patches: Patches) -> Mapping[str, Any]:
    """What all layers read, under the names by which transformers' forward takes it."""
    images, *windows = patches.rows
    shared: dict[str, Any] = {"cu_seqlens": images.cu_seqlens, "max_seqlen": images.longest}
    for row in windows:
        shared |= {"cu_window_seqlens": row.cu_seqlens, "max_window_seqlen": row.longest}
    return {**patches.by_patch, **shared, "tower_rows": TowerRows(images, *windows)}


@lru_cache(maxsize=256)
def _positions(size: tuple[int, ...], merge: int) -> np.ndarray:
    """`[P, 2]` int64: row and column of every patch of one image.

    Args:
        size: of the image, in patches: time, height and width.
    """
    return vision_utils.get_vision_position_ids(torch.tensor([size]), merge).numpy()


@lru_cache(maxsize=256)
def _interpolation(
    size: tuple[int, ...], merge: int, side: int, mode: str, align_corners: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which learned positions every patch of one image lies between, and their weights; both `[P, taps]`.

    Args:
        size: of the image, in patches: time, height and width.
        side: of the square of learned positions.
    """
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([size]),
        num_grid_per_side=side,
        mode=mode,
        align_corners=align_corners,
        spatial_merge_size=merge,
    )
    return indices.numpy(), weights.numpy()


class FastPatchEmbed(nn.Module):
    """Takes the place of the class of a tower's first layer.

    Trainers that checkpoint make its output require a gradient by a hook; a frozen tower would then run its
    whole backward pass for nothing.
    """

    is_frozen: bool
    proj: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        embedded: Tensor = super().__call__(*args, **kwargs)
        return embedded.detach() if self.is_frozen else embedded

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[P, C]` of `[P, pixels of a patch]`.

        Every patch meets the convolution's kernel once, so that it is one product; cuDNN is slower.
        """
        proj = self.proj
        if type(proj) is not nn.Conv3d or has_hooks(proj):
            return super().forward(hidden_states)
        return F.linear(hidden_states.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)


class FastTowerAttention(nn.Module):
    """Takes the place of the class of a tower's attention, in which no image sees another."""

    attn_backend: str
    num_heads: int
    head_dim: int
    scaling: float
    qkv: nn.Module
    proj: nn.Module

    @runs_eagerly
    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        tower_rows: TowerRows | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`[P, C]` of `[P, C]`.

        Args:
            cu_seqlens: which of `tower_rows` this layer attends within.
            position_embeddings: `cos` and `sin`, `[P, D]`.
        """
        if tower_rows is None or position_embeddings is None:
            return super().forward(
                hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs
            )
        q_PHD, k_PHD, v_PHD = self.qkv(hidden_states).view(-1, 3, self.num_heads, self.head_dim).unbind(1)
        q_PHD, k_PHD = rope_qk(q_PHD, k_PHD, *position_embeddings)
        options = AttentionOptions(self.scaling, causal=False)
        out = attend(q_PHD, k_PHD, v_PHD, tower_rows.of(cu_seqlens), options, self.attn_backend)
        return self.proj(out.flatten(1))
