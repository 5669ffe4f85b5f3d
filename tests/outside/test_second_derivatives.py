"""A penalty on a gradient through fused operations is an error, before any of its terms is lost."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from unsloth_pack import patch_model


def test_a_penalty_on_a_gradient_is_refused():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, attn_implementation="eager", **sizes))
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    row = torch.arange(6)[None]
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def penalty():
        gradients = torch.autograd.grad(model(input_ids=row).logits.sum(), weights, create_graph=True)
        return sum(gradient.square().sum() for gradient in gradients)

    plain = torch.autograd.grad(penalty(), weights, allow_unused=True)
    assert any(gradient is not None and gradient.any() for gradient in plain)
    with patch_model(model), pytest.raises(ValueError, match="create_graph=True: a fused operation has no"):
        penalty()
