"""Routed experts as one node: what PEFT's own forward gives, with no full gradient and in every state."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import DEVICE, error, random_documents, run_alone, run_packed, tiny_model
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from unsloth_pack import patch_model
from unsloth_pack.layers import moe as fast
from unsloth_pack.layers.layer import GateAndUpPlan
from unsloth_pack.lora.expert_stacks import is_expert_adapter, is_experts

EXPERTS, WIDTH, FEATURES, RANK = 5, 32, 24, 3
LAYOUTS = {
    "stacked": lambda: Qwen3MoeExperts(
        Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=FEATURES)
    ),
    "transposed": lambda: GptOssExperts(
        GptOssConfig(num_local_experts=EXPERTS, hidden_size=WIDTH, intermediate_size=FEATURES)
    ),
}
ROUTES = {  # which experts 13 tokens go to
    "spread": lambda: torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(13)]),
    "some without tokens": lambda: torch.tensor([[3, 1]] * 12 + [[1, 3]]),
    "one token in one": lambda: torch.tensor([[0, 4]] * 12 + [[2, 4]]),
    "all in one": lambda: torch.full((13, 1), 2),
    "one token": lambda: torch.tensor([[4, 0]]),
}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, index, weights):
        return self.experts(x, index, weights)


def adapted(layout, dtype, targets=STACKS):
    """A PEFT model of one stack of experts whose weights are exact in bfloat16."""
    experts = LAYOUTS[layout]()
    experts.config._experts_implementation = "eager"
    config = LoraConfig(r=RANK, lora_alpha=4, target_modules=[], target_parameters=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(Block(experts), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = (0.4 * torch.randn(weight.shape, generator=generator)).bfloat16().to(dtype)
    return model.to(DEVICE)


def fused(model, keep=True):
    """The same modules, with the classes that a patch gives them."""
    model = copy.deepcopy(model)
    layer = nn.Module()
    layer.gradient_checkpointing = not keep
    layer._gradient_checkpointing_func = None
    for one in list(model.modules()):
        if is_experts(one):
            own = dict(gate=fast.read_gate(one), gate_module=getattr(one, "act_fn", None), number=0)
            assert own["gate"] is not None
            vars(one).update(own, decoder_layer=layer, gate_and_up_plan=GateAndUpPlan([]))
            one.__class__ = type("Fast", (fast.FastExperts, type(one)), {})
        elif is_expert_adapter(one):
            one.__class__ = type("Fast", (fast.FastExpertsLora, type(one)), {})
    return model


def outcome(model, index, dtype):
    generator = torch.Generator().manual_seed(1)
    n, k = index.shape
    x, g = (torch.randn(n, WIDTH, generator=generator).bfloat16().to(DEVICE, dtype) for _ in range(2))
    weights = torch.rand(n, k, generator=generator).bfloat16().to(DEVICE, dtype)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = model(x, index.to(DEVICE), weights)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(y, [x, weights, *trained.values()], g, allow_unused=True)
    named = dict(zip(["y", "x", "weights", *trained], [y.detach(), *grads], strict=True))
    # PEFT's own leaves the factors of an expert without tokens out where its parameter gets no gradient
    return {name: torch.zeros(1) if value is None else value.double().cpu() for name, value in named.items()}


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_exact_as_peft_in_every_dtype(layout, routes):
    torch.manual_seed(2)
    index = ROUTES[routes]()
    truth = outcome(adapted(layout, torch.float64), index, torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = adapted(layout, dtype)
        plain = outcome(model, index, dtype)
        for keep in (True, False):
            got = outcome(fused(model, keep), index, dtype)
            for name, expected in truth.items():
                ours, theirs = (error(one[name], expected) for one in (got, plain))
                assert ours <= 1.5 * theirs + 4 * torch.finfo(dtype).eps, (dtype, keep, name, ours, theirs)


@pytest.mark.parametrize("targets", [[], STACKS[:1], STACKS[1:]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_an_adapter_on_one_stack_or_none(layout, targets):
    torch.manual_seed(2)
    index = ROUTES["spread"]()
    model = adapted(layout, torch.float64, targets or STACKS)
    if not targets:
        model = model.unload().requires_grad_(False)
    expected, got = (outcome(one, index, torch.float64) for one in (model, fused(model)))
    assert expected.keys() == got.keys()
    assert max(error(got[name], expected[name]) for name in got) < 1e-13


# In models


@pytest.fixture(scope="module")
def documents():
    return random_documents([5, 1, 19, 8])


def test_what_a_model_computes_without_an_adapter_or_with_several(documents):
    model = tiny_model("qwen3_moe", torch.float32)
    config = copy.deepcopy(model.peft_config["default"])
    model.add_adapter("other", config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".other." in name:
                weight.normal_(std=0.2)
    plain = copy.deepcopy(model)
    patch = patch_model(model)
    states = {
        "one": lambda m: m.set_adapter("default"),
        "the other": lambda m: m.set_adapter("other"),
        "both": lambda m: m.base_model.set_adapter(["default", "other"]),
        "merged": lambda m: (m.set_adapter("default"), m.merge_adapter()),
        "unmerged": lambda m: m.unmerge_adapter(),
        "disabled": lambda m: m.base_model.disable_adapter_layers(),
    }
    ids = documents[2][None].to(DEVICE)
    outputs = []
    for state, reach in states.items():
        for one in (model, plain):
            reach(one)
        said = patch.report.not_fused.get("LoRA", "")
        assert ("2 active adapters" in said) == (state == "both"), (state, said)
        logits, expected = (one(input_ids=ids, use_cache=False).logits for one in (model, plain))
        assert error(logits, expected) < 1e-5, state
        outputs.append(expected)
        if state in ("one", "the other", "both"):
            grads = []
            for one in (model, plain):
                one.zero_grad()
                one(input_ids=ids, use_cache=False).logits.sum().backward()
                grads.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
            assert grads[0].keys() == grads[1].keys()
            assert max(error(grads[0][n], grads[1][n]) for n in grads[0]) < 1e-4, state
    assert error(outputs[0], outputs[1]) > 0.01 < error(outputs[0], outputs[2])


def test_a_router_that_is_trained_gets_its_gradient(documents):
    truth = run_alone(trained_router(torch.float64), documents)
    name = next(name for name in truth.grads if name.endswith("mlp.gate.weight"))
    plain = run_alone(trained_router(torch.float32), documents)
    model = trained_router(torch.float32)
    patch_model(model)
    got = run_packed(model, documents)
    assert error(got.grads[name], truth.grads[name]) <= 1.5 * error(plain.grads[name], truth.grads[name])


def trained_router(dtype):
    model = tiny_model("qwen3_moe", dtype)
    model.get_base_model().model.layers[0].mlp.gate.weight.requires_grad_()
    return model


def test_the_auxiliary_loss_is_plains_and_sees_no_padding(documents):
    row = torch.cat(documents).to(DEVICE)[None]
    lengths = [len(document) for document in documents]
    asked = dict(output_router_logits=True)
    plain = tiny_model("qwen3_moe", torch.float32, mlp_only_layers=[])
    model = copy.deepcopy(plain)
    patch_model(model)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    expected = plain(input_ids=row, labels=row, position_ids=positions, use_cache=False, **asked)
    got = model(input_ids=row, labels=row, packed_seq_lengths=lengths, **asked)
    assert error(got.aux_loss, expected.aux_loss) < 1e-6
    # Two documents of 5 and 19 tokens as a padded batch: plain counts its tokens by the mask
    ids = torch.zeros(2, 19, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, document in enumerate((documents[0], documents[2])):
        ids[place, : len(document)], mask[place, : len(document)] = document, 1
    batch = dict(input_ids=ids.to(DEVICE), attention_mask=mask.to(DEVICE), labels=ids.to(DEVICE))
    expected, got = (one(**batch, use_cache=False, **asked) for one in (plain, model))
    assert error(got.aux_loss, expected.aux_loss) < 1e-6
    assert error(got.loss, expected.loss) < 1e-5
