"""The correctness grid: a patched packed row against every document alone in plain transformers in float64.

    python tests/grid.py [--json PATH]

For every architecture x backend that runs here x dtype x checkpointing x window, the patched model's error
may be at most 1.5 times the error of untouched transformers in the same dtype. That error is the greater of
two: with each document alone, and on the same row with position_ids, because the rounding of a GEMM depends
on its rows, and that of attention on its mask. Beside the verdict stand the multiples of each of the two. A
relative error can be 0 by luck where a scalar is compared, so the loss is granted one unit of rounding of its
dtype.
"""

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache

import torch
from tiny import DEVICE, MIXED_LENGTHS, error, random_documents, run_alone, run_packed, tiny_model

from unsloth_pack import patch_model, supported_architectures
from unsloth_pack.attention import BACKENDS
from unsloth_pack.errors import BackendUnavailable

FACTOR = 1.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WINDOWS = {"short": 24, "long": 1000}  # against documents of up to 129 tokens


@dataclass(frozen=True)
class Case:
    arch: str
    dtype: str
    checkpointing: bool
    window: str  # "none" for architectures without


def cases():
    for arch, spec in supported_architectures().items():
        for window in WINDOWS if spec.window != "none" and "sliding_window" in spec.tiny else ("none",):
            for dtype in DTYPES:
                for checkpointing in (False, True):
                    yield Case(arch, dtype, checkpointing, window)


def measure(case, backend):
    """The errors of one case as multiples of plain transformers', or why the backend refuses it."""
    truth = _truth(case.arch, case.window)
    alone, same_row = (
        _alone(case.arch, case.dtype, case.window),
        _same_row(case.arch, case.dtype, case.window),
    )
    dtype = DTYPES[case.dtype]
    model = tiny_model(case.arch, dtype, **_overrides(case.window))
    if case.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    try:
        patch_model(model, attn_backend=backend)
    except BackendUnavailable as refusal:
        return {"refused": str(refusal)}
    got = run_packed(model, random_documents(MIXED_LENGTHS), truth.routes)
    assert got.grads.keys() == truth.grads.keys()
    return {
        **_multiples(got, truth, [alone, same_row], dtype),
        "of_alone": _multiples(got, truth, [alone], dtype),
        "of_same_row": _multiples(got, truth, [same_row], dtype),
    }


def _multiples(got, truth, plains, dtype):
    """got's errors as multiples of the greatest of the plain ones; of the gradients, the worst."""
    rounding = torch.finfo(dtype).eps * abs(float(truth.loss))
    grads = {
        name: error(grad, truth.grads[name])
        / max(error(plain.grads[name], truth.grads[name]) for plain in plains)
        for name, grad in got.grads.items()
    }
    worst = max(grads, key=grads.__getitem__)
    return {
        "logits": error(got.logits, truth.logits)
        / max(error(plain.logits, truth.logits) for plain in plains),
        "loss": abs(float(got.loss - truth.loss))
        / max(rounding, *(abs(float(plain.loss - truth.loss)) for plain in plains)),
        "gradient": grads[worst],
        "worst_gradient": worst,
    }


def holds(result):
    return all(result[key] <= FACTOR for key in ("logits", "loss", "gradient"))


def _overrides(window):
    return {"sliding_window": WINDOWS[window]} if window != "none" else {}


@cache
def _truth(arch, window):
    model = tiny_model(arch, torch.float64, device="cpu", **_overrides(window))
    return run_alone(model, random_documents(MIXED_LENGTHS))


@cache
def _alone(arch, dtype, window):
    model = tiny_model(arch, DTYPES[dtype], **_overrides(window))
    return run_alone(model, random_documents(MIXED_LENGTHS), _truth(arch, window).routes)


@cache
def _same_row(arch, dtype, window):
    """Untouched transformers on the row: position_ids keep its documents apart, without cache or mask."""
    model = tiny_model(arch, DTYPES[dtype], **_overrides(window))
    documents = random_documents(MIXED_LENGTHS)
    positions = torch.cat([torch.arange(len(document)) for document in documents]).to(model.device)[None]
    routes = _truth(arch, window).routes
    return run_packed(model, documents, routes, position_ids=positions, use_cache=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    rows, failed = [], 0
    print(
        f"{'architecture':12} {'backend':9} {'dtype':9} {'ckpt':5} {'window':6}",
        *(f"{name:>7}" for name in ("logits", "loss", "grad")),
    )
    for case in cases():
        for backend in BACKENDS:
            result = measure(case, backend)
            rows.append({**asdict(case), "backend": backend, **result})
            head = f"{case.arch:12} {backend:9} {case.dtype:9} {case.checkpointing!s:5} {case.window:6}"
            if "refused" in result:
                print(head, " refused:", result["refused"].split("; use")[0])
                continue
            verdict = "" if holds(result) else f"  FAILED ({result['worst_gradient']})"
            failed += bool(verdict)
            print(
                head, *(f"{result[key]:7.2f}" for key in ("logits", "loss", "gradient")), verdict, flush=True
            )
    measured = [row for row in rows if "refused" not in row]
    print(f"{len(measured)} measured, {failed} failed, {len(rows) - len(measured)} refused")
    for which in ("of_alone", "of_same_row"):
        above = sum(not holds(row[which]) for row in measured)
        print(f"{above} above {FACTOR} by {which.replace('_', ' ')} only")
    if args.json:
        import peft
        import transformers

        about = {
            "date": date.today().isoformat(),
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "cpu",
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
            "python": platform.python_version(),
            "factor": FACTOR,
            "document_lengths": MIXED_LENGTHS,
        }
        with open(args.json, "w") as file:
            json.dump({**about, "rows": rows}, file, indent=1)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
