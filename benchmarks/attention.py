"""Speed and correctness of varlen attention kernels on packed rows.

    python benchmarks/attention.py [--kernels torch,fa4] [--head_dims 64,128] [--seconds 175] [--json PATH]

Rows of 32,768 tokens in bfloat16, cut into documents in several ways, causal, some with a sliding window.
`captured` is the ragged row in the form of a captured step: with empty documents at its end, and with an
upper bound instead of the longest document. Every kernel runs in a process of its own, so that a fault ends
no other.

Times are of calls replayed from a CUDA graph; if a kernel cannot be captured, it runs eagerly and its row
says so. The calls rotate through more bytes than the L2 cache holds. A backward's time is that of both passes
less the forward's. TFLOP/s counts only the visible pairs of query and key, and a backward as 2.5 forwards.
`first s` is the first call of a case, compilation included. Errors are of the worst token against float64, in
the first and the last group of heads: the norm of the error of its vector, divided by the norm of the true
vector or by the median norm, whichever is larger. A kernel is WRONG if an error exceeds 3 times that of
torch's FlashAttention.

A kernel that multiplies hidden values by 0 is right only while they are finite. So the middle document is
made NaN, and the table names the parts in which other documents see it (* among the fastest).
"""

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from clocks import WORKING_SET, eager_ms, graph_ms
from torch import Tensor

from unsloth_pack.attention import AttentionOptions, flash
from unsloth_pack.attention.flash import VarlenKernel
from unsloth_pack.kernels import varlen_attention

TOKENS = 32768
LAYOUTS = ((32, 8, 128), (14, 2, 64))  # query heads, key heads, head dim
# The same of LAYOUTS, of Phi-3 and of Gemma 2
HEADS = {layout[-1]: layout for layout in (*LAYOUTS, (32, 32, 96), (16, 8, 256))}
WINDOW = 1024
SLACK = 3.0
CHUNK = 2048  # queries at a time in float64
KERNEL_SECONDS = 75
CAPTURED_SEGMENTS = 128
WORST = 999.0  # larger errors and NaN become this
PARTS = ("out", "dq", "dk", "dv")
PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl")

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """A row cut into documents.

    Args:
        longest: tokens of the longest document, or a bound on them, as the kernels get it.
        window: keys that a query sees, its own included; None for all before it.
    """

    name: str
    lengths: tuple[int, ...]
    longest: int
    window: int | None = None

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        reach = self.window or self.longest
        return sum(min(n, reach) * (min(n, reach) + 1) // 2 + max(n - reach, 0) * reach for n in self.lengths)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Case], Tensor]  # q, k, v `[T, H, D]`, cu_seqlens, case


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default=",".join(KERNELS), help="one or several (default: all)")
    sizes = ",".join(str(size) for *_, size in LAYOUTS)
    known = ", ".join(map(str, HEADS))
    parser.add_argument("--head_dims", default=sizes, help=f"one or several of {known} (default: {sizes})")
    parser.add_argument("--seconds", type=float, default=175, help="start nothing after so long")
    parser.add_argument("--json", type=Path, help="also write every number here")
    parser.add_argument("--alone", choices=KERNELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.kernels.split(",")
    if unknown := [name for name in names if name not in KERNELS]:
        parser.error(f"--kernels: {unknown[0]!r} is none of {', '.join(KERNELS)}")
    head_dims = args.head_dims.split(",")
    if unknown := [size for size in head_dims if size not in map(str, HEADS)]:
        parser.error(f"--head_dims: {unknown[0]!r} is none of {known}")
    if not torch.cuda.is_available():
        print("benchmarks/attention.py measures a CUDA device and this machine has none", file=sys.stderr)
        return 2
    if args.alone:
        for row in measure_kernel(args.alone, [HEADS[int(size)] for size in head_dims]):
            print(json.dumps(row), flush=True)
        return 0

    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {d.name: d.version for d in distributions() if d.name in PACKAGES},
        "rows": [],
    }
    print("{gpu}, torch {torch}, cuDNN {cudnn}\n".format(**report))
    deadline = time.monotonic() + args.seconds
    for name in names:
        rows = in_a_process(name, args.head_dims, min(KERNEL_SECONDS, deadline - time.monotonic()))
        report["rows"] += rows
        judge(report["rows"])
        print_kernel(name, rows)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print_fastest(report["rows"])
    return 0


def in_a_process(name: str, head_dims: str, seconds: float) -> list[dict[str, Any]]:
    """The rows that a kernel finished, then one more if it failed."""
    if seconds <= 0:
        return [{"kernel": name, "note": "not run, out of time"}]
    command = [sys.executable, __file__, "--alone", name, "--head_dims", head_dims]
    try:
        run = subprocess.run(command, capture_output=True, timeout=seconds)
        out, problem = run.stdout, ""
        if run.returncode:
            problem = f"exit code {run.returncode}: {last_line(run.stderr)}"
    except subprocess.TimeoutExpired as timeout:
        out, problem = timeout.stdout or b"", f"stopped after {seconds:.0f} s"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    return [*rows, {"kernel": name, "note": problem}] if problem else rows


def last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or [""])[-1][:160]


def judge(rows: list[dict[str, Any]]) -> None:
    """Note in every row whether its errors are close to torch's."""
    torch_errors = {
        case_of(row): row["errors"] for row in rows if row["kernel"] == "torch" and "errors" in row
    }
    for row in rows:
        if "errors" in row and (usual := torch_errors.get(case_of(row))):
            row["right"] = all(row["errors"][part] <= SLACK * usual[part] for part in PARTS)


def case_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["heads"], row["case"]


def print_kernel(name: str, rows: list[dict[str, Any]]) -> None:
    print(name)
    head = f"{'forward ms':>10}{'TFLOP/s':>9}{'backward ms':>13}{'TFLOP/s':>9}{'first s':>9}"
    print(f"  {'':<28}{head}   worst error of {', '.join(PARTS)}")
    for row in rows:
        where = f"{row.get('heads', '')} {row.get('case', '')}"
        if "errors" not in row:
            print(f"  {where:<28} {row['note']}")
            continue
        ms = "".join(
            f"{row[f'{way}_ms']:>{width}.3f}{row[f'{way}_tflops']:>9.0f}"
            for way, width in (("forward", 10), ("backward", 13))
        )
        errors = " ".join(f"{row['errors'][part]:.2%}" for part in PARTS)
        wrong = "" if row.get("right", True) else "  WRONG"
        crosses = f"  NaN crosses into {', '.join(row['nan_crosses'])}" if row["nan_crosses"] else ""
        print(f"  {where:<28}{ms}{row['first_s']:>9.1f}   {errors}{wrong}{crosses}  {row['note']}".rstrip())
    print(flush=True)


def print_fastest(rows: list[dict[str, Any]]) -> None:
    """The fastest right kernel of every case, and by how much."""
    measured = [row for row in rows if row.get("right")]
    print(f"{'fastest, x times torch':<30}{'forward':>18}{'backward':>18}{'both':>18}")
    for case in dict.fromkeys(map(case_of, measured)):
        here = {row["kernel"]: row for row in measured if case_of(row) == case}
        cells = []
        for ways in (("forward",), ("backward",), ("forward", "backward")):
            ms = {name: sum(row[f"{way}_ms"] for way in ways) for name, row in here.items()}
            best = min(ms, key=ms.__getitem__)
            star = "*" if here[best]["nan_crosses"] else ""
            cells.append(f"{best}{star} {ms['torch'] / ms[best]:.2f}x" if "torch" in ms else best + star)
        print(f"{' '.join(case):<30}" + "".join(f"{cell:>18}" for cell in cells))


# One kernel


def measure_kernel(name: str, layouts: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    start = time.perf_counter()
    try:
        kernel = KERNELS[name]()
    except Exception as error:
        yield {"kernel": name, "note": f"does not load: {reason(error)}"}
        return
    loaded_s = time.perf_counter() - start
    yield {"kernel": name, "note": f"loaded in {loaded_s:.1f} s", "loaded_s": loaded_s}
    for layout in layouts:
        sets = input_sets(layout)
        for case in cases():
            row = {"kernel": name, "heads": "{}q/{}kv x {}".format(*layout), "case": case.name}
            try:
                yield row | measure(kernel, sets, case)
            except Exception as error:
                yield row | {"note": reason(error)}
                if isinstance(error, torch.AcceleratorError):  # its CUDA context is unusable
                    return


def reason(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:160]


def measure(kernel: Kernel, sets: list[Tensors], case: Case) -> dict[str, Any]:
    cu_seqlens = torch.tensor((0, *case.lengths), device="cuda").cumsum(0).int()

    def forward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensors:
        return (kernel(q, k, v, cu_seqlens, case),)

    def both(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensors:
        out = kernel(q, k, v, cu_seqlens, case)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    torch.cuda.synchronize()
    start = time.perf_counter()
    found = both(*sets[0])
    torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    errors = errors_of(found, sets[0], case)
    del found
    crossed = nan_crosses(both, sets[0], case)

    ms, note = {}, ""
    for way, path in (("forward", forward), ("both", both)):
        calls = [partial(path, *each) for each in sets]
        try:
            ms[way] = graph_ms(calls)
        except Exception as error:
            note = f"not captured: {reason(error)}"
            with torch.cuda.stream(torch.cuda.default_stream()):
                ms[way] = eager_ms(calls)
    backward_ms = ms["both"] - ms["forward"]
    n_heads, head_dim = sets[0][0].shape[1:]
    tflop = 4 * head_dim * n_heads * case.pairs / 1e9  # a millisecond
    return {
        "forward_ms": ms["forward"],
        "backward_ms": backward_ms,
        "forward_tflops": tflop / ms["forward"],
        "backward_tflops": 2.5 * tflop / backward_ms,
        "first_s": first_s,
        "errors": errors,
        "nan_crosses": crossed,
        "note": note,
    }


# The rows


def cases() -> list[Case]:
    found = [
        Case(f"{TOKENS // n:,} of {n:,}", (n,) * (TOKENS // n), n) for n in (TOKENS, 8192, 2048, 512, 256)
    ]
    ragged = ragged_lengths()
    longest = max(ragged)
    short = instruction_lengths()
    found.append(Case("short", short, max(short)))
    found.append(Case("ragged", ragged, longest))
    empty = (0,) * (CAPTURED_SEGMENTS - len(ragged))
    found.append(Case("captured", ragged + empty, 2 ** math.ceil(math.log2(longest))))
    found.append(Case(f"1 of {TOKENS:,} w{WINDOW}", (TOKENS,), TOKENS, WINDOW))
    found.append(Case(f"ragged w{WINDOW}", ragged, longest, WINDOW))
    return found


def ragged_lengths() -> tuple[int, ...]:
    """Documents of 16 to 8,192 tokens, as many from n to 2n for every n; the last one is cut at the end."""
    rng = random.Random(0)
    lengths: list[int] = []
    while (left := TOKENS - sum(lengths)) > 0:
        lengths.append(min(left, round(2 ** rng.uniform(4, 13))))
    return tuple(lengths)


def instruction_lengths() -> tuple[int, ...]:
    """Documents as long as those of instruction data: half of them under 80 tokens, few over 300."""
    rng = random.Random(0)
    lengths: list[int] = []
    while (left := TOKENS - sum(lengths)) > 0:
        lengths.append(min(left, max(25, round(rng.lognormvariate(4.4, 0.6)))))
    return tuple(lengths)


def input_sets(layout: tuple[int, int, int]) -> list[Tensors]:
    """Sets of q, k, v and the gradient of the output, together larger than the L2 cache."""
    torch.manual_seed(0)
    n_heads, n_kv_heads, head_dim = layout

    def one() -> Tensors:
        heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
        q, k, v, grad = (torch.randn(TOKENS, n, head_dim, dtype=torch.bfloat16, device="cuda") for n in heads)
        return *(x.requires_grad_() for x in (q, k, v)), grad

    size = 2 * TOKENS * head_dim * 2 * (n_heads + n_kv_heads)
    return [one() for _ in range(-(-WORKING_SET // size))]


# The truth


def errors_of(found: Tensors, inputs: Tensors, case: Case) -> dict[str, float]:
    """The worst token's error of the output and of every gradient."""
    q, k, v, grad = (x.detach() for x in inputs)
    n_groups = k.shape[1]

    def ends(x: Tensor) -> Tensor:
        """The heads of the first and the last group, in float64."""
        return x.unflatten(1, (n_groups, -1))[:, [0, -1]].flatten(1, 2).double()

    truth = written_out(*map(ends, (q, k, v, grad)), case)
    return {part: worst(ends(x.detach()), t) for part, x, t in zip(PARTS, found, truth, strict=True)}


def nan_crosses(path: Callable[..., Tensors], inputs: Tensors, case: Case) -> list[str]:
    """The parts in which NaN of the middle document reaches other documents."""
    documents = [i for i, n in enumerate(case.lengths) if n]
    middle = documents[len(documents) // 2]
    start = sum(case.lengths[:middle])
    rows = slice(start, start + case.lengths[middle])
    poisoned = [x.detach().clone() for x in inputs]
    for x in poisoned:
        x[rows] = torch.nan
    q, k, v, grad = poisoned
    found = path(*(x.requires_grad_() for x in (q, k, v)), grad)
    others = {part: x.detach().clone() for part, x in zip(PARTS, found, strict=True)}
    for x in others.values():
        x[rows] = 0
    return [part for part, x in others.items() if not x.isfinite().all()]


def worst(found: Tensor, truth: Tensor) -> float:
    norm = truth.norm(dim=-1)
    errors = (found - truth).norm(dim=-1) / norm.clamp_min(norm.median())
    return errors.nan_to_num(nan=WORST).max().clamp(max=WORST).item()


def written_out(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, case: Case) -> Tensors:
    """out, dq, dk and dv by their definitions, document by document; all `[T, heads, D]`."""
    scale = q.shape[-1] ** -0.5
    q, grad = (x.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3) for x in (q, grad))
    k, v = (x.transpose(0, 1)[:, None] for x in (k, v))  # `[groups, 1, T, D]`
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    places = torch.arange(TOKENS, device=q.device)
    starts = [sum(case.lengths[:i]) for i in range(len(case.lengths))]
    for start, length in zip(starts, case.lengths, strict=True):
        for first in range(start, start + length, CHUNK):
            rows = slice(first, min(first + CHUNK, start + length))
            keys = slice(start, rows.stop)
            age = places[rows, None] - places[keys]
            hidden = (age < 0) | (age >= (case.window or TOKENS))
            logits = scale * (q[:, :, rows] @ k[:, :, keys].mT)
            weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
            out[:, :, rows] = weights @ v[:, :, keys]
            row_sums = (out[:, :, rows] * grad[:, :, rows]).sum(-1, keepdim=True)
            d_logits = scale * weights * (grad[:, :, rows] @ v[:, :, keys].mT - row_sums)
            dq[:, :, rows] = d_logits @ k[:, :, keys]
            dk[:, :, keys] += (d_logits.mT @ q[:, :, rows]).sum(1, keepdim=True)
            dv[:, :, keys] += (weights.mT @ grad[:, :, rows]).sum(1, keepdim=True)
    return tuple(x.permute(2, 0, 1, 3).flatten(1, 2) for x in (out, dq, dk, dv))


# The kernels


def flash_attention(load: Callable[[], VarlenKernel]) -> Kernel:
    """A kernel of a backend of the package, called as the package calls it."""
    kernel = load()

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, case: Case) -> Tensor:
        options = AttentionOptions(q.shape[-1] ** -0.5, case.window)
        row: Any = SimpleNamespace(cu_seqlens=cu_seqlens, longest=case.longest)
        return kernel.call(q, k, v, row, options)

    return attend


def triton_kernels() -> Kernel:
    """The package's own."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, case: Case) -> Tensor:
        return varlen_attention(q, k, v, cu_seqlens, q.shape[-1] ** -0.5, window=case.window)

    return attend


def torch_cudnn() -> Kernel:
    """cuDNN's attention as it ships in torch, where nested tensors use it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, case: Case) -> Tensor:
        if case.window is not None:
            raise NotImplementedError("it has no window")
        attention = torch.ops.aten._cudnn_attention_forward
        bounds = (cu_seqlens, cu_seqlens, case.longest, case.longest)
        return attention(q, k, v, None, *bounds, True, 0.0, True, False)[0]

    return attend


def cudnn_frontend() -> Kernel:
    """cuDNN through NVIDIA's own Python package; a plan is built for every number of documents and bound."""
    import cudnn

    sdpa = cudnn.sdpa_torch

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, case: Case) -> Tensor:
        out, _ = sdpa(
            q,
            k,
            v,
            is_causal=True,
            window_left=-1 if case.window is None else case.window,  # it counts the query too
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=case.longest,
            max_seqlen_kv=case.longest,
            return_lse=True,
        )
        return out

    return attend


def flex() -> Kernel:
    """Compiled flex attention; its block mask is built beforehand, and that time does not count."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    document = torch.zeros(TOKENS, dtype=torch.int32, device="cuda")

    def visible(batch, head, query, key):
        return (query >= key) & (document[query] == document[key])

    def visible_in_window(batch, head, query, key):
        return visible(batch, head, query, key) & (query - key < WINDOW)

    @lru_cache(maxsize=1)
    def block_mask(case: Case):
        numbers = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths))
        document.copy_(numbers)
        rule = visible if case.window is None else visible_in_window
        return create_block_mask(rule, None, None, TOKENS, TOKENS, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, case: Case) -> Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = compiled(*heads_first, block_mask=block_mask(case), enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


KERNELS: dict[str, Callable[[], Kernel]] = {
    "torch": partial(flash_attention, flash.torch_flash),
    "triton": triton_kernels,
    "fa4": partial(flash_attention, flash.flash_attn_4),
    "torch-cudnn": torch_cudnn,
    "cudnn": cudnn_frontend,
    "fa3": partial(flash_attention, flash.flash_attn_3),
    "fa2": partial(flash_attention, flash.flash_attn_2),
    "flex": flex,
}


if __name__ == "__main__":
    sys.exit(main())
