"""Tiny models of vision and language, documents with images, and each document alone as the truth."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from random_models import random_model, with_adapter
from tiny import DEVICE, Outcome, exactly, routing
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from unsloth_pack.models import arch_spec_for

torch.backends.cudnn.allow_tf32 = False  # else towers in float32 cut their patches in TF32 on a GPU

VOCABULARY = 300
IMAGE, VIDEO, START, END = 299, 298, 297, 296
_TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START)
_TOKENS |= dict(vision_end_token_id=END)
_TOWER = dict(depth=3, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=1)
PIXELS = 3 * 4 * 4  # of a patch
MERGE = 2


def _text(name, **overrides):
    plain = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    plain |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    plain |= dict(initializer_range=0.08, pad_token_id=0) | dict(arch_spec_for(name).tiny)
    if "layer_types" in plain:
        plain["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    return plain | overrides


def _qwen3_vl(kind=Qwen3VLForConditionalGeneration, config=Qwen3VLConfig, name="qwen3_vl_text", **text):
    tower = dict(hidden_size=32, intermediate_size=48, out_hidden_size=64, num_position_embeddings=16)
    tower |= dict(deepstack_visual_indexes=[0, 1])
    return kind, config(text_config=_text(name, **text), vision_config=_TOWER | tower, **_TOKENS)


def _qwen3_vl_moe(**text):
    return _qwen3_vl(Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, "qwen3_vl_moe_text", **text)


def _qwen2_5_vl(**text):
    tower = dict(hidden_size=32, intermediate_size=49, out_hidden_size=64, window_size=16)
    tower |= dict(fullatt_block_indexes=[1])
    config = Qwen2_5_VLConfig(
        text_config=_text("qwen2_5_vl_text", **text), vision_config=_TOWER | tower, **_TOKENS
    )
    return Qwen2_5_VLForConditionalGeneration, config


def _qwen2_vl(**text):
    tower = dict(embed_dim=32, hidden_size=64, mlp_ratio=2)
    config = Qwen2VLConfig(
        text_config=_text("qwen2_vl_text", **text), vision_config=_TOWER | tower, **_TOKENS
    )
    return Qwen2VLForConditionalGeneration, config


MODELS = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
}
ALIGNER = ("merger", "deepstack_merger_list")
_PROJECTIONS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
_OF_TEXT = rf".*language_model.*\.({_PROJECTIONS})"
_OF_TOWER = r".*visual\.blocks.*\.(qkv|proj|linear_fc1|linear_fc2|fc1|fc2|gate_proj|up_proj|down_proj)"
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


def made(name, dtype=torch.float32, trained="frozen tower", seed=0, **text):
    """A random model, the same in every dtype.

    Args:
        trained: what trains: the adapter of the text model; also one in the tower; also the aligner, in full;
            or every weight.
    """
    kind, config = MODELS[name](**text)
    return adapted(*random_model(kind, config, lambda key: "visual" in key, dtype, seed), trained)


def adapted(model, generator=None, trained="frozen tower"):
    """The model with the adapter that trains, where one does; `trained` as in `made`."""
    if (targets := TRAINED[trained]) is None:
        return model
    return with_adapter(model, targets, generator, full=ALIGNER if trained == "aligner" else ())


@dataclass
class Document:
    """Token ids `[L]`, and `[images, 3]` grids with the pixels of their patches."""

    ids: torch.Tensor
    grids: torch.Tensor
    pixels: torch.Tensor

    @property
    def types(self):
        return (self.ids == IMAGE).int()


def document(parts, generator):
    """A document of text (a number of tokens) and images (patches in height and width, even)."""
    ids, grids = [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(1, 290, (part,), generator=generator))
        else:
            grids.append([1, *part])
            ids.append(torch.full((part[0] * part[1] // MERGE**2,), IMAGE))
    grids = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    pixels = torch.randn(int(grids.prod(-1).sum()), PIXELS, generator=generator)
    return Document(torch.cat(ids), grids, pixels)


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


# No image, one, three of unequal size; image first, last, touching; one token of text; text alone
PARTS = [
    [7],
    [(4, 6), 5],
    [3, (2, 2), 2, (6, 4), 1, (2, 8), 4],
    [6, (8, 4)],
    [2, (4, 4), (6, 2), 3],
    [1],
    [1, (2, 2), 1],
]


def documents(parts=PARTS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [document(part, generator) for part in parts]


def dtype_of(model):
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def images_of(model, docs, requires_grad=False):
    """The arguments of a call that hold the images of these documents; none if there are none."""
    pixels = torch.cat([doc.pixels for doc in docs]).to(DEVICE, dtype_of(model))
    grids = torch.cat([doc.grids for doc in docs]).to(DEVICE)
    if not len(grids):
        return {}
    return {"pixel_values": pixels.requires_grad_(requires_grad), "image_grid_thw": grids}


def outcome_of(model, logits, loss, pixels, routes=None):
    grads = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    if pixels:
        grads["pixel_values"] = torch.cat(pixels).double().cpu()
    return Outcome(
        torch.cat(logits).detach().double().cpu(), loss.detach().double().cpu(), grads, routes or {}
    )


def labels_of(docs):
    """`[T]`: no label on images, nor on the first token of a document."""
    labels = torch.cat([doc.ids for doc in docs]).clone()
    labels[labels == IMAGE] = -100
    labels[torch.tensor([0, *(len(doc.ids) for doc in docs[:-1])]).cumsum(0)] = -100
    return labels


def run_alone(model, docs, routes=None):
    """Every document in a call of its own; the loss is the mean over the labels of all."""
    counted = int((labels_of(docs) != -100).sum())
    model.zero_grad()
    logits, loss, pixels = [], torch.tensor(0.0), []
    with exactly(model), routing(model, routes) as seen:
        for doc in docs:
            given = images_of(model, [doc], requires_grad=True)
            # transformers cannot tell images that touch each other apart by itself
            positions = axes_of(doc)[:, None].to(DEVICE)
            ids = doc.ids[None].to(DEVICE)
            out = model(input_ids=ids, position_ids=positions, use_cache=False, **given).logits[0]
            logits.append(out)
            if len(doc.ids) > 1:
                wide = out[:-1].to(torch.promote_types(out.dtype, torch.float32))
                labels = labels_of([doc])[1:].to(DEVICE)
                share = F.cross_entropy(wide, labels, reduction="sum") / counted
                share.backward()
                loss = loss + share.detach().double().cpu()
            if given:
                grad = given["pixel_values"].grad
                pixels.append(torch.zeros_like(given["pixel_values"]) if grad is None else grad)
    return outcome_of(model, logits, loss, pixels, {name: torch.cat(parts) for name, parts in seen.items()})


def row_of(model, docs, requires_grad=False):
    """The arguments of a call with all documents in one row, without what describes it."""
    ids = torch.cat([doc.ids for doc in docs])[None].to(DEVICE)
    return {"input_ids": ids, **images_of(model, docs, requires_grad)}


def text_and_axes(docs):
    """`[4, 1, T]`: positions along the text, then in time, height and width; right in plain transformers."""
    along = torch.cat([torch.arange(len(doc.ids)) for doc in docs])
    return torch.cat([along[None], torch.cat([axes_of(doc) for doc in docs], dim=1)])[:, None].to(DEVICE)


def run_packed(model, docs, only_loss=False, routes=None, **describe):
    """All documents in one packed row.

    Args:
        only_loss: the step of training, which makes no logits.
        routes: the experts of every token.
        describe: the row; `packed_seq_lengths` where nothing is given.
    """
    describe = describe or {"packed_seq_lengths": [len(doc.ids) for doc in docs]}
    given = row_of(model, docs, requires_grad=True)
    model.zero_grad()
    with exactly(model), routing(model, routes):
        logits = torch.zeros(0)
        if not only_loss:
            with torch.no_grad():
                logits = model(**given, use_cache=False, **describe).logits[0]
        out = model(**given, labels=labels_of(docs)[None].to(DEVICE), use_cache=False, **describe)
        out.loss.backward()
    pixels = [given["pixel_values"].grad] if "pixel_values" in given else []
    return outcome_of(model, [logits], out.loss, pixels)


class Passes:
    """Counts the backward passes through modules."""

    def __init__(self, modules):
        self.number = 0
        for module in modules:
            module.register_full_backward_hook(self._count)

    def _count(self, *_):
        self.number += 1
