"""The shapes that the benchmarks run on, as models with random weights, which are as fast as trained ones.

`SHAPES` have 2**20 positions, so that only memory limits a context. `PUBLISHED` and `HYBRIDS` are the shapes
of published models, with the positions of those models.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes.

    Args:
        theta: the base of the rotary frequencies; a model with two kinds of layers has one for each kind.
        tokens: of a packed row in the benchmarks.
        others: what else differs from the defaults of the config.
        projections: what LoRA adapts.
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
    theta: float | Mapping[str, float]
    tokens: int
    others: Mapping[str, Any] = field(default_factory=dict)
    projections: tuple[str, ...] = SEVEN

    @property
    def head_dim(self) -> int:
        return self.others.get("head_dim", self.hidden // self.heads)

    def config(self, **overrides):
        """The transformers config."""
        from transformers import AutoConfig

        def rope(theta):
            return {"rope_type": "default", "rope_theta": theta}

        by_kind = isinstance(self.theta, Mapping)
        sizes = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "rope_parameters": (
                {kind: rope(theta) for kind, theta in self.theta.items()} if by_kind else rope(self.theta)
            ),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return AutoConfig.for_model(self.model_type, **(sizes | self.others | overrides))


SHAPES = {
    "qwen0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, 2**20, True, 1e6, tokens=2048),
    "llama8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 2**20, False, 5e5, tokens=8192),
    "tiny": Shape("qwen2", 4096, 128, 256, 2, 4, 2, 2**20, True, 1e4, tokens=512),
    "tiny-lfm2": Shape(
        "lfm2",
        4096,
        128,
        256,
        2,
        4,
        2,
        2**20,
        True,
        1e4,
        tokens=512,
        others={"full_attn_idxs": [1]},
        projections=("in_proj", "out_proj", "w1", "w2", "w3"),
    ),
}

_GEMMA2 = {
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {"head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256}
_GEMMA3_THETAS = {"sliding_attention": 1e4, "full_attention": 1e6}
_NORM6 = {"rms_norm_eps": 1e-6}
_NORM5 = {"rms_norm_eps": 1e-5}
_PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_LFM2 = {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3}
_LFM2_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3")
_GRANITE4_H = {
    "layer_types": ["full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 4096,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": None,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
_GRANITE4_H_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "input_linear", "output_linear")
_QWEN3_5 = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(24)],
}
_QWEN3_5_PROJECTIONS = (*SEVEN, "in_proj_qkv", "in_proj_z", "out_proj")
PUBLISHED = {
    "qwen2.5-0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, True, 1e6, 2048, _NORM6),
    "gemma3-1b": Shape(
        "gemma3_text", 262144, 1152, 6912, 26, 4, 1, 32768, True, _GEMMA3_THETAS, 4096, _GEMMA3 | _NORM6
    ),
    "llama3.2-1b": Shape("llama", 128256, 2048, 8192, 16, 32, 8, 131072, True, 5e5, 4096, _NORM5),
    "qwen3-1.7b": Shape(
        "qwen3", 151936, 2048, 6144, 28, 16, 8, 40960, True, 1e6, 4096, {"head_dim": 128} | _NORM6
    ),
    "gemma2-2b": Shape("gemma2", 256000, 2304, 9216, 26, 8, 4, 8192, True, 1e4, 4096, _GEMMA2 | _NORM6),
    "llama3.2-3b": Shape("llama", 128256, 3072, 8192, 28, 24, 8, 131072, True, 5e5, 8192, _NORM5),
    "phi3-mini": Shape(
        "phi3",
        32064,
        3072,
        8192,
        32,
        32,
        32,
        4096,
        False,
        1e4,
        4096,
        {"sliding_window": 2047} | _NORM5,
        _PHI3,
    ),
    "qwen3-4b": Shape(
        "qwen3", 151936, 2560, 9728, 36, 32, 8, 40960, True, 1e6, 8192, {"head_dim": 128} | _NORM6
    ),
    "mistral-7b": Shape(
        "mistral", 32768, 4096, 14336, 32, 32, 8, 32768, False, 1e6, 8192, {"sliding_window": None} | _NORM5
    ),
    "llama3.1-8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 131072, False, 5e5, 8192, _NORM5),
}
HYBRIDS = {  # with layers that carry a state
    "lfm2-1.2b": Shape(
        "lfm2", 65536, 2048, 12288, 16, 32, 8, 128000, True, 1e6, 8192, _LFM2, _LFM2_PROJECTIONS
    ),
    "granite4-h-1b": Shape(
        "granitemoehybrid",
        100352,
        1536,
        4096,
        40,
        12,
        4,
        131072,
        True,
        1e4,
        8192,
        _GRANITE4_H | _NORM5,
        _GRANITE4_H_PROJECTIONS,
    ),
    "qwen3.5-0.8b": Shape(
        "qwen3_5_text",
        248320,
        1024,
        3584,
        24,
        8,
        2,
        262144,
        True,
        1e7,
        8192,
        _QWEN3_5 | _NORM6,
        _QWEN3_5_PROJECTIONS,
    ),
}
_OSS = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
IN_MXFP4 = {  # written as published: experts in MXFP4
    "gpt-oss-20b": Shape("gpt_oss", 201088, 2880, 2880, 24, 64, 8, 131072, False, 15e4, 4096, _OSS),
}
_A3B = {"moe_intermediate_size": 768, "num_experts": 128, "norm_topk_prob": True}
LARGE = {  # written weight by weight: few machines hold them twice
    "llama70b": Shape("llama", 128256, 8192, 28672, 80, 64, 8, 2**20, False, 5e5, tokens=4096),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        151936,
        2048,
        6144,
        48,
        32,
        4,
        40960,
        False,
        1e6,
        4096,
        {"head_dim": 128} | _A3B | _NORM6,
    ),
    "qwen3-32b": Shape(
        "qwen3", 151936, 5120, 25600, 64, 64, 8, 40960, False, 1e6, 4096, {"head_dim": 128} | _NORM6
    ),
}
EVERY_SHAPE = SHAPES | PUBLISHED | HYBRIDS | LARGE | IN_MXFP4


_WRITERS = 12  # processes that write their files


def build(name: str, work: Path, texts: list[str] | None = None, layers: int | None = None) -> str:
    """A folder with a model of random weights and a tokenizer trained on `texts`; made once.

    Args:
        texts: without them the tokenizer knows single bytes only.
        layers: of the model; None for the shape's.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = EVERY_SHAPE[name]
    overrides = {} if layers is None else {"num_hidden_layers": layers}
    folder = work / (name if layers is None else f"{name}-of-{layers}-layers")
    if (folder / "tokenizer.json").exists():
        return str(folder)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_large = name in LARGE | IN_MXFP4
    with torch.device("meta" if is_large else device):
        model = AutoModelForCausalLM.from_config(shape.config(**overrides), dtype=torch.bfloat16)
    if is_large:
        if name in IN_MXFP4:
            model.config.quantization_config = {"quant_method": "mxfp4"}
        _write_by_weight(model, folder, device)
    else:
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


def _write_by_weight(model, folder: Path, device: str) -> None:
    """Write random weights of a model, several files at a time, each by a process of its own."""
    import multiprocessing

    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    folder.mkdir(parents=True, exist_ok=True)
    weights = model.state_dict()
    if hasattr(model.config, "quantization_config"):
        weights = _packed(weights)
    sizes = {name: meta.shape for name, meta in weights.items()}
    plan = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size="4GB"
    )
    n_devices = max(1, torch.cuda.device_count())
    jobs = [
        (str(folder / file), {name: sizes[name] for name in names}, f"{device}:{number % n_devices}")
        for number, (file, names) in enumerate(plan.filename_to_tensors.items())
    ]
    with multiprocessing.get_context("spawn").Pool(min(_WRITERS, len(jobs))) as pool:
        pool.starmap(_write_file, jobs)
    index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def _packed(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Replace stacks of experts on the meta device by those of MXFP4, 32 inputs a block."""
    packed = {}
    for name, weight in weights.items():
        if weight.dim() < 3:
            packed[name] = weight
            continue
        n_experts, n_inputs, n_outputs = weight.shape
        packed[f"{name}_blocks"] = weight.new_empty((n_experts, n_outputs, n_inputs // 32, 16)).byte()
        packed[f"{name}_scales"] = weight.new_empty((n_experts, n_outputs, n_inputs // 32)).byte()
    return packed


def _write_file(path: str, sizes: dict[str, Any], device: str) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(zlib.crc32(path.encode()))
    weights = {}
    for name, size in sizes.items():
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (119, 121)  # of about 0.02
            weights[name] = torch.randint(low, high, size, dtype=torch.uint8)
            continue
        weight = torch.ones(size, dtype=torch.bfloat16, device=device)  # of a norm
        weights[name] = (weight if len(size) == 1 else weight.normal_(std=0.02)).cpu()
    save_file(weights, path, {"format": "pt"})


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
