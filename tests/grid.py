"""The correctness grid: a patched packed row against every document alone in plain transformers in float64.

    python tests/grid.py --json                      to benchmarks/results/grid-<device>-<date>.json and .md
    python tests/grid.py --json PATH --minutes 9     to PATH; what is not reached in 9 minutes is left out
    python tests/grid.py --arch qwen3 --dtype nf4    a part, to look into a failure
    python tests/grid.py --images --json             models with images, to benchmarks/results/grid-images-...
    python tests/grid.py --join PART... --json       parts that were measured before, as one
    python tests/grid.py --list                      how many cases there are

A file with only a part of the cases says so, also during the run and after it was killed.

The whole product, nothing sampled: every architecture x window x LoRA variant x dtype x backend x
checkpointing mode, each uncaptured and captured in CUDA graphs. The patched model's error may be at most 1.5
times that of untouched transformers and PEFT in the same dtype, for logits, loss, and the gradient of every
parameter that is trained (`correctness/judge.py`). A combination that cannot exist has a row that says why.

Under "distillation" the base teaches the model by the forward KL divergence. "reverse_kl" and "jsd" do so on
one architecture for each kind of head, since they differ in its kernel alone.

Under "sharded" two ranks on a CPU hold parts of the layers, as `FastLanguageModel` loads them, and step on
rows of their own. Each step is judged as the others are, and must equal that of a whole model to the bit.

"nf4" is bfloat16 over weights in NF4, judged against float64 on the dequantised weights. Dropout drops by
token, not at random, so that all runs drop the same. Under "auto" a tiny model would always fit, so half of
its layers are recomputed by force; in captured steps none are.

With images a variant is what trains, and the gradients of pixels are compared too. Documents have no image,
one, two that touch, and three of unequal size.

Backends that need a GPU are refused without one. With TRITON_INTERPRET=1 the package's own kernels run there,
in float32 and float16, at a minute a case.

The exit code is 1 if a case failed or was not reached.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices are faster so; read when torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from correctness.cases import cases, values_of
from correctness.judge import FACTOR, holds
from correctness.parts import joined
from correctness.report import about, default_path, table
from correctness.workers import spread

_WRITE_EVERY = 10  # seconds: what a killed run leaves is at most so old


def main():
    args = _arguments()
    wanted = {name: getattr(args, name) for name in values_of()}
    chosen = cases(args.images, **wanted)
    if args.list:
        return _list(chosen)
    path = None if args.json is None else Path(args.json or default_path(args.images))
    result, rows = _joined(args, path) if args.join else _measured(args, chosen, wanted, path)
    print(table(result, rows))
    return int(not result["complete"] or not all(map(holds, rows)))


def _joined(args, path):
    try:
        result, rows = joined(args.join, 2 * len(cases(args.images)), args.images)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--join: {error}")
    rows.sort(key=_place(args.images))
    if path:
        _write(path, result, rows)
    return result, rows


def _measured(args, chosen, wanted, path):
    """The head of the result and its rows. What there is so far is written now and then."""
    result = {
        **about(args.images),
        "factor": FACTOR,
        "workers": args.workers,
        "only": {name: values for name, values in wanted.items() if values},
        "n_rows": 2 * len(chosen),
        "complete": False,
    }
    rows, started, written = [], time.monotonic(), 0.0
    try:
        for new in spread(chosen, args.workers, started + 60 * args.minutes):
            rows += new
            _show(new, len(rows), result["n_rows"], time.monotonic() - started)
            if path and time.monotonic() - written > _WRITE_EVERY:
                _write(path, result, rows)
                written = time.monotonic()
    finally:
        result["complete"] = len(rows) == result["n_rows"]
        result["seconds"] = round(time.monotonic() - started, 1)
        rows.sort(key=_place(args.images))
        if path:
            _write(path, result, rows)
    return result, rows


def _arguments():
    kind = argparse.ArgumentParser(add_help=False)
    kind.add_argument("--images", action="store_true", help="the grid of models with images")
    images = kind.parse_known_args()[0].images
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[kind])
    parser.add_argument(
        "--json", nargs="?", const="", metavar="PATH", help="write the rows, and a table beside"
    )
    parser.add_argument("--workers", type=int, default=min(8, max(1, (os.cpu_count() or 1) // 2)))
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop then, and say it is partial"
    )
    parser.add_argument("--list", action="store_true", help="count the cases and stop")
    parser.add_argument("--join", nargs="+", metavar="PART", help="measure nothing: join these files")
    for name, values in values_of(images).items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, help="only these")
    return parser.parse_args()


def _list(chosen):
    for name in values_of():
        counts = Counter(getattr(case, name) for case in chosen)
        print(f"{name}: " + ", ".join(f"{value} {n}" for value, n in counts.items()))
    print(f"{len(chosen)} cases, each uncaptured and captured: {2 * len(chosen)} rows")
    return 0


def _show(new, n_done, n_rows, seconds):
    for row in new:
        if not holds(row):
            print(f"FAILED {_name(row)}", *row["failed"][:5], sep="\n    ", file=sys.stderr)
    if n_done % 64 < len(new) or n_done == n_rows:
        print(
            f"{seconds:5.0f} s  {n_done} of {n_rows} rows, now {_name(new[0])}", file=sys.stderr, flush=True
        )


def _name(row):
    return " ".join([*(row[name] for name in values_of()), "captured" if row["captured"] else "uncaptured"])


def _place(images):
    """The key by which rows are sorted."""
    order = values_of(images).items()
    return lambda row: [values.index(row[name]) for name, values in order] + [row["captured"]]


def _write(path, result, rows):
    """Both files; the rows one a line. Replaced at once, so that a killed run leaves whole files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(result, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    texts = {path: f'{head},\n "rows": [\n{lines}\n ]\n}}\n', path.with_suffix(".md"): table(result, rows)}
    for place, text in texts.items():
        partial = place.with_name(place.name + ".partial")
        partial.write_text(text)
        partial.replace(place)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated; what is written is partial"))
    sys.exit(main())
