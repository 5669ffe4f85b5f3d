"""Parts of messages that would lose what they say are refused, and the line names the key."""

import base64

import pytest
from tiny_vision import encoded, picture

from unsloth_pack.data.lossless_json import to_dataset
from unsloth_pack.errors import InputError
from unsloth_pack.images.prepared import holds_images

PNG = encoded(picture(40, 72))
LIMITS = ("max_pixels", "min_pixels", "resized_height", "resized_width")
ANSWER = {"role": "assistant", "content": "red"}
SOURCES = ("image", "images", "image_url", "path", "url", "bytes", "base64")


def row(*parts, **columns):
    turns = [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, **columns}


@pytest.mark.parametrize("key", SOURCES)
def test_a_text_that_holds_an_image_is_refused(collate, key):
    said = rf"'messages': a part of type 'text' with the key '{key}' .*write the image as a part of its own"
    for part in ({"text": "Name it"}, {"value": "Name it"}, {}):
        with pytest.raises(InputError, match=said):
            collate()([row({"type": "text", **part, key: "0.png"})])


@pytest.mark.parametrize("nothing", [None, "", [], b""])
def test_a_text_with_empty_keys_of_images_stays(collate, nothing):
    plain, other = {"type": "text", "text": "Name it"}, dict.fromkeys(SOURCES, nothing)
    got = collate()([row(plain | other)])
    assert got["input_ids"].tolist() == collate()([row(plain)])["input_ids"].tolist()


def test_rows_whose_texts_hold_images_are_prepared_as_rows_with_images():
    """On the way of rows of text nothing would refuse them."""
    part = {"type": "text", "text": "Name it"}
    assert holds_images(to_dataset([row(part), row({**part, "image": "0.png"})]))
    assert holds_images(to_dataset([row({"url": "0.png", **part})]))
    assert not holds_images(to_dataset([row(part), row({**part, "image": None, "path": ""})]))
    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": {"image": "0.png"}}}],
    }
    with_tool = row(part)
    with_tool["messages"].insert(1, called)
    assert not holds_images(to_dataset([with_tool]))


@pytest.mark.parametrize("key", ["text", "value"])
@pytest.mark.parametrize("part", [{"image": PNG}, {"image_url": PNG}, {}], ids=["image", "image_url", "bare"])
def test_an_image_that_holds_a_text_is_refused(collate, part, key):
    part = {"type": next(iter(part), "image"), **part}
    columns = {"images": [PNG]} if len(part) == 1 else {}
    said = (
        rf"'messages': a part of an image with the key '{key}' of a text.*write the text as a part of its own"
    )
    with pytest.raises(InputError, match=said):
        collate()([row(part | {key: "Name it"}, **columns)])
    for nothing in (None, ""):
        collate()([row(part | {key: nothing}, **columns)])


@pytest.mark.parametrize("mark", ["<video>", "<audio>"])
def test_marks_of_what_is_not_trained_on_are_refused(collate, mark):
    said = f"column 'messages': the text holds {mark}; videos and sound are not trained on.*remove the row"
    for content in (f"{mark} Name it", [{"type": "text", "text": f"Name it {mark}"}]):
        with pytest.raises(InputError, match=said):
            collate()([{"messages": [{"role": "user", "content": content}, ANSWER]}])
    with pytest.raises(InputError, match=said):
        collate()([{"messages": [{"role": "user", "content": "?"}, ANSWER | {"content": f"{mark}!"}]}])


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("weight", 0.5, "a weight"),
        ("label", False, "a reply that is labelled bad"),
        ("labels", [1], "tokens or"),
    ],
)
def test_columns_that_would_act_elsewhere_are_refused(collate, column, value, said):
    """By the collator, too: the command line looks at whole data sets."""
    part = {"type": "image", "image": PNG}
    with pytest.raises(InputError, match=f"row 0, column '{column}': {said}"):
        collate()([row(part, **{column: value})])
    collate()([row(part, weight=1, label=None)])


@pytest.mark.parametrize("key", LIMITS)
@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_a_limit_of_one_image_is_refused(collate, key, kind):
    part = {"type": kind, kind: PNG}
    with pytest.raises(
        InputError, match=rf"a limit of its own, {key}, .*: --max_pixels and --min_pixels, or"
    ):
        collate()([row(part | {key: 1024})])
    with pytest.raises(InputError, match=rf"a limit of its own, {key}, "):
        collate()([row({"type": "image", key: 1024}, images=[PNG])])
    assert "pixel_values" in collate()([row(part | dict.fromkeys(LIMITS))])


def test_an_image_from_two_places_is_refused(collate):
    for one, other in (("image", "path"), ("image", "url"), ("bytes", "image"), ("image", "base64")):
        part = {"type": "image", one: PNG, other: "http://x/1.png"}
        with pytest.raises(InputError, match=rf"an image under {one} and {other}, .*; keep one of them"):
            collate()([row(part)])
        value = {one: PNG, other: "1.png"}
        with pytest.raises(InputError, match=r"; keep one of them"):
            collate()([row({"type": "image"}, images=[value])])
    with pytest.raises(InputError, match="an image under image and image_url, "):
        collate()([row({"type": "image_url", "image_url": {"url": "a.png"}, "image": PNG})])
    nulls = dict.fromkeys(("path", "url", "bytes", "base64", "image_url"))
    assert "pixel_values" in collate()([row({"type": "image", **nulls, "image": PNG})])
    assert "pixel_values" in collate()([row({"type": "image", "bytes": PNG, "path": "a name"})])


def test_an_image_under_an_unknown_key_is_refused_by_this_key(collate):
    source = {"type": "base64", "data": base64.b64encode(PNG).decode()}
    said = (
        r"under none of bytes, image, path, url, base64, image_url, but with source, .*give the image under"
    )
    with pytest.raises(InputError, match=said):
        collate()([row({"type": "image", "source": source})])
    with pytest.raises(InputError, match=said):
        collate()([row({"type": "image"}, {"type": "image", "source": source}, images=[PNG])])
    assert "pixel_values" in collate()([row({"type": "image", "index": 0}, images=[PNG])])


@pytest.mark.parametrize("given", ["no base64!", "data:image/png;base64,no base64!"])
def test_what_is_not_base64_is_broken(collate, given):
    with pytest.raises(InputError, match=r"that is not base64 .*encode the image anew, or remove the row"):
        collate()([row({"type": "image", "base64": given})])
