"""Weights that FSDP2 or DeepSpeed shards over the processes: trained, and saved as if they were whole.

With FSDP2 every parameter is a `DTensor`, of which a process holds a part; hooks at the decoder layers gather
a layer's parameters around its forward and its backward. ZeRO-3 does so at each module by itself, and leaves
parameters without elements behind. ZeRO-2 shards gradients and the optimizer's state only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from unsloth_pack.errors import InputError
from unsloth_pack.modules.sharding import sharded_by
from unsloth_pack.patching.patch import patch_of


def use_fsdp_on_a_cpu(trainer: Trainer) -> None:
    """Let a trainer without a GPU shard as its arguments say; accelerate ignores them there."""
    if not trainer.args.fsdp or trainer.is_fsdp_enabled:
        return
    PartialState().distributed_type = trainer.accelerator.state.distributed_type = DistributedType.FSDP
    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True


def is_sharded(trainer: Trainer) -> bool:
    """Whether FSDP2 or DeepSpeed trains."""
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


@contextmanager
def settings_refused_in_one_line(trainer: Trainer) -> Iterator[None]:
    """Inside this context, what DeepSpeed says against its settings is an `InputError`."""
    try:
        yield
    except ValueError as error:
        if not trainer.is_deepspeed_enabled:
            raise
        said = " ".join(str(error).split())
        raise InputError(
            f"DeepSpeed refuses its settings: {said}; correct the file", about="deepspeed"
        ) from error


def adapt_patch(trainer: Trainer) -> None:
    """Tell the model's patch how its weights have been sharded, if they have."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    patch, how = patch_of(model), sharded_by(model)
    if patch is not None and how is not None:
        patch.adapt_to_sharding(how)


def gathered(trainer: Trainer) -> dict[str, Tensor]:
    """The trained parameters, whole, on the main process's CPU. Every process has to call this."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_fsdp_enabled:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights: dict[str, Any] = get_model_state_dict(model, options=options)
        return weights
    from deepspeed.utils import safe_get_full_fp32_param

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: safe_get_full_fp32_param(parameter).cpu() for name, parameter in trained.items()}


@contextmanager
def loaded_whole(arguments: TrainingArguments) -> Iterator[None]:
    """Inside this context a model is loaded whole, under ZeRO-3 too; the trainer shards it later.

    transformers would shard it while it loads, and neither the checks of its weights nor the probe for leaks
    would see them.
    """
    settings = getattr(arguments, "hf_deepspeed_config", None)  # where DeepSpeed trains
    if settings is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(settings)
