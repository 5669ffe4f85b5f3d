"""The forwards of activations that stand alone, in MLPs without a gate."""

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2CLS

from unsloth_pack.kernels import relu2, xielu
from unsloth_pack.lora.layers import with_recipe
from unsloth_pack.modules.eager import runs_eagerly


class FastReLU2(nn.Module):
    """Takes the place of transformers' squared ReLU."""

    @runs_eagerly
    def forward(self, input: Tensor) -> Tensor:
        """`[...]` from `[...]`; as an RMS norm's, the result need not be kept beside the input."""
        return with_recipe(relu2(input), relu2, (input,))


class FastXIELU(nn.Module):
    """Takes the place of transformers' xIELU."""

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: Tensor
    eps: Tensor

    @runs_eagerly
    def forward(self, input: Tensor) -> Tensor:
        """`[...]` from `[...]`; as an RMS norm's, the result need not be kept beside the input."""
        inputs = (input, self.alpha_p, self.alpha_n, self.beta, self.eps)
        return with_recipe(xielu(*inputs), xielu, inputs)


FAST_ACTIVATIONS: dict[Any, type[nn.Module]] = {  # by transformers' class
    ACT2CLS["relu2"]: FastReLU2,
    ACT2CLS["xielu"]: FastXIELU,
}
