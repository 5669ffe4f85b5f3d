"""What is asked to train and is frozen, or left out, at once."""

from collections.abc import Iterator
from typing import Any

from unsloth_pack.config.options import AdapterOptions
from unsloth_pack.errors import InputError
from unsloth_pack.modules.walk import compile_patterns
from unsloth_pack.recipe.second_stage import adapted_by_options, modules_meant


def check_frozen(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse `freeze_modules` where it freezes what other options train, and new tokens that do not train.

    A pattern of `train_modules` may hold frozen modules, if something else that it chooses trains.

    Args:
        model: the base model, with or without weights.
    """
    yield from _check_new_rows(model, adapter)
    if adapter.tuning != "full":
        yield from _check_targets(model, adapter)
    if not adapter.freeze_modules:
        return
    yield from _check_patterns(model, adapter)
    if adapter.tuning != "full":
        yield from _check_whole(model, adapter)
    yield from _check_rows(model, adapter)


def _check_new_rows(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse new tokens in full tuning whose embeddings are not among what trains."""
    if adapter.tuning != "full" or adapter.add_tokens is None or adapter.train_modules is None:
        return
    is_trained, weight = compile_patterns(adapter.train_modules), model.get_input_embeddings().weight
    paths = [path for path, one in model.named_parameters(remove_duplicate=False) if one is weight]
    if not any(map(is_trained, paths)):
        name = paths[0].split(".")[-2]
        yield InputError(
            f"add_tokens adds rows to {name}, and train_modules leaves {name} out, so that they would not "
            f"train; name {name} in train_modules too, or leave out train_modules",
            about=("train_modules", "add_tokens"),
        )


def _check_targets(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse names of layers, and numbers, of which nothing is left for an adapter though some layers are."""
    is_frozen = compile_patterns(adapter.freeze_modules or ())
    targets, layers = adapter.target_modules, adapter.layers_to_transform
    if layers is None and not adapter.freeze_modules:
        return
    if all(map(is_frozen, adapted_by_options(model, targets, None, layers))):
        return
    asked: list[tuple[str, str | int, Any, Any]] = []
    if targets is not None and not isinstance(targets, str):
        asked += [("target_modules", name, [name], layers) for name in targets]
    asked += [("layers_to_transform", number, targets, [number]) for number in layers or ()]
    for option, value, names, numbers in asked:
        meant = adapted_by_options(model, names, None, numbers)
        other, why = "freeze_modules", "freeze_modules freezes all that it stands for"
        remedy = f"leave {value!r} out of {option}, or freeze less"
        if option == "target_modules" and not meant:
            other, why = "layers_to_transform", "it lies in no layer that layers_to_transform names"
            remedy = f"leave it out, or name all in one regular expression of whole paths in {option}"
        if all(map(is_frozen, meant)) and (meant or option == "target_modules"):
            yield InputError(f"{option} holds {value!r}, and {why}; {remedy}", about=(option, other))


def _check_patterns(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    is_frozen = compile_patterns(adapter.freeze_modules or ())
    named = [*model.named_parameters(remove_duplicate=False)]
    # A weight that is tied is one in full tuning; beside an adapter, a head gets a copy of its own
    shared = {id(one) for path, one in named if is_frozen(path)} if adapter.tuning == "full" else set()
    for pattern in adapter.train_modules or ():
        is_meant = compile_patterns([pattern])
        meant = [is_frozen(path) or id(one) in shared for path, one in named if is_meant(path)]
        if meant and all(meant):
            yield InputError(
                f"train_modules holds {pattern!r}, and freeze_modules freezes all that it stands for; leave "
                f"{pattern!r} out of train_modules, or freeze less",
                about=("train_modules", "freeze_modules"),
            )


def _check_whole(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    is_frozen = compile_patterns(adapter.freeze_modules or ())
    for name in adapter.modules_to_save or ():
        meant = modules_meant(model, [name])
        held = {path: [one for one, _ in model.get_submodule(path).named_parameters()] for path in meant}
        frozen = [path for path in sorted(meant) if any(is_frozen(f"{path}.{one}") for one in held[path])]
        named = [path for path in sorted(meant) if f".{path}".endswith(f".{name}")]
        own = [path for path in named if path in frozen]
        for path in (own or frozen)[:1]:
            remedy = f"leave {name} out of modules_to_save"
            if named and not own:  # PEFT reads the name as the end of others
                remedy = f"give whole paths in modules_to_save, such as {named[0]}"
            yield InputError(
                f"modules_to_save names {name}, by which {path} trains as a whole, and freeze_modules "
                f"freezes it; {remedy}, or freeze less",
                about=("modules_to_save", "freeze_modules"),
            )


def _check_rows(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    is_frozen, is_full = compile_patterns(adapter.freeze_modules or ()), adapter.tuning == "full"
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    asked = {"add_tokens": [embedding] if is_full or head is None else [embedding, head]}
    asked |= {} if is_full else {"trainable_token_indices": [embedding]}
    for option, holders in asked.items():
        if getattr(adapter, option) is None:
            continue
        weights = [holder.weight for holder in holders]
        for path, one in model.named_parameters(remove_duplicate=False):
            if is_frozen(path) and any(one is weight for weight in weights):
                yield InputError(
                    f"{option} trains rows of {path.rpartition('.')[0]}, and freeze_modules freezes that; "
                    f"freeze less, or leave out {option}",
                    about=(option, "freeze_modules"),
                )
                break
