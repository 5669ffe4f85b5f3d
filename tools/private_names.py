"""Write `unsloth_pack/cli/private_names.txt`, which `doctor` reads: `python -m tools.private_names`.

A line has the module or object of a library, a name of it that any release may drop, and the files that use
it. Such a name begins with an underscore, or its library does not export it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module

import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from trl import SFTTrainer

from unsloth_pack.cli.doctor import PRIVATE_NAMES, PrivateName, is_there

ROOT = PRIVATE_NAMES.parents[1]
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets")
# Modules and objects in which an attribute of an unknown object is looked for
OWNERS = (
    "torch.nn.modules.module",
    "torch.nn.modules.dropout",
    "torch.nn.parallel.distributed",
    "torch.Tensor",
    "torch.UntypedStorage",
    "torch.optim.adam",
    "torch.distributed.fsdp._common_utils",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "accelerate.accelerator",
    "accelerate.data_loader",
    "datasets.arrow_dataset",
    "datasets.iterable_dataset",
    "transformers.configuration_utils",
    "transformers.integrations.moe",
    "transformers.modeling_utils",
    "transformers.models.auto.auto_factory",
    "transformers.training_args",
    "transformers.trainer",
    "transformers.tokenization_utils_tokenizers",
    "peft.tuners.trainable_tokens.layer",
    "peft.tuners.tuners_utils",
    "peft.tuners.lora.layer",
    "trl.trainer.sft_trainer",
    "trl.trainer.base_trainer",
)
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_OTHERS = {"_option_string_actions", "_replace", "_exit", "_check_buffer"}  # argparse, named tuples, os, rich
_OTHERS |= {"_C", "_autograd"}  # parts of torch, in which names are used
_OTHERS |= {"_base", "_kernel"}  # endings of names
_OBJECTS = (torch.nn.Module(), torch.Tensor, PreTrainedModel, PreTrainedConfig(), TrainingArguments, Trainer)
_INHERITED = {name for theirs in (*_OBJECTS, SFTTrainer, LoraLayer) for name in dir(theirs)}


def find_names(sources: Mapping[str, str]) -> dict[tuple[str, str], set[str]]:
    """The private names that files use, as `{(owner, name): files}`.

    Raises:
        LookupError: an attribute is of no object that is known.
    """
    trees = {file: ast.parse(source) for file, source in sources.items()}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file, tree in trees.items():
        for owner, name in _used(tree, ours):
            found[owner, name].add(file)
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes, variables, arguments and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            yield node.attr


def _used(tree: ast.Module, ours: set[str]) -> Iterator[tuple[str, str]]:
    """Owner and name of each use."""
    imported: dict[str, str] = {}
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or _library(alias.name)] = (
                    alias.name if alias.asname else _library(alias.name)
                )
        elif isinstance(node, ast.ImportFrom) and _library(node.module or "") in LIBRARIES:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if _is_private(str(node.module), alias.name):
                    yield str(node.module), alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr) and node.attr not in _OTHERS:
            path = ast.unparse(node.value)
            root, *inside = path.split(".")
            if _library(imported.get(root, "")) in LIBRARIES:
                yield ".".join([imported[root], *inside]), node.attr
            elif (
                path == "super()" or node.attr not in ours or (not _is_own(node) and node.attr in _INHERITED)
            ):
                yield _owner_of(node.attr), node.attr
        elif isinstance(node, ast.ClassDef):  # methods that override those of the libraries
            for name in (each.name for each in node.body if isinstance(each, ast.FunctionDef)):
                if _PRIVATE.fullmatch(name) and name in _INHERITED:
                    yield _owner_of(name), name
        elif isinstance(node, ast.Constant) and node not in parts:  # for `getattr` and `vars`
            name = str(node.value)
            if _PRIVATE.fullmatch(name) and name not in ours | _OTHERS:
                with suppress(LookupError):  # a string of another meaning
                    yield _owner_of(name), name


def _library(module: str) -> str:
    return module.partition(".")[0]


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_private(module: str, name: str) -> bool:
    """Whether an import is of a private name. torch documents its modules, other libraries their exports."""
    library = _library(module)
    is_exported = library in ("torch", module) or hasattr(import_module(library), name)
    return name not in _OTHERS and bool(_PRIVATE.fullmatch(name) or "._" in module or not is_exported)


def _owner_of(name: str) -> str:
    owner = next((each for each in OWNERS if is_there(PrivateName(each, name, ()))), None)
    if owner is None:
        raise LookupError(f"no library is known to have {name}; add its module to OWNERS")
    return owner


def as_text(found: Mapping[tuple[str, str], set[str]]) -> str:
    """The lines of the file."""
    return "".join(
        f"{owner} {name} {' '.join(sorted(files))}\n" for (owner, name), files in sorted(found.items())
    )


def sources() -> dict[str, str]:
    """The package's files."""
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


if __name__ == "__main__":
    PRIVATE_NAMES.write_text(as_text(find_names(sources())), encoding="utf-8")
