"""Tiny models of vision and language with ordinary positions, their documents, and each alone as the truth.

What their images come in differs: tiles of one size with markers between them, tiles of which a document with
one image has more, or sizes of their own with a mark behind every line. The tokens of Gemma 3's images see
each other in both directions.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from random_models import random_model, with_adapter
from tiny import DEVICE, Outcome
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from vision_models import dtype_of, labels_of, outcome_of

from unsloth_pack.models import arch_spec_for

IMAGE, BREAK, START, END = 299, 298, 297, 296
SIDE, PATCH = 16, 4  # of a tile and of a patch, in pixels
_TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
_TOWER |= dict(image_size=SIDE, patch_size=PATCH)


def _text(name, **overrides):
    config = arch_spec_for(name).tiny_config(vocab_size=300, **overrides).to_dict()
    return config | {"tie_word_embeddings": False}


def _idefics3(kind=Idefics3Config, **text):
    return kind(
        text_config=_text("llama", **text), vision_config=_TOWER, image_token_id=IMAGE, scale_factor=2
    )


def _internvl(**text):
    tower = _TOWER | dict(image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH])
    return InternVLConfig(text_config=_text("qwen3", **text), vision_config=tower, image_token_id=IMAGE)


def _llava_onevision(**text):
    return LlavaOnevisionConfig(
        text_config=_text("qwen2", **text),
        vision_config=_TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
    )


def _mistral3(**text):
    tower = _TOWER | dict(model_type="pixtral", image_size=64)
    return Mistral3Config(
        text_config=_text("mistral", **text),
        vision_config=tower,
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )


def _smolvlm(**text):
    return _idefics3(SmolVLMConfig, **text)


def _gemma3(**text):
    text = dict(sliding_window=5) | text  # a document is longer, and touching images are
    return Gemma3Config(
        text_config=_text("gemma3_text", **text),
        vision_config=_TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    )


MODELS = {
    "idefics3": (Idefics3ForConditionalGeneration, _idefics3),
    "smolvlm": (SmolVLMForConditionalGeneration, _smolvlm),
    "llava_onevision": (LlavaOnevisionForConditionalGeneration, _llava_onevision),
    "internvl": (InternVLForConditionalGeneration, _internvl),
    "mistral3": (Mistral3ForConditionalGeneration, _mistral3),
    "gemma3": (Gemma3ForConditionalGeneration, _gemma3),
}
ALIGNER = ("connector", "multi_modal_projector")
_OF_TEXT = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
_OF_TOWER = (
    r".*(vision_tower|vision_model)\..*"
    r"\.(q_proj|k_proj|v_proj|o_proj|out_proj|fc1|fc2|projection_layer|gate_proj|up_proj|down_proj)"
)
TRAINED = {"frozen tower": _OF_TEXT, "tower": f"({_OF_TEXT})|({_OF_TOWER})", "aligner": _OF_TEXT, "all": None}


def made(name, dtype=torch.float32, trained="frozen tower", seed=0, **text):
    """A random model, the same in every dtype; `trained` as in `vision_models.made`."""
    kind, configure = MODELS[name]
    sees = ("vision", *ALIGNER)
    made = random_model(kind, configure(**text), lambda key: any(part in key for part in sees), dtype, seed)
    return adapted(*made, trained)


def adapted(model, generator=None, trained="frozen tower"):
    """The model with the adapter that trains, where one does; `trained` as in `vision_models.made`."""
    if (targets := TRAINED[trained]) is None:
        return model
    return with_adapter(model, targets, generator, full=ALIGNER if trained == "aligner" else ())


@dataclass
class Image:
    """`[tiles, 3, height, width]` pixels, and what else the processor says of them."""

    pixels: torch.Tensor
    size: tuple[int, int] = (SIDE, SIDE)  # in pixels, before tiles were cut
    mask: torch.Tensor | None = None  # `[tiles, height, width]`, 0 on padding inside a tile


@dataclass
class Document:
    """Token ids `[L]` and the images among them."""

    ids: torch.Tensor
    images: list[Image]


# No image, one, three of unequal size; image first, last, touching; one token of text; text alone.
# A number is text, a tuple an image: of height times width tiles, or for mistral3 of so many pairs of patches
PARTS = [
    [7],
    [(1, 2), 5],
    [3, (2, 2), 2, (1, 1), 1, (2, 1), 4],
    [6, (2, 1)],
    [2, (1, 1), (1, 2), 3],
    [1],
    [1, (2, 2), 1],
]


def documents(name, parts=PARTS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [_document(name, one, generator) for one in parts]


def _document(name, parts, generator):
    shapes = [part for part in parts if not isinstance(part, int)]
    images = [_image(name, shape, len(shapes) == 1, generator) for shape in shapes]
    ids, number = [], 0
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(1, 290, (part,), generator=generator))
        else:
            ids.append(torch.tensor(_placeholders(name, part, images[number], len(images) == 1)))
            number += 1
    return Document(torch.cat(ids), images)


def _image(name, shape, is_only, generator):
    def drawn(*size):
        return torch.randn(*size, generator=generator)

    height, width = shape
    if name == "mistral3":
        return Image(
            drawn(1, 3, 2 * PATCH * height, 2 * PATCH * width), (2 * PATCH * height, 2 * PATCH * width)
        )
    if name == "gemma3":
        return Image(drawn(1, 3, SIDE, SIDE))
    if name == "llava_onevision":
        n_tiles = height * width + 1 if is_only else 1
        return Image(drawn(n_tiles, 3, SIDE, SIDE), (SIDE * height - 3, SIDE * width))
    mask = torch.ones(height * width, SIDE, SIDE, dtype=torch.int64)
    if name == "idefics3":
        mask[-1, SIDE // 2 :] = 0
    return Image(drawn(height * width, 3, SIDE, SIDE), mask=mask)


def _placeholders(name, shape, image, is_only):
    height, width = shape
    if name == "mistral3":  # a mark behind every line
        return [*([*[IMAGE] * width, BREAK] * height)[:-1], END]
    if name == "llava_onevision":
        return [IMAGE] * _llava_tokens(image.size, is_only)
    if name == "gemma3":  # without the marks that a processor sets, so that images may touch
        return [IMAGE] * 4
    if name == "internvl":
        return [START, *[IMAGE] * 4 * len(image.pixels), END]
    return [token for _ in image.pixels for token in (START, *[IMAGE] * 4)]  # a mark before every tile


@cache
def _llava_tokens(size, is_only):
    """As many as the plain model makes."""
    model = made("llava_onevision").get_base_model()
    pixels = torch.zeros(1, 5, 3, SIDE, SIDE, device=DEVICE)
    given = {"image_sizes": torch.tensor([size]), "batch_num_images": [1] if is_only else [2]}
    with torch.no_grad():
        pixels = pixels if is_only else pixels.expand(2, -1, -1, -1, -1)
        given["image_sizes"] = given["image_sizes"].expand(len(pixels), 2)
        return len(model.model.get_image_features(pixels, **given, return_dict=True).pooler_output[0])


def images_of(name, model, docs, requires_grad=False):
    """The arguments of a call that hold the images of these documents, and a leaf for each image."""
    images = [image for doc in docs for image in doc.images]
    if not images:
        return {}, []
    dtype = dtype_of(model)
    # Copies: a gradient must not stay with the pixels for the next run
    leaves = [image.pixels.to(DEVICE, dtype, copy=True).requires_grad_(requires_grad) for image in images]
    if name in ("idefics3", "smolvlm"):
        masks = torch.cat([image.mask for image in images])[None].to(DEVICE)
        return {"pixel_values": torch.cat(leaves)[None], "pixel_attention_mask": masks}, leaves
    if name == "internvl":
        return {"pixel_values": torch.cat(leaves)}, leaves
    if name == "gemma3":
        types = (torch.cat([doc.ids for doc in docs])[None] == IMAGE).int().to(DEVICE)
        return {"pixel_values": torch.cat(leaves), "token_type_ids": types}, leaves
    shape = [max(sides) for sides in zip(*(leaf.shape for leaf in leaves), strict=True)]
    padded = torch.stack([_padded(leaf, shape) for leaf in leaves])
    sizes = torch.tensor([image.size for image in images]).to(DEVICE)
    if name == "mistral3":
        return {"pixel_values": padded[:, 0], "image_sizes": sizes}, leaves
    counts = torch.tensor([len(doc.images) for doc in docs]).to(DEVICE)
    return {"pixel_values": padded, "image_sizes": sizes, "batch_num_images": counts}, leaves


def _padded(leaf, shape):
    tiles, _, height, width = (most - own for most, own in zip(shape, leaf.shape, strict=True))
    return F.pad(leaf, (0, width, 0, height, 0, 0, 0, tiles))


def _pixel_gradients(leaves):
    return [(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).flatten() for leaf in leaves]


def run_alone(name, model, docs) -> Outcome:
    """Every document in a call of its own; the loss is the mean over the labels of all."""
    counted = int((labels_of(docs) != -100).sum())
    model.zero_grad()
    logits, loss, pixels = [], torch.tensor(0.0), []
    for doc in docs:
        given, leaves = images_of(name, model, [doc], requires_grad=True)
        out = model(input_ids=doc.ids[None].to(DEVICE), use_cache=False, **given).logits[0]
        logits.append(out)
        if len(doc.ids) > 1:
            wide = out[:-1].to(torch.promote_types(out.dtype, torch.float32))
            share = F.cross_entropy(wide, labels_of([doc])[1:].to(DEVICE), reduction="sum") / counted
            share.backward()
            loss = loss + share.detach().double().cpu()
        pixels += _pixel_gradients(leaves)
    return outcome_of(model, logits, loss, pixels)


def positions(docs):
    return torch.cat([torch.arange(len(doc.ids)) for doc in docs])[None].to(DEVICE)


def row_of(name, model, docs):
    """The arguments of a call with all documents in one row, without what describes it."""
    given, _ = images_of(name, model, docs)
    return given | {"input_ids": torch.cat([doc.ids for doc in docs])[None].to(DEVICE)}


def run_packed(name, model, docs, **describe) -> Outcome:
    """All documents in one packed row; `packed_seq_lengths` describes it where nothing does."""
    describe = describe or {"packed_seq_lengths": [len(doc.ids) for doc in docs]}
    given, leaves = images_of(name, model, docs, requires_grad=True)
    given["input_ids"] = torch.cat([doc.ids for doc in docs])[None].to(DEVICE)
    model.zero_grad()
    with torch.no_grad():
        logits = model(**given, use_cache=False, **describe).logits[0]
    out = model(**given, labels=labels_of(docs)[None].to(DEVICE), use_cache=False, **describe)
    out.loss.backward()
    return outcome_of(model, [logits], out.loss, _pixel_gradients(leaves))
