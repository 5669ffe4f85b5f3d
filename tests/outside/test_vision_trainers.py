"""Conversations with images under TRL, as notebooks write them, on a plain and on a patched model."""

import datasets
import pytest
import torch
from outside_models import DEVICE
from tiny_vision import picture, save_vision_model
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer

from unsloth_pack import FastVisionModel, UnslothVisionDataCollator


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_vision_model(tmp_path_factory.mktemp("vision") / "model"))


def rows(n=6):
    """As notebooks convert a data set of images and captions."""
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Describe it."},
                        {"type": "image", "image": picture(40 + 30 * i, 60, i)},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": f"Number {i}."}]},
            ]
        }
        for i in range(n)
    ]


def trainer_of(folder, tmp_path, given, processing, model=None, **options):
    _, processor = FastVisionModel.from_pretrained(folder, max_seq_length=512)
    if model is None:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        model.config.text_config.use_cache = False  # with a cache transformers does not see the boundaries
    cpu = {"use_cpu": True, "bf16": False} if DEVICE == "cpu" else {}
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=3, max_steps=2, report_to="none", save_strategy="no",
        remove_unused_columns=False, dataset_text_field="", dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False, max_length=512, logging_steps=1, learning_rate=1e-2, **cpu, **options,
    )  # fmt: skip
    return SFTTrainer(
        model=model,
        train_dataset=given,
        processing_class=processor if processing == "processor" else processor.tokenizer,
        data_collator=UnslothVisionDataCollator(model, processor),
        args=args,
    )


@pytest.mark.parametrize("processing", ["processor", "tokenizer"])
def test_trl_trains_on_images_in_parts(folder, tmp_path, processing):
    trainer = trainer_of(folder, tmp_path, datasets.Dataset.from_list(rows()), processing)
    before = trainer.model.model.visual.merger.mlp[0].weight.detach().cpu().clone()
    trainer.train()
    assert trainer.state.global_step == 2
    assert not torch.equal(before, trainer.model.model.visual.merger.mlp[0].weight.cpu())


def test_rows_of_paths_in_a_data_set_and_workers(folder, tmp_path):
    given = []
    for i, row in enumerate(rows()):
        row["messages"][0]["content"][1]["image"].save(tmp_path / f"{i}.png")
        question = {"role": "user", "content": "<image>Describe it."}
        answer = {"role": "assistant", "content": f"Number {i}."}
        given.append({"messages": [question, answer], "images": [str(tmp_path / f"{i}.png")]})
    data = datasets.Dataset.from_list(given)
    losses = []
    for workers in (0, 2):
        trainer = trainer_of(
            folder, tmp_path / str(workers), data, "processor", dataloader_num_workers=workers
        )
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("aligner", ["full", "lora", False])
def test_from_loading_to_a_merged_model_that_answers(folder, tmp_path, aligner):
    model, processor = FastVisionModel.from_pretrained(folder, max_seq_length=512, dtype="float32")
    model = FastVisionModel.get_peft_model(model, r=8, finetune_aligner=aligner)
    trainer = trainer_of(folder, tmp_path, datasets.Dataset.from_list(rows()), "processor", model)
    trainer.train()
    first, last = (line["loss"] for line in trainer.state.log_history if "loss" in line)
    assert last < first
    FastVisionModel.for_inference(model)
    question = rows(1)[0]["messages"][:1]
    text = processor.apply_chat_template(question, add_generation_prompt=True)
    given = processor(text=text, images=[question[0]["content"][1]["image"]], return_tensors="pt").to(DEVICE)
    answer = model.generate(**given, max_new_tokens=4, do_sample=False)
    model.save_pretrained_merged(tmp_path / "merged", processor)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).to(DEVICE)
    assert torch.equal(merged.generate(**given, max_new_tokens=4, do_sample=False), answer)
