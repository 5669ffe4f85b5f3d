"""What the planner knows of the tower's work: patches that are seen, and multiplications that are made."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from test_tiles import each_family
from tiny_tiles import PATCH, tile_config, tile_image_processor, tile_model, tile_processor
from tiny_vision import FAMILY, asked, picture, vision_model, vision_processor
from torch.utils.flop_counter import FlopCounterMode

from unsloth_pack import FastVisionModel, VisionDataCollator, patch_model
from unsloth_pack.data.rows import image_field
from unsloth_pack.images.families import make_image_family
from unsloth_pack.images.reading import ImageSource
from unsloth_pack.training.sampling import vision_work

SIZES = [(30, 70), (16, 16), (90, 20), (40, 41)]


def made(make, size, of_document):
    source = ImageSource(0, "image", picture(*size))
    return make(source, None, of_document), make.cut(source, size, None, of_document).tokens


@each_family
@pytest.mark.parametrize("of_document", [1, 2])
def test_patches_are_those_that_the_tower_sees(name, of_document):
    make = make_image_family(tile_config(name), tile_image_processor(name))
    for size in SIZES:
        image, tokens = made(make, size, of_document)
        tiles, _, height, width = image.values.shape
        of_tile = (height // PATCH) * (width // PATCH)
        assert make.seen(tokens, size, of_document) == (tiles * of_tile, of_tile)


def rows_of(make, *rows):
    """Rows, each of documents, each of sizes of images."""
    found = [
        [
            {
                "document": document,
                "height": height,
                "width": width,
                "tokens": made(make, (height, width), len(sizes))[1],
            }
            for document, sizes in enumerate(row)
            for height, width in sizes
        ]
        for row in rows
    ]
    return Dataset(pa.table({"packed_images": pa.array(found, image_field(True).type)}))


def counted(model, call):
    """Multiplications of the decoder and of the tower in a forward pass."""
    with torch.no_grad(), FlopCounterMode(display=False, depth=20) as counter:
        model(**call)
    totals = {
        path.rpartition("Generation.")[2]: sum(kinds.values())
        for path, kinds in counter.get_flop_counts().items()
    }
    decoder = next(totals[p] for p in totals if p.endswith(("model.language_model", "model.text_model")))
    tower = next(totals[p] for p in totals if p.endswith(("vision_tower", "vision_model", "model.visual")))
    # Small beside the layers of a real tower: what makes patches, and what joins them
    tower -= sum(total for path, total in totals.items() if path.endswith(("patch_embed", "visual.merger")))
    return tower / decoder


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_vl", "idefics3", "mistral3", "gemma3"])
def test_the_estimate_is_near_what_is_computed(name):
    if name in FAMILY:
        model, processor = vision_model(name), vision_processor(name)
    else:
        model, processor = tile_model(name), tile_processor(name)
    row = asked(picture(40, 90), "what is it?")
    batch = VisionDataCollator(model, processor)([row])
    n_tokens = batch["input_ids"].shape[1]
    call = {k: v for k, v in batch.items() if k not in ("labels", "packed_seq_lengths")}
    model.set_attn_implementation("eager")  # the counter misses attention in one call on a CPU
    make = make_image_family(model.config, processor.image_processor)
    (work,) = vision_work(rows_of(make, [[(40, 90)]]), "packed_images", model, make)
    # All weights train here, so the ratio is that of forward passes; the rest is attention over text
    assert work / n_tokens == pytest.approx(counted(model, call), rel=0.35)


def test_a_frozen_tower_has_no_backward_pass():
    model, processor = vision_model(), vision_processor()
    make = make_image_family(model.config, processor.image_processor)
    rows = rows_of(make, [[(40, 90)], []], [], [[], [(64, 64), (32, 96)]])
    patch_model(model)
    trained = vision_work(rows, "packed_images", model, make)
    assert trained[1] == 0
    assert (trained[[0, 2]] > 0).all()
    adapted = FastVisionModel.get_peft_model(model, r=4)
    frozen = vision_work(rows, "packed_images", adapted, make)
    np.testing.assert_allclose(trained / 2, frozen, rtol=0.2)  # but for the weights of the adapter
    assert vision_work(rows_of(make, [], []), "packed_images", adapted, make) is None
