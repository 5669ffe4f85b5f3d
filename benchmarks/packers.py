"""The speed of packing and the fill of the rows, beside TRL and fast-axolotl.

    python benchmarks/packers.py [--json PATH] [--documents N] [--large N]

plan     The time to plan on one core, and the fill, for log-normal lengths of mean about 370, cut at 4,096.
         `plan` gives the number of rows and their fill; `with bins` also gives the documents of each row. TRL
         packs a data set, so its time includes moving the tokens, one byte each, all in memory. It packs in
         batches of 1,000, its default, and in one batch of all documents.
memory   The same for many more documents: the peak memory beside the lengths themselves.
lists    100,000 Python lists of mean length 250 packed into lists of 2,048, without separators. fast-axolotl
         builds labels and masks in pack_sequences too. Rounds alternate between the two, and a fresh process
         runs each case. `kernel s` is the part of our time in which the system hands out memory. Both times
         include the garbage collection of the new lists, which follows at once.
fill     The share of rows of 2,048 that holds tokens, for every strategy and mean length.

Without TRL or fast-axolotl in the environment, their columns stay empty.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_pack.packing import concatenate_and_pack, pack_sequences, plan_packs
from unsloth_pack.packing.planner import STRATEGIES

MEAN, CAPACITY = 370, 4096
LISTS, LIST_MEAN, ROW, VOCABULARY = 100_000, 250, 2048, 151_936
MEANS, FILL_DOCUMENTS = (256, 512, 1024), 200_000
SPREAD = 0.8  # standard deviation of the logarithm of lengths
ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write every number here")
    parser.add_argument("--documents", type=int, default=1_000_000, help="of the planning table")
    parser.add_argument("--large", type=int, default=100_000_000, help="documents of the memory table")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(list_rounds(args.case)))
        return 0

    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "trl", "datasets", "pyarrow", "fast-axolotl")},
        "load_average": os.getloadavg()[0],
    }
    print(f"{report['date']}  {report['machine']}  Python {report['python']}")
    print("  ".join(f"{name} {number or '-'}" for name, number in report["versions"].items()))
    report["plan"] = plan_table(args.documents)
    report["memory"] = memory_table(args.large)
    report["lists"] = list_table()
    report["fill"] = fill_table()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


# Tables


def plan_table(documents: int) -> list[dict[str, Any]]:
    lengths = random_lengths(documents, MEAN, CAPACITY)
    print(f"\nplan: {documents:,} documents, mean {lengths.mean():.0f}, rows of {CAPACITY:,}")
    print(f"{'':<22}{'plan s':>9}{'with bins s':>13}{'fill':>9}{'rows':>10}")
    table: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        plan = plan_packs(lengths, CAPACITY, strategy)
        row = {
            "planner": strategy,
            "plan_s": median_of(partial(plan_packs, lengths, CAPACITY, strategy)),
            "with_bins_s": median_of(partial(order_of, lengths, CAPACITY, strategy)),
            "fill": plan.efficiency,
            "rows": plan.n_bins,
        }
        table.append(row)
    ours = table[-1]["with_bins_s"]
    if version("trl"):
        for name, batch in (("TRL bfd, by 1,000", 1000), ("TRL bfd, all at once", documents)):
            seconds, rows = trl_bfd(lengths, CAPACITY, batch)
            fill = float(lengths.sum() / (rows * CAPACITY))
            table.append({"planner": name, "with_bins_s": seconds, "fill": fill, "rows": rows})
            table[-1]["ratio_to_bfd"] = seconds / ours
    for row in table:
        plan_s = f"{row['plan_s']:.4f}" if "plan_s" in row else ""
        ratio = f"  {row['ratio_to_bfd']:.0f} x bfd's time" if "ratio_to_bfd" in row else ""
        print(
            f"{row['planner']:<22}{plan_s:>9}{row['with_bins_s']:>13.4f}{row['fill']:>9.4%}{row['rows']:>10,}{ratio}"
        )
    return table


def memory_table(documents: int) -> dict[str, Any]:
    lengths = random_lengths(documents, MEAN, CAPACITY).astype(np.uint16)
    row: dict[str, Any] = {"documents": documents, "lengths_mb": lengths.nbytes / 1e6}
    row["plan_s"] = seconds_of(lambda: plan_packs(lengths, CAPACITY))
    row["with_bins_s"] = seconds_of(lambda: order_of(lengths, CAPACITY, "bfd"))
    row["plan_peak_mb"] = peak_mb(lambda: plan_packs(lengths, CAPACITY))
    row["with_bins_peak_mb"] = peak_mb(lambda: order_of(lengths, CAPACITY, "bfd"))
    print(f"\nmemory: bfd on {documents:,} documents, whose lengths take {row['lengths_mb']:.0f} MB")
    print(f"{'':<12}{'s':>9}{'peak MB':>10}")
    for name, key in (("plan", "plan"), ("with bins", "with_bins")):
        print(f"{name:<12}{row[f'{key}_s']:>9.2f}{row[f'{key}_peak_mb']:>10.0f}")
    return row


def list_table() -> list[dict[str, Any]]:
    print(f"\nlists: {LISTS:,} of mean length {LIST_MEAN}, rows of {ROW:,}; median of {ROUNDS} rounds")
    print(f"{'':<34}{'ours s':>9}{'kernel s':>10}{'fast-axolotl s':>16}{'ratio':>8}")
    table = []
    for case in LIST_CASES:
        command = [sys.executable, __file__, "--case", case]
        rounds = json.loads(subprocess.check_output(command, text=True))
        row: dict[str, Any] = {"case": case, "rounds": rounds}
        row["ours_s"] = statistics.median(rounds["ours"])
        row["ours_kernel_s"] = statistics.median(rounds["ours_kernel"])
        theirs = ratio = ""
        if rounds["fast_axolotl"]:
            row["fast_axolotl_s"] = statistics.median(rounds["fast_axolotl"])
            row["ratio"] = row["fast_axolotl_s"] / row["ours_s"]
            theirs, ratio = f"{row['fast_axolotl_s']:.3f}", f"{row['ratio']:.1f}"
        print(f"{case:<34}{row['ours_s']:>9.3f}{row['ours_kernel_s']:>10.3f}{theirs:>16}{ratio:>8}")
        table.append(row)
    return table


def fill_table() -> list[dict[str, Any]]:
    names = [*STRATEGIES, *(["trl bfd"] if version("trl") else [])]
    print(f"\nfill: {FILL_DOCUMENTS:,} documents, rows of {ROW:,}")
    print(f"{'mean':<8}" + "".join(f"{name:>11}" for name in names))
    table = []
    for mean in MEANS:
        lengths = random_lengths(FILL_DOCUMENTS, mean, ROW)
        row = {"mean": float(lengths.mean())}
        row |= {strategy: plan_packs(lengths, ROW, strategy).efficiency for strategy in STRATEGIES}
        if version("trl"):
            row["trl bfd"] = float(lengths.sum() / (trl_bfd(lengths, ROW, 1000)[1] * ROW))
        print(f"{row['mean']:<8.0f}" + "".join(f"{row[name]:>11.3%}" for name in names))
        table.append(row)
    return table


# What is measured


def order_of(lengths: np.ndarray, capacity: int, strategy: str) -> np.ndarray:
    return plan_packs(lengths, capacity, strategy).order


def trl_bfd(lengths: np.ndarray, capacity: int, batch: int) -> tuple[float, int]:
    """Seconds of TRL's pack_dataset on documents of these lengths, and the rows that it makes."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pa.array(np.zeros(offsets[-1], np.int8))
    dataset = datasets.Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)}))
    options = {"batch_size": batch, "keep_in_memory": True}
    begin = time.perf_counter()
    packed = pack_dataset(dataset, capacity, "bfd", options)
    return time.perf_counter() - begin, len(packed)


def list_rounds(case: str) -> dict[str, list[float]]:
    ours, theirs = LIST_CASES[case]()
    times: dict[str, list[float]] = {"ours": [], "ours_kernel": [], "fast_axolotl": []}
    for _ in range(ROUNDS):
        kernel = os.times().system
        times["ours"].append(seconds_of(ours))
        times["ours_kernel"].append(os.times().system - kernel)
        if theirs:
            times["fast_axolotl"].append(seconds_of(theirs))
    return times


def case_sequences(vocabulary: int) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    ids = random_lists(vocabulary)
    fast_axolotl = peer()
    theirs = fast_axolotl and (lambda: fast_axolotl.pack_sequences(ids, ROW, 0, 2))
    return lambda: pack_sequences(ids, ROW, 0), theirs


def case_columns(vocabulary: int) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    ids = random_lists(vocabulary)
    labels, masks = [list(x) for x in ids], [[1] * len(x) for x in ids]
    fast_axolotl = peer()
    theirs = fast_axolotl and (lambda: fast_axolotl.concatenate_and_pack(ids, labels, masks, ROW, 0, -100))
    return lambda: concatenate_and_pack(ids, labels, masks, max_length=ROW, pad_token_id=0), theirs


def case_arrays() -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    ids = random_lists(VOCABULARY)
    arrays = [np.array(x, np.int32) for x in ids]
    fast_axolotl = peer()
    theirs = fast_axolotl and (lambda: fast_axolotl.concatenate_and_pack(ids, ids, ids, ROW, 0, -100))
    return lambda: concatenate_and_pack(arrays, arrays, arrays, max_length=ROW, pad_token_id=0), theirs


LIST_CASES: dict[str, Callable[[], tuple[Callable[[], Any], Callable[[], Any] | None]]] = {
    "pack_sequences": lambda: case_sequences(VOCABULARY),
    "pack_sequences, 100 ids": lambda: case_sequences(100),
    "concatenate_and_pack": lambda: case_columns(VOCABULARY),
    "concatenate_and_pack, 100 ids": lambda: case_columns(100),
    "concatenate_and_pack, our arrays": case_arrays,
}


def random_lengths(documents: int, mean: int, longest: int) -> np.ndarray:
    """`[documents]` int32, log-normal and cut at `longest`; their mean after the cut is `mean`."""
    normal = np.random.default_rng(0).normal(0, SPREAD, documents).astype(np.float32)
    some = np.exp(normal[:100_000])
    low, high = 0.0, float(longest)
    for _ in range(30):
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * some, 1, longest).mean() < mean else (low, scale)
    np.exp(normal, out=normal)
    normal *= scale
    return np.clip(normal, 1, longest, out=normal).astype(np.int32)


def random_lists(vocabulary: int) -> list[list[int]]:
    lengths = random_lengths(LISTS, LIST_MEAN, ROW - 48)  # fast-axolotl panics on documents as long as a row
    ids = np.random.default_rng(1).integers(0, vocabulary, lengths.sum())
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


# The clock and the surroundings


def seconds_of(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - begin
    del kept
    return seconds


def median_of(run: Callable[[], Any]) -> float:
    return statistics.median(seconds_of(run) for _ in range(ROUNDS))


def peak_mb(run: Callable[[], Any]) -> float:
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def peer() -> Any:
    try:
        import fast_axolotl
    except ImportError:
        return None
    return fast_axolotl


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
