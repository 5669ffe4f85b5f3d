"""Packed rows with images under trainers: however a batch is cut, the update is the same."""

import pytest
import torch
from datasets import Dataset
from image_models import PARTS_OF_GRIDS, documents, labels_of, made, row_of, text_and_axes
from model_folder import byte_tokenizer
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from unsloth_pack import patch_model

DOCS = [doc for doc in documents("qwen3_vl", PARTS_OF_GRIDS * 2) if len(doc.ids) > 1]


def logged(kind, model, folder, rows_a_batch, accumulation):
    """Loss and norm of the gradient of two updates over all documents."""

    def collate(rows):
        docs = [DOCS[row["number"]] for row in rows]
        lengths = [len(doc.ids) for doc in docs]
        described = {"position_ids": text_and_axes(docs), "packed_seq_lengths": lengths}
        return row_of("qwen3_vl", model, docs) | {"labels": labels_of(docs)[None]} | described

    options = dict(output_dir=str(folder), max_steps=2, learning_rate=0.01, lr_scheduler_type="constant")
    options |= dict(per_device_train_batch_size=rows_a_batch, gradient_accumulation_steps=accumulation)
    options |= dict(logging_steps=1, report_to="none", remove_unused_columns=False, save_strategy="no")
    options |= dict(gradient_checkpointing=True, bf16=False, seed=1)
    given = {"train_dataset": Dataset.from_dict({"number": range(len(DOCS))}), "data_collator": collate}
    if kind == "TRL":
        config = SFTConfig(**options, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = SFTTrainer(model, config, processing_class=byte_tokenizer(), **given)
    else:
        trainer = Trainer(model, TrainingArguments(**options), **given)
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", ["TRL", "transformers"])
def test_accumulation_equals_one_batch(kind, tmp_path):
    logs = []
    for rows_a_batch, accumulation in ((12, 1), (3, 4), (1, 12)):
        model = made("qwen3_vl", torch.float32, "aligner")
        patch_model(model)
        logs.append(logged(kind, model, tmp_path, rows_a_batch, accumulation))
    for log in logs:
        for line, first in zip(log, logs[0], strict=True):
            assert line == pytest.approx(first, rel=1e-4)
    assert logs[0][1][0] < logs[0][0][0]
