"""Rows of every form make the same document, and parts that would lose what they say are refused."""

import base64

import datasets
import pytest
import torch
from tables import table
from tiny_vision import encoded, picture

from unsloth_pack.data.lossless_json import to_dataset
from unsloth_pack.errors import InputError
from unsloth_pack.images.prepared import holds_images

IMAGES = [picture(40, 72), picture(96, 33, 1)]
BYTES = [encoded(image) for image in IMAGES]
QUESTION = ("First ", 0, "\nthen ", 1, "?")
ANSWER = "Both are red."


def parts(*images, bare=False, key="image"):
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image"}
        if bare
        else {"type": "image", key: images[part]}
        for part in QUESTION
    ]


def marked():
    return "".join(part if isinstance(part, str) else "<image>" for part in QUESTION)


def turns(content):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]


def uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


FORMS = {
    "parts of Pillow": lambda place: {"messages": turns(parts(*IMAGES))},
    "parts of paths": lambda place: {"messages": turns(parts("0.png", "1.png", key="path"))},
    "parts of base64": lambda place: {
        "messages": turns(parts(*(base64.b64encode(data).decode() for data in BYTES), key="base64"))
    },
    "parts as OpenAI writes them": lambda place: {
        "messages": turns(
            [
                {"type": "image_url", "image_url": {"url": part["image"]}}
                if part["type"] == "image"
                else part
                for part in parts(*map(uri, BYTES))
            ]
        )
    },
    "parts with nulls": lambda place: {
        "messages": turns([dict.fromkeys(("text", "image", "path", "url")) | part for part in parts(*IMAGES)])
    },
    "bare parts and a column": lambda place: {"messages": turns(parts(bare=True)), "images": IMAGES},
    "marks and a column": lambda place: {"messages": turns(marked()), "images": BYTES},
    "ShareGPT": lambda place: {
        "conversations": [{"from": "human", "value": marked()}, {"from": "gpt", "value": ANSWER}],
        "images": ["0.png", "1.png"],
    },
    "LLaVA, one image in a part": lambda place: {
        "conversations": [
            {"from": "human", "value": [*parts(*IMAGES)[:3], {"type": "text", "text": "<image>?"}]},
            {"from": "gpt", "value": ANSWER},
        ],
        "image": "1.png",
        "id": "a",
    },
}


@pytest.fixture
def place(tmp_path):
    for number, data in enumerate(BYTES):
        (tmp_path / f"{number}.png").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_makes_the_same_document(form, place, collate):
    made = collate(image_folder=place)
    wanted, got = made([FORMS["parts of Pillow"](place)]), made([FORMS[form](place)])
    assert made.counts.images == 4
    for name in ("input_ids", "labels", "position_ids", "pixel_values", "image_grid_thw"):
        assert torch.equal(wanted[name], got[name]), name


def test_prompt_and_completion_and_instructions(collate):
    pair = {"prompt": marked(), "completion": ANSWER, "images": IMAGES}
    others = [
        pair | {"completion": None, "response": ANSWER},
        {"prompt": turns(parts(*IMAGES))[:1], "completion": turns("")[1:] and turns(marked())[1:]},
        {"instruction": marked(), "input": "", "output": ANSWER, "images": IMAGES},
    ]
    wanted = collate()([pair])
    for other in others:
        got = collate()([other])
        assert torch.equal(wanted["labels"], got["labels"])
        assert torch.equal(wanted["pixel_values"], got["pixel_values"])
    whole = collate()([FORMS["parts of Pillow"](None)])
    assert torch.equal(wanted["input_ids"], whole["input_ids"])
    assert (wanted["labels"] != -100).sum() < (whole["labels"] != -100).sum()


def test_rows_of_a_data_set(collate, place):
    """Arrow holds null for the keys that only other parts have, and images as bytes or decoded."""
    answer = {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}
    rows = [
        {"messages": [{"role": "user", "content": content}, answer]}
        for content in (parts("0.png", "1.png", key="path"), [{"type": "text", "text": "no image"}])
    ]
    made = datasets.Dataset.from_list(rows)
    assert made[1]["messages"][0]["content"][0].keys() == {"type", "text", "path"}
    got = collate(image_folder=place)([*made])
    assert got["packed_seq_lengths"] == collate(image_folder=place)(rows)["packed_seq_lengths"]
    table = {"messages": [turns(marked())], "images": [[str(path) for path in sorted(place.iterdir())]]}
    features = datasets.Features(
        {
            "messages": datasets.List(
                {"role": datasets.Value("string"), "content": datasets.Value("string")}
            ),
            "images": datasets.List(datasets.Image()),
        }
    )
    decoded = datasets.Dataset.from_dict(table, features=features)
    assert torch.equal(collate()([*decoded])["pixel_values"], got["pixel_values"])


@pytest.mark.parametrize(("images", "told"), [(IMAGES[:1], 1), ([*IMAGES, IMAGES[0]], 3)])
def test_as_many_images_as_places(images, told, collate):
    with pytest.raises(InputError, match=f"places for images in column 'messages': 2, images: {told}"):
        collate()([{"messages": turns(marked()), "images": images}])


def test_a_template_that_writes_no_images_is_refused():
    from tiny_vision import vision_model, vision_processor

    from unsloth_pack import VisionDataCollator

    text_alone = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    made = VisionDataCollator(vision_model(), vision_processor(template=text_alone))
    made([{"messages": turns("no image")}])
    with pytest.raises(InputError, match=r"2 images, and the chat template writes 0 placeholders"):
        made([FORMS["parts of Pillow"](None)])


TEXT, IMAGE = {"type": "text", "text": "Name it"}, {"type": "image", "image": BYTES[0]}
URL = {"type": "image_url", "image_url": {"url": uri(BYTES[0])}}
UNSEEN = "which the model would never see"
NOT_TRAINED = "videos and sound.*remove the row"
REFUSED = [
    *(
        (turns([TEXT | {key: "0.png"}]), f"'text' with '{key}', {UNSEEN}")
        for key in ("image", "images", "url")
    ),
    *((turns([part | {"text": "x"}]), f"with 'text', {UNSEEN}") for part in (IMAGE, URL, {"type": "image"})),
    (turns([IMAGE | {"resized_height": 64}]), f"with 'resized_height', {UNSEEN}.*max_pixels"),
    (turns([IMAGE | {"path": "1.png"}]), "an image under image and path, .*keep one"),
    (turns("<video> Name it"), f"the text holds <video>.*{NOT_TRAINED}"),
]


@table("given", REFUSED, ids=lambda given: given[1])
def test_parts_that_would_lose_something_are_refused(collate, given):
    messages, says = given
    with pytest.raises(InputError, match=f"'(messages|images)': .*{says}"):
        collate()([{"messages": messages}])


@pytest.mark.parametrize(
    ("column", "says"), [({"weight": 0.5}, "a weight"), ({"label": False}, "a reply that is labelled bad")]
)
def test_columns_that_would_act_elsewhere_are_refused(collate, column, says):
    with pytest.raises(InputError, match=f"row 0, column '{next(iter(column))}': {says}"):
        collate()([{"messages": turns([IMAGE]), **column}])


def test_rows_of_text_hold_no_images():
    called = {"tool_calls": [{"function": {"name": "f", "arguments": {"image": "0.png"}}}]}
    rows = [{"messages": [*turns([TEXT | {"image": None}]), {"role": "assistant", **called}]}]
    assert not holds_images(to_dataset(rows))
    assert holds_images(to_dataset([*rows, {"messages": turns([TEXT, {"type": "image", "image": "0.png"}])}]))
