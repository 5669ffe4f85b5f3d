"""Weights that FSDP2 or DeepSpeed shards over the processes: trained, and saved as if they were whole.

With FSDP2 every parameter is a `DTensor`, of which a process holds a part; hooks at the decoder layers gather
a layer's parameters around its forward and its backward. ZeRO-3 does so at each module by itself, and leaves
parameters without elements behind. ZeRO-2 shards gradients and the optimizer's state alone.
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


class ShardedWeights(Trainer):
    """A trainer whose weights may be sharded; what it saves holds the trained ones whole."""

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 or DeepSpeed trains."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:  # accelerate passes over it on a CPU, torch does not
            PartialState().distributed_type = self.accelerator.state.distributed_type = DistributedType.FSDP
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.accelerator.state.fsdp_plugin = plugin
            self.is_fsdp_enabled = True

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        try:
            prepared = super()._prepare_for_training(*args, **kwargs)
        except ValueError as error:
            if not self.is_deepspeed_enabled:
                raise
            said = " ".join(str(error).split())
            raise InputError(f"DeepSpeed refuses its settings: {said}; correct the file") from error
        model: Any = self.accelerator.unwrap_model(self.model)
        patch, how = patch_of(model), sharded_by(model)
        if patch is not None and how is not None:
            patch.adapt_to_sharding(how)
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_sharded:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir, state_dict=self.trained_weights())

    def trained_weights(self) -> dict[str, Tensor]:
        """The trained parameters, whole, on the main process's CPU. Every process has to call this."""
        model: Any = self.accelerator.unwrap_model(self.model)
        if self.is_fsdp_enabled:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
            weights: dict[str, Any] = get_model_state_dict(model, options=options)
            return weights
        from deepspeed.utils import safe_get_full_fp32_param

        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {name: safe_get_full_fp32_param(parameter).cpu() for name, parameter in trained.items()}


@contextmanager
def loaded_whole(arguments: TrainingArguments) -> Iterator[None]:
    """Inside this context a model is loaded whole under ZeRO-3 too.

    transformers would shard it as it loads, and neither the checks of its weights nor the probe for leaks
    would see them. The trainer shards it.
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
