"""Tiny models on disk for the command line, and what its runs leave behind."""

import json
import os

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from unsloth_pack import supported_architectures

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(chat_template=TEMPLATE):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: place for place, letter in enumerate(letters)} | {"<eos>": 256, "<pad>": 257}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = chat_template
    return tokenizer


def save_model(folder, architecture="llama", chat_template=TEMPLATE, **overrides):
    config = supported_architectures()[architecture].tiny_config(
        **{
            "vocab_size": 258,
            "max_position_embeddings": 256,
            "eos_token_id": 256,
            "pad_token_id": 257,
            **overrides,
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder


def read_metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        kind: [line for line in lines if line["kind"] == kind] for kind in {line["kind"] for line in lines}
    }


def losses(folder):
    return {line["step"]: line["loss"] for line in read_metrics(folder)["log"] if "loss" in line}


def tree(folder):
    """Every file under a folder, with its size and the time of its last change."""
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return {path: (os.path.getsize(path), os.path.getmtime(path)) for path in paths}
