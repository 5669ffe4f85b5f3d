"""What PEFT's LoRA does for linear layers, and not for the stacked parameters of experts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from unsloth_pack.errors import InputError, at_once
from unsloth_pack.lora.targets import Targets

_NONE_THERE = ("lora_dropout", "use_dora", "lora_bias", "loftq_config")
_BEGINNINGS = (True, False, "gaussian")  # the others look at a layer's weight


def refuse_on_stacks(targets: Targets, given: Mapping[str, Any]) -> None:
    """Refuse what an adapter on stacked parameters cannot have.

    Args:
        given: fields of the `LoraConfig`, `loftq_config` aside as `get_peft_model` takes it.

    Raises:
        InputError: names the argument, and a parameter.
    """
    stacks = [*targets.parameters, *(given.get("target_parameters") or ())]
    if not stacks:
        return
    wanted = {name: given[name] for name in _NONE_THERE if given.get(name)}
    beginning = given.get("init_lora_weights", True)
    if beginning not in _BEGINNINGS:
        wanted["init_lora_weights"] = beginning
    at_once([partial(_refuse, name, value, stacks[0]) for name, value in wanted.items()])


def _refuse(name: str, value: Any, stack: str) -> None:
    raise InputError(
        f"{name} is {value!r}, which PEFT's LoRA does not have on stacked parameters of experts ({stack}); "
        f"drop {name}, or give target_modules without layers of experts",
        about=(name, "target_modules"),
    )
