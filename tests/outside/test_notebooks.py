"""What the cells of a notebook do between two calls of a patched model."""

import copy
from functools import partial

import pytest
import torch
from datasets import Dataset
from model_folder import byte_tokenizer
from outside_models import (
    DEVICE,
    LENGTHS,
    assert_close,
    assert_same_training,
    calls_alone,
    documents,
    fill_adapters,
    gradients,
    packed_call,
    plain_model,
)
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from unsloth_pack import InputError, patch_model
from unsloth_pack.packing import pack_dataset

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def models():
    """An untouched model and a patched one, with the same adapter."""
    plain = get_peft_model(plain_model(), LoraConfig(r=4, target_modules=PROJECTIONS, task_type="CAUSAL_LM"))
    fill_adapters(plain).train()
    patched = copy.deepcopy(plain)
    patch_model(patched)
    return plain, patched


@pytest.fixture
def ids():
    return torch.cat(documents())[None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_of_any_whole_numbers(dtype, training, models, ids):
    """Before, int32 trained, and the evaluation after it failed."""
    plain, patched = (model.train(training) for model in models)
    loss = patched(input_ids=ids, labels=ids.to(dtype), packed_seq_lengths=LENGTHS).loss
    assert_close(loss, calls_alone(plain)[1])
    batch = {"input_ids": ids[:, :40], "use_cache": False}
    loss = patched(**batch, labels=ids[:, :40].to(dtype)).loss
    assert_close(loss, plain(**batch, labels=ids[:, :40]).loss)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("described", [{"packed_seq_lengths": LENGTHS}, {}], ids=["packed", "ordinary"])
@pytest.mark.parametrize(
    ("label", "says"),
    [(-200, "-200"), (256, "256"), (0.5, "float")],
)
def test_labels_that_cannot_be(label, says, described, training, models, ids):
    if DEVICE != "cpu" and isinstance(label, int):
        pytest.skip("the values of labels on a GPU are not looked at")
    labels = torch.where(ids % 2 == 0, label, ids)
    with pytest.raises(InputError, match=says):
        models[1].train(training)(input_ids=ids, labels=labels, **described)


@pytest.mark.parametrize("mask", [0.0, 0.5, 0.99], ids=str)
def test_a_mask_of_no_token(mask, models, ids):
    """An additive mask is 0 where all may look: as a mask of tokens it would hide the documents' ends."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(DEVICE)
    with pytest.raises(InputError, match="attention_mask"):
        models[1](
            input_ids=ids, position_ids=positions, attention_mask=torch.full(ids.shape, mask).to(ids.device)
        )


@pytest.fixture
def default_device():
    """`torch.set_default_device("cuda")` in the first cell; "meta" shows on a CPU what it would do."""
    torch.set_default_device("cuda" if DEVICE == "cuda" else "meta")
    yield
    torch.set_default_device(None)


def test_a_default_device(models, ids, default_device):
    loss = models[1](input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS).loss
    loss.backward()
    torch.set_default_device(None)
    assert_close(loss, calls_alone(models[0])[1])


def double_the_projections(model):
    for name, weight in model.named_parameters():
        if "proj" in name:
            weight.data = 2 * weight.data


def test_weights_exchanged_between_forward_and_backward(models):
    """`p.data = ...`: the backward pass is that of the weights of the forward pass, as in torch."""
    plain, patched = models
    expected = gradients(plain, calls_alone)
    _, loss = packed_call(patched)
    double_the_projections(patched)
    loss.backward()
    for name, weight in patched.named_parameters():
        if weight.requires_grad:
            assert_close(weight.grad, expected[name], name)
    double_the_projections(plain)
    assert_same_training(patched, plain)


@pytest.mark.parametrize(
    "name", ["input_layernorm", "q_proj", "down_proj", "base_layer", "default", "act_fn"]
)
def test_a_forward_that_is_set_on_a_module_is_called(name, models):
    """As accelerate sets it, and tools that record or scale what a module gives."""

    def halve(forward, *args):
        return forward(*args) / 2

    for model in models:
        for path, module in model.named_modules():
            if path.endswith(f".{name}"):
                module.forward = partial(halve, module.forward)
    patched, plain = models[1], models[0]
    assert_same_training(patched, plain)


def packed_rows(streamed):
    rows = Dataset.from_list([{"input_ids": document.tolist()} for document in documents() * 3])
    packed = pack_dataset(rows, capacity=64)
    return packed.to_iterable_dataset() if streamed else packed


def trainer_of_packed_rows(kind, streamed, model, folder, tokenizer=None):
    given = {"output_dir": str(folder), "max_steps": 1, "report_to": "none", "use_cpu": DEVICE == "cpu"}
    given |= {"disable_tqdm": True, "save_strategy": "no", "bf16": False}
    if kind == "flattening":
        collator = DataCollatorWithFlattening()
        return Trainer(
            model, TrainingArguments(**given), train_dataset=packed_rows(streamed), data_collator=collator
        )
    config = SFTConfig(**given, max_length=None, padding_free=kind == "padding_free")
    return SFTTrainer(model, config, train_dataset=packed_rows(streamed), processing_class=tokenizer)


@pytest.mark.parametrize(
    ("kind", "streamed"), [("flattening", False), ("flattening", True), ("padded", False)]
)
def test_a_collator_that_drops_the_ends_of_documents(kind, streamed, models, tmp_path):
    """Before, each row trained as one document, and nothing said so."""
    trainer = trainer_of_packed_rows(kind, streamed, models[1], tmp_path, byte_tokenizer())
    with pytest.raises(InputError, match="seq_lengths"):
        trainer.train()
    assert trainer.state.global_step == 0


def trainer_of_numbered_rows(model, numbers, folder, padded=True, streamed=False):
    """Of rows with a column of numbers, which no packing has made, under the name of packed rows' lists."""
    ids = [document.tolist() for document in documents()]
    rows = Dataset.from_dict({"input_ids": ids, "seq_lengths": numbers})
    pad = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
    given = {"max_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none"}
    return Trainer(
        model,
        TrainingArguments(str(folder), **given, use_cpu=DEVICE == "cpu", disable_tqdm=True),
        train_dataset=rows.to_iterable_dataset() if streamed else rows,
        data_collator=pad if padded else DataCollatorWithFlattening(),
    )
