"""Tiny models whose images come in tiles or in sizes of their own, and their processors."""

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from unittest import mock

import pytest
import torch
import transformers
from image_models import PATCH, SIDE, TEXTS, TOWERS
from tiny import tiny_config
from tiny_vision import asked, model_of, picture
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unsloth_pack.images.processor import VisionProcessor
from unsloth_pack.images.tokens import IMAGE_TOKENS

_PINPOINTS = [[SIDE * a, SIDE * b] for a in range(1, 4) for b in range(1, 4)]
# Shortened from those that lie beside the models; the first two show no turn that is one text
_IDEFICS = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_LLAVA = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ '\n' + c['text'] }}{% endgeneration %}{% else %}{{ '\n' + c['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_INTERN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}[IMG]{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}[/INST]{% else %}{% if m['content'] is string %}"
    "{{ m['content'] + eos_token }}{% else %}{{ m['content'][0]['text'] + eos_token }}{% endif %}{% endif %}"
    "{% endfor %}"
)
# As Gemma's own: every text is trimmed, and the system's stands before that of the first turn
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ (m['content'] if m['content'] is string else "
    "m['content'][0]['text']) | trim }}{% endgeneration %}"
    "{% elif m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ c['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """What a family's tests need beside its tower: image processor, sizes, chat template and tokens."""

    image_processor: str
    sizes: dict
    template: str
    tokens: tuple
    config: dict = field(default_factory=dict)
    of_tokenizer: dict = field(default_factory=dict)  # attributes by which transformers' processor knows them


_ROWS = tuple(f"<row_{line}_col_{column}>" for line in range(1, 4) for column in range(1, 4))
_HALF = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
_SPLIT = dict(size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE}, **_HALF)
_SQUARE = {"height": SIDE, "width": SIDE}
_TURNS = ("<|im_start|>", "<|im_end|>")
_OF_IDEFICS = ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", *_ROWS)
FAMILIES = {
    "idefics3": Family("Idefics3", _SPLIT, _IDEFICS, ("<image>", *_OF_IDEFICS), dict(scale_factor=2)),
    "smolvlm": Family(
        "SmolVLM", _SPLIT, _IDEFICS, ("<image>", "<video>", *_OF_IDEFICS), dict(scale_factor=2)
    ),
    "llava_onevision": Family(
        *("LlavaOnevision", dict(size=_SQUARE, image_grid_pinpoints=_PINPOINTS), _LLAVA),
        ("<image>", "<video>", *_TURNS),
        dict(image_grid_pinpoints=_PINPOINTS, vision_aspect_ratio="anyres_max_4"),
    ),
    "internvl": Family(
        *("GotOcr2", dict(size=_SQUARE, max_patches=6), _INTERN),
        ("<IMG_CONTEXT>", "<video>", *_TURNS, "<img>", "</img>"),
        of_tokenizer=dict(start_image_token="<img>", end_image_token="</img>")
        | dict(context_image_token="<IMG_CONTEXT>", video_token="<video>"),
    ),
    "mistral3": Family(
        *("Pixtral", dict(size={"longest_edge": 64}, patch_size={"height": PATCH, "width": PATCH}), _MISTRAL),
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"),
        dict(spatial_merge_size=2),
    ),
    "gemma3": Family(
        *("Gemma3", dict(size=_SQUARE, **_HALF), _GEMMA),
        (
            "<bos>",
            "<start_of_turn>",
            "<end_of_turn>",
            "<start_of_image>",
            "<end_of_image>",
            "<image_soft_token>",
        ),
        dict(mm_tokens_per_image=4),
        dict(bos_token="<bos>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
        | dict(image_token="<image_soft_token>"),
    ),
}


def tile_tokenizer(name, template=None):
    """Bytes, but for two line ends and three, which real tokenizers make one token."""
    family = FAMILIES[name]
    vocab = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<eos>": 256, "<pad>": 257, "ĊĊ": 258, "ĊĊĊ": 259}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    options = dict(eos_token="<eos>", pad_token="<pad>", extra_special_tokens=family.of_tokenizer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **options)
    known = [token for token in family.tokens if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens(known, special_tokens=True)
    tokenizer.chat_template = template or family.template
    return tokenizer


def tile_config(name):
    family, tokenizer = FAMILIES[name], tile_tokenizer(name)
    text = tiny_config(TEXTS[name], vocab_size=len(tokenizer), eos_token_id=256, pad_token_id=257)
    return transformers.AutoConfig.for_model(
        name,
        text_config=text.to_dict() | {"tie_word_embeddings": False},
        vision_config=dict(TOWERS[name]),
        **family.config,
        **{_image_id(name): tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[name].placeholder)},
    )


def _image_id(name):
    return "image_token_index" if name in ("llava_onevision", "mistral3", "gemma3") else "image_token_id"


def tile_model(name, dtype=torch.float32, seed=0):
    return model_of(tile_config(name), dtype, seed)


def tile_image_processor(name, **options):
    return getattr(transformers, f"{FAMILIES[name].image_processor}ImageProcessorPil")(
        **(FAMILIES[name].sizes | options)
    )


def tile_processor(name, **options):
    tokenizer = tile_tokenizer(name)
    return VisionProcessor(
        tile_image_processor(name, **options),
        tokenizer,
        tokenizer.chat_template,
        tile_config(name),
    )


def save_tile_model(folder, name):
    tile_model(name).save_pretrained(folder)
    tile_processor(name).save_pretrained(folder)
    return folder


def theirs(name, **options):
    """transformers' own processor, without its video processor, for which torchvision is needed."""
    config = tile_config(name)
    kind, sizes = {
        "idefics3": ("Idefics3Processor", {"image_seq_len": 4}),
        "smolvlm": ("SmolVLMProcessor", {"image_seq_len": 4}),
        "llava_onevision": (
            "LlavaOnevisionProcessor",
            dict(
                num_image_tokens=16, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_4"
            ),
        ),
        "internvl": ("InternVLProcessor", {"image_seq_length": 4}),
        "mistral3": ("PixtralProcessor", {"patch_size": PATCH, "spatial_merge_size": 2}),
        "gemma3": ("Gemma3Processor", {"image_seq_length": 4}),
    }[name]
    with _without_torchvision():
        if name == "mistral3":
            from transformers.models.pixtral.processing_pixtral import PixtralProcessor as Theirs
        else:
            Theirs = getattr(transformers, kind)

        class WithoutVideos(Theirs):
            def check_argument_for_proper_class(self, name, argument):
                return None

        tokenizer = tile_tokenizer(name)
        made = WithoutVideos(
            image_processor=tile_image_processor(name, **options),
            tokenizer=tokenizer,
            **sizes,
            **({} if name in ("idefics3", "mistral3", "gemma3") else {"video_processor": None}),
        )
    assert config.image_token_id == made.image_token_ids[0]
    made.chat_template = tokenizer.chat_template
    return made


@contextmanager
def _without_torchvision():
    """For transformers' processors of Pixtral and SmolVLM, which import packages that are not used here."""
    from transformers.models.pixtral import image_processing_pil_pixtral as pil
    from transformers.models.smolvlm import processing_smolvlm

    name = "transformers.models.pixtral.image_processing_pixtral"
    stand_in = ModuleType(name)
    stand_in.get_resize_output_image_size = pil.get_resize_output_image_size
    with (
        mock.patch.dict(sys.modules, {name: stand_in}),
        mock.patch.object(processing_smolvlm, "num2words", object()),
    ):
        yield


each_family = pytest.mark.parametrize("name", FAMILIES)
ROWS = [
    asked(picture(30, 70), "what is it?"),  # an image first, and the only one
    asked("no image\n\nat all", answer="None."),
    asked("look: ", picture(40, 90, 1), picture(16, 16, 2), " and", picture(33, 12, 3), answer="Three."),
    asked(picture(5, 20, 4), answer="x"),
    asked("an image last ", picture(90, 20, 5)),
]


def images_of(row):
    return [part["image"] for part in row["messages"][0]["content"] if part["type"] == "image"]


def alone(oracle, row):
    """A document as transformers' own processor makes it: every turn in parts, all images in one list."""
    turns = [
        turn
        if isinstance(turn["content"], list)
        else turn | {"content": [{"type": "text", "text": turn["content"]}]}
        for turn in row["messages"]
    ]
    text = oracle.tokenizer.apply_chat_template(turns, tokenize=False)
    images = {"images": [images_of(row)]} if images_of(row) else {}
    return oracle(text=[text], return_tensors="pt", **images)
