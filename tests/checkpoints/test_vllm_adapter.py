"""An adapter saved for vLLM is plain LoRA on the layers of the hub's checkpoint."""

import copy
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import TINY, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from unsloth_pack import supported_architectures
from unsloth_pack.checkpoints.saving import save_pretrained_merged
from unsloth_pack.errors import InputError

IDS = torch.arange(3, 35)[None]
ROUTED = {name for name in TINY if any("expert" in field for field in TINY[name])}
# What vLLM 0.33 calls the layers of an expert in `get_expert_mapping`, where they are not as in Llama
NAMES = {
    **dict.fromkeys(("mixtral", "lfm2_moe"), ("w1", "w3", "w2")),
    "nemotron_h": ("up_proj", "down_proj"),
}
LATENT = ("deepseek_v3", "glm4_moe_lite")
MOVED = {"mixtral": ("mlp", "block_sparse_moe"), "nemotron_h": ("model", "backbone")}
BY_LAYER = sorted(ROUTED & supported_architectures().keys() - {"gpt_oss", "granitemoehybrid"})


class Expert(nn.Module):
    def __init__(self, names, weights):
        super().__init__()
        for name, weight in zip(names, weights, strict=True):
            layer = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
            layer.weight.data = weight.clone()
            self.add_module(name, layer)


class LinearExperts(nn.ModuleList):
    """Experts as checkpoints, vLLM and transformers 4 hold them."""

    def __init__(self, stacked, names):
        n_gates = len(names) - 1
        inner = stacked.gate_up_proj if n_gates == 2 else stacked.up_proj
        rows = inner.shape[1] // n_gates
        super().__init__(
            Expert(names, [*inner[i].split(rows), stacked.down_proj[i]]) for i in range(len(inner))
        )
        self.names, self.act = names, [stacked.act_fn]  # no module of this one

    def forward(self, x, chosen, shares):
        result = torch.zeros_like(x, dtype=x.dtype if len(self.names) > 2 else shares.dtype)  # as there
        for i, expert in enumerate(self):
            token, place = torch.where(chosen == i)
            *ups, down = (getattr(expert, name) for name in self.names)
            hidden = self.act[0](ups[0](x[token]))
            for up in ups[1:]:
                hidden = hidden * up(x[token])
            own = down(hidden) * shares[token, place, None]
            result = result.index_add(0, token, own.to(result.dtype))
        return result


def with_linear_experts(name, base):
    """The model with `LinearExperts`, and with the paths of the hub's checkpoint."""
    base = copy.deepcopy(base)
    names = NAMES.get(name, ("gate_proj", "up_proj", "down_proj"))
    for module in [*base.modules()]:
        if type(getattr(module, "experts", None)).__name__.endswith("Experts"):
            module.experts = LinearExperts(module.experts, names)
    old, new = MOVED.get(name, ("", ""))
    for parent in [*base.modules()]:
        if old in parent._modules:
            moved = parent._modules.pop(old)
            parent.add_module(new, moved)
            parent.__dict__[old] = moved
    base.config.model_type = "linear_experts"  # PEFT would stack the adapters of model types that it knows
    return base


def served_logits(base, folder):
    with_adapter = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()
    weights = load_file(folder / "adapter_model.safetensors")
    loaded = {key.replace(".default", "") for key in with_adapter.state_dict() if "lora_" in key}
    assert loaded == weights.keys()
    with torch.no_grad():
        return with_adapter(IDS).logits


def merged_logits(model):
    with torch.no_grad():
        return copy.deepcopy(model).merge_and_unload().eval()(IDS).logits


def save(model, folder):
    save_pretrained_merged(model, folder, save_method="lora_vllm")
    return json.loads((folder / "adapter_config.json").read_text())


def base_like(model, arch):
    """An unpatched base model with the same weights."""
    options = {"attn_implementation": model.config._attn_implementation}
    base = AutoModelForCausalLM.from_config(tiny_config(arch), dtype=torch.float64, **options)
    unloaded = copy.deepcopy(model).unload()
    base.config._experts_implementation = "eager"
    base.load_state_dict(unloaded.state_dict())
    return base


@pytest.mark.every_architecture
@pytest.mark.parametrize("arch", BY_LAYER)
def test_plain_peft_computes_the_merged_model(arch, tmp_path):
    lora = {"exclude_modules": ["kv_b_proj"]} if arch in LATENT else {}
    model = tiny_model(arch, torch.float64, "cpu", lora=lora)
    config = save(model, tmp_path)
    assert config["r"] == config["lora_alpha"] == (4 if arch == "nemotron_h" else 8)
    base = with_linear_experts(arch, base_like(model, arch))
    torch.testing.assert_close(served_logits(base, tmp_path), merged_logits(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_scales_ranks_and_stacks_without_an_adapter(stack, tmp_path):
    lora = dict(
        target_modules=["q_proj", "v_proj"],
        target_parameters=[f"experts.{stack}"],
        use_rslora=True,
        rank_pattern={"q_proj": 2, f".*{stack}": 3},
        alpha_pattern={"layers.1.self_attn.v_proj": 5},
    )
    model = tiny_model("mixtral", torch.float64, "cpu", lora=lora)
    config = save(model, tmp_path)
    assert not config["use_rslora"]
    assert {*config["target_modules"]} == {"q_proj", "v_proj", "w1", "w2", "w3"}
    base = with_linear_experts("mixtral", base_like(model, "mixtral"))
    torch.testing.assert_close(served_logits(base, tmp_path), merged_logits(model), rtol=1e-9, atol=1e-9)


def test_only_some_layers_are_adapted(tmp_path):
    lora = dict(
        target_modules=["layers.0.self_attn.q_proj"], target_parameters=["layers.1.mlp.experts.down_proj"]
    )
    model = tiny_model("olmoe", torch.float64, "cpu", lora=lora)
    targets = {*save(model, tmp_path)["target_modules"]}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.up_proj"} <= targets
    base = with_linear_experts("olmoe", base_like(model, "olmoe"))
    torch.testing.assert_close(served_logits(base, tmp_path), merged_logits(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stacks", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]])
def test_where_vllm_reads_stacks_both_are_saved_as_peft_does(stacks, tmp_path):
    lora = dict(target_modules=["q_proj"], target_parameters=stacks, rank_pattern={".*down_proj": 3})
    model = tiny_model("gpt_oss", torch.float64, "cpu", lora=lora)
    config = save(model, tmp_path)
    assert config["target_parameters"][0] == "model.layers.0.mlp.experts.down_proj"
    weights = load_file(tmp_path / "adapter_model.safetensors")
    experts = "base_model.model.model.layers.0.mlp.experts"
    assert weights[f"{experts}.base_layer.lora_A.weight"].shape == (4 * 4, 64)  # gate and up, as vLLM expects
    assert weights[f"{experts}.lora_A.weight"].shape == (4 * 4, 96)
    base = base_like(model, "gpt_oss")
    torch.testing.assert_close(served_logits(base, tmp_path), merged_logits(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fields", [{}, {"target_modules": r".*\.q_proj"}])
def test_an_adapter_without_experts_stays_as_it_is(fields, tmp_path):
    model = tiny_model("llama", torch.float64, "cpu", lora=fields)
    save(model, tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert len(weights) == sum("lora_" in name for name, _ in model.named_parameters())
    base = base_like(model, "llama")
    torch.testing.assert_close(served_logits(base, tmp_path), merged_logits(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("arch", "lora", "says"),
    [
        ("granitemoehybrid", {}, r"takes none on model.*put_linear: merge it"),
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "no plain LoRA of a linear layer"),
        ("llama", {"target_modules": ["embed_tokens"]}, "no plain LoRA of a linear layer"),
        ("deepseek_v3", {}, "takes no adapter on kv_b_proj: merge it"),
        ("llama", {"modules_to_save": ["lm_head"]}, "takes no modules_to_save"),
        ("llama", {"trainable_token_indices": [5]}, "takes no trained tokens|no plain LoRA"),
    ],
)
def test_what_vllm_cannot_serve_is_refused(arch, lora, says, tmp_path):
    with pytest.raises(InputError, match=says) as error:
        save(tiny_model(arch, device="cpu", lora=lora), tmp_path / "new")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()
