"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): a short convolution, then a state space.

The state and the last tokens of the convolution would go over to the next document.
"""

from typing import Any

from torch import Tensor, nn

from unsloth_pack.forwards.mixers.state_layer import FastStateLayer, StateMixer, seq_idx
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import is_gathered_by_module


class FastMamba2(FastStateLayer):
    """Takes the place of the class of a transformers Mamba-2 layer."""

    training: bool
    out_proj: nn.Module

    def run_whole(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """transformers' forward. In training its kernels read `out_proj.weight` themselves, unless that is an
        adapter's, or comes by a hook: they would pass over it."""
        if not self.training or _is_plain(self.out_proj):
            return super().run_whole(hidden_states, *args, **kwargs)
        vars(self)["training"] = False  # of this module alone, which has no other use for it
        try:
            return super().run_whole(hidden_states, *args, **kwargs)
        finally:
            vars(self)["training"] = True


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
