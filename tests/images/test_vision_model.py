"""`FastVisionModel`: what is loaded, which parts train, and what is saved."""

import numpy as np
import pytest
import torch
from image_models import made
from peft import PeftModel
from tiny_vision import asked, picture, save_vision_model
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from unsloth_pack import FastVisionModel, InputError, VisionDataCollator, patch_model
from unsloth_pack.lora.trained_parts import (
    TrainedParts,
    VisionParts,
    vision_targets,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_vision_model(tmp_path_factory.mktemp("vision") / "model"))


def load(folder, **options):
    return FastVisionModel.from_pretrained(folder, max_seq_length=512, dtype="float32", **options)


def adapted(model):
    """Paths of the layers that have an adapter."""
    return {
        name.rpartition(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in model.named_parameters()
        if ".lora_A." in name
    }


def trained_whole(model):
    return {
        name.partition(".modules_to_save")[0].removeprefix("base_model.model.")
        for name, p in model.named_parameters()
        if p.requires_grad and ".lora_" not in name
    }


def test_a_model_and_its_processor(folder):
    model, processor = load(folder, max_pixels=60 * 60, min_pixels=28 * 28)
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert not any(p.requires_grad for p in model.parameters())
    assert processor.image_processor.size == {"shortest_edge": 784, "longest_edge": 3600}
    collate = VisionDataCollator(model, processor)
    batch = collate([asked(picture(300, 300), "what?")])
    assert np.prod(batch["image_grid_thw"]) == 16
    text = processor.apply_chat_template(
        asked("hello")["messages"][:1], tokenize=False, add_generation_prompt=True
    )
    ids = processor.tokenizer(text, return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 3


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("options", "tower", "language", "aligner"),
    [
        ({}, set(), ATTENTION | MLP, "full"),
        (dict(finetune_aligner=False), set(), ATTENTION | MLP, False),
        (dict(finetune_aligner="lora"), set(), ATTENTION | MLP, "lora"),
        (dict(finetune_vision_layers=True), {"qkv", "proj"} | MLP, ATTENTION | MLP, "full"),
        (dict(finetune_mlp_modules=False), set(), ATTENTION, "full"),
        (
            dict(finetune_vision_layers=True, finetune_language_layers=False, finetune_mlp_modules=False),
            {"qkv", "proj"},
            set(),
            "full",
        ),
        (dict(finetune_language_layers=False, finetune_aligner="lora"), set(), set(), "lora"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_adapters_go_on_the_chosen_parts_alone(folder, options, tower, language, aligner):
    model = FastVisionModel.get_peft_model(load(folder)[0], r=4, **options)
    paths = adapted(model)
    of_tower = {path for path in paths if path.startswith("model.visual.blocks")}
    of_aligner = {path for path in paths if path.startswith("model.visual.merger")}
    of_language = {path for path in paths if path.startswith("model.language_model")}
    assert paths == of_tower | of_aligner | of_language
    assert {path.rpartition(".")[2] for path in of_tower} == tower
    assert {path.rpartition(".")[2] for path in of_language} == language
    assert len(of_language) == 3 * len(language)  # in every layer
    assert len(of_tower) == 2 * len(tower)
    assert bool(of_aligner) == (aligner == "lora")
    assert trained_whole(model) == ({"model.visual.merger"} if aligner == "full" else set())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(finetune_aligner="whole"), "finetune_aligner is 'whole'; give 'full', 'lora' or False"),
        (dict(finetune_language_layers=False, finetune_aligner=False), "leave no layer for an adapter"),
        (dict(target_modules=["q_proj", "gate_proj"]), "may also mean layers of the tower"),
        (dict(modules_to_save=["no_such"]), "names 'no_such'"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted(folder, options, message):
    with pytest.raises(InputError, match=message):
        FastVisionModel.get_peft_model(load(folder)[0], **options)


def test_rows_of_text_train_and_the_adapter_comes_back(folder, tmp_path):
    """Rows with images are for the patched forward; a row of text goes through every layer but the tower."""
    model, processor = load(folder)
    model = FastVisionModel.get_peft_model(model, r=4, finetune_aligner="full")
    batch = VisionDataCollator(model, processor)([asked("one"), asked("two", answer="red")])
    loss = model(**batch).loss
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.01 * torch.randn_like(weight)
    model = FastVisionModel.for_inference(model)
    wanted = model(input_ids=batch["input_ids"]).logits
    model.save_pretrained(tmp_path / "adapter")
    processor.save_pretrained(tmp_path / "adapter")
    again, loaded = load(str(tmp_path / "adapter"))
    assert isinstance(again, PeftModel)
    assert torch.equal(again.eval()(input_ids=batch["input_ids"]).logits, wanted)
    of_tower = "model.visual.merger.modules_to_save.default.mlp.0.weight"
    states = [
        {n.removeprefix("base_model.model."): p for n, p in m.named_parameters()} for m in (model, again)
    ]
    assert torch.equal(states[0][of_tower], states[1][of_tower])
    assert loaded.tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_an_adapter_comes_back_with_the_limits_that_it_was_trained_with(folder, tmp_path):
    model, processor = load(folder, max_pixels=60 * 60)
    model = FastVisionModel.get_peft_model(model, r=4)
    model.save_pretrained(tmp_path)
    base = load(str(tmp_path))[1].image_processor.size  # an adapter without a processor has that of its base
    assert base["longest_edge"] > 3600
    processor.save_pretrained(tmp_path)
    assert load(str(tmp_path))[1].image_processor.size == processor.image_processor.size
    other = load(str(tmp_path), max_pixels=3000)[1]
    assert other.image_processor.size == processor.image_processor.size | {"longest_edge": 3000}
    (tmp_path / "processor_config.json").write_text('{"image_processor": 1')
    with pytest.raises(InputError, match=f"cannot load {tmp_path}: "):
        load(str(tmp_path))


def test_four_bits_leave_the_tower_as_it_is(folder):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, _ = load(folder, load_in_4bit=True)
    quantised = {n for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert quantised
    assert all(name.startswith("model.language_model.layers") for name in quantised)
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} - quantised
    assert {name for name in linear if not name.startswith("model.visual")} == {"lm_head"}
    assert len(linear) > 5


@pytest.mark.parametrize("model_type", ["gemma3", "smolvlm", "llava_onevision", "mistral3", "qwen2_5_vl"])
def test_names_of_layers_never_hit_a_tower(model_type):
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    import re

    parts = VisionParts.locate(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for trained, wanted in [
        (TrainedParts(), {"decoder"}),
        (TrainedParts(vision_layers=True), {"decoder", "tower"}),
        (TrainedParts(language_layers=False, vision_layers=True), {"tower"}),
        (TrainedParts(aligner="lora"), {"decoder", "aligner"}),
    ]:
        if trained.aligner == "lora" and "aligner" not in map(parts.kind, linear):  # Gemma 3's is one matrix
            with pytest.raises(InputError, match="the aligner has no linear layer"):
                vision_targets(model, trained)
            continue
        pattern, saved = vision_targets(model, trained)
        everything = {name for name, _ in model.named_modules()}
        assert all(name in linear for name in everything if re.fullmatch(pattern, name))
        hit = {name for name in linear if re.fullmatch(pattern, name)}
        assert {parts.kind(name) for name in hit} == wanted
        if trained.language_layers:
            assert {name for name in linear if parts.kind(name) == "decoder"} <= hit
        assert bool(saved) == (trained.aligner == "full")


@pytest.mark.parametrize(
    "asked",
    [{}, {"finetune_vision_layers": True}, {"finetune_aligner": "lora"}, {"finetune_mlp_modules": False}],
)
def test_parts_of_a_model_with_experts(asked):
    """Its experts are adapted with the language model's MLPs, and the other parts as they are asked for."""
    model = made("qwen3_vl_moe", torch.float32, "all")
    patch_model(model)
    model = FastVisionModel.get_peft_model(model, r=4, **asked)
    adapted = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" in name]
    assert any(".experts." in name for name in adapted) == asked.get("finetune_mlp_modules", True)
    assert any("visual.blocks" in name for name in adapted) == ("finetune_vision_layers" in asked)
    assert any("visual.merger" in name for name in adapted) == ("finetune_aligner" in asked)
    assert any("language_model" in name and "self_attn" in name for name in adapted)
