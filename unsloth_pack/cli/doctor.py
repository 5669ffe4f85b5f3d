"""`unsloth-pack doctor`: what is installed, what can run here, and what is worth changing."""

import os
import pkgutil
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unsloth_pack.config import Parser
from unsloth_pack.errors import errors_of, printable
from unsloth_pack.report.terminal import LastingConsole
from unsloth_pack.run.machine import device_type

PRIVATE_NAMES = Path(__file__).with_name("private_names.txt")  # of tools/private_names.py

# Package -> the first release that the tests run with, and the first that they do not.
TESTED = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.24"),
    "trl": ("1.15", "1.17"),
    "peft": ("0.19", "0.22"),
    "accelerate": ("1.15", "1.16"),
    "datasets": ("4.8", "5.3"),
}
# Optional package -> what uses it, and whether every machine with CUDA should have it.
OPTIONAL = {
    "triton": ("fused kernels on CUDA, among them softcapped attention", True),
    "bitsandbytes": ("load_in_4bit, load_in_8bit and 8-bit optimizers", False),
    "torchao": ("the optimizers adamw_torch_8bit and adamw_torch_4bit", False),
    "xformers": ("the xformers attention backend", False),
    "flash-attn": ("flash attention with attention dropout; torch and triton bring the rest", False),
    "fla-core": ("gated delta nets of hybrid models: whole rows at once", False),
    "causal-conv1d": ("convolutions of hybrid models: whole rows at once", False),
    "mamba-ssm": ("Mamba-2 layers of hybrid models: whole rows at once", False),
    "pillow": ("rows with images", False),
    "flash-attn-4": ("attention about twice as fast for long documents on Hopper GPUs", False),
}


# Releases that break together; the device on which they do, or None for all; what breaks; the remedy
BREAKAGES: tuple[tuple[dict[str, str], str | None, str, str], ...] = (
    (
        {"xformers": "<=0.0.35", "torch": ">=2.11"},
        "cuda",
        "the compiled extension of xformers does not load; of its operators only FlashAttention's runs",
        "use --attn_backend flash, or an xformers that was built for this torch",
    ),
    ({"trl": "<1.16"}, "cpu", "TRL trains on CUDA only", "pip install 'trl>=1.16'"),
    (
        {"peft": "<0.21"},
        None,
        "a saved adapter of experts (qwen3_moe) cannot be loaded again",
        "pip install 'peft>=0.21'",
    ),
    (
        {"transformers": "<5.18"},
        None,
        "transformers' own sdpa attention drops Gemma 2's softcap; models from FastLanguageModel keep it",
        "pip install 'transformers>=5.23' before comparing with an unpatched model",
    ),
)


class PrivateName(NamedTuple):
    """A name that any release of a library may drop."""

    owner: str  # the module or object of the library that has it
    name: str
    files: tuple[str, ...]  # of this package that use it


def private_names() -> list[PrivateName]:
    """Read the list of private names of other libraries that this package uses."""
    lines = PRIVATE_NAMES.read_text(encoding="utf-8").splitlines()
    return [PrivateName(owner, name, tuple(files)) for owner, name, *files in map(str.split, lines)]


@dataclass(frozen=True)
class Line:
    """One finding."""

    section: str
    name: str
    found: str
    remedy: str = ""  # empty if it is fine


def run(arguments: Sequence[str]) -> int:
    """Print all findings, each that is not fine with its remedy; with `--json` as JSON.

    Returns:
        0 where everything is fine, else 1.
    """
    as_json = build_parser().parse(arguments).get("json", False)
    looks = (_versions, _private_names, _devices, _attention, _breakages, _variables)
    lines = [line for look in looks for line in look(device_type())]
    is_fine = not any(line.remedy for line in lines)
    console = LastingConsole()
    if as_json:
        console.show_json({"fine": is_fine, "lines": [asdict(line) for line in lines]})
    else:
        _print(console, lines)
    return 0 if is_fine else 1


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = Parser(prog="unsloth-pack doctor", description="Show versions, devices and what can run here.")
    parser.add_switch("--json", "print JSON")
    return parser


def _versions(device_type: str) -> Iterator[Line]:
    yield Line("versions", "python", platform.python_version())
    for name, (first, beyond) in TESTED.items():
        installed = _installed(name)
        if installed and _holds(installed, f">={first},<{beyond}"):
            yield Line("versions", name, f"{installed}, tested")
            continue
        state = f"{installed}, outside the tested range" if installed else "missing"
        yield Line("versions", name, state, _install(name))
    for name, (purpose, for_cuda) in OPTIONAL.items():
        installed = _installed(name)
        is_needed = for_cuda and device_type == "cuda" and not installed
        state = installed or f"not installed; for {purpose}"
        yield Line("versions", name, state, f"pip install {name}" if is_needed else "")


def _private_names(device_type: str) -> Iterator[Line]:
    """Check that the libraries still have the private names that are used."""
    for library in filter(_installed, TESTED):
        names = [each for each in private_names() if each.owner.partition(".")[0] == library]
        gone = [f"{each.owner}.{each.name} (in {', '.join(each.files)})" for each in missing_names(names)]
        state = f"gone: {', '.join(gone)}" if gone else "all there"
        remedy = _install(library) if gone else ""
        yield Line("private names", f"of {library}", f"{len(names)} are used, {state}", remedy)


def missing_names(names: Sequence[PrivateName]) -> list[PrivateName]:
    """List the names that the installed libraries do not have. Only builds with CUDA have its names."""
    import torch

    has_cuda = torch.version.cuda is not None
    return [each for each in names if not is_there(each) and (has_cuda or not each.name.startswith("_cuda"))]


def is_there(wanted: PrivateName) -> bool:
    """Return whether a library has a name. Its modules are read, since importing them takes seconds."""
    if re.search(rf"\b{wanted.name}\b", _source_of(wanted.owner)):
        return True
    try:
        return hasattr(pkgutil.resolve_name(wanted.owner), wanted.name)
    except (ImportError, AttributeError):
        return False


def _source_of(module: str) -> str:
    """Read a module; empty where there is none, or it is not written in Python."""
    library, *inside = module.split(".")
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        return ""
    path = Path(spec.submodule_search_locations[0], *inside)
    file = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _install(name: str) -> str:
    first, beyond = TESTED[name]
    return f"pip install '{name}>={first},<{beyond}'"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _holds(installed: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(installed, prereleases=True)


def _devices(device_type: str) -> Iterator[Line]:
    import torch

    if device_type == "cpu":
        yield Line("devices", "CPU", f"{torch.get_num_threads()} threads, no CUDA device")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        memory = f"{about.total_memory / 2**30:.0f} GiB"
        yield Line("devices", about.name, f"{memory}, compute capability {about.major}.{about.minor}")


def _attention(device_type: str) -> Iterator[Line]:
    """Run one tiny forward and backward with every backend that `auto` may take, by kind of layer."""
    import torch

    from unsloth_pack.attention import BACKENDS, AttentionOptions, choose_backend, why_passed_over
    from unsloth_pack.attention.options import AttentionNeed

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    kinds = [(dtype, head_dim, None) for dtype in dtypes for head_dim in (64, 128)]
    for dtype, head_dim, softcap in (*kinds, (torch.bfloat16, 256, 50.0)):  # Gemma 2's
        options = AttentionOptions(scale=head_dim**-0.5, softcap=softcap)
        need = AttentionNeed(device_type, dtype, head_dim, options)
        title = f"{str(dtype).removeprefix('torch.')}, {head_dim}{', softcap' if softcap else ''}"
        for name in BACKENDS:
            why = why_passed_over(name, need)
            yield Line("attention", f"{title}: {name}", why or "runs", _remedy(name, why))
        backend, why = choose_backend("auto", need)
        yield Line("attention", f"{title}: auto", f"{backend}: {why}")


def _remedy(backend: str, why: str | None) -> str:
    """Say what to do about a backend that is broken; one that needs another device or dtype is not."""
    package = {"flash": "flash-attn", "sdpa": "torch"}.get(backend, backend)
    if why is None or not ("failed" in why or ("not import" in why and _installed(package))):
        return ""
    return f"reinstall {package} for torch {_installed('torch')}, or keep to another --attn_backend"


def _breakages(device_type: str) -> Iterator[Line]:
    for releases, where, what, remedy in BREAKAGES:
        installed = {name: _installed(name) for name in releases}
        if where in (None, device_type) and all(
            has and _holds(has, releases[name]) for name, has in installed.items()
        ):
            title = ", ".join(f"{name} {has}" for name, has in installed.items())
            yield Line("known to break", title, what, remedy)


def _variables(device_type: str) -> Iterator[Line]:
    from unsloth_pack.attention.backends import ENVIRONMENT_VARIABLE, requested_backend

    for name, value in sorted(os.environ.items()):
        if name == ENVIRONMENT_VARIABLE:
            state = f"{value or 'empty'}: overrides --attn_backend"
            unknown = errors_of(requested_backend, "auto")
            yield Line("environment", name, state, *(str(error).partition("; ")[2] for error in unknown))
        elif name.startswith("UNSLOTH_PACK_"):
            yield Line("environment", name, "unknown", f"unset it; known is {ENVIRONMENT_VARIABLE}")


def _print(console: Console, lines: Sequence[Line]) -> None:
    for section, members in groupby(lines, key=lambda line: line.section):
        table = Table("", "found", "remedy", title=section, title_justify="left", title_style="bold")
        for line in members:
            name, found, remedy = map(printable, (line.name, line.found, line.remedy))
            table.add_row(Text(name), Text(found), Text(remedy, style="yellow"))
        console.print(table)
    n_remedies = sum(bool(line.remedy) for line in lines)
    console.print(f"not fine: {n_remedies}" if n_remedies else "all is fine")
