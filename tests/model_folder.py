"""A tiny random model and its tokenizer as files in a folder."""

import torch
from tiny import tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

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
    sizes = {"vocab_size": 258, "max_position_embeddings": 256, "eos_token_id": 256, "pad_token_id": 257}
    config = tiny_config(architecture, **{**sizes, **overrides})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder
