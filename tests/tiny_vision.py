"""Tiny models of vision and language, their processor, and images drawn from a seed."""

import io

import numpy as np
import torch
from model_folder import byte_tokenizer
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from unsloth_pack.images.processor import VisionProcessor
from unsloth_pack.images.tokens import IMAGE_TOKENS

QWEN = IMAGE_TOKENS["qwen3_vl"]
TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- elif m.content is string %}{{ m.content }}<|im_end|>
{%- else %}{% for part in m.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}<|im_end|>{% endif %}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
FAMILY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def vision_tokenizer(template=TEMPLATE):
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *QWEN.texts]})
    return tokenizer


def image_processor(patch=16, **options):
    return Qwen2VLImageProcessorPil(
        patch_size=patch, **{"min_pixels": (2 * patch) ** 2, "max_pixels": 24 * (2 * patch) ** 2, **options}
    )


def vision_processor(model_type="qwen3_vl", template=TEMPLATE, **options):
    patch = 16 if model_type == "qwen3_vl" else 14
    tokenizer = vision_tokenizer(template)
    return VisionProcessor(image_processor(patch, **options), tokenizer, template, vision_config(model_type))


def vision_config(model_type="qwen3_vl", tie=False):
    tokenizer = vision_tokenizer()
    ids = {
        name: tokenizer.convert_tokens_to_ids(text)
        for name, text in zip(
            ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id"),
            QWEN.texts,
            strict=True,
        )
    }
    text = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048)
    text |= dict(initializer_range=0.08, tie_word_embeddings=tie, eos_token_id=256, pad_token_id=257)
    sections = [4, 2, 2] if model_type == "qwen3_vl" else [2, 3, 3]
    text["rope_parameters"] = dict(rope_type="default", rope_theta=1e4, mrope_section=sections)
    vision = dict(depth=2, num_heads=2, intermediate_size=48, spatial_merge_size=2, temporal_patch_size=2)
    if model_type == "qwen3_vl":
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= dict(hidden_size=32, patch_size=16, out_hidden_size=64, num_position_embeddings=64)
        vision |= dict(deepstack_visual_indexes=[0, 1], initializer_range=0.08)
    elif model_type == "qwen2_5_vl":
        vision |= dict(hidden_size=32, patch_size=14, out_hidden_size=64, window_size=56)
        vision |= dict(fullatt_block_indexes=[1])
    else:
        vision |= dict(embed_dim=32, hidden_size=64, patch_size=14, mlp_ratio=2)
    return AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, tie_word_embeddings=tie, **ids
    )


def vision_model(model_type="qwen3_vl", dtype=torch.float32, seed=0):
    return model_of(vision_config(model_type), dtype, seed)


def model_of(config, dtype=torch.float32, seed=0):
    """A random model, the same in every dtype."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases begin as ones and zeros
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return model.to(dtype)


def save_vision_model(folder, model_type="qwen2_5_vl", template=TEMPLATE):
    vision_model(model_type).save_pretrained(folder)
    vision_processor(model_type, template).save_pretrained(folder)
    return folder


def picture(height, width, seed=0, mode="RGB"):
    """Random pixels, so that resizing and transposing show."""
    numbers = np.random.default_rng(seed)
    coarse = numbers.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).convert(mode)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def asked(*content, answer="It is red."):
    """A row of one question, with texts and images, and its answer."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in content
    ]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}
