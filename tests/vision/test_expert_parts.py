"""Adapters on parts of a model of vision and language whose text model has experts."""

import pytest
import torch
from image_models import made

from unsloth_pack import FastVisionModel, InputError, patch_model
from unsloth_pack.config.options import ImageOptions
from unsloth_pack.run.trained import with_parts


@pytest.mark.parametrize(
    "asked",
    [{}, {"finetune_vision_layers": True}, {"finetune_aligner": "lora"}, {"finetune_mlp_modules": False}],
)
def test_parts_of_a_model_with_experts(asked):
    """Its experts are adapted with the language model's MLPs, and the other parts as they are asked for."""
    model = made("qwen3_vl_moe", torch.float32, "all")
    patch_model(model)
    model = FastVisionModel.get_peft_model(model, r=4, **asked)
    adapted = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" in name]
    assert any(".experts." in name for name in adapted) == asked.get("finetune_mlp_modules", True)
    assert any("visual.blocks" in name for name in adapted) == ("finetune_vision_layers" in asked)
    assert any("visual.merger" in name for name in adapted) == ("finetune_aligner" in asked)
    assert any("language_model" in name and "self_attn" in name for name in adapted)


def test_names_beside_a_tower():
    """As `train --freeze_vit false --target_modules gate_proj,up_proj,down_proj` chooses."""
    model = made("qwen3_vl_moe", torch.float32, "all")
    patch_model(model)
    given = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "modules_to_save": None}
    options = ImageOptions(freeze_vit=False, freeze_aligner=True)
    model = FastVisionModel.get_peft_model(
        model, r=4, target_modules=with_parts(model, given, options)["target_modules"], finetune_aligner=False
    )
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(".experts." in name for name in adapted)
    assert any("visual.blocks" in name for name in adapted)
    assert not any("self_attn" in name for name in adapted)
    model = made("qwen3_vl_moe", torch.float32, "all")
    with pytest.raises(InputError, match="would mean routers of experts too"):
        with_parts(model, given | {"target_modules": "all-linear"}, options)
