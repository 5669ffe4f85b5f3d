"""Speed and correctness of softcapped attention on packed rows, in the shape of Gemma 2 2B.

    python benchmarks/softcap_attention.py [--seconds 85] [--json PATH]

Rows of 4,096 and 16,384 tokens in bfloat16, 8 query heads on 4 key heads of 256, softcap 50, causal, cut into
documents of about 180 tokens, of 2,048, and as one document. A step is a forward and a backward pass.
`triton` and `sdpa` are backends of the package; `flex` is compiled flex attention with its block mask built
beforehand. TFLOP/s counts the visible pairs of query and key, and a backward as 2.5 forwards. Errors are
those of out, dq, dk and dv against float64: the norm of the error, divided by the norm of the truth.

Then every kernel of `triton` runs with several tiles, each launch alone. The package's tiles have a star.
Nothing is started after `--seconds`. flex comes last.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.attention import BACKENDS, AttentionOptions
from unsloth_pack.kernels import reference
from unsloth_pack.packed_row.row import PackedRow

varlen = import_module("unsloth_pack.kernels.attention")  # whose name the function has taken
Tile = varlen.Tile
H, K, D = 8, 4, 256
OPTIONS = AttentionOptions(scale=D**-0.5, softcap=50.0)
ROUNDS = 20
SECONDS_A_PATH = 1.0
TRUTH_UP_TO = 4096  # tokens
TILES = {
    "forward": (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),
    "q gradient": (Tile(128, 32, 8, 2), Tile(128, 16, 8, 3), Tile(64, 16, 8, 2), Tile(32, 32, 4, 2)),
    "k gradient": (Tile(32, 128, 8, 2), Tile(16, 128, 8, 3), Tile(64, 32, 8, 2)),
    "v gradient": (Tile(64, 128, 8, 2), Tile(32, 128, 8, 2), Tile(32, 128, 8, 3), Tile(64, 32, 8, 2)),
    "k and v gradient": (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 64, 8, 2)),
}
Tensors = tuple[Tensor, ...]
Path_ = Callable[[Tensor, Tensor, Tensor, PackedRow], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=85, help="start nothing after so long")
    parser.add_argument("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "benchmarks/softcap_attention.py measures a CUDA device and this machine has none",
            file=sys.stderr,
        )
        return 2
    import triton

    deadline = time.monotonic() + args.seconds
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [],
        "tiles": [],
    }
    print("{gpu}, torch {torch}, triton {triton}".format(**report), flush=True)
    print(f"{'path':<8}{'tokens':>8} {'documents':<10}{'step ms':>9}{'TFLOP/s':>9}{'first s':>9}   errors")
    for name, path in {"triton": of_backend("triton"), "sdpa": of_backend("sdpa")}.items():
        measure_path(name, path, deadline, report["rows"])
    print(
        f"\n{'kernel':<18}{'tile: queries, keys, warps, stages':<38}{'one of 16,384 ms':>18}{'4,096 ms':>13}"
    )
    for row in tiles(deadline):
        report["tiles"].append(row)
        times = f"{row['one_ms']:>18.3f}{row['short_ms']:>13.3f}" if "one_ms" in row else f"  {row['note']}"
        print(f"{row['kernel']:<18}{row['tile']:<38}{times}", flush=True)
    print()
    measure_path("flex", flex(), deadline, report["rows"])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


# Rows


def cases() -> Iterator[tuple[int, str, PackedRow]]:
    for tokens in (4096, 16384):
        for name, lengths in (
            ("short", short(tokens)),
            ("2,048", (2048,) * (tokens // 2048)),
            ("one", (tokens,)),
        ):
            yield tokens, name, PackedRow.of_lengths(lengths, torch.device("cuda"))


def short(tokens: int) -> tuple[int, ...]:
    """Lengths like those of alpaca: 30 to 600, 180 on average."""
    draw, lengths = random.Random(0), []
    while tokens:
        lengths.append(min(tokens, 30 + int(draw.expovariate(1 / 150)) % 570))
        tokens -= lengths[-1]
    return tuple(lengths)


def inputs_of(row: PackedRow) -> Tensors:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    tensors = (
        torch.randn(row.n_tokens, heads, D, dtype=torch.bfloat16, device="cuda") for heads in (H, K, K, H)
    )
    q, k, v, grad = tensors
    return 4 * q, k, v, grad  # logits of about 4, as far as the softcap bends them


def flops(row: PackedRow) -> float:
    """Of the forward and the backward pass."""
    return 3.5 * 4 * H * D * sum(n * (n + 1) // 2 for n in row.lengths)


# Paths


def of_backend(name: str) -> Path_:
    return lambda q, k, v, row: BACKENDS[name].attend(q, k, v, row, OPTIONS)


def flex() -> Path_:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def cap(score, batch, head, query, key):
        return OPTIONS.softcap * torch.tanh(score / OPTIONS.softcap)

    def attend(q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        def block_mask():
            lengths = torch.tensor(row.lengths, device="cuda")
            document = torch.arange(len(row.lengths), device="cuda").repeat_interleave(lengths)

            def visible(batch, head, query, key):
                return (query >= key) & (document[query] == document[key])

            return create_block_mask(visible, None, None, row.n_tokens, row.n_tokens, device="cuda")

        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = row.once("flex", block_mask)
        out = compiled(*heads_first, score_mod=cap, block_mask=mask, scale=OPTIONS.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def of_reference(q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
    return reference.varlen_attention(q, k, v, row.cu_seqlens, OPTIONS.scale, softcap=OPTIONS.softcap)


def step(path: Path_, inputs: Tensors, row: PackedRow) -> Tensors:
    """out, dq, dk, dv."""
    q, k, v, grad = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = path(*leaves, row)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def measure_path(name: str, path: Path_, deadline: float, rows: list[dict[str, Any]]) -> None:
    for tokens, documents, row in cases():
        found: dict[str, Any] = {"path": name, "tokens": tokens, "documents": documents}
        head = f"{name:<8}{tokens:>8,} {documents:<10}"
        if time.monotonic() > deadline:
            found["note"] = "not run, out of time"
        else:
            try:
                found |= measure(path, inputs_of(row), row)
            except Exception as error:
                found["note"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
                )
        rows.append(found)
        if "ms" in found:
            errors = " ".join(f"{x:.2%}" for x in found.get("errors", ()))
            print(
                f"{head}{found['ms']:>9.3f}{found['tflops']:>9.0f}{found['first_s']:>9.1f}   {errors}",
                flush=True,
            )
        else:
            print(f"{head} {found['note']}", flush=True)
        torch.cuda.empty_cache()


def measure(path: Path_, inputs: Tensors, row: PackedRow) -> dict[str, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    results = step(path, inputs, row)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"first_s": time.perf_counter() - start}
    if row.n_tokens <= TRUTH_UP_TO:
        found["errors"] = [
            ((x.double() - t).norm() / t.norm()).item()
            for x, t in zip(results, truth(inputs, row), strict=True)
        ]
    del results
    found["ms"] = median_ms(lambda: step(path, inputs, row))
    return found | {"tflops": flops(row) / found["ms"] / 1e9}


def truth(inputs: Tensors, row: PackedRow) -> Tensors:
    """In float64, one head of keys at a time."""
    outs = []
    for head in range(K):
        of_queries = slice(head * H // K, (head + 1) * H // K)
        q, k, v, grad = inputs
        one = (q[:, of_queries], k[:, head, None], v[:, head, None], grad[:, of_queries])
        outs.append(step(of_reference, tuple(x.double() for x in one), row))
    return tuple(torch.cat(parts, 1) for parts in zip(*outs, strict=True))


def median_ms(call: Callable[[], object]) -> float:
    """Of up to ROUNDS calls, or as many as SECONDS_A_PATH allows, after one more."""
    call()
    times: list[float] = []
    start = time.monotonic()
    while len(times) < ROUNDS and (not times or time.monotonic() - start < SECONDS_A_PATH):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


# Tiles


def tiles(deadline: float) -> Iterator[dict[str, Any]]:
    rows = {
        "one_ms": PackedRow.of_lengths((16384,), torch.device("cuda")),
        "short_ms": PackedRow.of_lengths(short(4096), torch.device("cuda")),
    }
    launches = {name: launches_of(row) for name, row in rows.items()}
    chosen = varlen._tiles(torch.empty(1, H, D, dtype=torch.bfloat16, device="cuda"))
    ours = {"forward": chosen.forward, "q gradient": chosen.q_gradient}
    if chosen.v_gradient is None:
        ours |= {"k and v gradient": chosen.kv_gradient}
    else:
        ours |= {"k gradient": chosen.kv_gradient, "v gradient": chosen.v_gradient}
    for kernel, choices in TILES.items():
        for tile in choices:
            star = " *" if ours.get(kernel) == tile else ""
            sizes = f"{tile.queries}, {tile.keys}, {tile.warps}, {tile.stages}{star}"
            found: dict[str, Any] = {"kernel": kernel, "tile": sizes}
            if time.monotonic() > deadline:
                yield found | {"note": "not run, out of time"}
                continue
            try:
                yield found | {
                    name: median_ms(partial(launch[kernel], tile)) for name, launch in launches.items()
                }
            except Exception as error:
                yield found | {"note": f"{type(error).__name__}: {str(error)[:100]}"}


def launches_of(row: PackedRow) -> dict[str, Callable[[Tile], None]]:
    """Each kernel of a step, to launch alone with a tile."""
    q, k, v, grad = inputs_of(row)
    options = (OPTIONS.scale, None, OPTIONS.softcap)
    out, lse = varlen._forward(q, k, v, row.cu_seqlens, options)
    gq, gk, gv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
    kernels, strided = varlen.kernels, (q, k, v, grad)

    def forward(tile: Tile) -> None:
        tensors = (q, k, v, out, lse)
        varlen._launch(kernels.forward_kernel, tile, True, tensors, strided[:3], row.cu_seqlens, options)

    def q_gradient(tile: Tile) -> None:
        tensors = (q, k, v, out, lse, grad, gq, delta)
        varlen._launch(kernels.q_gradient_kernel, tile, True, tensors, strided, row.cu_seqlens, options)

    def kv_gradient(into_gk: Tensor | None, into_gv: Tensor | None, tile: Tile) -> None:
        tensors = (q, k, v, lse, grad, delta, into_gk, into_gv)
        varlen._launch(kernels.kv_gradient_kernel, tile, False, tensors, strided, row.cu_seqlens, options)

    q_gradient(varlen._tiles(q).q_gradient)  # delta is what the others read
    return {
        "forward": forward,
        "q gradient": q_gradient,
        "k gradient": partial(kv_gradient, gk, None),
        "v gradient": partial(kv_gradient, None, gv),
        "k and v gradient": partial(kv_gradient, gk, gv),
    }


if __name__ == "__main__":
    sys.exit(main())
