"""Models with images in tiles: loaded and saved with their processors, adapted, trained, and asked."""

import json
import shutil

import pytest
import torch
from tiny_tiles import (
    FAMILIES,
    ROWS,
    alone,
    each_family,
    save_tile_model,
    theirs,
    tile_model,
    tile_processor,
    tile_tokenizer,
)
from tiny_vision import asked, picture
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from unsloth_pack import FastVisionModel, InputError, VisionDataCollator, patch_model
from unsloth_pack.images.tokens import IMAGE_TOKENS


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved model of each family, made once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = str(save_tile_model(tmp_path_factory.mktemp(name) / "model", name))
        return made[name]

    return folder


def load(folder, **options):
    return FastVisionModel.from_pretrained(folder, max_seq_length=512, dtype="float32", **options)


@each_family
def test_a_model_comes_with_its_processor_and_is_saved_with_it(name, folders, tmp_path):
    model, processor = load(folders(name))
    collate = VisionDataCollator(model, processor)
    wanted = alone(theirs(name), ROWS[2])
    assert collate([ROWS[2]])["input_ids"].tolist() == wanted["input_ids"].tolist()
    model = FastVisionModel.get_peft_model(model, r=4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.01 * torch.randn_like(weight)
    model.save_pretrained_merged(tmp_path / "merged", processor)
    saved = json.loads((tmp_path / "merged/processor_config.json").read_text())
    assert saved["processor_class"] == type(theirs(name)).__mro__[1].__name__ == IMAGE_TOKENS[name].processor
    sizes = vars(theirs(name))
    kept = {key: value for key, value in saved.items() if key in sizes and not isinstance(value, dict)}
    assert kept
    assert kept == {key: sizes[key] for key in kept}
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    image_processor, tokenizer = (
        kind.from_pretrained(tmp_path / "merged") for kind in (AutoImageProcessor, AutoTokenizer)
    )
    assert image_processor.to_dict() == processor.image_processor.to_dict()
    assert tokenizer.chat_template == FAMILIES[name].template
    again, loaded = load(str(tmp_path / "merged"))
    batch = VisionDataCollator(plain, loaded)([ROWS[2]])
    del batch["labels"], batch["packed_seq_lengths"]
    torch.testing.assert_close(again(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-5)


@each_family
def test_overlong_documents(name):
    model, processor = tile_model(name), tile_processor(name)

    def collate(**options):
        return VisionDataCollator(model, processor, **options)

    row = asked("two", picture(60, 80), "and", picture(40, 40, 1), answer="word " * 4)
    (length,) = collate()([row])["packed_seq_lengths"]
    cut = collate(max_seq_length=length - 9, overlong="truncate")([row])
    assert cut["input_ids"][0].tolist() == collate()([row])["input_ids"][0, :-9].tolist()
    if name in ("llava_onevision", "gemma3"):
        with pytest.raises(InputError, match="overlong is 'shrink', and the model's processor has no size"):
            collate(overlong="shrink")
        return
    limits, fitted = range(length - 1, 0, -1), []

    def shrunk(limit):
        return collate(max_seq_length=limit, overlong="shrink")([row])["packed_seq_lengths"][0]

    with pytest.raises(InputError, match="a document that is too long"):
        fitted += map(shrunk, limits)
    assert all(got <= limit for limit, got in zip(limits, fitted, strict=False))
    assert fitted == sorted(fitted, reverse=True)
    assert len({*fitted}) > 1
    least = length - len(fitted)
    patch_model(model)
    limited = collate(max_seq_length=least, overlong="shrink")([row, ROWS[1]])
    assert model(**limited).loss.isfinite()  # the model sees as many tokens as there are


def test_processors_of_other_sizes():
    for name, options, message in [
        (
            "idefics3",
            dict(max_image_size={"longest_edge": 32}),
            "max_image_size is 32, the model's image_size 16",
        ),
        ("internvl", dict(size={"height": 32, "width": 32}), "size is .*32.*, the model's tiles .*16"),
        ("llava_onevision", dict(image_grid_pinpoints=[[16, 16]]), "image_grid_pinpoints is .*, the model's"),
        ("gemma3", dict(do_pan_and_scan=True), "do_pan_and_scan is True; set it to False"),
        ("mistral3", dict(size={"longest_edge": 128}), r"size\['longest_edge'\] is 128, .* sees 64 pixels"),
    ]:
        with pytest.raises(InputError, match=message):
            tile_processor(name, **options)
    with pytest.raises(InputError, match="is a GotOcr2ImageProcessorPil, which has no do_image_splitting"):
        VisionDataCollator(tile_model("idefics3"), tile_processor("internvl"))
    tokenizer = tile_tokenizer("llava_onevision")
    processor = tile_processor("internvl")
    processor.tokenizer = tokenizer
    with pytest.raises(InputError, match="the tokenizer has no token <IMG_CONTEXT>"):
        VisionDataCollator(tile_model("internvl"), processor)


def test_the_template_beside_the_processor_is_that_of_images(folders, tmp_path):
    """LLaVA's tokenizer may hold that of a model of text, and its processor has a file of its own."""
    folder = tmp_path / "model"
    shutil.copytree(folders("llava_onevision"), folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages[0].content }}"}))
    model, processor = load(str(folder))
    assert processor.chat_template == processor.tokenizer.chat_template == template
    model = FastVisionModel.get_peft_model(model, r=4)
    model.save_pretrained(tmp_path / "adapter")
    for saved in (False, True):  # the adapter's own template comes first, where it has one
        _, again = load(str(tmp_path / "adapter"))
        assert again.tokenizer.chat_template == (template if not saved else "{{ messages }}")
        processor.chat_template = processor.tokenizer.chat_template = "{{ messages }}"
        processor.save_pretrained(tmp_path / "adapter")
