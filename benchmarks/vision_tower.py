"""The towers of vision models alone, over all images of a row: ours beside plain transformers with sdpa.

    python benchmarks/vision_tower.py [--shapes qwen2.5-vl-3b,qwen3-vl-2b] [--sides 448,mixed] [--json PATH]
    python benchmarks/vision_tower.py --shapes tiny,tiny-2.5 --sides tiny         on a CPU

The images are those of the rows of `benchmarks/vision.py`. Both towers have the same random weights, frozen,
in bfloat16, on a CPU in float32, and get the same pixels in one forward pass without gradients. transformers'
own gets the sizes of the images on the device, as trainers send them; ours gets them on the host, as
`VisionDataCollator` leaves them there.

Times are medians over all rows and `--repeats`, from the call until the device is done. Memory is the peak
above what is held before the call. `error` is that of the worst token of the first row: the norm of its
difference from transformers in float64, divided by the norm of the true vector. Exit code 1 if an error of
ours exceeds 3 times that of transformers.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from shapes import device_name, versions
from torch import Tensor
from transformers import AutoModelForImageTextToText
from vision_batches import file_reader
from vision_shapes import SHAPES, SIDES, VisionShape, updates

from unsloth_pack import patch_model
from unsloth_pack.images.families import make_image_family

TOWERS = [name for name, shape in SHAPES.items() if "qwen" in shape.model_type]
SLACK, SMALL = 3.0, 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", default="qwen2.5-vl-3b,qwen3-vl-2b", help=f"of {', '.join(TOWERS)}")
    add("--sides", default="448,1024,mixed", help=f"of {', '.join(SIDES)}")
    add("--row_tokens", type=int, default=8192, help="of a row, text included (default: 8192)")
    add("--rows", type=int, default=4, help="that are measured (default: 4)")
    add("--repeats", type=int, default=5, help="calls for each row (default: 5)")
    add("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    for given, known, flag in ((args.shapes, TOWERS, "--shapes"), (args.sides, SIDES, "--sides")):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{flag} is {', '.join(sorted(unknown))}; choose of {', '.join(known)}")
    found = [measure(name, sides, args) for name in args.shapes.split(",") for sides in args.sides.split(",")]
    if args.json is not None:
        report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device_name()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report | {"versions": versions(), "towers": found}, indent=1) + "\n")
    return int(any(one["ours"]["error"] > SLACK * max(one["sdpa"]["error"], SMALL) for one in found))


def measure(name: str, sides: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of both towers, which are printed as well."""
    model = model_of(SHAPES[name])
    rows = [*rows_of(SHAPES[name], model, sides, args.row_tokens, args.rows)]
    tower = model.model.visual

    def plain(pixels: Tensor, grids: Tensor) -> Tensor:
        return tokens_of(tower(pixels, grid_thw=grids.to(DEVICE)))

    def patched(pixels: Tensor, grids: Tensor) -> Tensor:
        return tokens_of(tower(pixels, grid_thw=grids))

    truth = truth_of(tower, *rows[0])
    run = {"tower": name, "sides": sides, "patches": [len(pixels) for pixels, _ in rows]}
    run["images"] = [len(grids) for _, grids in rows]
    run["sdpa"] = figures(plain, rows, args.repeats, truth)
    patch_model(model)
    run["ours"] = figures(patched, rows, args.repeats, truth)
    patches, images = (statistics.mean(run[what]) for what in ("patches", "images"))
    print(f"\n{name}, {sides}: {patches:,.0f} patches of {images:.1f} images in a row")
    for peer in ("ours", "sdpa"):
        one = run[peer]
        print(f"  {peer:<6}{one['ms']:>10.2f} ms{one['peak_GiB']:>8.2f} GiB   error {one['error']:.1e}")
    print(f"  {run['sdpa']['ms'] / run['ours']['ms']:.2f}x", flush=True)
    return run


def model_of(shape: VisionShape) -> Any:
    """A model with the tower of a shape, frozen, and few layers of text, which do not run."""
    config = replace(shape, text={**shape.text, "num_hidden_layers": 4}).config(pad_token_id=0)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    with torch.device(DEVICE):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def rows_of(
    shape: VisionShape, model: Any, sides: str, row_tokens: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pixels on the device and grids on the host of rows with images."""
    make = make_image_family(model.config, shape.image_processor())
    read = file_reader(make)
    for documents in updates(sides, row_tokens, make, count):
        images = [read(file, len(one.sides)) for one in documents for file in one.jpegs()]
        pixels = torch.cat([values for _, values in images])
        yield pixels.to(DEVICE, model.dtype), torch.tensor([made.size for made, _ in images])


def tokens_of(output: Any) -> Tensor:
    """`[tokens, C]`: all that a tower hands to the text model, one part below the other."""
    return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])])


@torch.no_grad()
def truth_of(tower: Any, pixels: Tensor, grids: Tensor) -> Tensor:
    return tokens_of(copy.deepcopy(tower).double()(pixels.double(), grid_thw=grids.to(DEVICE)))


@torch.no_grad()
def figures(
    tower: Callable[[Tensor, Tensor], Tensor],
    rows: list[tuple[Tensor, Tensor]],
    repeats: int,
    truth: Tensor,
) -> dict[str, Any]:
    """Milliseconds, peak memory and the error of a tower; the first call of each row is not timed."""
    off = tower(*rows[0]).double() - truth
    error = (off.norm(dim=1) / truth.norm(dim=1)).max().item()
    del off
    for row in rows:
        tower(*row)
    runs = [timed(tower, *row) for row in rows * repeats]
    return {
        "ms": 1000 * statistics.median(seconds for seconds, _ in runs),
        "seconds": [seconds for seconds, _ in runs],
        "peak_GiB": max(peak for _, peak in runs) / 2**30,
        "error": error,
    }


def timed(tower: Callable[[Tensor, Tensor], Tensor], pixels: Tensor, grids: Tensor) -> tuple[float, int]:
    """Seconds of a call, and bytes that it held at most; 0 on a CPU."""
    on_gpu = DEVICE == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    began = time.perf_counter()
    tower(pixels, grids)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() - held if on_gpu else 0


if __name__ == "__main__":
    sys.exit(main())
