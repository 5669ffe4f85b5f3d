"""The LayerNorms inside the layers of a tower, which autocast would widen."""

from torch import Tensor, autocast, get_autocast_dtype, is_autocast_enabled, nn

# Of the layers of all towers here; what they make goes into linear layers alone
NORMS = ("norm1", "norm2", "layer_norm1", "layer_norm2", "layernorm_before", "layernorm_after")


class FastTowerNorm(nn.Module):
    """Takes the place of the class of a LayerNorm whose output goes into linear layers alone.

    Autocast makes it read and write float32, which the linear layers round to 16 bits at once. In 16 bits it
    computes in float32 too, and rounds as they do.
    """

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[.., C]` of `[.., C]`."""
        device = hidden_states.device.type
        if not is_autocast_enabled(device):
            return super().forward(hidden_states)
        is_in_16_bits = hidden_states.dtype == self.weight.dtype == get_autocast_dtype(device)
        with autocast(device, enabled=not is_in_16_bits):
            return super().forward(hidden_states)
