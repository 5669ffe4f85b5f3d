"""Losses that are computed outside of the model, from its logits, by labels that it never gets.

transformers' `Trainer` takes the labels out of a call for `label_smoothing_factor` and `compute_loss_func`,
and many people override `compute_loss`. No label of a document's first token may train there either.
"""

import logging

import pytest
import torch
from outside_models import DEVICE
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from unsloth_pack import FastLanguageModel, InputError

LENGTHS = [9, 30, 14, 11]
SMOOTHING = 0.2


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (length,), generator=generator) for length in LENGTHS]


def packed(mask_first):
    """A collator's row with all documents."""
    ids = torch.cat(documents())[None]
    labels = ids.clone()
    if mask_first:
        starts = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
        labels[0, starts] = -100
    return {"input_ids": ids, "labels": labels, "seq_lengths": torch.tensor(LENGTHS)}


def shifted(logits, labels):
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def smooth_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = shifted(outputs.logits, labels)
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=SMOOTHING)
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class LabelsKept(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = smooth_loss(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class LabelsGiven(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = smooth_loss(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


WAYS = {
    "label_smoothing_factor": (Trainer, {"label_smoothing_factor": SMOOTHING}, {}),
    "compute_loss_func": (Trainer, {}, {"compute_loss_func": smooth_loss}),
    "compute_loss keeps the labels": (LabelsKept, {}, {}),
    "compute_loss gives the labels": (LabelsGiven, {}, {}),
}


@pytest.fixture
def model(model_folder):
    model, _ = FastLanguageModel.from_pretrained(model_folder, max_seq_length=256, dtype=torch.float32)
    return FastLanguageModel.get_peft_model(model, r=4)


@pytest.fixture
def gradients(model, tmp_path):
    """Trains one update, and returns the gradients that it was made with."""
    seen = {}

    def run(way, mask_first=True, rows=1):
        kind, arguments, options = WAYS[way]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, gradient_accumulation_steps=rows, max_grad_norm=0.0,
            per_device_train_batch_size=1, report_to="none", use_cpu=DEVICE == "cpu",
            save_strategy="no", learning_rate=0.1, optim="sgd", remove_unused_columns=False, **arguments,
        )  # fmt: skip
        trainer = kind(
            model, arguments, train_dataset=[{"row": 0}] * rows,
            data_collator=lambda _: packed(mask_first), **options,
        )  # fmt: skip
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        trainer.train()
        seen.update(
            {name: (before[name] - p) / 0.1 for name, p in model.named_parameters() if p.requires_grad}
        )
        return seen

    return run


@pytest.fixture
def alone(model, model_folder):
    """The gradients of untouched transformers, every document by itself."""
    from peft import LoraConfig, get_peft_model

    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    names = [name.rsplit(".", 1)[-1] for name, _ in plain.named_modules() if name.endswith("_proj")]
    plain = get_peft_model(plain, LoraConfig(r=4, target_modules=sorted(set(names)), lora_alpha=16))
    plain.load_state_dict(model.state_dict())
    plain.to(model.device)
    n_labels = sum(LENGTHS) - len(LENGTHS)
    for document in documents():
        ids = document[None].to(model.device)
        smooth_loss(plain(input_ids=ids), ids, n_labels).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("way", WAYS)
def test_documents_train_as_they_would_alone(way, gradients, alone):
    got = gradients(way, rows=2)
    assert got.keys() == alone.keys()
    for name, truth in alone.items():
        torch.testing.assert_close(got[name], truth, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", ["label_smoothing_factor", "compute_loss_func"])
def test_labels_of_document_starts_are_refused(way, gradients, model):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(InputError, match="labels at document starts"):
        gradients(way, mask_first=False)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("way", "mask_first"),
    [
        ("compute_loss keeps the labels", False),
        ("compute_loss gives the labels", False),
        ("compute_loss keeps the labels", True),
    ],
)
def test_a_loss_of_ones_own_is_warned_of_once_where_it_is_wrong(way, mask_first, gradients, caplog):
    with caplog.at_level(logging.WARNING, "unsloth_pack"):
        gradients(way, mask_first, rows=3)
    assert caplog.text.count("outside of the model") == (not mask_first)


def call(model, **given):
    model.zero_grad()
    row = packed(mask_first=True)
    out = model.train()(input_ids=row["input_ids"].to(model.device), packed_seq_lengths=LENGTHS, **given)
    out.loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def test_shift_labels_that_were_counted_are_looked_at(model):
    """Trainers count `shift_labels` where there are any, and not `labels`."""
    right = packed(mask_first=True)["labels"]
    raw = F.pad(packed(mask_first=False)["labels"], (0, 1), value=-100)[:, 1:]
    with pytest.raises(InputError, match="labels at document starts"):
        call(model, labels=right, shift_labels=raw, num_items_in_batch=torch.tensor(63))
    truth = call(model, labels=right)
    got = call(model, labels=right, shift_labels=raw)  # nobody has counted: they are masked
    assert all(torch.equal(got[name], truth[name]) for name in truth)
