"""Adapters in PEFT's own ways: a patched model does what the untouched one does, or says why not."""

import copy
import threading

import peft
import pytest
import torch
from outside_models import (
    assert_close,
    assert_same_training,
    calls_alone,
    documents,
    fill_adapters,
    packed_call,
    plain_model,
)
from peft import LoraConfig, PeftModel

from unsloth_pack import FastLanguageModel, InputError, patch_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGURATIONS = {
    "seven projections": {"target_modules": ALL},
    "all-linear": {"target_modules": "all-linear"},
    "gate without up": {"target_modules": ["gate_proj", "down_proj"]},
    "one layer": {"target_modules": ALL, "layers_to_transform": [1]},
    "rank above the width": {"target_modules": ALL, "r": 300},
    "alphas by pattern": {"target_modules": ALL, "alpha_pattern": {"v_proj": 64, "up_proj": 1}},
    "rslora": {"target_modules": ALL, "use_rslora": True},
    "dora": {"target_modules": ALL, "use_dora": True},
    "lora_bias": {"target_modules": ALL, "lora_bias": True},
    "pissa": {"target_modules": ALL, "init_lora_weights": "pissa"},
    "the head too": {"target_modules": [*ALL, "lm_head"]},
    "the embeddings too": {"target_modules": [*ALL, "embed_tokens"]},
    "head and embeddings trained": {"target_modules": ALL, "modules_to_save": ["lm_head", "embed_tokens"]},
    "norms trained": {"target_modules": ALL, "modules_to_save": ["input_layernorm", "norm"]},
    "an MLP trained": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    "tokens trained": {"target_modules": ALL, "trainable_token_indices": [5, 9, 77]},
    "biases trained": {"target_modules": ALL, "bias": "all"},
}
COPIED_LAYERS = {"target_modules": ["q_proj"], "layer_replication": [(0, 2), (1, 2)]}  # not in a qwen2


def adapted(configuration, architecture="llama", seed=1, **overrides):
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **configuration})
    model = peft.get_peft_model(plain_model(architecture, **overrides), config)
    return fill_adapters(model, seed).train()


@pytest.mark.parametrize("name", CONFIGURATIONS)
# qwen2 has biases, and ties its embeddings
@pytest.mark.parametrize(("architecture", "when"), [("llama", "after"), ("qwen2", "before")])
def test_every_configuration_trains_as_under_plain_peft(name, architecture, when):
    assert_trains_as_under_plain_peft(CONFIGURATIONS[name], architecture, when)


@pytest.mark.parametrize(
    ("configuration", "architecture", "when"),
    [
        (CONFIGURATIONS["lora_bias"], "qwen2", "after"),  # added to the biases of its layers
        (COPIED_LAYERS, "llama", "before"),
        (COPIED_LAYERS, "llama", "after"),
    ],
)
def test_biases_of_both_and_copied_layers(configuration, architecture, when):
    assert_trains_as_under_plain_peft(configuration, architecture, when)


def assert_trains_as_under_plain_peft(configuration, architecture, when):
    plain = adapted(configuration, architecture)
    if when == "after":
        patched = copy.deepcopy(plain)
        patch_model(patched)
    else:
        model = plain_model(architecture)
        patch_model(model)
        given = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **configuration}
        patched = peft.get_peft_model(model, LoraConfig(**given)).train()
        patched.load_state_dict(plain.state_dict())
    assert_same_training(patched, plain)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "cohere2", "qwen3_5_text"])
def test_norms_are_tuned(architecture):
    model = plain_model(architecture)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if "norm" in name}
    plain = peft.get_peft_model(model, peft.LNTuningConfig(target_modules=[*names])).train()
    for name, weight in plain.named_parameters():
        if "ln_tuning" in name:
            weight.data += 0.1 * torch.randn_like(weight)
    patched = copy.deepcopy(plain)
    patch_model(patched)
    assert_same_training(patched, plain)


@pytest.fixture
def two_adapters():
    """An untouched model and a patched one with two adapters of different ranks and targets."""
    plain = adapted({"target_modules": ALL})
    plain.add_adapter("other", LoraConfig(r=7, lora_alpha=3, target_modules=["q_proj", "up_proj"]))
    fill_adapters(plain, seed=3)
    patched = copy.deepcopy(plain)
    patch_model(patched)
    return plain, patched


def both(models, act):
    for model in models:
        act(model)
    got, truth = packed_call(models[1])[0].detach(), calls_alone(models[0])[0].detach()
    assert_close(got, truth)
    return truth


def test_adapters_come_and_go(two_adapters, tmp_path):
    seen = [
        both(two_adapters, lambda m: m.set_adapter("other")),
        both(two_adapters, lambda m: m.set_adapter("default")),
        both(two_adapters, lambda m: m.base_model.set_adapter(["default", "other"])),
        both(two_adapters, lambda m: m.base_model.disable_adapter_layers()),
    ]
    for one, truth in enumerate(seen):
        assert all(not torch.allclose(truth, other) for other in seen[one + 1 :])
    both(two_adapters, lambda m: m.base_model.enable_adapter_layers())
    both(two_adapters, lambda m: m.set_adapter("default"))
    plain, patched = two_adapters
    with plain.disable_adapter(), patched.disable_adapter():
        both(two_adapters, lambda m: None)
    both(two_adapters, lambda m: m.delete_adapter("other"))
    plain.save_pretrained(tmp_path)
    both(two_adapters, lambda m: m.load_adapter(tmp_path, "third", is_trainable=True))
    both(two_adapters, lambda m: m.set_adapter("third"))
    assert_same_training(patched, plain)


@pytest.mark.parametrize("names", [["default"], ["other"], ["default", "other"]])
def test_merged_and_unmerged(names, two_adapters):
    before = both(two_adapters, lambda m: m.base_model.set_adapter(names))
    after = both(two_adapters, lambda m: m.merge_adapter(names))
    assert_close(after, before)
    assert_close(both(two_adapters, lambda m: m.unmerge_adapter()), before)


SHIFTED = "its virtual tokens shift the documents; use LoRA"
REFUSED = {
    "prompt tuning": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), SHIFTED),
    "prefix tuning": (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), SHIFTED),
    "adaption prompt": (
        peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
        "it wraps the attention; use LoRA",
    ),
    "LILY": (peft.LilyConfig(target_modules=ALL), "is LILY: its router averages over the whole row"),
    "shadow": (peft.ShadowConfig(task_type="CAUSAL_LM"), "is SHADOW: its shadow network does not see where"),
    "activated LoRA": (
        LoraConfig(task_type="CAUSAL_LM", target_modules=ALL, alora_invocation_tokens=[5]),
        "PEFT looks for alora_invocation_tokens once a row, not in each document",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_leak_is_refused_on_a_patched_model(name):
    """PEFT acts before a call enters the patched model, which sees the documents shifted, or as one."""
    config, why = REFUSED[name]
    model = plain_model()
    patch = patch_model(model)
    with pytest.raises(InputError, match=why):
        peft.get_peft_model(model, config)
    patch.undo()
    assert peft.get_peft_model(model, config).peft_config  # a model that is not patched takes it


def test_what_would_leak_is_refused_beside_another_adapter(two_adapters):
    plain, patched = two_adapters
    config, why = REFUSED["activated LoRA"]
    plain.add_adapter("third", config)
    with pytest.raises(InputError, match=why):
        patched.add_adapter("third", config)
    assert "third" not in patched.peft_config


def padded(side):
    """Ids and mask of all documents as rows of a batch."""
    rows = documents()
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64, device=rows[0].device)
    for row, document in zip(ids, rows, strict=True):
        (row[-len(document) :] if side == "left" else row[: len(document)]).copy_(document)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def scored(model, side="right", **more):
    batch = padded(side)
    return model(**batch, use_cache=False, **more).logits[batch["attention_mask"].bool()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_row_has_an_adapter_of_its_own(side, two_adapters):
    """`adapter_names` names one for each row of a padded batch, where there is no cache either."""
    names = ["default", "other", "__base__", "other", "default"]
    with torch.no_grad():
        got, truth = (scored(model.eval(), side, adapter_names=names) for model in two_adapters[::-1])
    assert_close(got, truth)


def test_each_row_has_a_task_of_its_own():
    config = peft.PolyConfig(task_type="CAUSAL_LM", target_modules=ALL, r=4, n_tasks=3, init_weights=False)
    plain = peft.get_peft_model(plain_model(), config).train()
    patched = copy.deepcopy(plain)
    patch = patch_model(patched)
    tasks = torch.tensor([0, 2, 1, 2, 0], device=documents()[0].device)
    got, truth = [], []
    for model, made in ((patched, got), (plain, truth)):
        torch.manual_seed(0)  # the router draws in training
        made.append(scored(model, task_ids=tasks))
        made[0].square().mean().backward()
        made += [weight.grad for weight in model.parameters() if weight.requires_grad]
    for one, two in zip(got, truth, strict=True):
        assert_close(one, two)
    assert "PEFT pairs rows" in patch.report.not_fused["padding"]


def test_an_adapter_begins_with_what_rows_hold():
    """EVA measures the inputs of layers in a padded batch, by the places of its tokens."""
    config = LoraConfig(r=2, target_modules=ALL, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1))
    models = [plain_model() for _ in range(2)]
    patch_model(models[1])
    models = [peft.get_peft_model(model, config, low_cpu_mem_usage=True) for model in models]
    batch = {**padded("right"), "use_cache": False}
    for model in models:
        peft.initialize_lora_eva_weights(model, [batch] * 3, show_progress_bar=False)
    weights = [{n: w for n, w in model.state_dict().items() if "lora_A" in n} for model in models]
    assert weights[0].keys() == weights[1].keys()
    for name, truth in weights[0].items():
        assert_close(weights[1][name], truth, name)


def test_copies_are_independent():
    plain = adapted({"target_modules": ALL})
    patched = copy.deepcopy(plain)
    patch = patch_model(patched)
    twin = copy.deepcopy(patched)
    assert_same_training(twin, plain)
    patch.undo()
    assert_same_training(twin, plain)
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    assert not torch.allclose(packed_call(twin)[0], calls_alone(plain)[0])
    both((plain, copy.deepcopy(plain)), lambda m: None if m is plain else patch_model(m))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_changes_after_the_patch(dtype):
    plain = adapted({"target_modules": ALL})
    patched = copy.deepcopy(plain)
    patch_model(patched)
    plain, patched = plain.to(dtype), patched.to(dtype)
    slack = 1e-5 if dtype == torch.float64 else 2e-2
    (logits, loss), (truth, true_loss) = packed_call(patched), calls_alone(plain)
    assert logits.dtype == dtype
    assert_close(logits.detach(), truth.detach(), slack=slack)
    loss.backward()
    true_loss.backward()
    for (name, one), (_, two) in zip(patched.named_parameters(), plain.named_parameters(), strict=True):
        if two.grad is not None:
            assert_close(one.grad, two.grad, name, slack=5 * slack)


def test_threads_share_a_model():
    """Two rows at once through one model, as a server does."""
    plain = adapted({"target_modules": ALL}).eval()
    patched = copy.deepcopy(plain)
    patch_model(patched)
    truth = [calls_alone(plain, seed)[0].detach() for seed in range(4)]
    errors = []

    def call(seed):
        try:
            for _ in range(5):
                with torch.no_grad():
                    assert_close(packed_call(patched, seed)[0], truth[seed])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_an_adapter_by_anothers_hand_loads(tmp_path, model_folder):
    """Saved by plain PEFT, loaded by `FastLanguageModel`, and the other way round."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    theirs = fill_adapters(peft.get_peft_model(base, LoraConfig(r=4, target_modules=ALL))).train()
    theirs.save_pretrained(tmp_path / "theirs")
    options = {"max_seq_length": 256, "dtype": torch.float32}
    ours, _ = FastLanguageModel.from_pretrained(str(tmp_path / "theirs"), **options)
    theirs = theirs.to(ours.device)
    assert_same_training(ours.train(), theirs)
    ours.save_pretrained(tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    again = PeftModel.from_pretrained(base, tmp_path / "ours", is_trainable=True).to(ours.device)
    assert_same_training(ours, again.train())


@pytest.mark.parametrize(
    ("name", "n_trained", "says"),
    [
        ("norm", 5, "input_layernorm, post_attention_layernorm end so: all 5 train as a whole; name"),
        ("model.norm", 1, None),
        ("lm_head", 1, None),
    ],
)
def test_names_that_are_ends_of_longer_ones(name, n_trained, says, caplog):
    """PEFT trains them all as a whole."""
    patch_model(model := plain_model())
    model = FastLanguageModel.get_peft_model(model, r=2, modules_to_save=[name])
    saved = [path for path, p in model.named_parameters() if p.requires_grad and "modules_to_save" in path]
    assert len(saved) == n_trained
    told = [record.getMessage() for record in caplog.records if "end so" in record.getMessage()]
    assert len(told) == (says is not None)
    assert all(says in line for line in told)
