"""The tests of this folder use the package through its public names alone."""

import ast
from pathlib import Path

import pytest

PUBLIC = {"unsloth_pack", "unsloth_pack.packing", "unsloth_pack.kernels", "unsloth_pack.cli"}
PUBLIC |= {"unsloth_pack.chat_templates", "unsloth_pack.training.token_budget"}
FILES = sorted(Path(__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_internals(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            assert not any(alias.name.startswith("_") for alias in node.names), ast.unparse(node)
        else:
            continue
        for module in modules:
            assert not module.startswith("unsloth_pack") or module in PUBLIC, ast.unparse(node)
    for node in ast.walk(tree):
        is_patch = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr"
        assert not (is_patch and "unsloth_pack" in ast.unparse(node)), ast.unparse(node)
