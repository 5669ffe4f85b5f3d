"""Images that a packed row holds are compared with their SHA-256 before they are decoded."""

import pytest
from tiny_vision import asked, encoded, picture, vision_config, vision_processor

from unsloth_pack.errors import InputError
from unsloth_pack.images.encoding import VisionEncoder
from unsloth_pack.images.families import make_image_family
from unsloth_pack.images.prepared import source_from_record, stored
from unsloth_pack.training.image_rows import COLUMN, ImageRowCollator

ONE, OTHER = (encoded(picture(64, 64, seed), "BMP") for seed in (0, 1))  # of one size


@pytest.fixture
def packed():
    """A packed row of one document, and what makes batches of it."""
    config, processor = vision_config(), vision_processor()
    make = make_image_family(config, processor.image_processor)
    encode = VisionEncoder(processor.tokenizer, config, make)
    (document,) = encode([asked(ONE)])
    images = [{"path": None, **stored(image, None)} for image in document.images]
    row = {"input_ids": document.ids, "labels": document.labels, COLUMN: images}
    return row, lambda **options: ImageRowCollator(make, encode.token_ids, None, **options)


def test_bytes_that_are_not_those_that_were_packed_are_refused(packed):
    row, collator = packed
    assert "pixel_values" in collator()([row])
    (image,) = row[COLUMN]
    assert len(ONE) == len(OTHER)
    image["bytes"] = OTHER
    with pytest.raises(InputError, match=r"^row 0, column 'messages': an image that has changed"):
        collator()([row])
    assert collator(skip_broken=True)([row])["broken_images"] == 1
    del image["sha256"]  # as in packs of before
    assert source_from_record(image, None).content == OTHER
