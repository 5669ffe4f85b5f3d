"""Write the tables of `docs/options.md` and `docs/recipes.md` from the options, the recipes and `gpus.yaml`.

`--estimate` first estimates the peaks in `gpus.yaml` anew, which takes a minute.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from unsloth_pack.cli.recipe import recipe_names, summary_of
from unsloth_pack.config import OPTIONS, SECTIONS
from unsloth_pack.config.options import Option

GUIDES = [Path(__file__).with_name(name) for name in ("options.md", "recipes.md")]

GPUS = Path(__file__).with_name("gpus.yaml")
WEIGHTS = {"NF4": {"load_in_4bit": True}, "16 bits": {}}
_SLACK = 1.1  # estimates are off by up to a tenth
_CONTEXT = 0.5  # GiB of CUDA's own


def with_tables(guide: str) -> str:
    """Replace every table between `<!-- name -->` and `<!-- end -->`."""
    for name, lines in {"recipes": _recipes(), "gpus": _gpus(), "options": _options()}.items():
        table = f"<!-- {name} -->\n" + "\n".join(lines) + "\n<!-- end -->"
        guide = re.sub(
            rf"<!-- {name} -->.*?<!-- end -->", lambda _, table=table: table, guide, flags=re.DOTALL
        )
    return guide


def _recipes() -> Iterator[str]:
    yield "| recipe | what it is |"
    yield "|---|---|"
    yield from (f"| `{name}` | {summary_of(name)} |" for name in recipe_names())


def fits(peak: float, gpu: float) -> bool:
    """Return whether a step of this estimated peak fits, both in GiB."""
    return _SLACK * peak + _CONTEXT <= gpu


def _gpus() -> Iterator[str]:
    known = yaml.safe_load(GPUS.read_text(encoding="utf-8"))
    yield f"| GPU | rows | {' | '.join(known['families'])} |"
    yield f"|{'---|' * (2 + len(known['families']))}"
    for name, gpu in known["gpus"].items():
        for tokens in known["rows"]:
            cells = []
            for models in known["families"].values():
                peaks = {w: {m: known["peaks"][m][w][tokens] for m in models} for w in WEIGHTS}
                most = {w: next((m for m in models if fits(of[m], gpu)), None) for w, of in peaks.items()}
                told = (f"{m[m.rindex('-') + 1 :]} in {w} ({peaks[w][m]:.1f})" for w, m in most.items() if m)
                cells.append(", ".join(told) or "none")
            yield f"| {name} | {tokens:,} | {' | '.join(cells)} |"


def estimated(sizes: Mapping[str, Any], weights: str, tokens: int) -> float:
    """Estimate the peak of a step in GiB: an adapter of rank 16, one row, every layer recomputed."""
    from transformers import AutoConfig

    from unsloth_pack.config import TrainOptions, changed
    from unsloth_pack.run.estimate import estimate_run
    from unsloth_pack.training.chips import Gpu

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**sizes).save_pretrained(folder)
        values = {"model_name": folder, "max_seq_length": tokens, "use_gradient_checkpointing": True}
        run = estimate_run(changed(TrainOptions(), values | WEIGHTS[weights]), Gpu.named("h100"))
    return run.memory.peak / 2**30


def _write_peaks() -> None:
    head, _, _ = GPUS.read_text(encoding="utf-8").partition("\npeaks:\n")
    known = yaml.safe_load(head)
    lines = [f"{head}\npeaks:\n"]
    for name, sizes in ((n, s) for models in known["families"].values() for n, s in models.items()):
        peaks = {w: {t: round(estimated(sizes, w, t), 2) for t in known["rows"]} for w in WEIGHTS}
        written = yaml.safe_dump(peaks, default_flow_style=True, width=200, sort_keys=False)
        lines.append(f"  {name}: {written}")
    GPUS.write_text("".join(lines), encoding="utf-8")


def _options() -> Iterator[str]:
    for section, kind in SECTIONS.items():
        yield f"\n**`{section}`**: {kind.__doc__}\n"
        yield "| option | value | what it is | default |"
        yield "|---|---|---|---|"
        for name in kind.model_fields:
            yield f"| {' | '.join(_cells(OPTIONS[name]))} |"


def _cells(option: Option) -> Iterator[str]:
    yield " or ".join(f"`{name}`" for name in option.names)
    for text in (option.unit, option.help, option.shown_default):
        yield text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    if "--estimate" in sys.argv:
        _write_peaks()
    for guide in GUIDES:
        guide.write_text(with_tables(guide.read_text(encoding="utf-8")), encoding="utf-8")
