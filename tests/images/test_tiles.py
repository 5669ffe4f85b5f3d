"""Images in tiles and in sizes of their own: ids and pixels are those of transformers' own processors."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import error
from tiny_tiles import ROWS, alone, each_family, theirs, tile_config, tile_processor, tile_tokenizer
from tiny_vision import picture

from unsloth_pack import InputError, VisionDataCollator
from unsloth_pack.images.families import make_image_family
from unsloth_pack.images.reading import ImageSource
from unsloth_pack.images.tokens import IMAGE_TOKENS, ImageTokenIds


def test_what_stands_around_an_image_may_merge_with_its_marks():
    tokens = VisionDataCollator(tile_config("gemma3"), tile_processor("gemma3"))([ROWS[0]])["input_ids"][0]
    begin = int((tokens == tile_tokenizer("gemma3").convert_tokens_to_ids("<start_of_image>")).nonzero()[0])
    assert (
        tile_tokenizer("gemma3").decode(tokens[begin - 1]) == "\n\n\n"
    )  # the template's and two of the image


@each_family
def test_ids_and_pixels_equal_those_of_transformers(name):
    oracle, ours = theirs(name), tile_processor(name)
    collate = VisionDataCollator(tile_config(name), ours)
    for row in ROWS:
        wanted, batch, again = alone(oracle, row), collate([row]), alone(ours, row)
        assert batch["input_ids"].tolist() == wanted["input_ids"].tolist()
        assert {*again} == {*wanted}
        assert all(torch.equal(again[key], wanted[key]) for key in wanted)
        if "pixel_values" in wanted:
            pixels = wanted["pixel_values"].reshape(batch["pixel_values"].shape)  # LLaVA's come with padding
            if name == "mistral3":  # the tower looks at no padding behind an image
                for image, (height, width) in zip(batch["pixel_values"], batch["image_sizes"], strict=True):
                    image[:, height:], image[:, :, width:] = 0, 0
            assert error(batch["pixel_values"], pixels) < 1e-6
            assert wanted.get("pixel_attention_mask", torch.ones(1)).all()  # so it is left out
        for key in {"image_sizes", "batch_num_images"} & {*wanted}:
            assert batch[key].tolist() == wanted[key].tolist()


@each_family
def test_tokens_from_the_header_are_those_of_transformers(name):
    oracle, config = theirs(name), tile_config(name)
    has_edge = "longest_edge" in oracle.image_processor.size
    ids = ImageTokenIds(config, oracle.tokenizer)
    sides = st.integers(1, 90)

    @settings(deadline=None, max_examples=40, derandomize=True)
    @example(30, 80, False, None, 40)  # Idefics' second resizing makes a line of tiles more
    @example(80, 30, False, None, 40)
    @given(
        height=sides,
        width=sides,
        several=st.booleans(),
        most=st.none() | st.integers(1, 3000),
        edge=st.sampled_from((48, 40, 25)),  # a number of tiles, or not
    )
    def check(height, width, several, most, edge):
        if has_edge:
            oracle.image_processor.size = {"longest_edge": edge}
        make = make_image_family(config, oracle.image_processor)
        of_document = 1 + several
        source = ImageSource(0, "image", picture(height, width))
        if name == "mistral3" and edge < max(height, width) / min(height, width):
            with pytest.raises(InputError, match="would be less than one pixel high or wide"):
                make.cut(source, (height, width))
            return
        cut = make.cut(source, (height, width), None, of_document)
        images = [[source.content] * of_document]
        text = IMAGE_TOKENS[name].in_text * of_document
        wanted = oracle(images=images, text=[text], return_tensors="pt")["input_ids"][0]
        if IMAGE_TOKENS[name].in_template:  # the marks are in the text before ids are made of it
            wanted = wanted[wanted == ids.placeholder]
        assert [*ids.encode(cut)] * of_document == wanted.tolist()
        # elsewhere their forecast is another than what they make
        has_forecast = name != "smolvlm" and edge == 48 and min(height, width) > 4
        if has_forecast and not (several and name == "llava_onevision"):
            forecast = oracle._get_num_multimodal_tokens([(height, width)])["num_image_tokens"]
            assert forecast == [len(ids.encode(cut))]
        assert make(source, None, of_document).cut == cut
        if name == "mistral3" and max(height, width) > 8 * min(height, width):
            return  # too thin to be made much smaller
        small = make.cut(source, (height, width), most, of_document)
        made = make(source, most, of_document)
        assert made.cut == small
        assert len(ids.encode(small)) <= len(ids.encode(cut))

    check()
