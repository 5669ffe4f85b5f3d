"""The package as a whole: importing it does nothing, and its layers import one way."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import unsloth_pack
from unsloth_pack import kernels

ROOT = Path(unsloth_pack.__file__).parent

# A module may import from its own layer and those to the right: cli -> api -> ... -> kernels.
LAYERS = [
    {"cli"},
    {"bench"},
    {"report"},
    {"api"},
    {"verification"},
    {"trl"},
    {"packed_rows", "evaluation", "whole_checkpoints", "finite_updates", "out_of_memory", "sharded_weights"},
    {"checkpointing", "loading", "saving"},
    {"offload", "recompute"},
    {"patch"},
    {"patch_report", "spare_memory"},
    {"models"},
    {"describe"},
    {"graph", "leak_probe"},
    {"attention", "row_form", "graph_memory"},
    {"layout", "hooks"},
    {"kernels"},
    {"errors", "to_host"},
]
BESIDE = {"packing", "data", "demo", "whole_folders"}  # know no torch model, nor what patches one


def imports(path):
    """The modules a file imports, in functions too, relative ones spelt out."""
    package = [*path.relative_to(ROOT.parent).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*above, *([node.module] if node.module else [])])


def layer_of(module):
    return next((i for i, layer in enumerate(LAYERS) if module in layer), None)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    imported = list(imports(path))
    ours = {name.split(".")[1] for name in imported if name.startswith("unsloth_pack.")}
    if part in BESIDE:
        assert not {name for name in ours if layer_of(name) is not None} - {"errors"}
    else:
        assert all(layer_of(name) >= layer_of(part) for name in ours - BESIDE)
    theirs = {name.split(".")[0] for name in imported}
    if part in ("kernels", "layout"):
        assert not theirs & {"transformers", "peft", "trl", "datasets"}
    if part == "packing":
        assert not theirs & {"torch", "transformers", "trl"}
    if "trl" in theirs:
        assert part in ("trl", "cli"), "one file knows TRL; the command line names its types"


def test_the_guide_says_where_every_module_is():
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for part in {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")} - {"__init__.py"}:
        name = part.removesuffix(".py") if part.endswith(".py") else f"{part}/"
        assert f"`{name}`" in guide, name


def test_importing_does_nothing():
    code = """
import json, os, sys, io
import torch
before, modules = dict(os.environ), set(sys.modules)
sys.stdout = sys.stderr = said = io.StringIO()
import unsloth_pack
sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
new = {name.split(".")[0] for name in set(sys.modules) - modules}
print(json.dumps({"new": sorted(new), "environment": before == dict(os.environ), "said": said.getvalue(),
                  "cuda": torch.cuda.is_initialized()}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    seen = json.loads(done.stdout)
    assert seen == {"new": ["unsloth_pack"], "environment": True, "said": "", "cuda": False}


def test_every_public_name_is_there():
    assert set(unsloth_pack.__all__) <= set(dir(unsloth_pack))
    for name in unsloth_pack.__all__:
        assert getattr(unsloth_pack, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        unsloth_pack.no_such_name  # noqa: B018


def test_every_kernel_has_an_oracle_of_its_arguments():
    functions = [name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))]
    assert len(functions) > 5
    for name in functions:
        kernel, oracle = (inspect.signature(getattr(module, name)) for module in (kernels, kernels.reference))
        assert [*kernel.parameters] == [*oracle.parameters], name
