"""Check what trains beside LoRA's matrices: biases, whole modules, single tokens, some of the layers."""

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from unsloth_pack.errors import InputError, at_once, require_whole
from unsloth_pack.lora.targets import check_names

logger = logging.getLogger("unsloth_pack")


def check_parts(model: Any, bias: str, modules_to_save: Any, options: Mapping[str, Any]) -> None:
    """Refuse values that PEFT ignores silently, or fails on without an explanation.

    Args:
        modules_to_save: as in PEFT's `LoraConfig`.
        options: further fields of the `LoraConfig`.

    Raises:
        InputError: names the argument, its value and the remedy.
    """
    if bias not in ("none", "all", "lora_only"):
        raise InputError(f"bias is {bias!r}; choose one of none, all, lora_only", about="bias")
    n_layers = model.config.get_text_config().num_hidden_layers
    tokens, whole = options.get("trainable_token_indices"), () if modules_to_save is None else modules_to_save
    if not isinstance(whole, list | tuple):
        raise InputError(
            f"modules_to_save is {modules_to_save!r}; give a list of names", about="modules_to_save"
        )
    at_once(
        [
            partial(check_layers, options.get("layers_to_transform"), n_layers),
            partial(check_names, model, "modules_to_save", whole),
            partial(_check_can_train, model, whole),
            partial(_check_tokens, model, tokens),
            partial(check_rows_apart, model, whole, tokens),
        ]
    )


def warn_of_longer_names(model: Any, modules_to_save: Collection[str]) -> None:
    """Warn of modules that PEFT trains too, because their paths end with a name, such as `norm`."""
    paths = [path for path, _ in model.named_modules()]
    for name in modules_to_save:
        matches = [path for path in paths if path.endswith(name)]
        longer = {path.rpartition(".")[2] for path in matches if not f".{path}".endswith(f".{name}")}
        whole = next((path for path in matches if f".{path}".endswith(f".{name}")), name)
        if longer:
            text = "modules_to_save names %s, and %s end so: all %d train as a whole; name %s for one alone"
            logger.warning(text, name, ", ".join(sorted(longer)), len(matches), whole)


def check_layers(layers: int | list[int] | None, n_layers: int) -> None:
    """Raise InputError for numbers of layers that the model does not have."""
    for layer in [layers] if not isinstance(layers, list | tuple) else layers:
        if layer is not None:
            require_whole("layers_to_transform", layer, 0, n_layers - 1)


def check_token_ids(name: str, ids: Collection[Any], vocab_size: int) -> None:
    """Raise InputError for a token id without an embedding, or a repeated one."""
    for token in ids:
        require_whole(name, token, 0, vocab_size - 1)
    if twice := sorted({token for token in ids if [*ids].count(token) > 1}):
        raise InputError(f"{name} holds {twice[0]} twice; keep one", about=name)


def _by_module(tokens: Any) -> Mapping[str, Any]:
    """Return PEFT's `trainable_token_indices` by layer."""
    return tokens if isinstance(tokens, Mapping) else {"embed_tokens": tokens}


def _check_tokens(model: Any, tokens: Any) -> None:
    """Raise InputError unless the tokens are lists of ids of the embedding."""
    for ids in () if tokens is None else _by_module(tokens).values():
        if not isinstance(ids, list | tuple) or not ids:
            raise InputError(
                f"trainable_token_indices is {tokens!r}; give a list of token ids",
                about="trainable_token_indices",
            )
        check_token_ids("trainable_token_indices", ids, model.get_input_embeddings().num_embeddings)


def check_rows_apart(
    model: Any,
    modules: Collection[str],
    tokens: Any,
    option: str = "modules_to_save",
    asked: str = "trainable_token_indices",
) -> None:
    """Raise InputError for tokens of a layer that trains as a whole, or of one tied to a head that does.

    Args:
        modules: that train as a whole.
        tokens: as PEFT's `trainable_token_indices`, or None.
        option: the option that names the modules.
        asked: the option that names the tokens.
    """
    if tokens is None:
        return
    for name in modules:
        if name.rpartition(".")[2] in {each.rpartition(".")[2] for each in _by_module(tokens)}:
            raise InputError(
                f"{option} names {name}, of which {asked} trains some rows alone; leave one of them out",
                about=(option, asked),
            )
    output = model.get_output_embeddings()
    head = next((name for name, module in model.named_modules() if module is output), "")
    is_tied = output.weight is model.get_input_embeddings().weight
    saved = [name for name in modules if name == head or head.endswith(f".{name}")]
    if is_tied and saved:
        raise InputError(
            f"{option} names {saved[0]}, which is tied to the embedding whose rows {asked} trains; leave one "
            "of them out",
            about=(option, asked),
        )


def refuse_adapted_rows(
    model: Any,
    adapted: Collection[str],
    tokens: Any,
    option: str = "trainable_token_indices",
    tied_head: bool = False,
) -> None:
    """Raise InputError for an adapter on an embedding, or on a head, of which some rows train alone.

    Args:
        adapted: the adapted paths.
        tokens: as PEFT's `trainable_token_indices`, or None.
        option: the option that names the tokens.
        tied_head: refuse one on a tied head too, which TRL's loss ignores.
    """
    if tokens is None:
        return
    names = tokens if isinstance(tokens, Mapping) else ()
    embedding = model.get_input_embeddings()
    named = [module for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    layers = named or [embedding]
    for path, module in model.named_modules():
        if path not in adapted:
            continue
        if module in layers or (tied_head and any(module.weight is layer.weight for layer in layers)):
            name = path.rpartition(".")[2]
            raise InputError(
                f"target_modules puts an adapter on {name}, and {option} trains single rows of its weight; "
                f"leave {name} out of target_modules, or leave out {option}",
                about=("target_modules", option),
            )


def refuse_rows_without_direction(adapted: Any) -> None:
    """Raise InputError for DoRA on a weight with a row of zeros, such as an embedding's padding token.

    DoRA divides every row by its length, and 0 / 0 makes every loss NaN.

    Args:
        adapted: the PEFT model. If it is refused, its adapter is removed.
    """
    for path, layer in adapted.named_modules():
        for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():
            rows = (magnitude.weight == 0).flatten().nonzero().flatten().tolist()
            if rows:
                name = path.rpartition(".")[2]
                adapted.unload()
                raise InputError(
                    f"use_dora divides the rows of {path} by their lengths, and row {rows[0]} is zero, as "
                    f"that of a padding token often is; leave {name} out of target_modules, or drop use_dora",
                    about=("use_dora", "target_modules"),
                )


def _check_can_train(model: Any, modules_to_save: Collection[str]) -> None:
    """Raise InputError for quantised modules: they have no gradient."""
    for path, module in model.named_modules():
        if not any(path == name or path.endswith(f".{name}") for name in modules_to_save):
            continue
        for name, weight in module.named_parameters():
            if not weight.is_floating_point() or weight.dtype == torch.float8_e4m3fn:
                raise InputError(
                    f"modules_to_save names {path}, whose {name} is quantised; load without load_in_4bit, "
                    "load_in_8bit or load_in_fp8",
                    about="modules_to_save",
                )
