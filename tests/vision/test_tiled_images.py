"""Packed rows of models with ordinary positions, whose images come as tiles or with sizes."""

import pytest
import torch
from image_models import (
    IMAGE,
    PATCH,
    SIDE,
    documents,
    lengths_of,
    made,
    row_of,
    run_alone,
    run_packed,
    tower_of,
)
from tables import table
from test_wrappers import wrapped
from tiny import error
from transformers.models.pixtral import modeling_pixtral

from unsloth_pack import patch_model
from unsloth_pack.errors import InputError

# The tower


def test_a_tower_of_sizes_makes_no_mask_of_all_patches(monkeypatch):
    model, docs = patched("mistral3"), documents("mistral3")
    monkeypatch.setattr(modeling_pixtral, "generate_block_attention_mask", None)
    run_packed("mistral3", model, docs)


def test_a_tower_with_dropout_attends_as_transformers_does():
    model, docs = made("mistral3", torch.float64).eval(), documents("mistral3")
    truth = run_alone("mistral3", model, docs)
    tower_of(model).config.attention_dropout = 0.1
    patch = patch_model(model)
    assert "attention_dropout is 0.1" in patch.report.not_fused["tower"]
    assert error(run_packed("mistral3", model, docs).logits, truth.logits) < 1e-6


# What is refused


def patched(name, *args):
    model = made(name, *args)
    patch_model(model)
    return model


SEVERAL = [[1, (1, 2), 3], [2, (1, 1), 2, (2, 1), 1]]


def without(name):
    return lambda row: row.pop(name)


def replaced(name, change):
    def act(row):
        row[name] = change(row[name])

    return act


def _cut(row):
    row["packed_seq_lengths"] = [3, sum(row["packed_seq_lengths"]) - 3]


def _shifted(row):  # one tile of the second document would go to the first
    first, second = row["packed_seq_lengths"]
    row["packed_seq_lengths"] = [first + 5, second - 5]


def _embeddings(row):
    row["inputs_embeds"] = torch.zeros(*row.pop("input_ids").shape, 64)


def _zeros(row):
    row["pixel_values"][:, 1] = 0


REFUSED = {
    ("llava_onevision", "several images a document"): (
        without("batch_num_images"),
        "batch_num_images is None, the number of images of every document",
    ),
    ("llava_onevision", "wrong counts"): (
        replaced("batch_num_images", lambda counts: counts.flip(0)),
        "batch_num_images is [2, 1]",
    ),
    ("llava_onevision", "a size less"): (
        replaced("image_sizes", lambda sizes: sizes[:-1]),
        "pixel_values holds 3 ",
    ),
    ("mistral3", "no sizes"): (without("image_sizes"), "comes with images but no image_sizes"),
    ("mistral3", "sizes of nothing"): (
        replaced("image_sizes", lambda sizes: sizes * 0),
        "give whole numbers, as the model's processor makes them",
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
    ("idefics3", "zeros"): (_zeros, "an image of zeros counts as padding"),
    ("internvl", "a tile less"): (replaced("pixel_values", lambda pixels: pixels[1:]), "a row holds"),
    ("internvl", "a document ends inside a tile"): (_cut, "document 0 of a row ends inside image 0"),
    ("internvl", "a boundary late"): (_shifted, "document 0 of a row ends inside image 2"),
    ("internvl", "embeddings"): (_embeddings, "give input_ids"),
    ("gemma3", "another size"): (
        replaced("pixel_values", lambda pixels: pixels[:, :, :-4]),
        "pixel_values is [3, 3, 12, 16], the tower takes images of [16, 16]",
    ),
    ("gemma3", "types of others"): (
        replaced("token_type_ids", lambda types: types.roll(1, 1)),
        "token_type_ids of token 1 does not fit its id",
    ),
    ("gemma3", "types without images"): (
        replaced("token_type_ids", lambda types: types * 0 + 1),
        "token_type_ids of token 0 does not fit its id",
    ),
    ("internvl", "videos"): (
        lambda row: row.update(pixel_values_videos=row["pixel_values"]),
        "comes with pixel_values_videos; only images are packed, as pixel_values",
    ),
    ("idefics3", "features"): (
        lambda row: row.update(image_hidden_states=row["pixel_values"]),
        "comes with image_hidden_states; only images are packed, as pixel_values",
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


@pytest.mark.parametrize("name", ["gemma4", "qwen3_5"])
@pytest.mark.parametrize("argument", ["pixel_values", "pixel_values_videos"])
def test_models_that_pack_text_alone_say_so(name, argument):
    model = wrapped(name, torch.float32)
    patch_model(model)
    row = {"input_ids": torch.tensor([[5, IMAGE, 6, 7]]), argument: torch.zeros(1, 3, SIDE, PATCH)}
    with pytest.raises(InputError) as caught:
        model(**row, packed_seq_lengths=[2, 2])
    said = str(caught.value)
    assert f"a packed row comes with {argument}; a {type(model).__name__} packs rows of text alone" in said
    assert "give such examples unpacked" in said
