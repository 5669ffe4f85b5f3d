"""The speed of rope_qk on a packed row, compared with torch and with the speed of memory.

    python benchmarks/rope.py [--json PATH]

For each head layout and row length, in bfloat16, forward and forward + backward:
  torch    transformers' way: q * cos + rotate_half(q) * sin, with cos and sin ready in bfloat16
  packed   rope_qk with the positions of a row of ragged documents
  dense    rope_qk with positions 0 .. T-1
`eager` is the time between CUDA events around many calls, launch gaps and Python included. `graph` is the
time of the same calls replayed from a CUDA graph. The calls rotate through so many inputs and outputs that
the L2 cache holds none of them when its turn comes. GB/s is for the graph's time: it counts one read and one
write of q and k, and one read of the positions and of the table rows that occur. The yardstick is a large
device-to-device copy in the same run, with both its reads and its writes counted.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ((32, 8, 128), (14, 2, 64))  # query heads, key heads, head dim
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
WORKING_SET = 2**29  # bytes of inputs and outputs that the calls rotate through, many times the L2 cache
MAX_SETS = 128
ROUNDS = 30

Outputs = tuple[Tensor, ...]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/rope.py measures a CUDA device and this machine has none", file=sys.stderr)
        return 2
    import triton

    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "copy_gb_s": copy_bandwidth(),
    }
    print("{gpu}, torch {torch}, triton {triton}, copy {copy_gb_s:.0f} GB/s\n".format(**report))
    rows = []
    for layout in LAYOUTS:
        for direction in ("forward", "forward+backward"):
            print_head(layout, direction)
            for tokens in LENGTHS:
                rows.append(measure(layout, tokens, direction, report["copy_gb_s"]))
                print_row(rows[-1])
            print()
    errors = [float32_errors(layout) for layout in LAYOUTS]
    print("float32, 1024 tokens, largest error against float64")
    for error in errors:
        print("  " + "  ".join(f"{k} {v:.2e}" if isinstance(v, float) else v for k, v in error.items()))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report | {"rows": rows, "float32_errors": errors}, indent=1) + "\n")
    return 0


def print_head(layout: tuple[int, int, int], direction: str) -> None:
    ms = f"{'torch':>8}{'packed':>8}{'dense':>8} {'speedup':>7}"
    print(f"{name_of(layout)}, {direction}")
    print(f"{'':>6} {'eager ms':^32} {'graph ms':^32} {'packed/':>8}")
    print(f"{'T':>6} {ms} {ms} {'dense':>8} {'GB/s':>6} {'% of copy':>9}")


def print_row(row: dict[str, Any]) -> None:
    print(f"{row['tokens']:>6}", end="")
    for clock in ("eager", "graph"):
        ms = [row[f"{path}_{clock}_ms"] for path in ("torch", "packed", "dense")]
        print(" " + "".join(f"{x:>8.4f}" for x in ms), f"{row[f'speedup_{clock}']:>6.1f}x", end="")
    print(f" {row['packed_over_dense']:>8.3f} {row['packed_gb_s']:>6.0f} {row['percent_of_copy']:>8.0f}%")


def measure(layout: tuple[int, int, int], tokens: int, direction: str, copy_gb_s: float) -> dict[str, Any]:
    HQ, HK, D = layout
    backward = direction != "forward"
    positions = packed_positions(tokens)
    cos, sin = tables(tokens, D)
    qk_bytes = 2 * tokens * (HQ + HK) * D
    n_sets = min(MAX_SETS, max(4, -(-WORKING_SET // (2 * qk_bytes))))
    inputs = [random_inputs(layout, tokens, backward) for _ in range(n_sets)]

    paths = {
        "torch": torch_rope(cos, sin, positions),
        "packed": fused_rope(cos, sin, positions),
        "dense": fused_rope(cos, sin, torch.arange(tokens, device="cuda")),
    }
    ms = {}
    for name, path in paths.items():
        calls = [bind(path, *x, backward=backward) for x in inputs]
        ms[f"{name}_eager_ms"] = eager_ms(calls)
        ms[f"{name}_graph_ms"] = graph_ms(calls)

    rows_read = int(positions.max()) + 1
    one_way = 2 * qk_bytes + 8 * tokens + rows_read * 2 * (D // 2) * cos.element_size()
    gb_s = (2 if backward else 1) * one_way / ms["packed_graph_ms"] / 1e6
    return {
        "heads": name_of(layout),
        "direction": direction,
        "tokens": tokens,
        **ms,
        "speedup_eager": ms["torch_eager_ms"] / ms["packed_eager_ms"],
        "speedup_graph": ms["torch_graph_ms"] / ms["packed_graph_ms"],
        "packed_over_dense": ms["packed_graph_ms"] / ms["dense_graph_ms"],
        "packed_gb_s": gb_s,
        "percent_of_copy": 100 * gb_s / copy_gb_s,
    }


def name_of(layout: tuple[int, int, int]) -> str:
    return "{}q/{}kv x {}".format(*layout)


# The paths


def torch_rope(cos: Tensor, sin: Tensor, positions: Tensor) -> Callable[..., Outputs]:
    cos, sin = (x[positions][None, None].bfloat16() for x in (cos, sin))
    return lambda q, k: plain_rope(q, k, cos, sin)


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def fused_rope(cos: Tensor, sin: Tensor, positions: Tensor) -> Callable[..., Outputs]:
    from unsloth_pack.kernels import rope_qk

    return lambda q, k: rope_qk(q, k, cos, sin, positions)


def bind(path, q: Tensor, k: Tensor, gq: Tensor, gk: Tensor, *, backward: bool) -> Callable[[], Outputs]:
    def forward() -> Outputs:
        return path(q, k)

    def forward_backward() -> Outputs:
        outs = path(q, k)
        return *outs, *torch.autograd.grad(outs, (q, k), (gq, gk))

    return forward_backward if backward else forward


# The inputs


def random_inputs(layout: tuple[int, int, int], tokens: int, backward: bool) -> Outputs:
    """q, k and their gradients: `[1, H, T, D]` over memory of `[1, T, H, D]`, as projections leave them."""
    HQ, HK, D = layout

    def randn(H: int) -> Tensor:
        return torch.randn(1, tokens, H, D, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    q, k = randn(HQ).requires_grad_(backward), randn(HK).requires_grad_(backward)
    return q, k, randn(HQ), randn(HK)


def packed_positions(tokens: int) -> Tensor:
    """Documents of 16 to 1000 tokens, the last one cut at the row's end."""
    generator = torch.Generator().manual_seed(0)
    positions: list[int] = []
    while len(positions) < tokens:
        positions += range(int(torch.randint(16, 1001, (), generator=generator)))
    return torch.tensor(positions[:tokens], device="cuda")


def tables(n_positions: int, D: int) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** -(torch.arange(0, D, 2, device="cuda", dtype=torch.float64) / D)
    angle = torch.arange(n_positions, device="cuda")[:, None] * frequency.repeat(2)
    return angle.cos().float(), angle.sin().float()


# The clocks


def eager_ms(calls: list[Callable[[], Outputs]]) -> float:
    """Milliseconds of one call: the median over rounds, each of which makes all calls in turn."""

    def a_round() -> None:
        kept = [call() for call in calls]  # so that each call writes memory of its own
        del kept

    return statistics.median(timed(a_round)) / len(calls)


def graph_ms(calls: list[Callable[[], Outputs]]) -> float:
    """The same for calls replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    ms = statistics.median(timed(graph.replay))
    del kept
    return ms / len(calls)


def timed(run: Callable[[], object]) -> Iterator[float]:
    """Milliseconds of each of ROUNDS runs."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return (start.elapsed_time(end) for start, end in events)


def copy_bandwidth() -> float:
    """GB/s of a 2 GiB device-to-device copy, bytes read and written both counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(timed(lambda: target.copy_(source))) / 1e6


def float32_errors(layout: tuple[int, int, int]) -> dict[str, str | float]:
    """Largest error of outputs and gradients in float32 against float64, ours and torch's."""
    positions = packed_positions(1024)
    cos, sin = tables(1024, layout[2])
    rows = cos[positions][None, None], sin[positions][None, None]
    q, k, gq, gk = (x.detach().float() for x in random_inputs(layout, 1024, False))

    def run(path, dtype: torch.dtype) -> Outputs:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k)]
        outs = path(*leaves)
        return *outs, *torch.autograd.grad(outs, leaves, (gq.to(dtype), gk.to(dtype)))

    truth = run(lambda q, k: plain_rope(q, k, *(x.double() for x in rows)), torch.float64)
    ours = run(fused_rope(cos, sin, positions), torch.float32)
    plain = run(lambda q, k: plain_rope(q, k, *rows), torch.float32)

    def error(results: Outputs) -> list[float]:
        return [(x - t).abs().max().item() for x, t in zip(results, truth, strict=True)]

    ours_error, torch_error = error(ours), error(plain)
    return {
        "heads": name_of(layout),
        "ours_forward": max(ours_error[:2]),
        "torch_forward": max(torch_error[:2]),
        "ours_backward": max(ours_error[2:]),
        "torch_backward": max(torch_error[2:]),
    }


if __name__ == "__main__":
    sys.exit(main())
