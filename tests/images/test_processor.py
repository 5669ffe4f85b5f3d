"""Patches, tokens and ids are those of transformers' own processors, which need torchvision to be made."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import error
from tiny_vision import FAMILY, asked, encoded, image_processor, picture, vision_config, vision_processor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)

from unsloth_pack import VisionDataCollator
from unsloth_pack.errors import InputError
from unsloth_pack.images.families import QwenVLImages
from unsloth_pack.images.processor import build_processor, limit_pixels, load_image_processor
from unsloth_pack.images.reading import ImageSource

THEIRS = dict(zip(FAMILY, (Qwen2VLProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor), strict=True))


def theirs(model_type):
    """transformers' processor without its video processor, which cannot be made without torchvision."""

    class WithoutVideos(THEIRS[model_type]):
        def check_argument_for_proper_class(self, name, argument):
            return None

    ours = vision_processor(model_type)
    return WithoutVideos(ours.image_processor, ours.tokenizer, None, ours.chat_template)


@pytest.mark.parametrize("model_type", FAMILY)
def test_ids_and_pixels_equal_those_of_transformers(model_type):
    from tiny_vision import vision_model

    images = [picture(70, 100), picture(33, 250, 1), picture(300, 300, 2)]
    row = asked("one ", images[0], " two ", images[1], images[2], " what?")
    oracle = theirs(model_type)
    text = oracle.apply_chat_template(row["messages"], tokenize=False)
    wanted = oracle(images=images, text=[text], return_tensors="pt")
    batch = VisionDataCollator(vision_model(model_type), vision_processor(model_type))([row])
    assert batch["input_ids"].tolist() == wanted["input_ids"].tolist()
    assert batch["image_grid_thw"].tolist() == wanted["image_grid_thw"].tolist()
    assert batch["pixel_values"].shape == wanted["pixel_values"].shape
    again = vision_processor(model_type)(images=images, text=[text], return_tensors="pt")
    assert again.keys() == wanted.keys() >= {"mm_token_type_ids"}
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    options = dict(tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True)
    one, other = (
        each.apply_chat_template(row["messages"][:1], **options)
        for each in (vision_processor(model_type), oracle)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    of_videos = {"second_per_grid_ts"}
    assert {*vision_processor(model_type).model_input_names} == {*oracle.model_input_names} - of_videos
    assert error(batch["pixel_values"], wanted["pixel_values"]) < 1e-6


@settings(deadline=None, max_examples=60)
@given(height=st.integers(1, 400), width=st.integers(1, 400), most=st.one_of(st.none(), st.integers(1, 30)))
def test_tokens_from_the_header_are_those_of_the_patches(height, width, most):
    if max(height, width) / min(height, width) > 190:
        return
    make = QwenVLImages(image_processor(), vision_config())
    limit = None if most is None else make.pixels_of_tokens(most)
    source = ImageSource(0, "image", picture(height, width))
    patches = make(source, limit)
    tokens = make.cut(source, (height, width), limit).tokens
    assert len(patches.values) == 4 * tokens == np.prod(patches.size)


@pytest.mark.parametrize("model_type", FAMILY)
def test_what_is_saved_can_be_loaded_by_transformers(model_type, tmp_path):
    ours = vision_processor(model_type)
    ours.image_processor.size = {"shortest_edge": 4096, "longest_edge": 40960}
    ours._of_videos = {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2}
    ours.save_pretrained(tmp_path)
    image_processor, tokenizer = (
        kind.from_pretrained(tmp_path) for kind in (AutoImageProcessor, AutoTokenizer)
    )
    assert image_processor.size == ours.image_processor.size
    assert tokenizer.get_vocab() == ours.tokenizer.get_vocab()
    assert tokenizer.chat_template == ours.chat_template
    for name in ("processor_config.json", "tokenizer_config.json"):
        saved = json.loads((tmp_path / name).read_text())
        assert saved["processor_class"] == THEIRS[model_type].__name__
    assert json.loads((tmp_path / "processor_config.json").read_text())["video_processor"]["fps"] == 2
    loaded = load_image_processor(str(tmp_path), vision_config(model_type))
    again = build_processor(str(tmp_path), loaded, tokenizer, vision_config(model_type))
    assert again._of_videos["fps"] == 2
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    one, two = (p(images=[picture(90, 64)], text=[text], return_tensors="pt") for p in (ours, again))
    assert torch.equal(one["input_ids"], two["input_ids"])
    assert torch.equal(one["pixel_values"], two["pixel_values"])


def test_limits_of_pixels(processor, tmp_path):
    made = limit_pixels(image_processor(), 2048, None)
    assert made.size == {"shortest_edge": 1024, "longest_edge": 2048}
    make = QwenVLImages(made, vision_config())
    source = ImageSource(0, "image", encoded(picture(300, 300)))
    assert make.cut(source, (300, 300)).tokens == 1 == len(make(source).values) // 4
    for most, least, message in [
        (1000, None, "one token is 1024 pixels"),
        (4096, 8192, "max_pixels is 4096, .* min_pixels 8192"),
    ]:
        with pytest.raises(InputError, match=message):
            limit_pixels(image_processor(), most, least)
    processor.save_pretrained(tmp_path)
    for name, value in (("max_pixels", 0), ("min_pixels", "many"), ("max_pixels", 1.5)):
        with pytest.raises(InputError, match=f"{name} is {value!r}"):
            load_image_processor(str(tmp_path), vision_config(), **{name: value})
