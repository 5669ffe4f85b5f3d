"""One update under every trainer against plain transformers in float64, one document at a time.

Every case trains one update over all documents, in several rows and steps of accumulation: its gradients
must be those of the mean loss over all counted tokens of the update, and its logged loss that mean. The
bound, 1e-4, is far above the rounding of float32 and far below what one token more or less would do.
"""

import pytest
import torch
from datasets import Dataset
from model_folder import byte_tokenizer, save_model
from tiny import DEVICE, error
from torch.nn import functional as F
from trainer_runs import PACKING, PAIRS, ROWS, adapted, arguments, fill_adapter
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTConfig, SFTTrainer

from unsloth_pack import FastLanguageModel
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.packing import pack_dataset
from unsloth_pack.training.trl_setup import row_collator, sft_config

BOUND = 1e-4


def tokens(kind):
    """Every document's ids, and which of them count in the loss."""
    tokenizer = byte_tokenizer()
    for prompt, answer in PAIRS:
        if kind == "assistant":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            out = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
            yield out["input_ids"], [bool(mark) for mark in out["assistant_masks"]]
        else:
            head, tail = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], 256]
            yield head + tail, [kind == "text"] * len(head) + [True] * len(tail)


def labelled(kind):
    """Every document as a row of ids and labels."""
    return Dataset.from_list(
        [
            {"input_ids": ids, "labels": [t if mark else -100 for t, mark in zip(ids, marks, strict=True)]}
            for ids, marks in tokens(kind)
        ]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


@pytest.fixture(scope="module")
def truth(folder):
    """The loss and the gradients of each kind of document, by plain transformers and PEFT."""
    from peft import LoraConfig, get_peft_model

    def of(kind):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
        fill_adapter(model)
        model.double()
        documents = list(tokens(kind))
        counted = sum(sum(marks[1:]) for _, marks in documents)
        total = 0.0
        for ids, marks in documents:
            ids, counts = torch.tensor([ids]), torch.tensor(marks[1:])
            losses = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            loss = losses[counts].sum() / counted
            loss.backward()
            total += loss.item()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return total, grads

    return {kind: of(kind) for kind in ROWS}


class Gradients(TrainerCallback):
    """What the optimizer is given, in its first update."""

    def __init__(self):
        self.seen = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        assert not self.seen, "one update was expected"
        self.seen = {n: p.grad.double().cpu() for n, p in model.named_parameters() if p.grad is not None}


def sft(folder, tmp_path, kind, streamed_eval=False, rows=None, **options):
    model, tokenizer = adapted(folder)
    options = {"max_length": 80, "assistant_only_loss": kind == "assistant", **options}
    config = SFTConfig(**arguments(tmp_path, **options))
    gradients = Gradients()
    rows = rows or Dataset.from_list(ROWS[kind])
    trainer = SFTTrainer(
        model,
        config,
        train_dataset=rows,
        eval_dataset=rows.to_iterable_dataset() if streamed_eval else rows,
        processing_class=tokenizer,
        callbacks=[gradients],
    )
    return trainer, gradients


def assert_the_update_is(expected, gradients, loss):
    expected_loss, expected_grads = expected
    assert abs(loss / expected_loss - 1) < BOUND
    assert gradients.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert error(gradients[name], grad) < BOUND, name


def train(trainer):
    trainer.train()
    assert trainer.state.global_step == 1
    return trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    "options",
    [
        PACKING,
        PACKING | {"per_device_train_batch_size": 2},
        {"padding_free": True, "max_length": None, "per_device_train_batch_size": 3},
        {"per_device_train_batch_size": 3},
        PACKING | {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_under_trl(folder, tmp_path, truth, kind, options):
    trainer, gradients = sft(folder, tmp_path, kind, **options)
    loss = train(trainer)
    assert_the_update_is(truth[kind], gradients.seen, loss)
    log = trainer.state.log_history[0]
    assert log["num_tokens"] == sum(len(ids) for ids, _ in tokens(kind))
    assert 0 <= log["mean_token_accuracy"] <= 1
    assert log["entropy"] > 0


@pytest.mark.parametrize(
    ("packed", "collate"),
    [
        (True, default_data_collator),
        (True, row_collator()),
        (False, DataCollatorWithFlattening()),
        (False, DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)),
    ],
    ids=["default", "TRL's", "flattening", "flash and seq_idx"],
)
def test_under_a_plain_trainer(folder, tmp_path, truth, packed, collate):
    """It drops columns that the model's signature does not name."""
    model, _ = adapted(folder)
    rows, gradients = labelled("completion"), Gradients()
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=1 if packed else 4)),
        train_dataset=pack_dataset(rows, 80) if packed else rows,
        data_collator=collate,
        callbacks=[gradients],
    )
    loss = train(trainer)
    assert_the_update_is(truth["completion"], gradients.seen, loss)


@pytest.mark.parametrize(("eval_packing", "streamed_eval"), [(True, False), (False, True)])
def test_evaluation(folder, tmp_path, truth, eval_packing, streamed_eval):
    """All documents in one row, or one batch, so that the mean over batches is the mean over tokens."""
    options = PACKING | {"eval_packing": eval_packing, "per_device_eval_batch_size": len(PAIRS)}
    trainer, _ = sft(folder, tmp_path, "completion", streamed_eval, **options)
    assert abs(trainer.evaluate()["eval_loss"] / truth["completion"][0] - 1) < BOUND


@pytest.mark.parametrize("how", [{"full_finetuning": True}, {}], ids=str)
def test_a_model_of_which_nothing_is_trained_is_noticed(folder, tmp_path, caplog, how):
    """As when `get_peft_model` was left out: checkpointing lets the backward pass run all the same."""
    model, tokenizer = FastLanguageModel.from_pretrained(folder, 256, torch.float32, **how)
    config = SFTConfig(**arguments(tmp_path, gradient_checkpointing=True))
    rows = Dataset.from_list(ROWS["text"])
    SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer).train()
    said = [record.message for record in caplog.records if "no weight of the decoder" in record.message]
    assert len(said) == (0 if how else 1)


def test_in_a_bare_loop(folder, truth):
    model, _ = adapted(folder)
    model.train()
    documents = list(tokens("completion"))
    counted = sum(sum(marks[1:]) for _, marks in documents)
    total = 0.0
    for rows in (documents[:4], documents[4:]):
        ids = torch.tensor([[token for ids, _ in rows for token in ids]], device=DEVICE)
        marks = torch.tensor([[mark for _, marks in rows for mark in marks]], device=DEVICE)
        out = model(
            input_ids=ids,
            labels=ids.masked_fill(~marks, -100),
            packed_seq_lengths=[len(ids) for ids, _ in rows],
            num_items_in_batch=counted,
        )
        out.loss.backward()
        total += out.loss.item()
    grads = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    assert_the_update_is(truth["completion"], grads, total)


def in_a_loop(folder, tmp_path):
    model, _ = adapted(folder)
    ids = torch.arange(3, 43, device=DEVICE)[None]
    model(input_ids=ids, labels=ids, packed_seq_lengths=[30, 10]).loss.backward()


def by_trl(folder, tmp_path):
    trainer, _ = sft(folder, tmp_path, "text", **PACKING)
    trainer.train()


@pytest.mark.parametrize("train_a_step", [in_a_loop, by_trl])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_every_trainer_asks_for_the_captured_step(train_a_step, architecture, tmp_path, monkeypatch):
    """Nothing that a trainer passes to the model stands against it, with experts neither."""
    asked = []
    monkeypatch.setattr("unsloth_pack.patching.patch._why_never_captured", lambda *_: None)
    monkeypatch.setattr(StepGraphs, "run", lambda self, decoder, row, ids, _: asked.append((row, ids)))
    train_a_step(str(save_model(tmp_path / "model", architecture)), tmp_path)
    assert asked
    assert all(ids is not None and len(row.lengths) > 1 for row, ids in asked)


def test_one_process_takes_one_of_several_gpus(monkeypatch, tmp_path):
    """With more, the trainer would wrap the model in DataParallel, which TRL refuses."""

    def two_gpus(arguments):
        arguments._n_gpu = 2
        return torch.device("cpu")

    monkeypatch.setattr(SFTConfig, "_setup_devices", property(two_gpus))
    assert SFTConfig(str(tmp_path), bf16=False).n_gpu == 2
    assert sft_config(str(tmp_path), padding_free=True, dtype=torch.float32).n_gpu == 1
