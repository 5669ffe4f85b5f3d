"""A tiny gpt-oss as its files on the hub are: experts in MXFP4, all else in bfloat16."""

import json

import torch
from model_folder import save_model
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def pack(stack):
    """Blocks `[E, O, G, 16]` and scales `[E, O, G]`, uint8, of weights `[E, I, O]`."""
    weights = stack.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (weights.abs().amax(-1, keepdim=True).clamp(min=2.0**-120) / 6).log2().ceil()
    scaled = weights / 2**exponents
    codes = torch.bucketize(scaled.abs().contiguous(), (E2M1[1:] + E2M1[:-1]) / 2) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponents[..., 0] + 127).to(torch.uint8)


def save_in_mxfp4(folder, **overrides):
    save_model(folder, "gpt_oss", **overrides)
    path, weights = folder / "model.safetensors", {}
    for name, weight in load_file(path).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            weights[f"{name}_blocks"], weights[f"{name}_scales"] = pack(weight)
        else:
            weights[name] = weight.bfloat16()
    save_file(weights, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder
