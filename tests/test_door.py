"""Whoever calls a patched model, the call enters one door, where its row is described and its loss chosen."""

from types import MethodType

import pytest
import torch
import trl.trainer.utils as trl_utils
from accelerate.utils import extract_model_from_parallel
from datasets import Dataset
from model_folder import byte_tokenizer
from tiny import DEVICE, error, random_documents, tiny_config, tiny_model
from trainer_runs import PACKING, ROWS, arguments, asked_by_trl, base_of
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from unsloth_pack import FastLanguageModel, patch_model
from unsloth_pack.losses.head import LabelledHead
from unsloth_pack.patching import trainer_hooks
from unsloth_pack.training.trl_setup import _loss_needs_cuda

LENGTHS = [5, 1, 9, 3]
VOCABULARY = 260  # of the tokenizer that the trainers get


def row(documents, labels=None):
    ids = torch.cat(documents)[None].to(DEVICE)
    return {"input_ids": ids, "labels": ids if labels is None else labels}


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)


def patched(arch="qwen3", dtype=torch.float32, adapter=True):
    model = tiny_model(arch, dtype, vocab_size=VOCABULARY)
    if not adapter:
        model = model.unload().train()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    patch_model(model)
    return model


def sft(model, tmp_path, **options):
    config = SFTConfig(**arguments(tmp_path, **(PACKING | {"max_length": 80, **options})))
    rows = Dataset.from_list(ROWS["text"])
    return SFTTrainer(model, config, train_dataset=rows, eval_dataset=rows, processing_class=byte_tokenizer())


# Described once


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
def test_a_bare_loop_describes_a_row_once(described, adapter):
    model = patched(adapter=adapter)
    for _ in range(3):
        model(**row(random_documents(LENGTHS)), position_ids=positions(LENGTHS)).loss.backward()
    assert len(described) == 3


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
def test_a_plain_trainer_describes_a_row_once(described, adapter, tmp_path):
    rows = [{"input_ids": d.tolist()} for d in random_documents(LENGTHS)]
    trainer = Trainer(
        patched(adapter=adapter),
        TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=4, max_steps=3)),
        train_dataset=rows,
        data_collator=DataCollatorWithFlattening(),
    )
    trainer.train()
    assert described == [(1, sum(LENGTHS))] * 3


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("by_loader", [False, True], ids=["by the model", "by the loader"])
def test_trls_trainer_describes_a_row_once(
    described, adapter, by_loader, tmp_path, no_chunked_head, monkeypatch
):
    """In the loader, if the collator is TRL's."""
    if not by_loader:
        monkeypatch.setattr(trainer_hooks, "is_trls", lambda collate: False)
    trainer = sft(patched(adapter=adapter), tmp_path, gradient_accumulation_steps=1, num_train_epochs=2)
    trainer.train()
    assert len(described) == (0 if by_loader else 2 * len(trainer.train_dataset))
    assert trainer.state.log_history[0]["mean_token_accuracy"] >= 0


# What TRL asks for


def scores_and_gradients(model, weights, forward=None, **inputs):
    """What a trainer may make of the output: any weight for a token's log-probability and entropy."""
    model.zero_grad()
    out = (forward or model)(**inputs, fused_lm_head=True)
    loss = (weights[0] * out.log_probs).sum() + (weights[1] * out.entropy).sum()
    if out.aux_loss is not None:
        loss = loss + 0.3 * out.aux_loss
    loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3 with a bias", "gemma2", "granite", "qwen3_moe"])
def test_scores_are_trls_own(arch, temperature, dtype):
    """With a bias, a softcap, a divisor, routed experts, at any temperature; where TRL's own can run."""
    model = patched(arch.split()[0], dtype)
    if "bias" in arch:
        torch.manual_seed(3)
        base_of(model).lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY, device=DEVICE, dtype=dtype))
    base = asked_by_trl(model, temperature=temperature)
    ids = torch.cat(random_documents(LENGTHS)).to(DEVICE)[None]
    labels = ids.masked_fill(torch.rand(ids.shape, device=DEVICE) < 0.3, -100)
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions(LENGTHS), "use_cache": False}
    if arch == "qwen3_moe":
        inputs["output_router_logits"] = True
    weights = torch.randn(2, 1, ids.shape[1] - 1, device=DEVICE)
    ours, our_grads = scores_and_gradients(model, weights, **inputs)
    head = vars(base)["unsloth_pack_trl_head"]
    assert head.why_not is None
    assert isinstance(ours, trl_utils.FusedCausalLMOutput)
    if _loss_needs_cuda() and DEVICE == "cpu":
        return
    # TRL's own gets the labels that the door masks
    start = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    inputs["labels"] = labels.index_fill(1, start.to(DEVICE), -100)
    theirs, their_grads = scores_and_gradients(model, weights, head.forward, **inputs)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "loss", "aux_loss"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.shape == other.shape, name
            torch.testing.assert_close(mine.to(wide), other.to(wide), **close, msg=name)
    assert torch.equal(ours.label_mask, theirs.label_mask)
    assert ours.is_top1.dtype == theirs.is_top1.dtype == torch.bool
    if dtype == torch.float32:
        assert torch.equal(ours.is_top1, theirs.is_top1)
    bound = 0.05 if dtype == torch.bfloat16 else 1e-4
    for name, gradient in their_grads.items():
        assert error(our_grads[name].float(), gradient.float()) < bound, name


def test_scores_in_float64_are_those_of_the_formulas():
    """A head with a bias, against log-softmax of plain transformers' logits of each document alone."""
    model = patched(dtype=torch.float64)
    base = asked_by_trl(model)
    head = torch.nn.Linear(64, VOCABULARY, bias=True, dtype=torch.float64, device=DEVICE)
    base.lm_head = head.requires_grad_(False)
    documents = random_documents(LENGTHS)
    out = model(**row(documents), packed_seq_lengths=LENGTHS, fused_lm_head=True)
    start = 0
    for document in documents:
        ids = document.to(DEVICE)[None]
        log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        places = slice(start, start + len(document) - 1)
        assert torch.allclose(out.log_probs[0, places], log_p.gather(1, ids[0, 1:, None])[:, 0], atol=1e-10)
        assert torch.allclose(out.entropy[0, places], -(log_p.exp() * log_p).sum(-1), atol=1e-10)
        assert torch.equal(out.is_top1[0, places], log_p.argmax(-1) == ids[0, 1:])
        assert out.label_mask[0, places].all()
        start += len(document)
    assert int(out.label_mask.sum()) == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("why", ["float32", "adapter"])
def test_what_only_trls_head_can_do_goes_its_way(why, described):
    model = patched()
    base = base_of(model)
    if why == "adapter":
        base.lm_head = torch.nn.Sequential(base.lm_head)
        base.lm_head.weight, base.lm_head.bias = base.lm_head[0].weight, None
    asked_by_trl(model, cast_lm_head_to_fp32=why == "float32")
    inputs = row(random_documents(LENGTHS))
    if not (_loss_needs_cuda() and DEVICE == "cpu"):
        out = model(**inputs, packed_seq_lengths=LENGTHS, fused_lm_head=True)
        assert int(out.label_mask.sum()) == sum(LENGTHS) - len(LENGTHS)
        assert len(described) == 1
    said = patch_model(model).report.not_fused["TRL's loss"]
    assert ("float32" if why == "float32" else "Sequential") in said


class CountsEverything:
    """A collator that knows nothing of boundaries: every token has a label."""

    def __call__(self, rows):
        lengths = [len(row["input_ids"]) for row in rows]
        ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions(lengths).cpu()}


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
def test_labels_of_first_tokens_never_train(adapter, tmp_path, no_chunked_head, monkeypatch, caplog):
    scored, scores = [], LabelledHead.scores
    monkeypatch.setattr(
        LabelledHead, "scores", lambda self, *a: scored.append(int(self.mask.sum())) or scores(self, *a)
    )
    rows = Dataset.from_list([{"input_ids": d.tolist()} for d in random_documents([6, 6])])
    trainer = SFTTrainer(
        patched(adapter=adapter),
        SFTConfig(**arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=1)),
        train_dataset=rows,
        data_collator=CountsEverything(),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    assert scored == [10]  # of 12 tokens in two documents
    assert "2 labels at document starts" not in caplog.text  # column 0 of a row no trainer counts
    assert "1 labels at document starts or on padding carry no loss" in caplog.text


# Undone


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
def test_undo_after_a_trainer_gives_back_the_model_that_came_in(adapter, tmp_path):
    """And it runs: a forward that a trainer has put on the instance went with the patch."""
    model = tiny_model("qwen3", torch.float32, vocab_size=VOCABULARY)
    model = model if adapter else model.unload().requires_grad_(True)
    before = {name: set(vars(module)) for name, module in base_of(model).named_modules()}
    patch = patch_model(model)
    sft(model, tmp_path, max_steps=2, num_train_epochs=1).train()
    ids = torch.cat(random_documents([7])).to(DEVICE)[None]
    model.eval()
    expected = model(input_ids=ids).logits
    patch.undo()
    got = model(input_ids=ids, labels=ids)
    assert torch.allclose(got.logits, expected, atol=1e-5)
    assert torch.isfinite(got.loss)
    for name, module in base_of(model).named_modules():
        assert type(module).__module__.startswith(("transformers", "torch", "peft")), name
        left = set(vars(module)) - before[name]
        assert not {n for n in left if "unsloth" in n or n in ("forward", "spec", "fast_decoder")}, name
    again = patch_model(model)
    assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)
    again.undo()


def test_a_trainer_that_is_there_before_the_patch_gets_the_kernel(
    tmp_path, no_chunked_head, described, monkeypatch
):
    """And keeps its own head when the patch is undone."""
    monkeypatch.setattr(trainer_hooks, "is_trls", lambda collate: False)  # the model describes every row
    model = tiny_model("qwen3", torch.float32, vocab_size=VOCABULARY)
    trainer = sft(model, tmp_path, gradient_accumulation_steps=1, max_steps=2, num_train_epochs=1)
    its_own = vars(base_of(model))["forward"]
    patch = patch_model(model)
    trainer.train()
    assert len(described) == 2
    patch.undo()
    assert vars(base_of(model))["forward"] is its_own


# Other forwards on the instance


def test_what_accelerate_keeps_of_a_wrapped_forward_goes_with_the_patch():
    """It wraps the function of model.forward for mixed precision, and keeps the method beside."""
    model = tiny_model("qwen3", torch.float32, vocab_size=VOCABULARY).unload().eval()
    ids = torch.cat(random_documents([7])).to(DEVICE)[None]
    plain, attributes = model(input_ids=ids).logits, set(vars(model))
    patch = patch_model(model)
    model._original_forward = model.forward
    doors = model.forward.__func__
    model.forward = MethodType(lambda self, *args, **kwargs: (doors(self, *args, **kwargs).logits, 1), model)
    assert torch.allclose(model(input_ids=ids)[0], plain, atol=1e-5)
    patch.undo()
    assert set(vars(model)) == attributes
    assert torch.equal(
        extract_model_from_parallel(model, keep_fp32_wrapper=False)(input_ids=ids).logits, plain
    )


# Models that somebody else has loaded


def test_a_model_that_transformers_loaded_takes_an_adapter():
    """Its base is frozen then, as PEFT does."""
    config = tiny_config("qwen3")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE)
    patch_model(model)
    adapted_model = FastLanguageModel.get_peft_model(model, r=4)
    trained = [name for name, p in adapted_model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    out = adapted_model(**row(random_documents(LENGTHS)), packed_seq_lengths=LENGTHS)
    out.loss.backward()
    unpatched = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert FastLanguageModel.get_peft_model(unpatched, r=4).get_nb_trainable_parameters()[0] > 0
