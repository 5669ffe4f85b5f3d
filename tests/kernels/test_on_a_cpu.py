"""A CPU runs every kernel's reference without Triton; with Triton all other tests run it."""

import subprocess
import sys

# Every function that runs a kernel, with source of arguments that any reference takes
CALLS = {
    "rms_norm": "(randn(5, 8), randn(8), 1e-6, 1.0)",
    "add_rms_norm": "(randn(5, 8), randn(5, 8), randn(8), 1e-6, 1.0)",
    "gated": "(randn(5, 8), randn(5, 8), 'silu')",
    "gated_lora_": "(LoraOutput(randn(5, 8), low_rank), LoraOutput(randn(5, 8)), 'silu', False)",
    "relu2": "(randn(3, 5),)",
    "xielu": "(randn(3, 5), *map(torch.tensor, ([0.2], [-1.0], 0.5, -1e-6)))",
    "rope_qk": "(randn(5, 4, 8), randn(5, 2, 8), randn(5, 8), randn(5, 8))",
    "varlen_attention": "(randn(5, 4, 8), *randn(2, 5, 2, 8), torch.tensor([0, 2, 5]).int(), 0.3)",
    "routed_gate_": "(InnerSum(randn(5, 8)), torch.rand(5), Gate('silu'), False)",
    "dequantize_4bit": "(torch.arange(64).to(torch.uint8), torch.rand(16), torch.rand(2), 64, torch.float32)",
    "dropout": "(randn(5, 8), torch.tensor([7]), 0.5)",
    "linear_cross_entropy": "(randn(5, 8), randn(30, 8), torch.tensor([0, 29, -100, 3, 4]))",
    "token_scores": "(randn(5, 8), randn(30, 8), torch.tensor([0, 29, -100, 3, 4]))",
}
CODE = """
import sys
sys.modules["triton"] = None
import torch
from torch import randn
from unsloth_pack import kernels
from unsloth_pack.kernels import Gate, InnerSum, LoraOutput, LowRank, reference

low_rank = LowRank(randn(5, 2), randn(8, 2))
for what, arguments in {calls}.items():
    name, arguments = what.split()[0], eval(arguments)
    ours, theirs = (getattr(home, name)(*arguments) for home in (kernels, reference))
    torch.testing.assert_close(ours, theirs, msg=what)
"""


def test_every_kernel_runs_without_triton():
    code = CODE.format(calls=CALLS)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
