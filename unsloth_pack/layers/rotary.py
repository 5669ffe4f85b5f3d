"""Compute the cosines and sines for the positions of a packed row.

Positions restart in every document, so a table is as long as the longest document. Some rotary types depend
on the length of the text (dynamic NTK; LongRoPE's short and long factors): each document then reads the table
that it would read alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from unsloth_pack.errors import InputError
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.packed_row.row import PackedRow

_GRAIN = 256  # tables grow in steps of this many positions


class RotaryTables:
    """The tables of one `rotary_emb` module, cached between steps.

    `layer_type` is None where all layers have one base; `axis_of_pair` `[R/2]` is the axis by which each pair
    of dimensions turns, None with one axis.
    """

    def __init__(self, rotary_emb: Any, layer_type: str | None, axis_of_pair: np.ndarray | None = None):
        self.rotary_emb = rotary_emb
        self.layer_type = layer_type
        self.axis_of_pair = axis_of_pair
        # The latest `cos` and `sin`, where all documents rotate alike
        self.static_table: tuple[Tensor, Tensor] | None = None
        self._axis_on_device: Tensor | None = None
        rope_type, parameters = rotary_emb.rope_type, rotary_emb.config.rope_parameters or {}
        self.rope_type: str = rope_type if layer_type is None else rope_type[layer_type]
        if self.rope_type == "dynamic" and parameters.get("alpha"):
            self.rope_type = "ntk_alpha"  # a static type; transformers has it from 5.23

    @property
    def is_static(self) -> bool:
        """Return whether documents of all lengths rotate alike."""
        return self.rope_type not in _REGIMES

    def for_row(self, row: PackedRow) -> tuple[Tensor, ...]:
        """Return `cos` and `sin` `[P, R]` float32, and `[N]` int64 the table row of every token.

        Where tokens have positions on several axes: `cos` and `sin` `[N, R]`, a row for each token.
        """
        regime_of = _REGIMES.get(self.rope_type)
        if row.axes is not None and self.axis_of_pair is not None:
            if regime_of is not None:
                raise InputError(
                    f"rope type {self.rope_type!r} depends on the length of a document, which images do not "
                    "tell; set rope_parameters to another type"
                )
            return self._table_by_axes(row, self.axis_of_pair)
        if regime_of is None:
            return *self._static_table(int(row.positions.max()) + 1, row.device), row.position_ids
        return row.once(("rotary", self.layer_type), partial(self._table_by_length, row, regime_of))

    def _static_table(self, n_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        table = self.static_table
        if table is None or len(table[0]) < n_positions or table[0].device != device:
            inv_freq, scaling = self._frequencies()
            with torch.inference_mode(False):  # it outlives the call, and a backward pass may save it
                table = _cos_sin(inv_freq.to(device), scaling, -(-n_positions // _GRAIN) * _GRAIN)
            self.static_table = table
        return table

    def _table_by_axes(self, row: PackedRow, axis_of_pair: np.ndarray) -> tuple[Tensor, Tensor]:
        inv_freq, scaling = self._frequencies()
        if self._axis_on_device is None or self._axis_on_device.device != row.device:
            with torch.inference_mode(False):  # it outlives the call, and CUDA graphs read it
                self._axis_on_device = row.upload(axis_of_pair)
        angles = row.axis_ids[self._axis_on_device].T.float() * inv_freq.to(row.device).float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * scaling, angles.sin() * scaling

    def _frequencies(self) -> tuple[Tensor, float]:
        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        inv_freq: Tensor = getattr(self.rotary_emb, f"{prefix}inv_freq")
        return inv_freq, getattr(self.rotary_emb, f"{prefix}attention_scaling")

    def _table_by_length(self, row: PackedRow, regime_of: "Regime") -> tuple[Tensor, Tensor, Tensor]:
        config = self.rotary_emb.config
        parameters, options = config.rope_parameters, {}
        if self.layer_type is not None:
            parameters, options = parameters[self.layer_type], {"layer_type": self.layer_type}
        ends = row.starts + np.array(row.lengths) - 1
        n_positions = row.positions[ends] + 1
        regimes = [regime_of(config, parameters, int(n)) for n in n_positions]
        tables, offsets, n_rows = [], {}, 0
        for regime in sorted(set(regimes)):
            longest = max(int(n) for n, r in zip(n_positions, regimes, strict=True) if r == regime)
            init = ROPE_INIT_FUNCTIONS[self.rope_type]
            inv_freq, scaling = init(config, row.device, seq_len=regime, **options)
            tables.append(_cos_sin(inv_freq, scaling, longest))
            offsets[regime], n_rows = n_rows, n_rows + longest
        shift = np.repeat([offsets[regime] for regime in regimes], row.lengths)
        cos, sin = (torch.cat(parts) for parts in zip(*tables, strict=True))
        return cos, sin, row.upload(row.positions + shift)


def rotary_tables(decoder: Any, spec: ArchSpec) -> dict[str | None, RotaryTables]:
    """Build one set of tables for every base that the layers of a decoder rotate with."""
    if (module := rotary_module(decoder, spec)) is None:
        return {}
    kinds = set(decoder.config.layer_types) if spec.rotary_per_layer_type else {None}
    axis_of_pair = axes_of_pairs(module, spec)
    return {kind: RotaryTables(module, kind, axis_of_pair) for kind in kinds}


def axes_of_pairs(rotary_emb: Any, spec: ArchSpec) -> np.ndarray | None:
    """Return `[R/2]` int64: whether each pair of dimensions turns by time (0), height (1) or width (2).

    Source: Qwen2-VL (Wang et al. 2024), multimodal rotary position embedding; Qwen3-VL interleaves them.
    """
    if spec.axes is None:
        return None
    sections = rotary_emb.mrope_section
    if spec.axes == "blocks":
        return np.repeat(np.arange(len(sections)) % 3, sections)
    axes = np.zeros(len(rotary_emb.inv_freq), dtype=np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rotary_module(decoder: Any, spec: ArchSpec) -> Any:
    """Return transformers' rotary module of a decoder, or None if nothing rotates."""
    name = spec.name("rotary_emb")
    return getattr(decoder, name) if name else None


def double_angles(table: Tensor, spec: ArchSpec) -> Tensor:
    """Bring a table of transformers' rotary module to `[..., R]`: the R/2 cosines or sines, twice."""
    if spec.angles == "twice":
        return table
    return torch.cat([table[..., ::2] if spec.angles == "side_by_side" else table] * 2, dim=-1)


# Maps a length to one that stands for all texts which rotate alike
Regime = Callable[[PreTrainedConfig, Mapping[str, Any], int], int]
_REGIMES: dict[str, Regime] = {  # rotary types not named here do not depend on the length
    "dynamic": lambda config, parameters, n: max(n, config.max_position_embeddings),
    "longrope": lambda config, parameters, n: (
        parameters["original_max_position_embeddings"] + (n > parameters["original_max_position_embeddings"])
    ),
}


def _cos_sin(inv_freq: Tensor, scaling: float, n_positions: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(n_positions, device=inv_freq.device, dtype=torch.float32)
    angles = positions[:, None] * inv_freq.float()[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def scale_queries(q: Tensor, position_ids: Tensor, config: PreTrainedConfig) -> Tensor:
    """Scale q, `[N, H, D]` or `[B, H, T, D]`, by 1 + beta * log(1 + floor(position / P)), in its dtype.

    P is the length of pretraining. Source: Llama 4 (2025); also Ministral 3.
    """
    beta = config.rope_parameters["llama_4_scaling_beta"]
    periods = torch.floor(position_ids / config.rope_parameters["original_max_position_embeddings"])
    scale = 1 + beta * torch.log1p(periods)
    scale = scale[:, None, None] if q.dim() == 3 else scale[:, None, :, None]
    scaled: Tensor = q * scale.to(q.dtype)
    return scaled
