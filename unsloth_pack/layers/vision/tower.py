"""Run the tower that turns patches of images into tokens: all images of a row in one attention call a layer.

A frozen tower keeps nothing for a backward pass, and may be replayed from CUDA graphs.

Shapes: P patches of all images, H heads, D head size, C features.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, autocast, get_autocast_dtype, is_autocast_enabled, nn
from torch.nn import functional as F
from transformers import vision_utils
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from unsloth_pack.attention import AttentionOptions, attend
from unsloth_pack.cuda_graphs.tower import Patches, Run, TowerGraphs
from unsloth_pack.errors import InputError
from unsloth_pack.kernels import gated, rope_qk
from unsloth_pack.layers.layer import name_activation
from unsloth_pack.lora.linear import can_run_fused, get_compute_dtype, project
from unsloth_pack.lora.mlp import gated_mlp
from unsloth_pack.models.spec import VisionSpec
from unsloth_pack.modules import has_hooks, no_compile
from unsloth_pack.packed_row.row import PackedRow

_ALIGNMENT = 128  # bits; rows that begin at multiples are copied by the hardware itself


class FastTowerMLP(nn.Module):
    """Replaces the class of a tower's gated MLP.

    Qwen2.5-VL's has 3,420 features, so its rows in 16 bits are not aligned for fast GEMMs. Where nothing is
    kept for a backward pass, zero features are added. The weights are copied anew every time.
    """

    act_fn: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: Any

    @no_compile
    def forward(self, hidden_state: Tensor) -> Tensor:
        """Run `[.., C]` through the gate, up and down projections."""
        activation = name_activation(self.act_fn)
        if activation is None:  # it was replaced, or has hooks now
            plain: Tensor = super().forward(hidden_state)
            return plain
        inner: list[Any] = [self.gate_proj, self.up_proj]
        down = self.down_proj
        if can_run_fused(hidden_state, [*inner, down]):
            return gated_mlp(hidden_state, inner, down, activation, keep=True)
        if missing := _count_missing_features(hidden_state, [*inner, down]):
            gate, up = (_run_padded(layer, hidden_state, missing) for layer in inner)
            return F.linear(gated(gate, up, activation), F.pad(down.weight, (0, missing)), down.bias)
        gate, up = project(hidden_state, inner)
        out: Tensor = down(gated(gate, up, activation))
        return out


def _count_missing_features(x: Tensor, layers: list[Any]) -> int:
    """Return how many features to add to align rows; 0 where a backward pass would keep the copies."""
    if not all(type(layer) is nn.Linear and not has_hooks(layer) for layer in layers):
        return 0
    if torch.is_grad_enabled() and (x.requires_grad or any(layer.weight.requires_grad for layer in layers)):
        return 0
    n_features: int = layers[-1].in_features
    return -n_features % (_ALIGNMENT // torch.finfo(get_compute_dtype(x)).bits)


def _run_padded(layer: nn.Linear, x: Tensor, missing: int) -> Tensor:
    bias = None if layer.bias is None else F.pad(layer.bias, (0, missing))
    return F.linear(x, F.pad(layer.weight, (0, 0, 0, missing)), bias)


# Names in all towers; their outputs go into linear layers alone
NORMS = ("norm1", "norm2", "layer_norm1", "layer_norm2", "layernorm_before", "layernorm_after")


class FastTowerNorm(nn.Module):
    """Replaces the class of a LayerNorm whose output goes into linear layers alone.

    Autocast makes it read and write float32, which the linear layers round to 16 bits at once. In 16 bits it
    computes in float32 too, and rounds as they do.
    """

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm `[.., C]`."""
        device = hidden_states.device.type
        if not is_autocast_enabled(device):
            plain: Tensor = super().forward(hidden_states)
            return plain
        is_in_16_bits = hidden_states.dtype == self.weight.dtype == get_autocast_dtype(device)
        with autocast(device, enabled=not is_in_16_bits):
            normed: Tensor = super().forward(hidden_states)
            return normed


READ_ON_HOST = "arguments beside the pixels are read on the host"


def tower_gradients(tower: nn.Module, pixels: Tensor) -> AbstractContextManager[Any]:
    """Enable gradients only if a tower's pixels or weights need them."""
    trains = pixels.requires_grad or any(weight.requires_grad for weight in tower.parameters())
    return torch.set_grad_enabled(torch.is_grad_enabled() and trains)


class CapturedTower(nn.Module):
    """A tower with graphs of its forward pass."""

    tower_graphs: TowerGraphs

    def _replay(self, run: Run, patches: Patches, options: dict[str, Any]) -> Any:
        """Run `run` on patches without gradients, from graphs if these know all keywords."""
        if any(not (value is None or isinstance(value, int)) for value in options.values()):
            self.tower_graphs.leave_out(READ_ON_HOST)
            return run(patches)
        return self.tower_graphs.output(self, run, replace(patches, asked=options))

    def _apply(self, fn: object, *args: object, **kwargs: object) -> "CapturedTower":
        """Move or cast the weights as torch does; graphs then release those that lie elsewhere now."""
        move: Callable[..., CapturedTower] = super()._apply
        moved = move(fn, *args, **kwargs)
        if (graphs := vars(self).get("tower_graphs")) is not None:  # PEFT builds new modules of this class
            graphs.let_go(self)
        return moved


class FrozenTower(CapturedTower):
    """Replaces the class of a tower whose images are a batch, to skip the backward pass of a frozen tower.

    Trainers that checkpoint make the output of a tower's embedding require a gradient by a hook.
    """

    @no_compile
    def forward(self, pixel_values: Tensor, *args: object, **kwargs: object) -> Any:
        """Run the tower; a frozen one without gradients, and from CUDA graphs if launch-bound."""
        theirs = super().forward
        with tower_gradients(self, pixel_values):
            if torch.is_grad_enabled() or args:
                return theirs(pixel_values, *args, **kwargs)
            return self._replay(
                lambda patches: theirs(patches.pixels, **kwargs), Patches(pixel_values), kwargs
            )


_PLACES = "window_index"  # the place of each run of patches that becomes one token


class FastTower(CapturedTower):
    """Replaces the class of a tower: computes what its layers share from the grids, once and on the host.

    A frozen tower keeps nothing for a backward pass, whatever hooks a trainer sets on its embedding.
    """

    vision_spec: VisionSpec
    config: Any
    patch_embed: "FastPatchEmbed"
    num_grid_per_side: int
    interpolation_mode: str
    interpolation_align_corners: bool

    @no_compile
    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: object) -> Any:
        """Run transformers' forward with one attention call a layer, from CUDA graphs where that is faster.

        Args:
            hidden_states: `[P, pixels of a patch]`.
            grid_thw: `[images, 3]` patches in time, height and width; on the host it spares a wait.
        """
        theirs = super().forward
        trains = torch.is_grad_enabled() and (hidden_states.requires_grad or self._layers_train())
        self.patch_embed.is_frozen = not trains

        def run(patches: Patches) -> Any:
            return theirs(patches.pixels, grid_thw, **_name_shared(patches), **kwargs)

        patches = self._describe(hidden_states, grid_thw.to("cpu", torch.int64))
        if torch.is_grad_enabled() or kwargs.keys() - {"return_dict"}:
            return run(patches)
        return self.tower_graphs.output(self, run, patches)

    def _layers_train(self) -> bool:
        """Return whether anything before the aligner trains."""
        aligner = tuple(path.split(".", 1)[1] for path in self.vision_spec.aligner)
        return any(
            weight.requires_grad for name, weight in self.named_parameters() if not name.startswith(aligner)
        )

    def _describe(self, pixels: Tensor, grids: Tensor) -> Patches:
        """Compute on the host what transformers' forward would compute of the grids on the device."""
        spec, merge = self.vision_spec, getattr(self.config, self.vision_spec.merge)
        frames = np.repeat((grids[:, 1] * grids[:, 2]).numpy(), grids[:, 0].numpy())
        rows = [PackedRow.of_lengths(tuple(frames.tolist()), pixels.device)]
        sizes = tuple(map(tuple, grids.tolist()))
        by_name = {"position_ids": np.concatenate([_positions(size, merge) for size in sizes])}
        if spec.windows:
            sides = {"window_size": self.config.window_size, "patch_size": self.config.patch_size}
            index, ends = vision_utils.get_vision_window_index(grids, spatial_merge_size=merge, **sides)
            rows.append(PackedRow.of_lengths(tuple(ends.diff().tolist()), pixels.device))
            by_name[_PLACES] = index.numpy()
        if spec.interpolates:
            table = (self.num_grid_per_side, self.interpolation_mode, self.interpolation_align_corners)
            indices, weights = zip(*(_interpolation(size, merge, *table) for size in sizes), strict=True)
            by_name |= {"interp_indices": np.concatenate(indices), "interp_weights": np.concatenate(weights)}
        by_patch = {name: rows[0].upload(value) for name, value in by_name.items()}
        return Patches(pixels, by_patch, _PLACES if spec.windows else None, rows)


def _name_shared(patches: Patches) -> Mapping[str, Any]:
    """Name what all layers read as transformers' forward takes it."""
    images, *windows = patches.rows
    shared: dict[str, Any] = {"cu_seqlens": images.cu_seqlens, "max_seqlen": images.longest}
    for row in windows:
        shared |= {"cu_window_seqlens": row.cu_seqlens, "max_window_seqlen": row.longest}
    return {**patches.by_patch, **shared, "tower_rows": patches.rows}


@lru_cache(maxsize=256)
def _positions(size: tuple[int, ...], merge: int) -> np.ndarray:
    """Return `[P, 2]` int64: row and column of every patch, for a `size` of patches."""
    return vision_utils.get_vision_position_ids(torch.tensor([size]), merge).numpy()


@lru_cache(maxsize=256)
def _interpolation(
    size: tuple[int, ...], merge: int, side: int, mode: str, align_corners: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return which positions in a learned square each patch lies between, and their weights: `[P, taps]`."""
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([size]),
        num_grid_per_side=side,
        mode=mode,
        align_corners=align_corners,
        spatial_merge_size=merge,
    )
    return indices.numpy(), weights.numpy()


class FastPatchEmbed(nn.Module):
    """Replaces the class of a tower's first layer; see `FrozenTower` for gradients."""

    is_frozen: bool
    proj: nn.Module

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        embedded: Tensor = super().__call__(*args, **kwargs)
        return embedded.detach() if self.is_frozen else embedded

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute `[P, C]` from `[P, pixels of a patch]`.

        Every patch meets the convolution's kernel once, so it is one product; cuDNN is slower.
        """
        proj = self.proj
        if type(proj) is not nn.Conv3d or has_hooks(proj):
            plain: Tensor = super().forward(hidden_states)
            return plain
        return F.linear(hidden_states.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)


class _ImageAttention(nn.Module):
    """Attention of a tower, in which no image sees another."""

    attn_backend: str
    num_heads: int
    head_dim: int
    scaling: float

    def _attend(
        self, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, angles: tuple[Tensor, Tensor], row: PackedRow
    ) -> Tensor:
        """Rotate queries and keys, and attend within the segments of `row`; return `[P, C]`."""
        q_PHD, k_PHD = rope_qk(q_PHD, k_PHD, *angles)
        options = AttentionOptions(self.scaling, causal=False)
        return attend(q_PHD, k_PHD, v_PHD, row, options, self.attn_backend).flatten(1)


class FastTowerAttention(_ImageAttention):
    """Replaces the class of a tower's attention."""

    qkv: nn.Module
    proj: Callable[[Tensor], Tensor]

    @no_compile
    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        tower_rows: Sequence[PackedRow] | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Compute `[P, C]` from `[P, C]`; `position_embeddings` are `cos` and `sin`, `[P, D]`.

        `cu_seqlens` are those of one of `tower_rows`: the frames of all images, and perhaps their windows.
        """
        if tower_rows is None or position_embeddings is None:
            plain: Tensor = super().forward(
                hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs
            )
            return plain
        q_PHD, k_PHD, v_PHD = self.qkv(hidden_states).view(-1, 3, self.num_heads, self.head_dim).unbind(1)
        row = next((row for row in tower_rows if row.cu_seqlens is cu_seqlens), tower_rows[0])
        return self.proj(self._attend(q_PHD, k_PHD, v_PHD, position_embeddings, row))


class FastVariableSizeTower(CapturedTower):
    """Replaces the class of a tower that cuts images, which come with their sizes, into patches.

    transformers keeps images apart by a mask of all patches by all patches; here they are segments.
    """

    patch_size: int
    patch_conv: nn.Conv2d
    ln_pre: nn.Module
    patch_positional_embedding: nn.Module
    transformer: nn.Module

    @no_compile
    def forward(self, pixel_values: Tensor, image_sizes: object = None, **kwargs: object) -> Any:
        """Return the features of all patches, `[1, P, C]`.

        Args:
            pixel_values: `[images, channels, height, width]`, padded behind each image.
            image_sizes: `[images, 2]`, on the host to spare a wait for the device. None: none is padded.
        """
        with tower_gradients(self, pixel_values):
            patches = self._cut_patches(pixel_values, image_sizes)
            if torch.is_grad_enabled():
                return self._encode(patches, **kwargs)
            return self._replay(lambda patches: self._encode(patches, **kwargs), patches, kwargs)

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def _encode(self, patches: Patches, **kwargs: object) -> Any:
        hidden_1PC, (row,) = self.ln_pre(patches.pixels[None]), patches.rows
        angles = self.patch_positional_embedding(hidden_1PC, patches.by_patch["places"])
        return self.transformer(
            hidden_1PC, attention_mask=None, position_embeddings=angles, tower_rows=row, **kwargs
        )

    def _cut_patches(self, pixel_values: Tensor, image_sizes: object) -> Patches:
        """Cut images into patches: features `[P, C]` and places `[P, 2]`."""
        side, shape = self.patch_size, tuple(pixel_values.shape[-2:])
        sizes = [shape] * len(pixel_values) if image_sizes is None else image_sizes
        sizes = np.array(sizes.tolist() if isinstance(sizes, Tensor) else sizes)
        if (sizes > shape).any():
            problem = f"image_sizes is {sizes.tolist()}, and pixel_values holds {list(shape)} of each image"
            raise InputError(f"{problem}; give the sizes that the model's processor has made")
        grids = sizes // side
        patches = self.patch_conv(pixel_values.to(self.patch_conv.weight.dtype))
        images = [
            one[:, :height, :width].flatten(1) for one, (height, width) in zip(patches, grids, strict=True)
        ]
        row = PackedRow.of_lengths(tuple(grids.prod(axis=1).tolist()), patches.device)
        places = np.concatenate([np.indices(grid).reshape(2, -1) for grid in grids], axis=1)
        return Patches(torch.cat(images, dim=1).T, {"places": row.upload(places.T)}, rows=[row], axis=1)


class FastVariableSizeAttention(_ImageAttention):
    """Replaces the class of that tower's attention."""

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
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `[1, P, C]` from `[1, P, C]`; `position_embeddings` are `cos` and `sin`, `[P, D]`."""
        if tower_rows is None or position_embeddings is None:
            plain: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, attention_mask, position_embeddings, **kwargs
            )
            return plain
        q_PHD, k_PHD, v_PHD = (
            projection(hidden_states).view(-1, self.num_heads, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self._attend(q_PHD, k_PHD, v_PHD, position_embeddings, tower_rows)
        return self.o_proj(out[None]), None
