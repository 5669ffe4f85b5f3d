"""Which parts of a model with experts an adapter is put on, and that its files are PEFT's."""

import logging
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tables import table
from tiny import DEVICE, error, tiny_config
from tiny_experts import EVERY_LAYER, adapted, base, logits
from transformers import AutoModelForCausalLM
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeForCausalLM

from unsloth_pack import patch_model
from unsloth_pack.checkpoints.loading import load_adapter
from unsloth_pack.checkpoints.merging import merged_weights
from unsloth_pack.errors import InputError
from unsloth_pack.lora.targets import lora_targets

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = {f"layers.{i}.self_attn.{name}" for i in (0, 1) for name in SEVEN[:4]}
STACKS = {f"layers.{i}.mlp.experts{inner}" for i in (0, 1) for inner in ("", ".base_layer")}
DENSE = {f"layers.1.mlp.{name}" for name in SEVEN[4:]}


def places(model):
    """Where there is an A."""
    return {
        name.removeprefix("base_model.model.model.").partition(".lora_A")[0]
        for name, _ in model.named_parameters()
        if "lora_A" in name
    }


@pytest.mark.parametrize("targets", [SEVEN, None, "all-linear", r".*_proj"], ids=str)
@pytest.mark.parametrize("overrides", [EVERY_LAYER, {}], ids=str)
def test_all_layers_by_the_names_that_people_use(targets, overrides):
    model = adapted(base(**overrides), targets)
    stacks = STACKS if overrides else {place for place in STACKS if "layers.0" in place}
    assert places(model) == ATTENTION | stacks | (set() if overrides else DENSE)
    assert not model.get_base_model().unsloth_pack_patch.report.not_fused.keys() & {"LoRA", "experts", "MLP"}


@pytest.mark.parametrize(
    ("targets", "options", "expected"),
    [
        (["down_proj"], {}, {"layers.0.mlp.experts", "layers.1.mlp.down_proj"}),
        (["mlp.down_proj"], {}, {"layers.1.mlp.down_proj"}),
        (["experts.down_proj"], {}, {"layers.0.mlp.experts"}),
        (r".*layers\.0.*\.(gate|up)_proj", {}, {"layers.0.mlp.experts"}),
        (r".*layers\.1.*\.(q|up)_proj", {}, {"layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"}),
        (None, {"layers_to_transform": [1]}, DENSE | {place for place in ATTENTION if "layers.1" in place}),
        ("all-linear", {"layers_to_transform": 1}, DENSE | {p for p in ATTENTION if "layers.1" in p}),
        (SEVEN[5:], {"exclude_modules": ["down_proj", "experts"]}, {"layers.1.mlp.up_proj"}),
        (SEVEN[4:], {"exclude_modules": r".*experts.*"}, DENSE),
        (SEVEN[:4], {"target_parameters": ["experts.down_proj"]}, ATTENTION | {"layers.0.mlp.experts"}),
        (None, {"target_parameters": ["experts.down_proj"]}, ATTENTION | DENSE | {"layers.0.mlp.experts"}),
        (["gate"], {}, {"layers.0.mlp.gate"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)  # fmt: skip
def test_some_layers(targets, options, expected):
    assert places(adapted(base(), targets, **options)) == expected


def test_what_is_refused():
    for targets, message in (
        (["gate_proj"], "names 'gate_proj' of experts without 'up_proj'"),
        (["w_proj"], "target_modules names 'w_proj'; the model has down_proj, "),
        (r".*experts\.(w_proj|q)", "which matches nothing"),
    ):
        with pytest.raises(InputError, match=message):
            adapted(base(**EVERY_LAYER), targets)
    for names, message in (
        (["mlp.experts.gate_upp"], "target_parameters names 'mlp.experts.gate_upp'"),
        (["mlp.experts.gate_up_proj", "nothing.down_proj"], "target_parameters names 'nothing.down_proj'"),
    ):
        with pytest.raises(InputError, match=message):
            adapted(base(), ["q_proj"], target_parameters=names)


@table("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_what_peft_lacks_for_stacks_is_refused(options):
    with pytest.raises(InputError, match=f"{next(iter(options))} is .* does not have on stacks of experts"):
        adapted(base(), None, **options)
    of_q = {place for place in ATTENTION if "q_proj" in place}
    assert places(adapted(base(), ["q_proj"], **options)) == of_q


def test_all_linear_says_that_routers_stay(caplog):
    with caplog.at_level(logging.WARNING, "unsloth_pack"):
        lora_targets(shared(), "all-linear")  # as checks before a run do
        assert not caplog.text
        model = adapted(shared(), "all-linear")
    assert caplog.messages.count("all-linear leaves the routers of experts as they are") == 1
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name in trained if ".gate." in name or "shared_expert_gate" in name]
    assert sum("shared_expert." in name for name in trained) == 2 * 3
    assert lora_targets(shared(), ["shared_expert_gate"]).modules == ["shared_expert_gate"]


def shared():
    """A model whose layers have a shared expert beside the routed ones."""
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, num_hidden_layers=1)
    sizes |= dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(shared_expert_intermediate_size=32, **sizes))


def of_type(arch, **overrides):
    config = tiny_config(arch, **overrides)
    return AutoModelForCausalLM.from_config(config).requires_grad_(False)


UNGATED = {"layers.3.mixer.experts", "layers.3.mixer.experts.base_layer"}


@pytest.mark.parametrize(
    "targets",
    [None, ["up_proj", "down_proj"], "all-linear", r".*(up|down)_proj", ["experts.up_proj"]],
    ids=str,
)
def test_experts_without_a_gate_are_adapted_by_the_same_names(targets, caplog):
    found = places(adapted(of_type("nemotron_h"), targets))
    if targets == ["experts.up_proj"]:
        assert found == {"layers.3.mixer.experts"}
        return
    assert found >= UNGATED | {"layers.1.mixer.up_proj", "layers.3.mixer.shared_experts.down_proj"}
    assert not [path for path in found if "out_proj" in path or "gate" in path]
    if targets == "all-linear":
        assert "all-linear leaves out out_proj, which PEFT refuses to adapt" in caplog.text


@pytest.mark.parametrize(
    ("arch", "joined"), [("phi3", {"qkv_proj", "gate_up_proj"}), ("glm4", {"gate_up_proj"})]
)
def test_the_seven_names_mean_a_layer_that_joins_some(arch, joined, caplog):
    """Plain PEFT adapts what is left of the seven, without a word."""
    found = {place.rpartition(".")[2] for place in places(adapted(of_type(arch), SEVEN))}
    assert found == joined | {"o_proj", "down_proj"} | (set(SEVEN[:3]) if arch == "glm4" else set())
    for name in joined:
        assert f"are one layer here, {name}, which is adapted in their place" in caplog.text
    with pytest.raises(InputError, match="target_modules names 'gate_proj'; the model has"):
        lora_targets(of_type(arch), ["gate_proj"])


def test_the_ranks_are_those_that_peft_makes_of_these_names():
    ours = adapted(base(**EVERY_LAYER), SEVEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=3, lora_alpha=5, target_modules=SEVEN, task_type="CAUSAL_LM")
        plain = get_peft_model(base(**EVERY_LAYER), config)
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (ours, plain)]
    assert shapes[0] == shapes[1]
    scalings = [
        [m.scaling for m in model.modules() if hasattr(m, "scaling") and hasattr(m, "lora_A")]
        for model in (ours, plain)
    ]
    assert scalings[0] == scalings[1]
    given = adapted(base(**EVERY_LAYER), SEVEN, rank_pattern={"gate_up_proj": 2, "q_proj": 1})
    assert given.get_base_model().model.layers[0].mlp.experts.base_layer.r == {"default": 2}
    assert given.get_base_model().model.layers[0].self_attn.q_proj.r == {"default": 1}


@pytest.mark.parametrize(
    "patterns",
    [
        {"rank_pattern": {"gate_up_proj": 2}},
        {"alpha_pattern": {"gate_up_proj": 64}},
        {"alpha_pattern": {"mlp.experts.gate_up_proj": 64, "down_proj": 7}},
        {"rank_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 2}, "alpha_pattern": {"q_proj": 9}},
        {"alpha_pattern": {"v_proj": 64, ".*_proj": 3}},
    ],
    ids=str,
)
def test_patterns_mean_the_same_in_a_saved_adapter(patterns, tmp_path):
    model = adapted(base(**EVERY_LAYER), SEVEN, **patterns)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(**EVERY_LAYER), tmp_path)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=[EVERY_LAYER, {}], ids=str)
def trained(request, tmp_path_factory):
    """A folder of a model, one with an adapter, and what both give."""
    folder = tmp_path_factory.mktemp("experts")
    base(**request.param).save_pretrained(folder / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(folder / "base").to(DEVICE), None)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = (0.2 * torch.randn(weight.shape, generator=generator)).to(DEVICE)
    model.save_pretrained(folder / "adapter")
    return folder, model, logits(model)


def test_files_go_to_plain_peft_and_come_back(trained, tmp_path):
    folder, _, expected = trained
    assert error(logits(AutoModelForCausalLM.from_pretrained(folder / "base").to(DEVICE)), expected) > 0.1
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter"
    )
    assert error(logits(plain.to(DEVICE)), expected) < 1e-5
    plain.save_pretrained(tmp_path / "again")
    back = load_adapter(AutoModelForCausalLM.from_pretrained(folder / "base"), tmp_path / "again").to(DEVICE)
    report = patch_model(back).report
    assert "LoRA" not in report.not_fused
    assert error(logits(back), expected) < 1e-5


def test_merged_is_trained_is_peft_s_own(trained):
    folder, model, expected = trained
    weights = dict(merged_weights(model, torch.float32))
    fresh = AutoModelForCausalLM.from_pretrained(folder / "base").to(DEVICE)
    fresh.load_state_dict(weights)
    assert error(logits(fresh), expected) < 1e-5
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter"
    )
    theirs = plain.merge_and_unload().state_dict()
    assert max(error(theirs[name], weights[name]) for name in weights) < 1e-6
