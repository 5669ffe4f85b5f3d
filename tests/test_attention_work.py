"""The share of a row's time that attention takes, by which ranks get even work."""

import pytest
import torch
from tiny import tiny_model
from tiny_vision import vision_model

from unsloth_pack.training import sampling
from unsloth_pack.training.sampling import attention_share

ROWS = [[30], [10, 20]]
OF_TOKEN = (30**2 + 10**2 + 20**2) / 60  # tokens of a token's document on average
SLOWER, NOT_FULL = sampling._SLOWER, sampling._NOT_FULL


def share(width, weights):
    of_attention = 3.5 * SLOWER * width * (OF_TOKEN + NOT_FULL)
    return pytest.approx(of_attention / (of_attention + weights))


def linear_weights(model, passes_of):
    return sum(
        passes_of(module) * module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    )


def test_frozen_weights_take_two_passes_and_trained_ones_three():
    model = tiny_model("llama", device="cpu")
    config = model.config
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    lora = linear_weights(model, lambda module: 3 if module.weight.requires_grad else 2)
    assert attention_share(model, ROWS) == share(width, lora)
    full = tiny_model("llama", device="cpu", lora={"tuning": "full"})
    assert attention_share(full, ROWS) == share(width, linear_weights(full, lambda module: 3))


def test_a_token_goes_through_some_experts():
    model = tiny_model("mixtral", device="cpu")
    experts = [weight for name, weight in model.named_parameters() if weight.ndim == 3]
    assert experts
    config = model.config
    passed = sum(
        (3 if weight.requires_grad else 2) * weight.numel() * config.num_experts_per_tok / len(weight)
        for weight in experts
    )
    linear = linear_weights(model, lambda module: 3 if module.weight.requires_grad else 2)
    width = config.num_hidden_layers * config.hidden_size
    assert attention_share(model, ROWS) == share(width, linear + passed)


def test_only_layers_that_attend_count():
    model = tiny_model("lfm2", device="cpu")
    config = model.config
    n_layers = config.layer_types.count("full_attention")
    assert 0 < n_layers < config.num_hidden_layers
    width = n_layers * config.hidden_size
    linear = linear_weights(model, lambda module: 3 if module.weight.requires_grad else 2)
    assert attention_share(model, ROWS) == share(width, linear)


def test_a_tower_is_no_work_of_a_token():
    model = vision_model("qwen3_vl")
    config = model.config.text_config
    of_text = [
        (3 if module.weight.requires_grad else 2) * module.weight.numel()
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "visual" not in path
    ]
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert attention_share(model, ROWS) == share(width, sum(of_text))
