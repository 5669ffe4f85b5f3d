"""Packed rows of models with ordinary positions, whose images come as tiles or with sizes."""

import pytest
from image_models import documents, lengths_of, patched, row_of
from tables import table

from unsloth_pack.errors import InputError

SEVERAL = [[1, (1, 2), 3], [2, (1, 1), 2, (2, 1), 1]]


def without(name):
    return lambda row: row.pop(name)


def replaced(name, change):
    def act(row):
        row[name] = change(row[name])

    return act


def _cut(row):
    row["packed_seq_lengths"] = [3, sum(row["packed_seq_lengths"]) - 3]


def _zeros(row):
    row["pixel_values"][:, 1] = 0


REFUSED = {
    ("llava_onevision", "several images a document"): (
        without("batch_num_images"),
        "one number of images for each document",
    ),
    ("llava_onevision", "a size less"): (
        replaced("image_sizes", lambda sizes: sizes[:-1]),
        "pixel_values holds 3 ",
    ),
    ("mistral3", "larger than its pixels"): (
        replaced("image_sizes", lambda sizes: sizes * 2),
        "give the sizes that the model's processor has made",
    ),
    ("mistral3", "sizes of others"): (
        replaced("image_sizes", lambda sizes: sizes[[1, 0, 2]]),
        "document 0 of a row ends inside image 1",
    ),
    ("idefics3", "four dimensions"): (
        replaced("pixel_values", lambda pixels: pixels[0]),
        "give a tensor of 5 dimensions",
    ),
    ("idefics3", "zeros"): (_zeros, "a row holds"),
    ("internvl", "a tile less"): (replaced("pixel_values", lambda pixels: pixels[1:]), "a row holds"),
    ("internvl", "a document ends inside a tile"): (_cut, "document 0 of a row ends inside image 0"),
    ("gemma3", "another size"): (
        replaced("pixel_values", lambda pixels: pixels[:, :, :-4]),
        "pixel_values is [3, 3, 12, 16], the tower takes images of [16, 16]",
    ),
    ("internvl", "videos"): (
        lambda row: row.update(pixel_values_videos=row["pixel_values"]),
        "comes with pixel_values_videos; only images are packed, as pixel_values",
    ),
}


def test_counts_of_several_documents_without_boundaries_are_refused():
    model, docs = patched("llava_onevision"), documents("llava_onevision", SEVERAL)
    with pytest.raises(InputError, match="batch_num_images is of 2 documents, the input ids have 1 rows"):
        model(**row_of("llava_onevision", model, docs))


@table(("name", "case"), REFUSED)
def test_refused(name, case):
    model, docs = patched(name), documents(name, SEVERAL)
    row = row_of(name, model, docs) | {"packed_seq_lengths": lengths_of(docs)}
    if case == "a tile less":
        row.pop("pixel_attention_mask", None)
    change, said = REFUSED[name, case]
    change(row)
    with pytest.raises(InputError) as caught:
        model(**row)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_counts_of_other_documents_are_refused():
    docs = documents("llava_onevision", [[(1, 1), (1, 1), 1], [(1, 1), 1, (1, 1), (1, 1)]])
    model = patched("llava_onevision")
    row = row_of("llava_onevision", model, docs) | {"packed_seq_lengths": lengths_of(docs)}
    with pytest.raises(
        InputError, match=r"batch_num_images is \[3, 2\], the documents of the row hold \[2, 3\]"
    ):
        model(**row | {"batch_num_images": [3, 2]})
    model(**row | {"batch_num_images": [2, 0, 3]})
