"""Tokenizers of bytes with the special tokens of each family, and conversations."""

from model_folder import byte_tokenizer

from unsloth_pack.chat_templates import CHAT_FORMATS

FAMILIES = sorted(CHAT_FORMATS)
_CHATML = ("<|im_start|>", "<|im_end|>")
_GEMMA = ("<start_of_turn>", "<end_of_turn>")
_LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_PHI_3 = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
SPECIAL = {
    **dict.fromkeys(("chatml", "qwen-2.5", "qwen-3", "qwen-3-instruct", "qwen-3-thinking"), _CHATML),
    **dict.fromkeys(("gemma", "gemma-2", "gemma-3", "gemma-3n"), _GEMMA),
    **dict.fromkeys(("llama-3", "llama-3.1", "llama-3.2", "llama-3.3"), _LLAMA_3),
    **dict.fromkeys(("phi-3", "phi-3.5"), _PHI_3),
    "phi-4": (*_CHATML, "<|im_sep|>"),
}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ta"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be kind."}, *TURNS]


def tokenizer_of(family, special=True):
    """`special=False`: the markers are text of several tokens, as in an older vocabulary."""
    tokenizer = byte_tokenizer(chat_template=None)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL.get(family, ())]})
    return tokenizer
