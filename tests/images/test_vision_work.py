"""What the planner knows of the tower's work: patches that are seen, and multiplications that are made."""

import numpy as np
import pyarrow as pa
from datasets import Dataset
from tiny_vision import picture, vision_model, vision_processor

from unsloth_pack import FastVisionModel, patch_model
from unsloth_pack.data.rows import image_field
from unsloth_pack.images.families import make_image_family
from unsloth_pack.images.reading import ImageSource
from unsloth_pack.training.sampling import vision_work


def made(make, size, of_document):
    source = ImageSource(0, "image", picture(*size))
    return make(source, None, of_document), make.cut(source, size, None, of_document).tokens


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
    assert vision_work(rows_of(make, [], []), "packed_images", adapted, make).tolist() == [0, 0]
