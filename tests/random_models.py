"""Random models of vision and language, of which chosen parts train."""

import torch
from peft import LoraConfig, get_peft_model
from tiny import DEVICE


def random_model(kind, config, varied, dtype, seed):
    """A model, the same in every dtype, and the generator that has drawn it.

    Args:
        varied: takes the name of a weight; whether noise is added to it, as to norms and biases.
    """
    torch.manual_seed(seed)
    weights = kind._from_config(config, dtype=torch.float32).state_dict()
    generator = torch.Generator().manual_seed(seed + 1)
    for key, weight in weights.items():
        if "norm" in key or key.endswith("bias") or varied(key):
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    model = kind._from_config(config, dtype=dtype)
    if dtype == torch.float64:  # the grouped GEMM of the experts has no float64
        model.get_decoder().config._experts_implementation = "eager"
    model.load_state_dict(weights)
    return model.to(DEVICE).train(), generator


def with_adapter(model, targets, generator, full=()):
    """Random LoRA on `targets`, and the parts named in `full` trained whole beside it."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for key, weight in model.named_parameters():
        if "lora_" in key:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
        elif any(f".{part}." in key for part in full):
            weight.requires_grad_()
    return model
