"""vLLM's own reader makes of a saved adapter what PEFT merges.

By hand, where vLLM is installed, without a GPU: `python -m pytest tests/checkpoints/vllm_reads.py`.
"""

from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from checkpoints.test_vllm_adapter import BY_LAYER, LATENT, NAMES, save
from tiny import tiny_model
from torch import nn


def vllm_class(model):
    """The class of vLLM for a model of transformers."""
    name = type(model.get_base_model()).__name__
    registry = import_module("vllm.model_executor.models.registry")
    module, _ = registry._TEXT_GENERATION_MODELS[name]
    return getattr(import_module(f"vllm.model_executor.models.{module}"), name)


def read_by_vllm(folder, kind, packed, modules):
    """The adapter as vLLM's manager packs it for a model of `kind`.

    `packed` are the layers of experts by the path of the experts, `modules` are vLLM's own that read stacks.
    """
    manager_module, model_module = (import_module(f"vllm.lora.{x}") for x in ("model_manager", "lora_model"))
    helper = import_module("vllm.lora.peft_helper").PEFTHelper.from_local_dir(str(folder), None)
    assert not helper._validate_features()
    mapper = getattr(kind, "hf_to_vllm_mapper", None)
    expected = {"experts", *(target.rpartition(".")[2] for target in helper.target_modules)}
    expected |= {name[name.index("experts.") :] for names in packed.values() for name in names}
    manager = object.__new__(manager_module.LoRAModelManager)
    vars(manager).update(packed_modules=packed, modules=modules, is_pooling_model=False)
    vars(manager).update(_enable_moe_shared_loras=False, _enable_mixed_moe_lora_format=False)
    vars(manager).update(_is_3d_moe_model=kind.is_3d_moe_weight, _is_non_gated_moe=kind.is_non_gated_moe)
    with (
        mock.patch.multiple(model_module, PIN_MEMORY=False),
        mock.patch.multiple(manager_module, PIN_MEMORY=False),
    ):
        adapter = model_module.LoRAModel.from_local_checkpoint(
            *(str(folder), expected, helper),
            lora_model_id=1,
            device="cpu",
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        manager._create_merged_loras_inplace(adapter)
    return adapter.loras


def merged_deltas(model):
    """What PEFT's merge adds to each stack, and the paths of the experts."""
    base = model.get_base_model()
    before = {
        name.replace("base_layer.", ""): weight.detach().clone()
        for name, weight in base.named_parameters()
        if "lora_" not in name and ".experts." in name and weight.dim() == 3
    }
    merged = dict(model.merge_and_unload().named_parameters())
    deltas = {name: merged[name].detach() - weight for name, weight in before.items()}
    return deltas, {name.rpartition(".")[0] for name in deltas}


@pytest.mark.every_architecture
@pytest.mark.parametrize("arch", BY_LAYER)
def test_layers_of_experts(arch, tmp_path):
    lora = {"exclude_modules": ["kv_b_proj"]} if arch in LATENT else {}
    model = tiny_model(arch, torch.float64, "cpu", lora=lora)
    save(model, tmp_path)
    kind = vllm_class(model)
    assert kind.supports_lora
    assert not kind.is_3d_moe_weight
    *ups, down = NAMES.get(arch, ("gate_proj", "up_proj", "down_proj"))
    deltas, paths = merged_deltas(model)
    packed, path_in_vllm = {}, {}
    for path in paths:
        block = path.removesuffix(".experts")
        if arch == "mixtral":
            block = block.replace(".mlp", ".block_sparse_moe")
        order = [f"{block}.experts.{e}.{name}" for e in range(4) for name in (ups[0], down, *ups[1:])]
        path_in_vllm[path], packed[f"{block}.experts"] = f"{block}.experts", order
    read = read_by_vllm(tmp_path, kind, packed, {})
    for path in paths:
        lora = read[path_in_vllm[path]]
        w1, w2, w3 = (b @ a for a, b in zip(lora.lora_a, lora.lora_b, strict=True))
        first = ("up_proj", w1) if len(ups) == 1 else ("gate_up_proj", torch.cat([w1, w3], 1))
        for name, delta in (first, ("down_proj", w2)):
            torch.testing.assert_close(delta, deltas[f"{path}.{name}"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_stacks(stack, tmp_path):
    lora = dict(target_modules=["q_proj"], target_parameters=[stack])
    model = tiny_model("gpt_oss", torch.float64, "cpu", lora=lora)
    save(model, tmp_path)
    kind = vllm_class(model)
    assert kind.is_3d_moe_weight
    deltas, paths = merged_deltas(model)
    modules = {}
    for path in paths:
        module = object.__new__(import_module("vllm.lora.layers").FusedMoE3DWithLoRA)
        nn.Module.__init__(module)
        module.moe_config = SimpleNamespace(num_experts=4, moe_parallel_config=SimpleNamespace(ep_rank=0))
        module.w13_lora_a_stacked = (torch.zeros(1, 4, 1, 1),)
        modules[path] = module
    read = read_by_vllm(tmp_path, kind, {}, modules)
    for path in paths:
        for name, a, b in zip(
            ("gate_up_proj", "down_proj"), read[path].lora_a, read[path].lora_b, strict=True
        ):
            torch.testing.assert_close((b @ a).mT, deltas[f"{path}.{name}"], rtol=1e-9, atol=1e-9)
