"""Legal but unusual use gives what plain transformers and PEFT give, and what cannot be right is noticed."""

import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from tiny import error, random_documents, tiny_model
from torch import nn

from unsloth_pack import patch_model
from unsloth_pack.errors import BackendUnavailable, InputError
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.patching.patch import patch_of

IDS = random_documents([40])[0][None]
SLACK = 5e-6  # transformers rotates and normalises in float32, whatever the dtype


def pair(arch="llama", prepare=lambda model: None, dtype=torch.float64):
    """The same model twice, the second one patched."""
    models = [tiny_model(arch, dtype, device="cpu") for _ in range(2)]
    for model in models:
        prepare(model)
    patch_model(models[1])
    return models


def loss_of(model, ids=IDS):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def assert_same_gradients(models):
    plain, ours = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in models)
    assert plain.keys() == ours.keys()
    for name, grad in plain.items():
        assert error(ours[name], grad) < SLACK, name


def named(model, ending):
    return [module for name, module in model.named_modules() if name.endswith(ending)]


def checkpoint(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


# Hooks and parts that change


@pytest.mark.parametrize(
    ("arch", "where"),
    [
        ("llama", "base_layer"),
        ("llama", "lora_A.default"),
        ("llama", "lora_B.default"),
        ("llama", "lora_dropout.default"),
        ("llama", "_proj"),
        ("llama", "act_fn"),
        ("phi3", "activation_fn"),
        ("qwen3", "q_norm"),
        ("gemma3_text", "k_norm"),
        ("olmo2", "q_norm"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_hooks_act_wherever_they_are(arch, where, when, way):
    def hook(model):
        for module in named(model, where):
            if way == "forward":
                module.register_forward_hook(lambda module, args, output: output * 1.5)
            else:
                module.register_full_backward_hook(lambda module, grads, _: tuple(1.5 * g for g in grads))

    models = pair(arch, hook if when == "before" else lambda model: None)
    for model in models:
        if when == "after":
            loss_of(model).backward()
            model.zero_grad()
            hook(model)
        if way == "backward":  # which needs an input that has a gradient
            model.enable_input_require_grads()
        loss_of(model).backward()
    assert_same_gradients(models)


def double_in_place(where):
    def double(module, args, output):
        (output if isinstance(output, torch.Tensor) else output[0]).mul_(2)

    return lambda model: [module.register_forward_hook(double) for module in named(model, where)]


def replace_activations(model):
    for mlp in named(model, "mlp"):
        mlp.act_fn = nn.ReLU()


def change_the_mode(model):
    checkpoint(model)
    loss = loss_of(model)
    model.eval()
    loss.backward()


def go_back_twice(model):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def train_once(model):
    loss_of(model).backward()


@pytest.mark.parametrize(
    ("prepare", "act", "arch"),
    [
        *(
            (double_in_place(where), train_once, "llama")
            for where in ("q_proj", "o_proj", "mlp", "self_attn")
        ),
        (None, lambda model: (replace_activations(model), train_once(model)), "llama"),
        (None, change_the_mode, "llama"),
        (checkpoint, go_back_twice, "llama"),
    ],
)
def test_gradients_are_those_of_the_plain_model(prepare, act, arch):
    models = pair(arch, prepare or (lambda model: None))
    for model in models:
        act(model)
    assert_same_gradients(models)


@pytest.mark.parametrize("describe", [{}, {"packed_seq_lengths": [10, 30]}], ids=str)
def test_attention_weights_are_dropped_in_training_alone(describe):
    outs = []
    for dropout in (0.5, 0.0):
        model = tiny_model("llama", device="cpu", attention_dropout=dropout)
        patch_model(model)
        with torch.no_grad():
            twice = [model(input_ids=IDS, use_cache=False, **describe).logits for _ in "ab"]
            assert torch.equal(*twice) == (dropout == 0)
            outs.append(model.eval()(input_ids=IDS, use_cache=False, **describe).logits)
    assert torch.equal(*outs)


# In between


@pytest.mark.parametrize("part", ["self_attn", "q_norm", "k_norm"])
@pytest.mark.parametrize("way", ["trained", "disabled", "merged"])
def test_a_part_of_the_attention_that_is_trained_whole(way, part):
    """PEFT's `modules_to_save` wraps it: the frozen one runs where the adapter is disabled."""
    models = [
        tiny_model("qwen3", torch.float64, device="cpu", lora={"modules_to_save": [part]}) for _ in "ab"
    ]
    for model in models:
        for name, p in model.named_parameters():
            if "modules_to_save" in name:
                p.data.mul_(1.5)
    patch_model(models[1])
    logits = []
    for model, more in zip(models, ({}, {"packed_seq_lengths": [IDS.shape[1]]}), strict=True):
        if way == "merged":
            model.merge_adapter()
        with model.disable_adapter() if way == "disabled" else nullcontext():
            logits.append(model(input_ids=IDS, use_cache=False, **more).logits)
        if way == "trained":
            logits[-1].square().sum().backward()
    assert error(logits[1], logits[0]) < SLACK
    assert_same_gradients(models)


# Inference mode


def test_rotary_tables_outlive_inference_mode():
    decoder = pair()[1].get_base_model().model
    with torch.inference_mode():
        table = decoder.rotary_tables[None].for_row(PackedRow.of_lengths([5, 3], IDS.device))
    assert not table[0].is_inference()
    assert not table[1].is_inference()


# The loss


def full(arch="llama"):
    _, model = pair(arch)
    return model.unload().requires_grad_(True)


def test_logits_asked_for_after_the_head_has_changed_are_refused():
    model = full()
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(InputError, match="head has changed"):
        _ = out.logits


# The model as an object


@pytest.mark.parametrize("backend", ["flash", "no such"])
def test_a_patch_that_is_refused_leaves_the_one_before(backend):
    _, model = pair()
    patch = patch_of(model)
    with pytest.raises((BackendUnavailable, InputError)):
        patch_model(model, backend)
    assert patch_of(model) is patch
    model(input_ids=IDS, labels=IDS, packed_seq_lengths=[10, 30]).loss.backward()


def test_a_patched_model_is_pickled():
    _, model = pair()
    loss_of(model).backward()
    twin = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    twin.zero_grad()
    assert torch.equal(loss_of(twin), loss_of(model))
    loss_of(twin).backward()
    assert_same_gradients([model, twin])
    patch_of(twin).undo()
    assert patch_of(twin) is None
    assert patch_of(model) is not None


# Parts
