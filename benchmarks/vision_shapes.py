"""Models of vision and language with random weights, and random documents with images for them.

Shapes: T tokens of a row or L of a document, P patches of all its images.
"""

import io
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Median and sigma of the logarithm of the letters, one token each, of a question and an answer
QUESTION, ANSWER = (40, 0.7), (160, 0.9)
IMAGES = (0, 1, 1, 1, 1, 1, 1, 2, 3)  # of a document, one of these
SIDES = {"448": (448,), "1024": (1024,), "mixed": (224, 336, 448, 448, 672, 1024), "tiny": (64, 96, 224)}
FILES = 4  # different images of each size

TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{%- else %}{% for part in m.content %}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


@dataclass(frozen=True)
class VisionShape:
    """The sizes of a published model.

    Args:
        text, tower, others: what its configuration says of these parts, and besides.
        processor: the class of its image processor in transformers.
        images: the arguments of that class.
    """

    model_type: str
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    tied: bool
    processor: str
    images: Mapping[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)

    def config(self, pad_token_id: int, **ids: int) -> Any:
        """The transformers config.

        Args:
            ids: of the tokens that stand for images.
        """
        from transformers import AutoConfig

        tied = {"tie_word_embeddings": self.tied}
        return AutoConfig.for_model(
            self.model_type,
            text_config={**self.text, **tied, "pad_token_id": pad_token_id},
            vision_config=dict(self.tower),
            **tied,
            **ids,
            **self.others,
        )

    def image_processor(self) -> Any:
        """With Pillow for all peers, so that they see the same pixels; `Auto` may choose torchvision."""
        import transformers

        return getattr(transformers, self.processor)(**self.images)


def _qwen(model_type: str, text: dict[str, Any], tower: dict[str, Any], tied: bool) -> VisionShape:
    """A token stands for 2 by 2 patches of an image, which keeps its shape."""
    tower = tower | {"spatial_merge_size": 2, "temporal_patch_size": 2}
    a_token = (2 * tower["patch_size"]) ** 2
    limits = {"min_pixels": a_token, "max_pixels": 64**2 * a_token}
    images = {"patch_size": tower["patch_size"], **limits}
    return VisionShape(model_type, text, tower, tied, "Qwen2VLImageProcessorPil", images)


def _onevision(text: dict[str, Any], tower: dict[str, Any], tiles: int, tied: bool) -> VisionShape:
    """A token stands for a patch. The only image of a document is also cut into tiles.

    Args:
        tiles: of an image in height, and in width, at most.
    """
    side = tower["image_size"]
    canvases = [[side * lines, side * columns] for lines in _up_to(tiles) for columns in _up_to(tiles)]
    return VisionShape(
        "llava_onevision",
        text,
        tower | {"model_type": "siglip_vision_model", "vision_use_head": False},
        tied,
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": side, "width": side}, "image_grid_pinpoints": canvases},
        {"image_grid_pinpoints": canvases, "vision_aspect_ratio": "anyres_max_9"},
    )


def _up_to(most: int) -> range:
    return range(1, most + 1)


_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
}
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 5e6}
_QWEN3_AXES = _QWEN3_ROPE | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_QWEN3_VL = _QWEN3 | {"rope_parameters": _QWEN3_AXES}
_QWEN3_TOWER = {"num_heads": 16, "patch_size": 16, "num_position_embeddings": 2304}
_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

SHAPES = {
    "qwen3-vl-2b": _qwen(
        "qwen3_vl",
        _QWEN3_VL
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
        | {"num_attention_heads": 16},
        _QWEN3_TOWER
        | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
        | {"deepstack_visual_indexes": [5, 11, 17]},
        tied=True,
    ),
    "qwen3-vl-8b": _qwen(
        "qwen3_vl",
        _QWEN3_VL
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
        | {"num_attention_heads": 32},
        _QWEN3_TOWER
        | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096}
        | {"deepstack_visual_indexes": [8, 16, 24]},
        tied=False,
    ),
    "qwen2.5-vl-3b": _qwen(
        "qwen2_5_vl",
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000}
        | {"rms_norm_eps": 1e-6}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}
        | {"window_size": 112, "out_hidden_size": 2048}
        | {"fullatt_block_indexes": [7, 15, 23, 31]},
        tied=True,
    ),
    # Tower and tiles of llava-onevision-qwen2-7b, which leaves out the last of SigLIP's 27 layers. The text
    # model is Qwen3-4B, as in the 4B models of later LLaVA-OneVision; Qwen2 has none of this size.
    "onevision-4b": _onevision(
        _QWEN3
        | {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "rope_parameters": _QWEN3_ROPE},
        {"num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 4304}
        | {"num_attention_heads": 16, "patch_size": 14, "image_size": 384},
        tiles=6,
        tied=True,
    ),
    "tiny": _qwen(
        "qwen3_vl",
        _QWEN3_VL | _TINY | {"rope_parameters": _QWEN3_AXES | {"mrope_section": [4, 2, 2]}},
        _QWEN3_TOWER
        | {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        | {"deepstack_visual_indexes": [0, 1]},
        tied=True,
    ),
    "tiny-2.5": _qwen(
        "qwen2_5_vl",
        _TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14}
        | {"window_size": 112, "out_hidden_size": 64}
        | {"fullatt_block_indexes": [1]},
        tied=True,
    ),
    "tiny-onevision": _onevision(
        _QWEN3 | _TINY | {"model_type": "qwen3", "rope_parameters": _QWEN3_ROPE},
        {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
        | {"num_attention_heads": 2, "patch_size": 16, "image_size": 112},
        tiles=3,
        tied=True,
    ),
}


def build(name: str, work: Path) -> str:
    """A folder with a model of random weights and its processor, whose tokenizer knows single bytes."""
    import torch
    from transformers import AutoModelForImageTextToText

    from unsloth_pack.images.processor import VisionProcessor
    from unsloth_pack.images.tokens import IMAGE_TOKENS

    shape, folder = SHAPES[name], work / "vision" / name
    if (folder / "tokenizer.json").exists():
        return str(folder)
    tokens = IMAGE_TOKENS[shape.model_type]
    tokenizer = _tokenizer(tokens)
    texts = {"image_token_id": tokens.placeholder, "video_token_id": tokens.reserved[0]}
    texts |= {"vision_start_token_id": tokens.start, "vision_end_token_id": tokens.end}
    ids = {key: tokenizer.convert_tokens_to_ids(text) for key, text in texts.items() if text}
    config = shape.config(pad_token_id=tokenizer.pad_token_id, **ids)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    processor = VisionProcessor(shape.image_processor(), tokenizer, tokenizer.chat_template, config)
    processor.save_pretrained(folder)
    return str(folder)


def _tokenizer(tokens: Any) -> Any:
    """Of single bytes, with the image tokens of a family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE.replace("IMAGE", tokens.start + tokens.placeholder + tokens.end),
    )
    of_images = [tokens.placeholder, tokens.start, tokens.end, *tokens.reserved]
    names = ["<|im_start|>", *filter(None, of_images)]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


def processor_in(folder: str, name: str) -> tuple[Any, Any]:
    """The configuration and the processor of the model that `build` has made of a shape."""
    from transformers import AutoConfig, AutoTokenizer

    from unsloth_pack.images.processor import VisionProcessor

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    images = SHAPES[name].image_processor()
    return config, VisionProcessor(images, tokenizer, tokenizer.chat_template, config)


@cache
def jpeg(side: int, number: int) -> bytes:
    """A square image as a file: noise in blocks of 8 by 8 pixels."""
    from PIL import Image

    blocks = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((side, side)).save(file, "JPEG", quality=85)
    return file.getvalue()


@dataclass(frozen=True)
class Document:
    """A question with images, and its answer.

    Args:
        sides: of its images, in pixels.
        seed: chooses its images among those of their size.
    """

    question: str
    answer: str
    sides: tuple[int, ...]
    seed: int

    def jpegs(self) -> list[bytes]:
        """Its images as files."""
        return [jpeg(side, (self.seed + place) % FILES) for place, side in enumerate(self.sides)]

    def messages(self, images: list[Any]) -> list[dict[str, Any]]:
        """The document as a conversation with these images; for None with a place for one."""
        parts = [{"type": "image"} | ({} if image is None else {"image": image}) for image in images]
        return [
            {"role": "user", "content": [*parts, {"type": "text", "text": self.question}]},
            {"role": "assistant", "content": [{"type": "text", "text": self.answer}]},
        ]


def updates(sides: str, row_tokens: int, make: Any, count: int) -> list[list[Document]]:
    """The documents of each update: as many in order as fit into a row of so many tokens.

    Args:
        make: the `ImageMaker` of the model, which knows how many tokens an image has.
    """
    drawn, found, row, room = _documents(SIDES[sides], row_tokens, make), [], [], row_tokens
    while len(found) < count:
        document, length = next(drawn)
        if length > room:
            found.append(row)
            row, room = [], row_tokens
        row.append(document)
        room -= length
    return found


def _documents(sides: tuple[int, ...], most: int, make: Any) -> Iterator[tuple[Document, int]]:
    """Documents and about how many tokens each has; those that fit into no row are left out."""
    from unsloth_pack.images.reading import ImageSource

    draw = random.Random(0)

    def text(median: int, sigma: float) -> str:
        return "".join(draw.choices(LETTERS, k=max(4, int(median * draw.lognormvariate(0.0, sigma)))))

    for seed in iter(lambda: draw.getrandbits(32), None):
        chosen = tuple(draw.choices(sides, k=draw.choice(IMAGES)))
        document = Document(text(*QUESTION), text(*ANSWER), chosen, seed)
        source = ImageSource(0, "images", b"")  # of its size, which is known
        cuts = [make.cut(source, (side, side), of_document=len(chosen)) for side in chosen]
        of_images = sum(cut.tokens + 2 for cut in cuts)
        length = of_images + len(document.question) + len(document.answer) + 24  # roles and marks of turns
        if length <= most:
            yield document, length
