"""The shapes that the benchmarks run on, as models with random weights, which are as fast as trained ones.

All have 2**20 positions, so that only memory limits a context.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes.

    Args:
        tokens: of a packed row in the benchmarks.
    """

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    positions: int
    tied: bool
    theta: float
    tokens: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self, **overrides):
        """The transformers config."""
        from transformers import AutoConfig

        sizes = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return AutoConfig.for_model(self.model_type, **(sizes | overrides))


SHAPES = {
    "qwen0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, 2**20, True, 1e6, tokens=2048),
    "llama8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 2**20, False, 5e5, tokens=8192),
    "tiny": Shape("qwen2", 4096, 128, 256, 2, 4, 2, 2**20, True, 1e4, tokens=512),
}


def build(name: str, work: Path, texts: list[str] | None = None, layers: int | None = None) -> str:
    """A folder with a model of random weights and a tokenizer trained on `texts`; made once.

    Args:
        texts: without them the tokenizer knows single bytes only.
        layers: of the model; None for the shape's.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = SHAPES[name]
    overrides = {} if layers is None else {"num_hidden_layers": layers}
    folder = work / (name if layers is None else f"{name}-of-{layers}-layers")
    if (folder / "tokenizer.json").exists():
        return str(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(shape.config(**overrides), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=min(shape.vocab, 24000),
        special_tokens=special,
        initial_alphabet=letters,
        show_progress=False,
    )
    bpe.train_from_iterator(texts or [], trainer)
    pad, bos, eos = special
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=pad, bos_token=bos, eos_token=eos
    ).save_pretrained(folder)
    return str(folder)


def versions() -> dict[str, str | None]:
    """Versions of the packages that figures are measured with."""
    import platform

    import peft
    import torch
    import transformers
    import trl

    found: dict[str, str | None] = {m.__name__: m.__version__ for m in (torch, transformers, trl, peft)}
    return found | {"python": platform.python_version(), "cuda": torch.version.cuda}


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
