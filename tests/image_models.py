"""Tiny models of vision and language, their documents with images, and each document alone as the truth.

Positions of `GRIDS` are on three axes. Images of the others come as tiles of one size with markers between
them, as tiles of which a document with one image has more, or in sizes of their own with a mark behind every
line. The tokens of Gemma 3's images see each other in both directions.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import transformers
from random_models import random_model, with_adapter
from tiny import DEVICE, TINY, Outcome, exactly, routing, tiny_config

from unsloth_pack import patch_model

torch.backends.cudnn.allow_tf32 = False  # else towers in float32 cut their patches in TF32 on a GPU
VOCABULARY = 300
IMAGE, VIDEO, START, END = 299, 298, 297, 296
BREAK = VIDEO
SIDE, PATCH, MERGE = 16, 4, 2  # of a tile and of a patch, in pixels; patches of a token on each side
PIXELS = 3 * PATCH**2  # of a patch

CLASSES = dict(qwen3_vl="Qwen3VL", qwen3_vl_moe="Qwen3VLMoe", qwen2_5_vl="Qwen2_5_VL", qwen2_vl="Qwen2VL")
CLASSES |= dict(idefics3="Idefics3", smolvlm="SmolVLM", llava_onevision="LlavaOnevision", internvl="InternVL")
CLASSES |= dict(mistral3="Mistral3", gemma3="Gemma3")
MODELS = tuple(CLASSES)
GRIDS, TILED = MODELS[:4], MODELS[4:]
TEXTS = dict(zip(TILED, ("llama", "llama", "qwen2", "qwen3", "mistral", "gemma3_text"), strict=True))

_GRID = dict(depth=3, num_heads=2, patch_size=PATCH, spatial_merge_size=MERGE, temporal_patch_size=1)
_QWEN3 = _GRID | dict(hidden_size=32, intermediate_size=48, out_hidden_size=64, num_position_embeddings=16)
_QWEN3 |= dict(deepstack_visual_indexes=[0, 1])
_QWEN2_5 = _GRID | dict(hidden_size=32, intermediate_size=49, out_hidden_size=64, window_size=16)
_TILE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
_TILE |= dict(image_size=SIDE, patch_size=PATCH)
_SIGLIP = _TILE | dict(model_type="siglip_vision_model", vision_use_head=False)
TOWERS = {
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen2_5_vl": _QWEN2_5 | dict(fullatt_block_indexes=[1]),
    "qwen2_vl": _GRID | dict(embed_dim=32, hidden_size=64, mlp_ratio=2),
    "idefics3": _TILE,
    "smolvlm": _TILE,
    "llava_onevision": _SIGLIP,
    "internvl": _TILE | dict(image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH]),
    "mistral3": _TILE | dict(model_type="pixtral", image_size=64),
    "gemma3": _SIGLIP,
}
_AXES = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_SCALED = dict(image_token_id=IMAGE, scale_factor=2)
_PINPOINTS = [[SIDE * height, SIDE * width] for height in (1, 2) for width in (1, 2)]
WRAPPERS = {  # what else their configs have
    **dict.fromkeys(GRIDS, _AXES),
    **dict.fromkeys(("idefics3", "smolvlm"), _SCALED),
    "llava_onevision": dict(image_token_index=IMAGE, image_grid_pinpoints=_PINPOINTS),
    "internvl": dict(image_token_id=IMAGE),
    "mistral3": dict(image_token_index=IMAGE, spatial_merge_size=MERGE),
    "gemma3": dict(image_token_index=IMAGE, mm_tokens_per_image=4),
}

ALIGNER = ("merger", "deepstack_merger_list", "connector", "multi_modal_projector")
_OF_TEXT = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
_OF_TOWER = (
    r".*visual\.blocks.*\.(qkv|proj|linear_fc1|linear_fc2|fc1|fc2|gate_proj|up_proj|down_proj)"
    r"|.*(vision_tower|vision_model)\..*"
    r"\.(q_proj|k_proj|v_proj|o_proj|out_proj|fc1|fc2|projection_layer|gate_proj|up_proj|down_proj)"
)
TRAINED = {"frozen tower": _OF_TEXT, "tower": f"({_OF_TEXT})|({_OF_TOWER})", "aligner": _OF_TEXT, "all": None}

_EVERY_DAY = (
    ("frozen tower", torch.bfloat16, True),
    ("tower", torch.float32, False),
    ("aligner", torch.bfloat16, False),
    ("all", torch.float32, True),
)
WAYS = [  # to train: what trains, in which dtype, and whether layers are recomputed
    pytest.param(*way, id="-".join(map(str, way)), marks=[] if way in _EVERY_DAY else [pytest.mark.nightly])
    for way in product(TRAINED, (torch.float32, torch.bfloat16), (False, True))
]


def _text(name, overrides):
    if name in TILED:
        config = tiny_config(TEXTS[name], vocab_size=VOCABULARY, **overrides).to_dict()
        return config | {"tie_word_embeddings": False}
    plain = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    plain |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    plain |= dict(initializer_range=0.08, pad_token_id=0) | dict(TINY[f"{name}_text"])
    if "layer_types" in plain:
        plain["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    return plain | overrides


def made(name, dtype=torch.float32, trained="frozen tower", seed=0, **text):
    """A random model, the same in every dtype.

    Args:
        trained: what trains: the adapter of the text model; also one in the tower; also the aligner, in full;
            or every weight.
    """
    if name == "gemma3":  # a document is longer, and touching images are
        text = dict(sliding_window=5) | text
    kind, config = (
        getattr(transformers, f"{CLASSES[name]}{part}") for part in ("ForConditionalGeneration", "Config")
    )
    config = config(text_config=_text(name, text), vision_config=dict(TOWERS[name]), **WRAPPERS[name])
    sees = ("visual",) if name in GRIDS else ("vision", "connector", "multi_modal_projector")
    return adapted(*random_model(kind, config, lambda key: any(x in key for x in sees), dtype, seed), trained)


def adapted(model, generator=None, trained="frozen tower"):
    """The model with the adapter that trains, where one does; `trained` as in `made`."""
    if (targets := TRAINED[trained]) is None:
        return model
    return with_adapter(model, targets, generator, full=ALIGNER if trained == "aligner" else ())


def tower_of(model):
    inner = getattr(model, "get_base_model", lambda: model)().model
    return next(getattr(inner, x) for x in ("visual", "vision_tower", "vision_model") if hasattr(inner, x))


@dataclass
class Image:
    """`[tiles, 3, height, width]` or `[patches, PIXELS]`, and what else the processor says of them."""

    pixels: torch.Tensor
    size: tuple[int, int] = (SIDE, SIDE)  # in pixels, before tiles were cut; of `GRIDS` in patches
    mask: torch.Tensor | None = None  # `[tiles, height, width]`, 0 on padding inside a tile


@dataclass
class Document:
    """Token ids `[L]` and the images among them."""

    ids: torch.Tensor
    images: list[Image]

    @property
    def types(self):
        return (self.ids == IMAGE).int()

    @property
    def grids(self):
        return torch.tensor([[1, *image.size] for image in self.images], dtype=torch.int64).reshape(-1, 3)

    @property
    def pixels(self):
        return torch.cat([torch.zeros(0, PIXELS), *(image.pixels for image in self.images)])


# No image, one, three of unequal size; image first, last, touching; one token of text; text alone.
# A number is text, a tuple an image: in tiles, patches (`GRIDS`) or pairs of patches (mistral3)
PARTS = [[7], [(1, 2), 5], [3, (2, 2), 2, (1, 1), 1, (2, 1), 4], [6, (2, 1)], [2, (1, 1), (1, 2), 3], [1]]
PARTS += [[1, (2, 2), 1]]
PARTS_OF_GRIDS = [[7], [(4, 6), 5], [3, (2, 2), 2, (6, 4), 1, (2, 8), 4], [6, (8, 4)], [2, (4, 4), (6, 2), 3]]
PARTS_OF_GRIDS += [[1], [1, (2, 2), 1]]


def parts_of(name):
    return PARTS_OF_GRIDS if name in GRIDS else PARTS


def documents(name, parts=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [document(name, one, generator) for one in parts or parts_of(name)]


def document(name, parts, generator):
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
    if name in GRIDS:
        return Image(drawn(height * width, PIXELS), shape)
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
    if name in GRIDS:
        return [IMAGE] * (height * width // MERGE**2)
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
    if name in GRIDS:
        grids = torch.cat([doc.grids for doc in docs]).to(DEVICE)
        return {"pixel_values": torch.cat(leaves), "image_grid_thw": grids}, leaves
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


def axes_of(doc):
    """`[3, L]` one token after another, as the papers have it."""
    axes, position, number, token = [], 0, 0, 0
    while token < len(doc.ids):
        if doc.ids[token] != IMAGE:
            axes.append([position] * 3)
            position, token = position + 1, token + 1
            continue
        _, height, width = (doc.grids[number] // torch.tensor([1, MERGE, MERGE])).tolist()
        axes += [[position, position + i, position + j] for i in range(height) for j in range(width)]
        position, number, token = position + max(height, width), number + 1, token + height * width
    return torch.tensor(axes).T


def dtype_of(model):
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def outcome_of(model, logits, loss, leaves, routes):
    grads = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    if leaves:
        of_pixels = [(torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in leaves]
        grads["pixel_values"] = torch.cat(of_pixels).double().cpu()
    logits, loss = torch.cat(logits).detach().double().cpu(), loss.detach().double().cpu()
    return Outcome(logits, loss, grads, {name: torch.cat(parts) for name, parts in routes.items() if parts})


def labels_of(docs):
    """`[T]`: no label on images, nor on the first token of a document."""
    labels = torch.cat([doc.ids for doc in docs]).clone()
    labels[labels == IMAGE] = -100
    labels[torch.tensor([0, *(len(doc.ids) for doc in docs[:-1])]).cumsum(0)] = -100
    return labels


def run_alone(name, model, docs, routes=None):
    """Every document in a call of its own; the loss is the mean over the labels of all."""
    counted = int((labels_of(docs) != -100).sum())
    model.zero_grad()
    logits, loss, leaves = [], torch.tensor(0.0), []
    with exactly(model), routing(model, routes) as seen:
        for doc in docs:
            given, own = images_of(name, model, [doc], requires_grad=True)
            if name in GRIDS:  # transformers cannot tell images that touch each other apart by itself
                given["position_ids"] = axes_of(doc)[:, None].to(DEVICE)
            out = model(input_ids=doc.ids[None].to(DEVICE), use_cache=False, **given).logits[0]
            logits.append(out)
            if len(doc.ids) > 1:
                wide = out[:-1].to(torch.promote_types(out.dtype, torch.float32))
                share = F.cross_entropy(wide, labels_of([doc])[1:].to(DEVICE), reduction="sum") / counted
                share.backward()
                loss = loss + share.detach().double().cpu()
            leaves += own
    return outcome_of(model, logits, loss, leaves, seen)


def row_of(name, model, docs):
    """The arguments of a call with all documents in one row, without what describes it."""
    given, _ = images_of(name, model, docs)
    return given | {"input_ids": torch.cat([doc.ids for doc in docs])[None].to(DEVICE)}


def lengths_of(docs):
    return [len(doc.ids) for doc in docs]


def positions(docs):
    return torch.cat([torch.arange(len(doc.ids)) for doc in docs])[None].to(DEVICE)


def text_and_axes(docs):
    """`[4, 1, T]`: positions along the text, then in time, height and width."""
    return torch.cat([positions(docs)[None].cpu(), torch.cat(list(map(axes_of, docs)), 1)[:, None]]).to(
        DEVICE
    )


def plain_positions(name, docs):
    """By which plain transformers keeps documents apart."""
    return text_and_axes(docs) if name in GRIDS else positions(docs)


def run_packed(name, model, docs, routes=None, **describe):
    """All documents in one packed row; `packed_seq_lengths` describes it where nothing does."""
    describe = describe or {"packed_seq_lengths": lengths_of(docs)}
    given, leaves = images_of(name, model, docs, requires_grad=True)
    given["input_ids"] = torch.cat([doc.ids for doc in docs])[None].to(DEVICE)
    model.zero_grad()
    with exactly(model), routing(model, routes):
        with torch.no_grad():
            logits = model(**given, use_cache=False, **describe).logits[0]
        out = model(**given, labels=labels_of(docs)[None].to(DEVICE), use_cache=False, **describe)
        out.loss.backward()
    return outcome_of(model, [logits], out.loss, leaves, {})


class Passes:
    """Counts the backward passes through modules."""

    def __init__(self, modules):
        self.number = 0
        for module in modules:
            module.register_full_backward_hook(self._count)

    def _count(self, *_):
        self.number += 1


def patched(name, *args):
    model = made(name, *args)
    patch_model(model)
    return model
