"""The loss that a model computes with its head, against that which transformers computes from the logits."""

import copy
import pickle

import pytest
import torch
from largest import Largest
from peft import LoraConfig, get_peft_model
from tiny import DEVICE, error, random_documents, tiny_config, tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from unsloth_pack import patch_model, supported_architectures
from unsloth_pack.kernels import head as chunked_head
from unsloth_pack.losses.head import LossOutput

ARCHITECTURES = list(supported_architectures())
LENGTHS = [1, 33, 2, 40, 31]
BOUND = 1e-5 if DEVICE == "cpu" else 1e-4


def patched(arch="qwen3", **overrides):
    model = tiny_model(arch, torch.float32, **overrides)
    patch_model(model, "sdpa")
    return model


def batch(masked=0.5, vocab_size=256):
    """A packed row in which many tokens have no label."""
    ids = torch.cat(random_documents(LENGTHS, vocab_size=vocab_size))[None]
    generator = torch.Generator().manual_seed(5)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < masked, -100)
    return {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE), "packed_seq_lengths": LENGTHS}


def ordinary_batch():
    inputs = batch()
    return {name: x.view(1, -1)[:, :106].reshape(2, -1) for name, x in inputs.items() if torch.is_tensor(x)}


def through_logits(model):
    """The model, whose loss comes from its logits: so it does with a loss function of its own."""
    base = model.get_base_model()
    theirs = base.loss_function
    base.loss_function = lambda *args, **kwargs: theirs(*args, **kwargs)
    return model


def step(model, inputs):
    """The output, the loss and all gradients."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, out.loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def is_fused(out):
    return isinstance(out, LossOutput)


def assert_same_step(ours, theirs):
    (out, loss, grads), (their_out, their_loss, their_grads) = ours, theirs
    assert is_fused(out)
    assert not is_fused(their_out)
    assert abs(loss / their_loss - 1) < BOUND
    assert grads.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        assert error(grads[name], grad) < BOUND, name


# The same loss


@pytest.mark.parametrize("make_batch", [batch, ordinary_batch])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_the_logits(arch, make_batch):
    inputs = make_batch()
    theirs = step(through_logits(patched(arch)), inputs)
    ours = step(patched(arch), inputs)
    assert_same_step(ours, theirs)
    assert torch.equal(ours[0].logits, theirs[0].logits)


def test_a_trained_head_and_a_tied_one():
    for tied in (False, True):
        models = []
        for wrap in (lambda model: model, through_logits):
            model = patched("gemma2", tie_word_embeddings=tied)
            model.get_output_embeddings().weight.requires_grad_()
            models.append(wrap(model))
        ours, theirs = (step(model, batch()) for model in models)
        assert_same_step(ours, theirs)
        assert any("embed" in name or "lm_head" in name for name in ours[2])


def test_a_head_with_a_bias():
    models = [patched(), through_logits(patched())]
    for model in models:
        head = model.get_output_embeddings()
        bias = torch.randn(head.out_features, generator=torch.Generator().manual_seed(3))
        head.bias = torch.nn.Parameter(bias.to(DEVICE))
    assert_same_step(*(step(model, batch()) for model in models))


def test_num_items_in_batch():
    inputs = batch() | {"num_items_in_batch": torch.tensor(77)}
    inputs["labels"][0, [0, 1, 34, 36, 76]] = -100  # starts of documents, which a trainer does not count
    assert_same_step(step(patched(), inputs), step(through_logits(patched()), inputs))


def test_labels_that_are_shifted_already_or_marked_otherwise():
    inputs = batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    other = inputs["labels"].masked_fill(inputs["labels"] == -100, 7)
    for more in ({"shift_labels": shifted}, {"ignore_index": 7, "labels": other}):
        given = {**inputs, **more}
        assert_same_step(step(patched(), given), step(through_logits(patched()), given))


def test_shifted_labels_are_masked_at_boundaries_too():
    """A label that stands one token before its own may not train the first token of the next document."""
    inputs = batch()
    inputs["labels"] = inputs["input_ids"]
    expected = step(through_logits(patched()), inputs)
    inputs["shift_labels"] = F.pad(inputs["labels"], (0, 1), value=5)[:, 1:]
    assert_same_step(step(patched(), inputs), expected)


# The memory


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    for name, value in (("_CHUNK_BYTES", 0), ("_MIN_ROWS", 8), ("_STEP", 8)):
        monkeypatch.setattr(chunked_head, name, value)
    V = 5000
    inputs = batch(vocab_size=V)
    most = []
    for model in (patched(vocab_size=V), through_logits(patched(vocab_size=V))):
        with Largest() as seen:
            step(model, inputs)
        most.append(seen.elements)
    assert most[0] == V * 64  # the weight of the head, and no row's logits beside eight others
    assert most[1] >= V * sum(LENGTHS)


# Where logits are asked for


def test_logits_are_made_when_asked_for_by_name_key_or_place():
    inputs = batch()
    theirs = through_logits(patched())(**inputs)
    for ask in (lambda o: o.logits, lambda o: o["logits"], lambda o: o[1], lambda o: o.to_tuple()[1]):
        out = patched()(**inputs)
        assert torch.equal(ask(out), theirs.logits)
        assert out.logits is out["logits"] is out[1]
    assert list(out.keys()) == list(theirs.keys())
    with torch.no_grad():
        assert patched()(**inputs).logits.shape == theirs.logits.shape
        late = out.logits
    late.square().mean().backward()  # they have a gradient


def test_an_output_that_is_copied_or_rebuilt_keeps_its_logits():
    model = patched()
    out = model(**batch())
    rebuilt = type(out)(dict(out.items()))  # as accelerate does under mixed precision
    again = type(out)(**dict(zip(out.keys(), out.values(), strict=True)))  # as torch's pytree does
    for other in (rebuilt, again, copy.copy(out)):
        assert torch.equal(other.logits, out.logits)
    with torch.no_grad():
        detached = type(out)(loss=out.loss.detach(), logits=out.logits.detach())
    assert torch.equal(pickle.loads(pickle.dumps(detached)).logits, out.logits)


@pytest.mark.parametrize(
    "change",
    [
        {"logits_to_keep": 1, "labels": None},
        {"return_dict": False},
        {"output_router_logits": True},
        {"labels": None},
    ],
    ids=str,
)
def test_calls_that_want_more_go_through_transformers(change):
    model = patched("qwen3_moe")
    out = model(**batch() | change)
    assert not is_fused(out)
    if "return_dict" in change:
        assert isinstance(out, tuple)
        assert out[1].shape[1] == sum(LENGTHS)
    if "output_router_logits" in change:
        assert out.aux_loss > 0


def test_evaluation_is_as_in_transformers():
    model = patched()
    with torch.no_grad():
        assert not is_fused(model(**batch()))
    out = model.eval()(**batch())
    assert type(out) is CausalLMOutputWithPast
    assert out.logits.requires_grad


# Heads that it does not fit


def adapted(target_modules=("q_proj",), **options):
    base = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=[*target_modules], **options)
    model = get_peft_model(base, lora).to(DEVICE).train()
    return model, patch_model(model).report


WRAPPED = {
    "the head is trained": {"modules_to_save": ["lm_head"]},
    "both ends are trained": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both ends are trained as one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens are trained": {"trainable_token_indices": [3, 40, 255]},
    "tokens of both ends are trained": {
        "trainable_token_indices": {"embed_tokens": [3, 4], "lm_head": [3, 5, 6]}
    },
    "an adapter on the head": {"target_modules": ["q_proj", "lm_head"], "lora_alpha": 3},
}


def wrapped(how, is_tied, dtype=torch.float32):
    model = tiny_model("qwen3", dtype, lora=WRAPPED[how], tie_word_embeddings=is_tied)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "lora_" not in name:
                weight += (0.1 * torch.randn(weight.shape, generator=generator)).to(weight)
    assert hasattr(model.get_output_embeddings(), "lora_A") == ("adapter" in how)
    patch_model(model, "sdpa")
    return model


@pytest.mark.parametrize(
    ("how", "is_tied"),
    [
        *(
            (how, False)
            for how in WRAPPED
            if how not in ("tokens are trained", "both ends are trained as one")
        ),
        *(
            (how, True)
            for how in ("tokens are trained", "both ends are trained as one", "an adapter on the head")
        ),
    ],
)
def test_a_head_with_an_adapter_makes_no_logits(how, is_tied):
    ours, theirs = (wrapped(how, is_tied) for _ in "ab")
    assert_same_step(step(ours, batch()), step(through_logits(theirs), batch()))
    out, loss, _ = step(ours, batch())
    from_logits = F.cross_entropy(out.logits[0, :-1].float(), batch()["labels"][0, 1:], reduction="sum")
    assert out.logits.shape == (1, sum(LENGTHS), 256)
    assert torch.isfinite(from_logits)
    with ours.disable_adapter():
        switched_off = ours(**batch()).loss.item()
    with theirs.disable_adapter():
        assert abs(switched_off / theirs(**batch()).loss.item() - 1) < BOUND
    assert abs(switched_off / loss - 1) > 1e-4


@pytest.mark.parametrize("how", ["an adapter on the head", "tokens are trained"])
def test_a_merged_head_makes_no_logits(how):
    ours, theirs = (wrapped(how, is_tied=False) for _ in "ab")
    before = ours(**batch()).loss.item()
    for model in (ours, theirs):
        model.merge_adapter()
    out, expected = ours(**batch()), through_logits(theirs)(**batch())
    assert is_fused(out)
    assert abs(out.loss.item() / expected.loss.item() - 1) < BOUND
    assert abs(out.loss.item() / before - 1) < BOUND


@pytest.mark.parametrize("how", ["the head is trained", "an adapter on the head"])
def test_a_head_in_float32_over_hidden_states_in_bfloat16(how):
    """As PEFT makes what it trains, and a trainer's autocast meets it."""
    models = [wrapped(how, False, torch.bfloat16) for _ in "ab"]
    for model in models:
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
    with torch.autocast(DEVICE, torch.bfloat16):
        out, expected = models[0](**batch()), through_logits(models[1])(**batch())
    assert is_fused(out)
    assert abs(out.loss.item() / expected.loss.item() - 1) < 2e-3
    out.loss.backward()
    expected.loss.backward()
    for (name, own), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None:
            assert own.grad.dtype == own.dtype, name
            assert error(own.grad, other.grad) < 0.02, name


def test_what_is_not_fused_is_in_the_report():
    for options, why in (
        ({"target_modules": ["lm_head"], "lora_dropout": 0.1}, "the head has an adapter: LoRA dropout"),
        ({"target_modules": ["lm_head"], "use_dora": True}, "the head has an adapter: Dora"),
        ({"target_modules": ["lm_head"], "lora_bias": True}, "the head has an adapter: its bias is trained"),
    ):
        model, report = adapted(**options)
        assert report.not_fused["loss"] == f"from the logits of all tokens: {why}"
        assert "loss" not in report.fused
        out = model(**batch())
        assert not is_fused(out)
        out.loss.backward()
    _, report = adapted()
    assert "loss" in report.fused
    assert "loss" not in report.not_fused


def test_a_hook_on_the_head_sees_the_logits():
    model, seen = patched(), []
    hook = model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call[-1].shape))
    model(**batch())
    assert seen == [(1, sum(LENGTHS), 256)]
    hook.remove()
    assert is_fused(model(**batch()))
