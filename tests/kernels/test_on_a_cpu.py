"""A CPU takes the reference of every kernel, with Triton installed and without."""

import subprocess
import sys

import pytest

# Every function that runs a kernel, with source of arguments that any reference takes
CALLS = {
    "rms_norm": "(randn(5, 8), randn(8), 1e-6, 1.0)",
    "add_rms_norm": "(randn(5, 8), randn(5, 8), randn(8), 1e-6, 1.0)",
    "add_rms_norm of one tensor": "(randn(5, 8), None, randn(8), 1e-6, 1.0)",
    "gated": "(randn(5, 8), randn(5, 8), 'silu')",
    "gated by gelu_tanh": "(randn(5, 8), randn(5, 8), 'gelu_tanh')",
    "gated_lora_": "(randn(5, 8), low_rank, randn(5, 8), low_rank, 'silu', False)",
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
# These compute in chunks without Triton too: to rounding as the reference, which has all logits at once
IN_CHUNKS = ("linear_cross_entropy", "token_scores")
CODE = """
import sys
{hide}
import torch
from torch import randn
from unsloth_pack import kernels
from unsloth_pack.kernels import Gate, InnerSum, LowRank, launch, reference

assert not launch.INTERPRETED
low_rank = LowRank(randn(5, 2), randn(8, 2))
wrong = []
for what, arguments in {calls}.items():
    name, arguments = what.split()[0], eval(arguments)
    with torch.no_grad():
        ours, theirs = (getattr(home, name)(*arguments) for home in (kernels, reference))
    ours, theirs = (
        [x] if isinstance(x, torch.Tensor) else [y for y in x if y is not None] for x in (ours, theirs)
    )
    same = torch.allclose if name in {in_chunks} else torch.equal
    if len(ours) != len(theirs) or not all(map(same, ours, theirs)):
        wrong.append(what)
sys.exit(f"not the reference: {{wrong}}" if wrong else 0)
"""


@pytest.mark.parametrize("hide", ["", "sys.modules['triton'] = None"], ids=["with Triton", "without Triton"])
def test_a_cpu_takes_the_reference(hide):
    code = CODE.format(hide=hide, calls=CALLS, in_chunks=IN_CHUNKS)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
