"""A packed row of conversations with images equals each alone, in a model that nothing has patched."""

import numpy as np
import pytest
import torch
from tiny import error
from tiny_vision import FAMILY, QWEN, asked, encoded, picture, vision_model, vision_processor
from torch.nn import functional as F

from unsloth_pack import UnslothVisionDataCollator, VisionDataCollator
from unsloth_pack.errors import InputError
from unsloth_pack.images.reading import UnreadableImage

ROWS = [
    asked(picture(70, 100), "what is it?"),  # an image first
    asked("no image at all", answer="None."),
    asked("look: ", picture(40, 200, 1), picture(64, 64, 2), " and", picture(33, 129, 3), answer="Three."),
    asked(picture(32, 32, 4), answer="x"),
    asked("an image last ", picture(250, 60, 5)),
]


def alone(model, collate, rows, pixels):
    """Loss, logits and pixel gradients of every row by itself, as transformers makes its positions."""
    batches = [collate([row]) for row in rows]
    counted = sum(int((batch["labels"][0, 1:] != -100).sum()) for batch in batches)
    logits, grads, loss = [], [], 0.0
    for batch in batches:
        ids, own = batch["input_ids"], {}
        if "pixel_values" in batch:
            values = batch["pixel_values"].to(model.dtype).requires_grad_(pixels)
            own = dict(pixel_values=values, image_grid_thw=batch["image_grid_thw"])
            own["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        model.model.rope_deltas = None  # transformers keeps those of the last call
        out = model(input_ids=ids, use_cache=False, **own).logits
        share = F.cross_entropy(out[0, :-1], batch["labels"][0, 1:], reduction="sum") / counted
        share.backward()
        loss += share.detach()
        logits.append(out[0].detach())
        if own:
            grads.append(own["pixel_values"].grad)
    return torch.cat(logits), loss, torch.cat(grads)


def packed(model, collate, rows):
    batch = collate(rows)
    batch["pixel_values"] = batch["pixel_values"].to(model.dtype).requires_grad_()
    labels = batch.pop("labels")[0]
    logits = model(**batch, use_cache=False).logits[0]
    loss = F.cross_entropy(logits[:-1], labels[1:])  # transformers' own would be in float32
    loss.backward()
    return logits.detach(), loss.detach(), batch["pixel_values"].grad


def measured(run, model_type, dtype):
    model = vision_model(model_type, dtype)
    collate = VisionDataCollator(model, vision_processor(model_type))
    results = run(model, collate)
    weights = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [each.double() for each in (*results, *weights.values())], ["logits", "loss", "pixels", *weights]


@pytest.mark.parametrize("model_type", FAMILY)
def test_a_packed_row_equals_its_documents_alone(model_type):
    def of_documents(model, collate):
        return alone(model, collate, ROWS, pixels=True)

    def of_row(model, collate):
        return packed(model, collate, ROWS)

    truth, names = measured(of_documents, model_type, torch.float64)
    plain, _ = measured(of_documents, model_type, torch.float32)
    ours, _ = measured(of_row, model_type, torch.float32)
    exact, same_names = measured(of_row, model_type, torch.float64)
    assert names == same_names
    # float64 rounds 2**29 times finer than float32
    worst = max(error(one, other) for one, other in zip(plain, truth, strict=True))
    for name, one, in_64, other in zip(names, ours, exact, truth, strict=True):
        assert error(in_64, other) <= worst * 2**-24, name
        assert error(one, other) <= 1.5 * worst, name


def test_what_the_batch_holds(collate, processor):
    batch = collate()(ROWS)
    lengths = batch["packed_seq_lengths"]
    starts = np.cumsum([0, *lengths[:-1]])
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert sum(lengths) == len(ids) == len(labels)
    assert all(isinstance(length, int) for length in lengths)
    assert batch["position_ids"].shape == (4, 1, len(ids))
    assert (labels[starts] == -100).all()
    vision = torch.isin(ids, torch.tensor(processor.tokenizer.convert_tokens_to_ids([*QWEN.texts])))
    assert vision.sum() > 20
    assert (labels[vision] == -100).all()
    others = torch.ones(len(ids), dtype=torch.bool)
    others[starts] = False
    assert (labels[others & ~vision] == ids[others & ~vision]).all()
    for begin, length in zip(starts, lengths, strict=True):
        assert batch["position_ids"][0, 0, begin : begin + length].tolist() == [*range(length)]
        assert (batch["position_ids"][1:, 0, begin] == 0).all()
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["image_grid_thw"].prod(1).sum() == len(batch["pixel_values"])
    text = collate()([ROWS[1]])
    assert {"pixel_values", "image_grid_thw"}.isdisjoint(text)


def test_only_answers_count_where_asked(collate, processor):
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = processor.tokenizer.encode("Three.", add_special_tokens=False)
    marked = collate(train_on_responses_only=True)([ROWS[2]])
    assert marked["labels"][marked["labels"] != -100].tolist() == [*answer, end]
    options = dict(instruction_part="<|im_start|>user\n", response_part="<|im_start|>assistant\n")
    found = collate(train_on_responses_only=True, **options)([ROWS[2]])
    assert found["labels"][found["labels"] != -100].tolist()[:7] == [*answer, end]
    assert found["labels"].shape == marked["labels"].shape
    pair = {"prompt": ROWS[2]["messages"][:1], "completion": ROWS[2]["messages"][1:]}
    of_pair = collate()([pair])
    assert of_pair["labels"][of_pair["labels"] != -100].tolist()[:7] == [*answer, end]
    assert of_pair["input_ids"].tolist() == marked["input_ids"].tolist()


def test_overlong_documents(collate):
    row = asked(picture(128, 128), "a question", answer="word " * 20)
    (length,) = collate()([row])["packed_seq_lengths"]
    with pytest.raises(InputError, match=rf"in a batch, row 0, .*{length} tokens with its images, max_seq"):
        collate(max_seq_length=length - 1)([row])
    cut = collate(max_seq_length=length - 30, overlong="truncate")
    batch = cut([row, ROWS[1]])
    assert batch["packed_seq_lengths"][0] == length - 30
    assert batch["input_ids"][0, : length - 30].tolist() == collate()([row])["input_ids"][0, :-30].tolist()
    assert cut.counts.truncated == 1
    with pytest.raises(InputError, match="cut before the end of an image"):
        collate(max_seq_length=20, overlong="truncate")([row])
    drop = collate(max_seq_length=length - 1, overlong="drop")
    assert drop([row, ROWS[1]])["packed_seq_lengths"] == drop([ROWS[1]])["packed_seq_lengths"]
    assert drop.counts.dropped == 1
    with pytest.raises(InputError, match="no document left"):
        drop([row])


def test_images_shrink_to_fit(collate):
    row = asked("two", picture(160, 130), "and", picture(40, 40, 1), answer="word")
    batch = collate()([row])
    (length,) = batch["packed_seq_lengths"]
    text, made = length - int(batch["image_grid_thw"].prod(1).sum()) // 4, []
    for limit in range(text + 2, length):
        shrink = collate(max_seq_length=limit, overlong="shrink")
        got = shrink([row])
        assert got["packed_seq_lengths"][0] <= limit
        assert (got["input_ids"] == batch["input_ids"][0, 12]).sum() == got["image_grid_thw"].prod(
            1
        ).sum() // 4
        assert shrink.counts.shrunk == 1
        made.append(got["packed_seq_lengths"][0])
    assert made == sorted(made)
    assert made[0] + 10 < made[-1]  # no further than they have to
    assert got["image_grid_thw"].tolist()[1] == batch["image_grid_thw"].tolist()[1]  # the small one stays
    with pytest.raises(InputError, match="a document that is too long"):
        collate(max_seq_length=text + 1, overlong="shrink")([row])


@pytest.mark.parametrize("size", [(160, 130), (60, 400)])
def test_images_shrink_no_further_than_min_pixels(size):
    """A limit is rounded to whole tokens: what is left has the pixels all the same."""
    least, a_token = 5000, 32 * 32
    model, processor = vision_model(), vision_processor(min_pixels=least)
    row = asked("two", picture(*size), "and", picture(120, 90, 1), answer="word")
    whole = VisionDataCollator(model, processor)([row])
    (length,) = whole["packed_seq_lengths"]

    def shrunk(limit):
        return VisionDataCollator(model, processor, max_seq_length=limit, overlong="shrink")([row])

    text = length - int(whole["image_grid_thw"].prod(1).sum()) // 4
    shortest = text + 2 * -(-least // a_token)
    made = []
    with pytest.raises(InputError, match="a document that is too long"):
        made += (shrunk(limit) for limit in range(length - 1, 0, -1))
    for limit, batch in zip(range(length - 1, 0, -1), made, strict=False):
        assert shortest <= batch["packed_seq_lengths"][0] <= limit
        assert (batch["image_grid_thw"].prod(1) // 4 * a_token >= least).all()
    assert made
    assert limit == made[-1]["packed_seq_lengths"][0]  # none that would fit is refused


def test_broken_images_are_counted(collate):
    data = encoded(picture(64, 64), "JPEG")
    png = encoded(picture(64, 64), "PNG")
    spoilt = png[: len(png) // 2] + bytes(10) + png[len(png) // 2 + 10 :]  # which shows as it is decoded
    rows = [asked(data), asked(b"no image"), asked(data[: len(data) // 2]), asked(spoilt), asked("text")]
    skip = collate(skip_broken_images=True)
    assert len(skip(rows)["packed_seq_lengths"]) == 2
    assert (skip.counts.broken, skip.counts.documents, skip.counts.images) == (3, 2, 1)
    with pytest.raises(InputError, match=r"row 1, .*no image of a known format"):
        collate()(rows)
    with pytest.raises(InputError, match="too long"):  # another mistake is none of these
        collate(skip_broken_images=True, max_seq_length=10)(rows)


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("data:image/png;base64,@@@", "not base64"),
        ("gone.png", "a path that is no file"),
        (encoded(picture(1, 1000)), "the processor refuses"),
    ],
)
def test_an_image_that_cannot_be_used_is_broken(image, says, collate, tmp_path):
    """One of them ends no run that skips broken images."""
    rows = [asked(picture(64, 64)), {**asked("<image>"), "images": [image]}]
    skip = collate(skip_broken_images=True, image_folder=tmp_path)
    assert len(skip(rows)["packed_seq_lengths"]) == 1
    assert skip.counts.broken == 1
    with pytest.raises(UnreadableImage, match=says):
        collate(image_folder=tmp_path)(rows)


def test_unsloths_arguments(collate, processor):
    assert UnslothVisionDataCollator is VisionDataCollator
    made = collate(formatting_func=lambda example: example["row"])
    rows = [{"row": row} for row in ROWS]
    assert torch.equal(made(rows)["input_ids"], collate()(ROWS)["input_ids"])
    collate(force_match=True, num_proc=None, ignore_index=-100, pad_to_multiple_of=None, resize_dimension=0)
    for options, message in [
        (dict(resize="min"), "resize is 'min'.*give max_pixels"),
        (dict(overlong="split"), "overlong is 'split'; choose one of error"),
        (dict(image_folder="no/such"), "image_folder is 'no/such', which is no folder"),
    ]:
        with pytest.raises(InputError, match=message):
            collate(**options)


def test_a_processor_of_another_model():
    with pytest.raises(InputError, match="patch_size is 14, the model's patch_size 16"):
        VisionDataCollator(vision_model(), vision_processor("qwen2_vl"))
    with pytest.raises(InputError, match="which has no tokenizer"):
        VisionDataCollator(vision_model(), vision_processor().tokenizer)
    model = vision_model()
    model.config.image_token_id = 5
    with pytest.raises(InputError, match=r"gives <\|image_pad\|> the id .*the model reads 5"):
        VisionDataCollator(model, vision_processor())
