"""Input embeddings of which PEFT trains a few rows, beside PEFT's own forward."""

import pytest
import torch
from tiny import DEVICE, error, random_documents, tiny_model

from unsloth_pack import patch_model

LENGTHS = [40, 1, 30]
TOKENS = [3, 40, 255]


def model_that_trains(arch="qwen3", tokens=TOKENS, dtype=torch.float64, device=DEVICE, **overrides):
    model = tiny_model(arch, dtype, device, lora={"trainable_token_indices": tokens}, **overrides)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "trainable_tokens_delta" in name:
                weight += torch.randn(weight.shape, generator=generator).to(weight)
    return model


def step(model, patched):
    """The loss of documents alone, or of their packed row, with all gradients."""
    documents = [x.clone() for x in random_documents(LENGTHS)]
    documents[0][::4] = 40
    documents[2][1::3] = 255
    model.zero_grad()
    if patched:
        row = torch.cat(documents)[None].to(model.device)
        labels = row.clone()
        loss = model(input_ids=row, labels=labels, packed_seq_lengths=LENGTHS).loss
        loss.backward()
    else:
        counted = sum(len(document) - 1 for document in documents)
        losses = []
        for ids in documents:
            logits = model(input_ids=ids[None].to(model.device)).logits[0, :-1]
            targets = ids[1:].to(model.device)
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / counted)
        loss = sum(losses)
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    assert abs(ours[0] / theirs[0] - 1) < 1e-6  # transformers computes norms and rotations in float32
    assert ours[1].keys() == theirs[1].keys()
    assert any("trainable_tokens_delta" in name for name in ours[1])
    for name, gradient in theirs[1].items():
        assert error(ours[1][name], gradient) < 1e-5, name


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "not tied"])
@pytest.mark.parametrize("arch", ["qwen3", "gemma", "granite", "gemma4_text"])
def test_a_packed_row_trains_tokens_as_documents_alone_do(arch, is_tied):
    """Where embeddings are scaled, too. The gradient of tied rows is that of both ends."""
    theirs = step(model_that_trains(arch, tie_word_embeddings=is_tied), patched=False)
    model = model_that_trains(arch, tie_word_embeddings=is_tied)
    report = patch_model(model).report
    assert report.fused["trained tokens"] == "looked up in a matrix of their own"
    assert_same(step(model, patched=True), theirs)


@pytest.mark.parametrize("how", ["switched off", "merged", "the padding trains", "hooks", "two adapters"])
def test_what_is_not_plain_runs_as_pefts_own(how):
    tokens = [*TOKENS[:2], 0] if how == "the padding trains" else TOKENS
    models = [model_that_trains(tokens=tokens) for _ in "ab"]
    patch_model(models[0])
    ids, found = torch.arange(256, device=DEVICE), []
    for model in models:
        embeddings = model.get_base_model().get_input_embeddings()
        layer = embeddings.token_adapter
        if how == "switched off":
            layer.enable_adapters(False)
        elif how == "merged":
            layer.merge()
        elif how == "the padding trains":
            layer.base_layer.padding_idx = 0
        elif how == "hooks":
            layer.base_layer.register_forward_hook(lambda *_: None)
        else:
            layer.update_layer("other", token_indices=[8, 9])
            layer.trainable_tokens_delta["other"].data.fill_(2)
            layer._active_adapter = ["default", "other"]
        out = embeddings(ids)
        found.append(out.detach())
        if out.requires_grad:
            (gradient,) = torch.autograd.grad(out.sum(), layer.trainable_tokens_delta["default"])
            found[-1] = torch.cat([found[-1], gradient])
    assert torch.equal(*found)


@pytest.mark.gpu
def test_a_step_that_trains_tokens_is_captured():
    models = [model_that_trains(dtype=torch.bfloat16, tie_word_embeddings=True) for _ in "ab"]
    for model, why_never in zip(models, (None, "for comparison"), strict=True):
        patch_model(model)
        graphs = model.get_base_model().model.step_graphs
        graphs.why_never = graphs.why_not = why_never
    for _ in range(5):
        ours, theirs = (step(model, patched=True) for model in models)
        assert abs(ours[0] / theirs[0] - 1) < 2e-3
        for name, gradient in theirs[1].items():
            assert error(ours[1][name].double(), gradient.double()) < 0.02, name
    assert str(models[0].get_base_model().model.step_graphs).startswith("captured for")
