"""The package as a whole: its layers import one way, and its public names are there."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from tables import table

import unsloth_pack
from unsloth_pack import kernels

ROOT = Path(unsloth_pack.__file__).parent

# A room may import from itself and from those below it in this list.
ROOMS = (
    *("cli", "bench", "run", "report", "vision_api", "api", "chat_templates"),
    *("unsloth_arguments", "verification", "training", "config"),
    *("images", "packing", "checkpoints", "data", "demo"),
    *("patching", "memory", "layers", "cuda_graphs", "losses", "lora", "models", "attention", "packed_row"),
    *("kernels", "modules", "forked", "errors"),
)
TORCH_FREE = {"packing", "data", "demo"}  # know nothing of a model, nor of what patches one


def imports(path):
    """The modules a file imports, in functions too, relative ones spelt out."""
    package = [*path.relative_to(ROOT.parent).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_room_has_its_place():
    assert {room_of(path) for path in ROOT.rglob("*.py")} - {"__init__"} == set(ROOMS)


@table("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    room = room_of(path)
    if room == "__init__":
        return
    imported = list(imports(path))
    ours = {name.split(".")[1] for name in imported if name.startswith("unsloth_pack.")}
    assert not [name for name in ours if ROOMS.index(name) < ROOMS.index(room)]
    if room in TORCH_FREE:
        assert ours <= TORCH_FREE | {"checkpoints", "forked", "errors"}
        of_checkpoints = [name for name in imported if name.startswith("unsloth_pack.checkpoints.")]
        assert all(name.startswith("unsloth_pack.checkpoints.atomic") for name in of_checkpoints)
    theirs = {name.split(".")[0] for name in imported}
    if room == "kernels":
        assert not theirs & {"transformers", "peft", "trl", "datasets"}
    if room == "packing":
        assert not theirs & {"torch", "transformers", "trl"}
    if "trl" in theirs:
        assert room in ("training", "run", "cli", "patching"), "one room knows TRL; others name its types"


def test_the_guide_lists_the_rooms_in_this_order():
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = guide[guide.index("| room |") : guide.index("## How to add something")]
    listed = re.findall(r"`(\w+)/?`", "".join(re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)))
    assert [room for room in listed if room in ROOMS] == [room for room in ROOMS if room in listed]


def test_every_public_name_is_there():
    assert set(unsloth_pack.__all__) <= set(dir(unsloth_pack))
    for name in unsloth_pack.__all__:
        assert getattr(unsloth_pack, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        unsloth_pack.no_such_name  # noqa: B018


def test_every_kernel_has_an_oracle_of_its_arguments():
    functions = [name for name, value in vars(kernels).items() if inspect.isfunction(value)]
    assert len(functions) > 5
    for name in functions:
        kernel, oracle = (inspect.signature(getattr(module, name)) for module in (kernels, kernels.reference))
        assert [*kernel.parameters] == [*oracle.parameters], name
