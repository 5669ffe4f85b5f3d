"""`unsloth-pack doctor`: what is installed, what can run here, and what is worth changing."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from unsloth_pack.cli.parser import Parser

# What the tests run with: from the first release up to, but not with, the second.
_TESTED = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.24"),
    "trl": ("1.15", "1.17"),
    "peft": ("0.19", "0.22"),
    "accelerate": ("1.15", "1.16"),
    "datasets": ("4.8", "5.3"),
}
_OPTIONAL = {
    "bitsandbytes": "load_in_4bit, load_in_8bit and 8-bit optimizers",
    "triton": "fused kernels on CUDA",
    "xformers": "the xformers attention backend",
    "flash-attn": "flash attention with softcap; torch brings the rest",
}
_VARIABLES = {"UNSLOTH_PACK_ATTN"}


def run(arguments: Sequence[str]) -> int:
    """Print the tables. Warnings are in them; the exit code is 0 all the same."""
    Parser(prog="unsloth-pack doctor", description="Show versions, devices and what can run here.").parse(
        arguments
    )
    from rich.console import Console

    from unsloth_pack.models import supported_architectures

    console = Console()
    _print(console, "versions", ("package", "version", "remark"), _version_rows())
    _print(console, "devices", ("device", "memory", "capability"), _device_rows())
    _print(console, "attention", ("dtype, head size", *_backends(), "auto takes"), _attention_rows())
    console.print(f"architectures: {', '.join(sorted(supported_architectures()))}")
    for name in sorted(os.environ):
        if name.startswith("UNSLOTH_PACK_") and name not in _VARIABLES:
            known = ", ".join(sorted(_VARIABLES))
            console.print(f"[yellow]environment variable {name} is unknown; known are {known}[/]")
    return 0


def _version_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("python", platform.python_version(), "")]
    for name, (first, beyond) in _TESTED.items():
        installed = _installed(name)
        rows.append((name, installed or "missing", _remark(name, installed, first, beyond)))
    for name, purpose in _OPTIONAL.items():
        installed = _installed(name)
        rows.append((name, installed or "not installed", "" if installed else f"for {purpose}"))
    return rows


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _remark(name: str, installed: str | None, first: str, beyond: str) -> str:
    from packaging.version import Version

    remedy = f"pip install '{name}>={first},<{beyond}'"
    if installed is None:
        return f"needed; {remedy}"
    if Version(first) <= Version(installed) < Version(beyond):
        return "tested"
    return f"outside the tested range; {remedy}"


def _device_rows() -> list[tuple[str, ...]]:
    import torch

    rows: list[tuple[str, ...]] = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        rows.append((about.name, f"{about.total_memory / 2**30:.0f} GiB", f"{about.major}.{about.minor}"))
    return rows or [("CPU", f"{torch.get_num_threads()} threads", "no CUDA device")]


def _backends() -> list[str]:
    from unsloth_pack.attention import BACKENDS

    return list(BACKENDS)


def _attention_rows() -> list[tuple[str, ...]]:
    import torch

    from unsloth_pack.attention import AttentionOptions, choose_backend, why_unavailable
    from unsloth_pack.attention.options import AttentionNeed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (64, 128):
            need = AttentionNeed(device, dtype, head_dim, AttentionOptions(scale=head_dim**-0.5))
            answers = [why_unavailable(name, need) or "runs" for name in _backends()]
            title = f"{str(dtype).removeprefix('torch.')}, {head_dim}"
            rows.append((title, *answers, choose_backend("auto", need)[0]))
    return rows


def _print(console: Any, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
