"""Frozen linear layers in fp8: half the memory of bfloat16, and GEMMs at twice the speed."""

from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.kernels import Fp8Rows, fp8_linear, fp8_linear_backward, fp8_transposed, quantize_rows
from unsloth_pack.kernels.launch import once_differentiable
from unsloth_pack.lora.expert_stacks import quantise_experts


class Fp8Linear(nn.Linear):
    """A linear layer with a frozen weight in e4m3 and a scale for every output.

    Quantises its input row by row, and in the backward pass the gradient of the output.

    Args:
        linear: the layer to replace; `in_features` and `out_features` are multiples of 16.
    """

    scale: Tensor

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype  # PEFT creates adapters in it
        rows = quantize_rows(linear.weight.detach())
        self.weight = nn.Parameter(rows.values, requires_grad=False)
        self.register_buffer("scale", rows.scale)
        self.bias = linear.bias

    @property
    def rows(self) -> Fp8Rows:
        """Return the weight `[O, I]`."""
        return Fp8Rows(self.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        y = _Fp8Linear.apply(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        ctx.weight = Fp8Rows(values, scale)
        y = x.new_empty((*x.shape[:-1], len(values)))
        fp8_linear(quantize_rows(x.reshape(-1, x.shape[-1])), ctx.weight, y.view(-1, len(values)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        n_inputs = ctx.weight.values.shape[1]
        gx = grad.new_empty((*grad.shape[:-1], n_inputs))
        g_NO = grad.reshape(-1, grad.shape[-1])
        fp8_linear_backward([g_NO], fp8_transposed([ctx.weight]), gx.view(-1, n_inputs))
        return gx, None, None


def quantize_to_fp8(model: Any) -> int:
    """Quantise the linear layers and experts of a model's decoder; return the number of linear layers.

    The head, the embeddings, and layers whose sizes are not multiples of 16 stay as they are.
    """
    n_quantized = 0
    quantise_experts(model, "fp8")
    for parent in list(model.get_decoder().layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.in_features % 16 == child.out_features % 16 == 0:
                setattr(parent, name, Fp8Linear(child))
                n_quantized += 1
    return n_quantized
