"""Every private name of other libraries that is used stands in one list, and is there."""

import ast
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import FunctionType

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from trl import SFTTrainer

import unsloth_pack
from unsloth_pack.cli.known import TESTED
from unsloth_pack.cli.private_names import PRIVATE_NAMES, PrivateName
from unsloth_pack.cli.run_errors import missing_names

ROOT = Path(unsloth_pack.__file__).parent
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets")
PRIVATE = re.compile(r"_[A-Za-z]\w*")
NAMESPACES = {"_C", "_autograd"}  # not used themselves
OF_PYTHON = {"_option_string_actions", "_replace", "_exit"}  # argparse, named tuples, os
NO_NAMES = {"_kernel"}  # how names end
OBJECTS = (torch.nn.Module(), torch.Tensor, PreTrainedModel, PreTrainedConfig(), TrainingArguments, Trainer)
OF_OBJECTS = {name for of in (*OBJECTS, SFTTrainer, LoraLayer) for name in dir(of) if PRIVATE.fullmatch(name)}


class Uses(ast.NodeVisitor):
    """The private names of the libraries in a file, as far as a look at the file can tell.

    Args:
        ours: private names that this package gives to things of its own.
    """

    def __init__(self, ours):
        self.ours, self.found, self.imported = ours, set(), set()
        self.aliases = set()  # what the libraries and their parts are called here

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name.split(".")[0] in LIBRARIES:
                self.aliases.add(alias.asname or alias.name.split(".")[0])
                self.found.update(filter(PRIVATE.fullmatch, alias.name.split(".")))

    def visit_ImportFrom(self, node):
        if (node.module or "").split(".")[0] in LIBRARIES:
            for alias in node.names:
                self.aliases.add(alias.asname or alias.name)
                self.imported.add((node.module, alias.name))
                self.found.update(filter(PRIVATE.fullmatch, (*node.module.split("."), alias.name)))

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if PRIVATE.fullmatch(node.attr) and self.is_foreign(node):
            self.found.add(node.attr)

    def is_foreign(self, node):
        if node.attr in OF_PYTHON | NAMESPACES:
            return False
        of = node.value
        if isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super":
            return True
        while isinstance(of, ast.Attribute):
            of = of.value
        if isinstance(of, ast.Name) and of.id in self.aliases:
            return True
        return node.attr not in self.ours or (not is_own(node) and node.attr in OF_OBJECTS)

    def visit_JoinedStr(self, node):
        """Parts of names are none."""

    def visit_Constant(self, node):
        """For `getattr`, and for looking into `vars` or the modules of a module."""
        if isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            self.found |= {node.value} - self.ours - NO_NAMES


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names_given(tree):
    """What functions, classes, variables, arguments and attributes of `self` are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr


def uses_of(sources):
    """`{name: {files}}` of private names, and of what is imported from inside the libraries."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    ours = {name for tree in trees.values() for name in names_given(tree)}
    private, imported = defaultdict(set), defaultdict(set)
    for file, tree in trees.items():
        uses = Uses(ours)
        uses.visit(tree)
        for name in uses.found:
            private[name].add(file)
        for pair in uses.imported:
            imported[pair].add(file)
    return private, imported


def overridden_names():
    """`{name: {files}}` of private methods of the libraries' classes that classes here override."""
    found = defaultdict(set)
    for module in walk_packages([str(ROOT)], "unsloth_pack."):
        file = f"{module.name.removeprefix('unsloth_pack.').replace('.', '/')}.py"
        for kind in vars(import_module(module.name)).values():
            if isinstance(kind, type) and kind.__module__ == module.name:
                theirs = [base for base in kind.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
                for name in filter(PRIVATE.fullmatch, functions_of(kind)):
                    if any(name in vars(base) for base in theirs):
                        found[name].add(file)
    return found


def functions_of(kind):
    return [name for name, value in vars(kind).items() if isinstance(value, FunctionType)]


SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
LIST = "cli/private_names.py"


@pytest.fixture(scope="module")
def used():
    private, imported = uses_of({file: text for file, text in SOURCES.items() if file != LIST})
    for name, files in overridden_names().items():
        private[name] |= files
    return private, imported


def test_every_private_name_that_is_used_is_listed_with_its_files(used):
    listed = {entry.name: {*entry.files} for entry in PRIVATE_NAMES if entry.name.startswith("_")}
    assert used[0] == listed


def test_every_other_name_that_is_listed_is_imported_from_there(used):
    for entry in PRIVATE_NAMES:
        if not entry.name.startswith("_"):
            assert used[1][entry.owner, entry.name] == {*entry.files}, entry


def test_a_name_is_listed_once():
    names = [entry.name for entry in PRIVATE_NAMES]
    assert len(names) == len({*names})
    assert {entry.library for entry in PRIVATE_NAMES} == {*LIBRARIES} <= TESTED.keys()


def test_every_listed_name_is_there():
    assert missing_names(PRIVATE_NAMES) == []


PLANTED = """
import torch
import torch._dynamo as dynamo
from transformers import Trainer
from peft.tuners import _tuner
from torch.distributed._tensor import Shard

class Own(Trainer):
    def __init__(self, model):
        self._mine = torch.cuda._sleep
        self._parameters = getattr(model, "_extra", None)

    def _step(self):
        return self._theirs + super()._step() + self._mine + f"_part_{self}"

def _helper(module: "Own"):
    return module._parameters, module._mine, Trainer._hidden, "a _b", "_kernel", module._replace(x=1), _helper
"""


def test_names_that_are_found():
    private, imported = uses_of({"a.py": PLANTED})
    names = "_dynamo _tuner _tensor _sleep _extra _theirs _step _parameters _hidden"
    assert dict(private) == {name: {"a.py"} for name in names.split()}
    assert imported["transformers", "Trainer"] == {"a.py"}


@pytest.mark.parametrize(
    ("owner", "name", "is_there"),
    [
        ("torch.nn.modules.module", "_modules", True),
        ("torch.nn.modules.module", "_module", False),  # a part of a name
        ("torch.nn.no_such_module", "_modules", False),
        ("torch.Tensor", "_version", True),
        ("torch.Tensor", "_no_version", False),
        ("torch.NoTensor", "_version", False),
        ("torch", "_scaled_mm", True),
        ("torch", "_no_such_mm", False),
        ("torch.ops.aten", "_unsafe_view", True),
        ("torch.ops.aten", "_no_such_view", False),
        ("no_such_library.module", "_name", False),
    ],
)
def test_names_that_are_gone(owner, name, is_there):
    wanted = PrivateName(owner, name, "a test", ())
    assert missing_names([wanted]) == ([] if is_there else [wanted])


def test_what_needs_cuda_is_not_sought_without(monkeypatch):
    wanted = PrivateName("torch._C", "_cuda_no_such_name", "a test", (), needs_cuda=True)
    for version, missing in ((None, []), ("13.0", [wanted])):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert missing_names([wanted]) == missing
