"""DPO, KTO and ORPO on packed rows against TRL's trainers over the untouched model, in float64.

TRL's head computes in float32 there, so that log-probabilities differ by its rounding.
"""

import copy
import math
import os
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from device_reads import ON_THE_HOST, Reads
from model_folder import byte_tokenizer, save_model
from peft import LoraConfig, get_peft_model
from trainer_runs import fill_adapter, text
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from warm import two_ranks

from unsloth_pack import patch_model
from unsloth_pack.data.preferences import preferences_of
from unsloth_pack.data.tokenize import rows_hash
from unsloth_pack.demo import MODEL_DIR
from unsloth_pack.losses.preferences import DpoLoss, KtoLoss, OrpoLoss
from unsloth_pack.packing import pack_dataset, read_packs, write_packs
from unsloth_pack.packing.model_columns import PackedReference
from unsloth_pack.patching import trainer_hooks
from unsloth_pack.run.teacher import LoadedRowModel
from unsloth_pack.training.preferences import PreferenceCollator, Preferences, make_reference
from unsloth_pack.training.trainer import make_trainer
from unsloth_pack.training.trl_setup import sft_config

SIZES = [(5, 30, 9), (12, 3, 4), (2, 9, 40), (20, 21, 20), (3, 2, 1), (7, 50, 8), (4, 11, 12), (30, 28, 3)]
PAIRS = [
    {"prompt": text(p, i), "chosen": text(c, 3 * i + 1), "rejected": text(r, 5 * i + 2)}
    for i, (p, c, r) in enumerate(SIZES)
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 != 1} for i, row in enumerate(PAIRS)
]
# An update of all rows: rows of as many tokens, or None for documents alone; and documents or rows a step
SPLITS = {"one row": (1024, 1), "rows of 128": (128, 1), "documents": (None, 3), "one batch": (None, 8)}
KINDS = {
    "sigmoid": ("trl", "DPO", DpoLoss, {"loss_type": "sigmoid", "beta": 0.3}),
    "hinge": ("trl", "DPO", DpoLoss, {"loss_type": "hinge"}),
    "ipo": ("trl", "DPO", DpoLoss, {"loss_type": "ipo", "beta": 0.4}),
    "robust": ("trl", "DPO", DpoLoss, {"loss_type": "robust", "label_smoothing": 0.2}),
    "kto": ("trl", "KTO", KtoLoss, {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.7}),
    "orpo": ("trl.experimental.orpo", "ORPO", OrpoLoss, {"beta": 0.2}),
}
METRICS = ("rewards/", "logps/", "kl", "nll_loss", "log_odds")
BOUND = 2e-5


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An untouched model without an adapter."""
    folder = save_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def adapted(plain):
    model = get_peft_model(copy.deepcopy(plain), lora(), autocast_adapter_dtype=False).double()
    fill_adapter(model)
    return model


def of_trl(kind, plain, folder):
    """Loss, metrics and gradients of TRL's trainer on one batch of all rows."""
    trainer = trainer_of_trl(kind, plain, folder, LABELLED if kind == "kto" else PAIRS)
    model = trainer.model.double().train()
    fill_adapter(model)
    loss = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    metrics = trainer._stored_metrics if kind == "orpo" else trainer._metrics
    return loss.item(), {name: values[0] for name, values in metrics["train"].items()}, gradients_of(model)


def gradients_of(model):
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def trainer_of_trl(kind, plain, folder, rows, tokenizer=None):
    home, name, _, options = KINDS[kind]
    home = import_module(home)
    config = getattr(home, f"{name}Config")(
        output_dir=str(folder), per_device_train_batch_size=len(rows), report_to="none", bf16=False,
        gradient_checkpointing=False, use_cpu=True, disable_tqdm=True, max_length=256, **options,
    )  # fmt: skip
    return getattr(home, f"{name}Trainer")(
        model=copy.deepcopy(plain), args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer or byte_tokenizer(), peft_config=lora(),
    )  # fmt: skip


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if state.global_step == 0:
            self.first = gradients_of(model)


def documents(objective, rows, max_length=256, tokenizer=None):
    return all_documents(objective, rows, max_length, tokenizer).rows


def all_documents(objective, rows, max_length=256, tokenizer=None):
    options = {"max_length": max_length, "objective": objective}
    return preferences_of(Dataset.from_list(rows), tokenizer or byte_tokenizer(), **options)


def trainer_of(
    kind, plain, folder, capacity=None, batch=8, *callbacks, copies=False, processes=1, packs=None, **options
):
    """Our trainer, one of whose updates has all rows; those of `packs` hold what the reference says."""
    _, name, loss, values = KINDS[kind]
    rows = packs or documents(name.lower(), LABELLED if name == "KTO" else PAIRS)
    rows = rows if capacity is None else pack_dataset(rows, capacity)
    model = adapted(plain)
    patch_model(model)
    steps = -(-len(rows) // (batch * processes))
    config = sft_config(
        str(folder), padding_free=True, dtype=torch.float32, max_steps=2, report_to="none", optim="sgd",
        per_device_train_batch_size=batch, per_device_eval_batch_size=batch, max_grad_norm=0.0,
        gradient_accumulation_steps=steps, logging_steps=1, save_strategy="no", learning_rate=1e-2, **options,
    )  # fmt: skip
    reference = None if loss is OrpoLoss or packs else make_reference(model, copies)
    objective = partial(Preferences, loss=loss(reference=reference, **values))
    watch = Gradients()
    trainer = make_trainer(
        model, byte_tokenizer(), config, rows, rows, [watch, *callbacks], objective=objective
    )
    return trainer, watch


def ours(*args, **options):
    return trained(*trainer_of(*args, **options))


def trained(trainer, watch):
    trainer.train()
    first = next(line for line in trainer.state.log_history if "loss" in line)
    return first["loss"], first, watch.first


def assert_equal(got, expected):
    loss, metrics, gradients = expected
    assert got[0] == pytest.approx(loss, rel=BOUND)
    compared = [name for name in metrics if name.startswith(METRICS)]
    assert len(compared) >= 6
    for name in compared:
        assert got[1][name] == pytest.approx(metrics[name], rel=BOUND, abs=BOUND), name
    assert got[2].keys() == gradients.keys()
    for name, truth in gradients.items():
        assert (got[2][name] - truth).norm() <= BOUND * truth.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_trls_trainer_however_documents_share_rows(kind, plain, tmp_path):
    expected = of_trl(kind, plain, tmp_path)
    for capacity, batch in SPLITS.values():
        assert_equal(ours(kind, plain, tmp_path, capacity, batch), expected)


def packs_of(kind, plain, folder):
    """Rows of 128 tokens with what the untouched model says of their answers."""
    name = KINDS[kind][1]
    made = all_documents(name.lower(), LABELLED if name == "KTO" else PAIRS)
    loading = {"dtype": torch.float64, "max_seq_length": 128}
    reference = LoadedRowModel(PackedReference(plain.name_or_path), loading)
    noted = {"tokenizer_hash": "a" * 64, "ledger": made.ledger, "objective": name.lower()}
    write_packs(made.rows, folder, 128, model=reference, **noted)
    return read_packs(folder, "a" * 64)[1]


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "kto"])
def test_a_stored_reference_trains_as_that_of_the_step(kind, plain, tmp_path):
    packs = packs_of(kind, plain, tmp_path / "packs")
    for batch in (1, 3):
        stored = trainer_of(kind, plain, tmp_path, None, batch, packs=packs)
        in_step = trainer_of(kind, plain, tmp_path, 128, batch)
        for trainer, _ in (stored, in_step):  # so that the KL term is positive
            for name, weight in trainer.model.named_parameters():
                weight.data *= -0.05 if "lora_B" in name else 1
        loss, metrics, gradients = trained(*stored)
        expected = trained(*in_step)
        assert expected[1].get("kl", 1) > 0
        assert loss == pytest.approx(expected[0], rel=1e-12)
        names = [name for name in metrics if name.startswith((*METRICS, "eval_loss"))]
        assert [metrics[n] for n in names] == pytest.approx([expected[1][n] for n in names], rel=1e-12)
        for name, truth in expected[2].items():
            assert (gradients[name] - truth).norm() <= 1e-12 * truth.norm(), name


def test_an_update_of_two_processes_is_that_of_one(plain, tmp_path):
    two_ranks(on_two_processes, str(tmp_path))
    for (kind, _), got in torch.load(tmp_path / "two.pt").items():
        assert_equal(got, ours(kind, plain, tmp_path, None, 8))


def on_two_processes(rank, folder):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    model = AutoModelForCausalLM.from_pretrained(
        save_model(Path(folder, f"model{rank}")), dtype=torch.float64
    )
    seen = {
        (kind, "rows"): ours(kind, model, folder, None, 2, processes=2) for kind in ("sigmoid", "orpo", "kto")
    }
    packs = packs_of("kto", model, f"{folder}/packs{rank}")
    assert len(packs) % 2 == 0  # or a row would come twice
    seen["kto", "packs"] = ours("kto", model, folder, None, 1, packs=packs, processes=2)
    if rank == 0:
        torch.save(seen, f"{folder}/two.pt")


@pytest.mark.parametrize("kind", ["sigmoid", "orpo"])
def test_answers_have_a_prompt_each_where_a_model_cannot_share_it(kind, plain, tmp_path):
    shared = ours(kind, plain, tmp_path, 1024, 1)
    trainer, watch = trainer_of(kind, plain, tmp_path, 1024, 1)
    trainer.data_collator = PreferenceCollator(shares=False, learns_prompts=kind == "orpo")
    assert_equal(trained(trainer, watch), shared)
    noisy, _ = trainer_of(kind, plain, tmp_path, neftune_noise_alpha=5.0)
    rows = [noisy.train_dataset[0]]
    assert (
        trainer.data_collator(rows)["packed_row"].parent,
        noisy.data_collator(rows)["packed_row"].parent,
    ) == (
        None,
        None,
    )


def test_a_reference_may_be_a_copy_of_an_adapter(plain, tmp_path):
    """As where TRL trains an earlier adapter on: at first it is the reference."""
    loss, metrics, gradients = ours("sigmoid", plain, tmp_path, None, 8, copies=True)
    assert loss == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["rewards/margins"] == 0
    assert any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(("kind", "n_passes"), [("sigmoid", 1), ("orpo", 0), ("kto", 3)])
def test_flops_of_a_reference(kind, n_passes, plain, tmp_path):
    """KTO runs the model and its reference over prompts with answers to others, too."""
    trainer, _ = trainer_of(kind, plain, tmp_path)
    batch = trainer.data_collator([*trainer.train_dataset])
    passes = trainer.objective.list_frozen_passes([batch])
    assert len(passes) == n_passes
    flops = []
    for frozen in ((), passes):
        before = trainer.trained.model_flops
        trainer.counts.add([batch], None, frozen, trainer.accelerator)
        flops.append(trainer.trained.model_flops - before)
    forward = 0.32 * n_passes  # of a pass: a forward is a third of it, adapters and first layers aside
    assert forward <= flops[1] / flops[0] - 1 <= 1.6 * forward


def test_documents_of_equal_tokens_and_other_labels_are_others():
    """Or a cache would give back the rows of the other ones."""
    other = [row | {"label": not row["label"]} for row in LABELLED]
    assert rows_hash(documents("kto", LABELLED)) != rows_hash(documents("kto", other))


def test_no_step_waits(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_hooks.PatchedTraining, "on_optimizer_step", lambda *_, **__: None)
    for kind in ("sigmoid", "kto", "orpo"):
        trainer, _ = trainer_of(kind, plain, tmp_path, None, 4, waits := Reads())
        trainer.train()
        assert waits.functions
        assert not waits.functions - ON_THE_HOST


def turns(*texts):
    return [{"role": role, "content": x} for role, x in zip(("user", "assistant") * 2, texts, strict=False)]


ROWS = {
    "text": PAIRS,
    "text without prompts": [
        {"chosen": "ab cd", "rejected": "ab ce f"},
        {"chosen": "x yz", "rejected": "x y"},
    ],
    "turns": [{"prompt": turns("q"), "chosen": turns("", "a")[1:], "rejected": turns("", "bc")[1:]}],
    "conversations": [
        {"chosen": turns("q", "a", "r", "b"), "rejected": turns("q", "a", "r", "cd")},
        {"chosen": turns("q", "a", "r", "b"), "rejected": turns("q", "x")},
    ],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_documents_are_those_of_trl(rows, plain, tmp_path):
    theirs = trainer_of_trl("sigmoid", plain, tmp_path, rows).train_dataset
    for ours_of_row, row in zip(documents("dpo", rows), theirs, strict=True):
        parts = [row[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        assert ours_of_row["input_ids"] == parts[0] + parts[1] + parts[2]
        assert ours_of_row["parts"] == [part for part, ids in enumerate(parts) for _ in ids]
        assert ours_of_row["labels"] == [-100] * len(parts[0]) + parts[1] + parts[2]


def test_labelled_answers_may_follow_an_instruction():
    row = {"instruction": "q", "input": "r", "output": "a", "label": True}
    pair = {"instruction": "q", "input": "r", "chosen": "a", "rejected": "b"}
    (labelled,), (paired,) = documents("kto", [row]), documents("dpo", [pair])
    n = len(labelled["input_ids"])
    assert labelled["input_ids"] == paired["input_ids"][:n]
    assert labelled["parts"] == paired["parts"][:n]
    assert paired["parts"][n:] == [2, 2]


def test_a_prompt_that_both_conversations_repeat_is_there_once():
    row = ROWS["conversations"][0]
    repeated = [row | {"prompt": row["chosen"][:-1]}]
    assert documents("dpo", repeated).to_list() == documents("dpo", [row]).to_list()


def test_an_answer_begins_where_the_tokens_of_both_differ(plain, tmp_path):
    """Here one of them has a token together with the end of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    rows = [{"prompt": "Sort the wor", "chosen": "ds: car", "rejected": " ds"}]
    (row,) = trainer_of_trl("sigmoid", plain, tmp_path, rows, tokenizer).train_dataset
    (document,) = documents("dpo", rows, tokenizer=tokenizer)
    assert len(row["prompt_ids"]) < len(tokenizer(rows[0]["prompt"])["input_ids"])
    assert document["input_ids"] == row["prompt_ids"] + row["chosen_ids"] + row["rejected_ids"]
    assert document["parts"].count(0) == len(row["prompt_ids"])


def test_labelled_documents_are_those_of_trl(plain, tmp_path):
    """With the completion before for the KL term, cut where it does not fit."""
    rows = [{"prompt": turns(p["prompt"]), "completion": turns("", p["completion"])[1:], "label": p["label"]}
            for p in LABELLED]  # fmt: skip
    theirs = trainer_of_trl("kto", plain, tmp_path, rows).train_dataset
    n_longest = max(len(row["prompt_ids"] + row["completion_ids"]) for row in theirs)
    for document, row in zip(documents("kto", rows, n_longest), theirs, strict=True):
        own = row["prompt_ids"] + row["completion_ids"]
        assert document["input_ids"] == own + row["KL_completion_ids"][: n_longest - len(own)]
        part = 1 if row["label"] else 2
        expected = [0] * len(row["prompt_ids"]) + [part] * len(row["completion_ids"])
        assert document["parts"] == expected + [3] * (len(document["input_ids"]) - len(own))
        assert document["labels"] == [
            token if 0 < of < 3 else -100
            for token, of in zip(document["input_ids"], document["parts"], strict=True)
        ]
