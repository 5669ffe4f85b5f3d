"""Models of vision and language with random weights, and random documents with images for them.

Shapes: T tokens of a row or L of a document, P patches of all its images.
"""

import io
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Median and sigma of the logarithm of the letters, one token each, of a question and an answer
QUESTION, ANSWER = (40, 0.7), (160, 0.9)
IMAGES = (0, 1, 1, 1, 1, 1, 1, 2, 3)  # of a document, one of these
SIDES = {"448": (448,), "1024": (1024,), "mixed": (224, 336, 448, 448, 672, 1024)}

TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{%- else %}{% for part in m.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
_QWEN3_TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
_QWEN3_TOWER = {"num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3_TOWER["num_position_embeddings"] = 2304


@dataclass(frozen=True)
class VisionShape:
    """The sizes of a published model.

    Args:
        text, tower: what its configuration says of these parts.
    """

    model_type: str
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    tied: bool

    @property
    def patch(self) -> int:
        return self.tower["patch_size"]


SHAPES = {
    "qwen3-vl-2b": VisionShape(
        "qwen3_vl",
        _QWEN3_TEXT
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
        | {"num_attention_heads": 16},
        _QWEN3_TOWER
        | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
        | {"deepstack_visual_indexes": [5, 11, 17]},
        tied=True,
    ),
    "qwen3-vl-8b": VisionShape(
        "qwen3_vl",
        _QWEN3_TEXT
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
        | {"num_attention_heads": 32},
        _QWEN3_TOWER
        | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096}
        | {"deepstack_visual_indexes": [8, 16, 24]},
        tied=False,
    ),
    "qwen2.5-vl-3b": VisionShape(
        "qwen2_5_vl",
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000}
        | {"rms_norm_eps": 1e-6}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 2048}
        | {"fullatt_block_indexes": [7, 15, 23, 31]},
        tied=True,
    ),
    "tiny": VisionShape(
        "qwen3_vl",
        _QWEN3_TEXT
        | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        | {"rope_parameters": _QWEN3_TEXT["rope_parameters"] | {"mrope_section": [4, 2, 2]}},
        _QWEN3_TOWER
        | {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        | {"deepstack_visual_indexes": [0, 1]},
        tied=True,
    ),
}


def build(name: str, work: Path) -> str:
    """A folder with a model of random weights and its processor, whose tokenizer knows single bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessorPil,
    )

    from unsloth_pack.images.processor import VisionProcessor
    from unsloth_pack.images.tokens import IMAGE_TOKENS

    shape, folder = SHAPES[name], work / name
    if (folder / "tokenizer.json").exists():
        return str(folder)
    tokens = IMAGE_TOKENS[shape.model_type]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *tokens.texts]})
    placeholder, start, end, video = (tokenizer.convert_tokens_to_ids(text) for text in tokens.texts)
    config = AutoConfig.for_model(
        shape.model_type,
        text_config={**shape.text, "tie_word_embeddings": shape.tied, "pad_token_id": tokenizer.pad_token_id},
        vision_config=dict(shape.tower),
        tie_word_embeddings=shape.tied,
        image_token_id=placeholder,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    side = 2 * shape.patch
    images = Qwen2VLImageProcessorPil(patch_size=shape.patch, min_pixels=side**2, max_pixels=64**2 * side**2)
    VisionProcessor(images, tokenizer, TEMPLATE, tokens).save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Document:
    """A question with images, and its answer.

    Args:
        sides: of its images, in pixels.
        seed: of their pixels.
    """

    question: str
    answer: str
    sides: tuple[int, ...]
    seed: int

    def grids(self, patch: int) -> list[list[int]]:
        """`[images, 3]`: patches in time, height and width."""
        per_side = [2 * round(side / (2 * patch)) for side in self.sides]
        return [[1, n, n] for n in per_side]

    def jpegs(self) -> list[bytes]:
        """Its images as files: noise in blocks of 8 by 8 pixels."""
        from PIL import Image

        made, numbers = [], np.random.default_rng(self.seed)
        for side in self.sides:
            blocks = numbers.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(blocks).resize((side, side)).save(file, "JPEG", quality=85)
            made.append(file.getvalue())
        return made

    def messages(self, images: list[Any]) -> list[dict[str, Any]]:
        """The document as a conversation with these images; for None with a place for one."""
        parts = [{"type": "image"} | ({} if image is None else {"image": image}) for image in images]
        return [
            {"role": "user", "content": [*parts, {"type": "text", "text": self.question}]},
            {"role": "assistant", "content": [{"type": "text", "text": self.answer}]},
        ]


def updates(sides: str, row_tokens: int, patch: int, count: int) -> list[list[Document]]:
    """The documents of each update: as many in order as fit into a row of so many tokens."""
    drawn, found, row, room = _documents(SIDES[sides], row_tokens, patch), [], [], row_tokens
    while len(found) < count:
        document, length = next(drawn)
        if length > room:
            found.append(row)
            row, room = [], row_tokens
        row.append(document)
        room -= length
    return found


def _documents(sides: tuple[int, ...], most: int, patch: int) -> Iterator[tuple[Document, int]]:
    """Documents and about how many tokens each has; those that fill more than half a row are left out."""
    draw = random.Random(0)

    def text(median: int, sigma: float) -> str:
        return "".join(draw.choices(LETTERS, k=max(4, int(median * draw.lognormvariate(0.0, sigma)))))

    for seed in iter(lambda: draw.getrandbits(32), None):
        chosen = tuple(draw.choices(sides, k=draw.choice(IMAGES)))
        document = Document(text(*QUESTION), text(*ANSWER), chosen, seed)
        of_images = sum(height * width // 4 + 2 for _, height, width in document.grids(patch))
        length = of_images + len(document.question) + len(document.answer) + 24  # roles and marks of turns
        if length <= most // 2:
            yield document, length
