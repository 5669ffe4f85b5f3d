"""Which parts of a model of vision and language a run trains."""

import pytest
import torch
from image_runs import flags, train
from safetensors.torch import load_file

from unsloth_pack import FastVisionModel
from unsloth_pack.cli import main

PARTS = {"visual.blocks": "tower", "visual.merger": "aligner", "visual.deepstack": "aligner"}


def parts_trained(weights):
    """The parts that an adapter has weights for, and whether by LoRA."""
    found = set()
    for name in weights:
        part = next((part for key, part in PARTS.items() if key in name), "decoder")
        found.add(f"{part}, {'lora' if '.lora_' in name else 'whole'}")
    return found


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--freeze_llm"], {"aligner, whole"}),
        (["--freeze_vit", "false", "--freeze_aligner"], {"tower, lora", "decoder, lora"}),
        (
            ["--freeze_vit=false", "--target_modules=q_proj"],
            {"tower, lora", "decoder, lora", "aligner, whole"},
        ),
        (["--freeze_vit=false", "--freeze_llm", "--target_modules=null"], {"tower, lora", "aligner, whole"}),
    ],
)
def test_parts_train_by_name(place, tmp_path, more, parts):
    trained = train(place, tmp_path / "out", "--max_steps", 1, *more)
    assert parts_trained(trained) == parts
    language = {
        name.split(".layers.0.")[1].split(".lora")[0] for name in trained if "language_model.layers.0" in name
    }
    assert language == {"self_attn.q_proj"} or "--target_modules=q_proj" not in more


def test_the_aligner_alone_and_then_the_language_model(place, tmp_path):
    """Two stages: the second trains on top of the first's aligner."""
    first = train(place, tmp_path / "first", "--freeze_llm")
    more = ["--init_adapter", tmp_path / "first", "--merge_init_adapter", "--freeze_aligner"]
    arguments = flags(place, tmp_path / "second", *more)
    assert main([each for each in arguments if each != str(place / "model") and each != "--model_name"]) == 0
    base = load_file(tmp_path / "second" / "base" / "model.safetensors")
    name = "visual.merger.linear_fc1.weight"
    key = next(key for key in first if key.endswith(name))
    assert torch.equal(base[f"model.{name}"], first[key])
    assert parts_trained(load_file(tmp_path / "second" / "adapter_model.safetensors")) == {"decoder, lora"}
    assert (tmp_path / "second" / "base" / "processor_config.json").is_file()


def test_parts_learn_at_rates_of_their_own(place, tmp_path):
    """At a rate of almost 0 a part stays as it was, and the others do not."""
    model, _ = FastVisionModel.from_pretrained(str(place / "model"), 256, "float32")
    before = dict(model.named_parameters())
    rates = ["--freeze_vit=false", "--aligner_lr=1e-30", "--vit_lr=0.1", "--warmup_steps=0"]
    trained = train(place, tmp_path / "out", *rates)
    for name, weight in trained.items():
        base = name.removeprefix("base_model.model.")
        if "visual.merger" in name or "deepstack" in name:
            assert torch.equal(weight, before[base])
    moved = {
        part: max(float(w.abs().max()) for name, w in trained.items() if key in name and "lora_B" in name)
        for part, key in {"tower": "visual.blocks", "decoder": "language_model"}.items()
    }
    assert moved["tower"] > 5 * moved["decoder"] > 0
