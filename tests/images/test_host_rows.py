"""A collator of a patched model describes its rows on the host: a step reads none of it from the device."""

import pickle

import pytest
import torch
from accelerate.utils import send_to_device
from device_reads import counted_reads
from tiny_tiles import ROWS, tile_model, tile_processor
from tiny_vision import vision_model, vision_processor

from unsloth_pack import InputError, VisionDataCollator, patch_model

DESCRIBED = {
    "qwen3_vl": {"image_grid_thw"},
    "idefics3": set(),
    "llava_onevision": {"image_sizes", "batch_num_images"},
    "internvl": set(),
    "mistral3": {"image_sizes"},
}
each_family = pytest.mark.parametrize("name", DESCRIBED)


def patched(name):
    model = vision_model(name) if name == "qwen3_vl" else tile_model(name)
    patch_model(model)
    return model, vision_processor(name) if name == "qwen3_vl" else tile_processor(name)


def readers(model, batch):
    """Loss of a step, and the functions of the package that read numbers that describe the row."""
    with counted_reads() as places:
        loss = model(**batch, use_cache=False).loss
    functions = ("_read_whole_numbers", "_find_placeholders", "copy_to_host")
    return loss.detach(), {place.split(":")[1] for place in places if place.split(":")[1] in functions}


@each_family
def test_nothing_that_describes_a_row_is_read_back(name):
    model, processor = patched(name)
    plain, host = (VisionDataCollator(given, processor)(ROWS) for given in (model.config, model))
    assert {key for key in plain if key in host and not torch.is_tensor(host[key])} == {
        "packed_seq_lengths",
        *DESCRIBED[name],
    }
    assert {*host} - {*plain} == {"packed_row"}
    wanted, read = readers(model, plain)
    assert "_find_placeholders" in read
    loss, read = readers(model, host)
    assert not read
    assert torch.equal(loss, wanted)
    # as a trainer sends a batch to its device, and as a worker of a loader sends one to its trainer
    for sent in (send_to_device(host, torch.device("cpu")), pickle.loads(pickle.dumps(host))):
        loss, read = readers(model, sent)
        assert not read
        assert torch.equal(loss, wanted)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda grids: [grids[0], grids[2], grids[1], *grids[3:]],
            "image 2 of a row has 3 tokens, which do not",
        ),
        (
            lambda grids: [[1, *grids[0][:0:-1]], *grids[1:]],
            "position_ids of token 8 are .* those of its images",
        ),
    ],
    ids=["exchanged", "on their side"],
)
def test_sizes_of_other_images_are_refused(change, says):
    """On their side, images have as many tokens in another shape, which only their positions tell."""
    model, processor = patched("qwen3_vl")
    batch = VisionDataCollator(model, processor)(ROWS)
    model(**batch, use_cache=False)
    with pytest.raises(InputError, match=says):
        model(**batch | {"image_grid_thw": change(batch["image_grid_thw"])}, use_cache=False)


@each_family
def test_ids_that_are_not_those_of_the_described_row_are_refused(name):
    model, processor = patched(name)
    batch = VisionDataCollator(model, processor)(ROWS)
    ids = batch["input_ids"]
    batch["input_ids"] = ids.roll(1, 1)
    with pytest.raises(InputError, match=r"tokens of input_ids are not what packed_row says") as caught:
        model(**batch, use_cache=False)
    assert "\n" not in str(caught.value)
