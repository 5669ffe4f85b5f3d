"""Speed of attention over rows that branch, against rows that repeat the prefix for each branch.

    python benchmarks/branched_attention.py [--window 256] [--uneven 1,2,4,8]

A row holds a prefix of 1,000 tokens and 8 branches of 500, or 8 documents of 1,500, once and four times, in
bfloat16. Times are of the forward pass and of both passes, the median of 30 calls. Backends that take no
branches leave those rows to `triton`. `--uneven` tries factors for how finely that divides the gradients of k
and v. Tests judge correctness.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from unsloth_pack.attention import BACKENDS, AttentionNeed, AttentionOptions, attend, why_unavailable
from unsloth_pack.packed_row.row import PackedRow

varlen = import_module("unsloth_pack.kernels.attention")  # whose name the function has taken
HEADS = ((32, 8, 128), (14, 2, 64), (16, 8, 256))  # of q, of k, and their size
PREFIX, BRANCH, BRANCHES, PROMPTS = 1000, 500, 8, 4
ROUNDS = 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--window", type=int, help="keys that a query sees (default: all)")
    parser.add_argument("--uneven", default=str(varlen.UNEVEN), help="one or several factors")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{sys.argv[0]} measures a CUDA device and this machine has none", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(
        f"{'backend':<10}{'heads':<14}{'prompts':>8}{'uneven':>8}  {'row':<10}{'forward':>10}{'both ms':>10}"
    )
    for heads in HEADS:
        options = AttentionOptions(heads[2] ** -0.5, args.window)
        need = AttentionNeed("cuda", torch.bfloat16, heads[2], options)
        for name in (name for name in BACKENDS if why_unavailable(name, need) is None):
            for uneven in args.uneven.split(",") if name == "triton" else ("",):
                varlen.UNEVEN = int(uneven or 1)
                for prompts in (1, PROMPTS):
                    for kind, row in rows(prompts).items():
                        times = (f"{ms:>9.3f}" for ms in measure(name, heads, row, options))
                        print(
                            f"{name:<10}{'/'.join(map(str, heads)):<14}{prompts:>8}{uneven:>8}  {kind:<10}",
                            *times,
                            flush=True,
                        )
    return 0


def rows(prompts: int) -> dict[str, PackedRow]:
    device = torch.device("cuda")
    lengths = (PREFIX, *[BRANCH] * BRANCHES) * prompts
    parent = tuple(-1 if s % (BRANCHES + 1) == 0 else s - s % (BRANCHES + 1) for s in range(len(lengths)))
    repeated = (PREFIX + BRANCH,) * BRANCHES * prompts
    return {
        "branched": PackedRow.of_lengths(lengths, device, parent),
        "repeated": PackedRow.of_lengths(repeated, device),
    }


def measure(
    name: str, heads: tuple[int, int, int], row: PackedRow, options: AttentionOptions
) -> tuple[float, float]:
    """Return the ms of the forward pass and of both."""
    n_heads, n_kv_heads, size = heads
    torch.manual_seed(0)
    *qkv, grad = (
        torch.randn(row.n_tokens, n, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    )

    def forward() -> Tensor:
        return attend(*qkv, row, options, name)

    def both() -> object:
        return torch.autograd.grad(forward(), qkv, grad)

    return median_ms(forward), median_ms(both)


def median_ms(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(ROUNDS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(2_000_000)  # the host is ahead, so that its own time does not count
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
