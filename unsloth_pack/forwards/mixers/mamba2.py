"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): a short convolution, then a state space.

The state and the last tokens of the convolution would go over to the next document.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from unsloth_pack.forwards.mixers.state_layer import FastStateLayer, StateMixer, seq_idx
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import is_gathered_by_module

# Tokens of a chunk at most, within which transformers' code in torch holds a product for each pair of tokens
_CHUNK = 64


class FastMamba2(FastStateLayer):
    """Takes the place of the class of a transformers Mamba-2 layer.

    mamba_ssm sums the decays of a chunk from its beginning, over all documents in it. A decay within a
    document is a difference of two such sums, and rounded as they are.
    """

    rounds_together = True
    training: bool
    chunk_size: int
    out_proj: nn.Module

    def run_whole(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """transformers' forward. In training its kernels read `out_proj.weight` themselves, unless that is an
        adapter's, or comes by a hook: they would pass over it."""
        if not self.training or _is_plain(self.out_proj):
            return super().run_whole(hidden_states, *args, **kwargs)
        with _set(self, training=False):  # of this module alone, which has no other use for it
            return super().run_whole(hidden_states, *args, **kwargs)

    def run_stack(self, hidden_SLC: Tensor) -> Tensor:
        """Likewise, in chunks of few tokens. How long they are changes the time and the memory that torch
        takes, and nothing of the result."""
        with _set(self, chunk_size=min(self.chunk_size, _CHUNK)):
            return super().run_stack(hidden_SLC)


@contextmanager
def _set(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Meanwhile a module has these attributes."""
    before = {name: vars(module)[name] for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(before)


def _is_plain(linear: Any) -> bool:
    return type(linear) is nn.Linear and not has_hooks(linear) and not is_gathered_by_module(linear.weight)


MAMBA2 = StateMixer(
    kind="Mamba-2",
    attribute="mamba",
    boundaries=seq_idx,
    packages={"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"},
    known_names="""
        A_log D act activation chunk_size config conv1d conv_dim conv_kernel_size dt_bias
        groups_time_state_size head_dim hidden_size in_proj intermediate_size layer_idx
        layer_norm_epsilon layer_type mamba_rms_norm mup_vector n_groups norm num_heads out_proj
        ssm_in_multiplier ssm_state_size time_step_limit use_bias use_conv_bias use_mem_eff_path
        """,
    forward=FastMamba2,
)
