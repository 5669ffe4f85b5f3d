"""The share of a row's time that attention takes, by which ranks get even work."""

import pytest
import torch
from tiny import tiny_model
from tiny_vision import vision_model

from unsloth_pack.training import sampling
from unsloth_pack.training.sampling import attention_share

ROWS = [[30], [10, 20]]
OF_TOKEN = (30**2 + 10**2 + 20**2) / 60  # tokens of a token's document on average


def passes(weight):
    """Frozen weights take two passes and trained ones three."""
    return (3 if weight.requires_grad else 2) * weight.numel()


@pytest.mark.parametrize(
    ("arch", "lora"), [("llama", {}), ("llama", {"tuning": "full"}), ("mixtral", {}), ("qwen3_vl", {})]
)
def test_attention_is_weighed_against_the_weights_that_a_token_passes(arch, lora):
    """It passes some of the experts, and no tower."""
    model = vision_model(arch) if arch == "qwen3_vl" else tiny_model(arch, device="cpu", lora=lora)
    config = model.config.get_text_config()
    weights = sum(
        passes(module.weight)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "visual" not in path
    )
    if arch == "mixtral":
        experts = [weight for weight in model.parameters() if weight.ndim == 3]
        assert experts
        weights += sum(passes(weight) * config.num_experts_per_tok / len(weight) for weight in experts)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * size
    of_attention = 3.5 * sampling._SLOWER * width * (OF_TOKEN + sampling._NOT_FULL)
    assert attention_share(model, ROWS) == pytest.approx(of_attention / (of_attention + weights))
