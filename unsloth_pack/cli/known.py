"""Data for `doctor`: tested releases, and releases known to break."""

from collections.abc import Mapping
from dataclasses import dataclass

# Package -> the first release that the tests run with, and the first that they do not.
TESTED = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.24"),
    "trl": ("1.15", "1.17"),
    "peft": ("0.19", "0.22"),
    "accelerate": ("1.15", "1.16"),
    "datasets": ("4.8", "5.3"),
}
# Optional package -> what uses it, and whether every machine with CUDA should have it.
OPTIONAL = {
    "triton": ("fused kernels on CUDA, among them softcapped attention", True),
    "bitsandbytes": ("load_in_4bit, load_in_8bit and 8-bit optimizers", False),
    "torchao": ("the optimizers adamw_torch_8bit and adamw_torch_4bit", False),
    "xformers": ("the xformers attention backend", False),
    "flash-attn": ("flash attention with attention dropout; torch and triton bring the rest", False),
    "fla-core": ("gated delta nets of hybrid models: whole rows at once", False),
    "causal-conv1d": ("convolutions of hybrid models: whole rows at once", False),
    "mamba-ssm": ("Mamba-2 layers of hybrid models: whole rows at once", False),
    "flash-attn-4": ("attention about twice as fast for long documents on Hopper GPUs", False),
}


@dataclass(frozen=True)
class Breakage:
    """Something that does not work with certain releases.

    Args:
        releases: package -> versions, as pip writes them; all must be installed.
        device_type: "cuda" or "cpu" if it breaks only there.
        what: what does not work.
        remedy: what to do about it.
    """

    releases: Mapping[str, str]
    device_type: str | None
    what: str
    remedy: str


BREAKAGES = (
    Breakage(
        {"xformers": "<=0.0.35", "torch": ">=2.11"},
        "cuda",
        "the compiled extension of xformers does not load; of its operators only FlashAttention's runs",
        "use --attn_backend flash, or an xformers that was built for this torch",
    ),
    Breakage({"trl": "<1.16"}, "cpu", "TRL trains on CUDA only", "pip install 'trl>=1.16'"),
    Breakage(
        {"peft": "<0.21"},
        None,
        "a saved adapter of experts (qwen3_moe) cannot be loaded again",
        "pip install 'peft>=0.21'",
    ),
    Breakage(
        {"transformers": "<5.18"},
        None,
        "transformers' own sdpa attention drops Gemma 2's softcap; models from FastLanguageModel keep it",
        "pip install 'transformers>=5.23' before comparing with an unpatched model",
    ),
)
