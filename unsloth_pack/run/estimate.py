"""Estimate the memory and the time of a run before its weights are loaded; refuse what cannot fit."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_pack.checkpoints.loading import auto_class, find_model, load_config, weight_dtype
from unsloth_pack.config import TrainOptions, changed
from unsloth_pack.errors import InputError, written
from unsloth_pack.memory.estimate import CONTEXT, MemoryEstimate, StepSettings, estimate_memory
from unsloth_pack.modules import base_of
from unsloth_pack.patching.patch import patch_model
from unsloth_pack.run.machine import count_processes
from unsloth_pack.run.model import adapt
from unsloth_pack.training.chips import Gpu
from unsloth_pack.training.flops import ModelFlops
from unsloth_pack.training.trl_setup import silenced

logger = logging.getLogger("unsloth_pack")
_ROW_OVERHEAD = 0.008  # seconds of a micro-batch, whatever it holds
_MOST_TOKENS = 2**20  # whose keys are counted


@dataclass(frozen=True)
class RunEstimate:
    """A run as it is expected on a GPU."""

    memory: MemoryEstimate
    gpu: Gpu | None  # None for a CPU
    tokens: int  # of a micro-batch, at most
    model: Any  # patched, on the meta device

    @property
    def fits(self) -> bool | None:
        """Whether the memory is enough; None where no GPU is known."""
        return None if self.gpu is None else self.memory.peak + CONTEXT <= self.gpu.memory

    def seconds(self, lengths: Sequence[int], tokens: float) -> float | None:
        """Return the time of a micro-batch of `tokens`, in documents like those of these lengths.

        Utilisation is that measured on H100s (`sweep-h100-2026-11-26.json`), where it depends on the width of
        the model: narrow ones wait for memory. None where the peak of the GPU is not known.
        """
        if self.gpu is None or self.gpu.peak is None:
            return None
        hidden = base_of(self.model).get_decoder().config.hidden_size
        keys = torch.cat([torch.arange(1, length + 1) for length in lengths])[:_MOST_TOKENS]
        _, flops = ModelFlops(self.model).count(keys, None)
        per_token = float(flops) / len(keys) / self.gpu.peak
        return _ROW_OVERHEAD + tokens * per_token * (1.5 + 1250 / int(hidden))

    def __str__(self) -> str:
        memory, gib = self.memory, 2**30
        parts = {"weights": memory.weights, "what trains": memory.trained + memory.moments + memory.gradients}
        parts |= {"activations": memory.activations, "loss": memory.loss}
        shown = ", ".join(f"{n / gib:.1f} {name}" for name, n in parts.items())
        of_gpu = "" if self.gpu is None else f" of {self.gpu.memory / gib:.1f} GiB on {self.gpu.name}"
        return f"{memory.peak / gib:.1f} GiB{of_gpu} at {self.tokens:,} tokens a micro-batch ({shown})"


def estimate_run(o: TrainOptions, gpu: Gpu | None) -> RunEstimate:
    """Estimate a run from the configuration of its model alone; images and teachers are left out.

    Raises:
        InputError: the model or its adapter cannot be as the options say.
    """
    training, is_full = o.training, o.adapter.tuning == "full"
    default = None if is_full or gpu is None else "bfloat16"  # whatever GPU is here
    dtype = weight_dtype(o.model.dtype or default, is_full)
    model = _build_on_meta(o, dtype)
    quantised = {"nf4": o.model.load_in_4bit, "int8": o.model.load_in_8bit, "fp8": o.model.load_in_fp8}
    step = StepSettings(
        tokens=(training.per_device_train_batch_size or 1) * o.model.max_seq_length,
        dtype=dtype,
        checkpointing=training.use_gradient_checkpointing,
        weights=next((name for name, is_set in quantised.items() if is_set), None),
        optimizer=training.optim or "adamw_torch_fused",
        accumulates=training.gradient_accumulation_steps > 1 and not training.optimizer_in_backward,
        on_host=training.masters_on_host,
        shards=count_processes() if training.fsdp is not None else 1,
    )
    memory = estimate_memory(model, step, gpu.memory if gpu else math.inf)
    return RunEstimate(memory, gpu, step.tokens, model)


def _build_on_meta(o: TrainOptions, dtype: torch.dtype) -> Any:
    """Build the model of a run with its adapter, without memory."""
    config = load_config(find_model(o.model.model_name)[0])
    adapter = o.adapter.model_copy(update={"loftq_config": None, "init_adapter": None})
    with torch.device("meta"), silenced("unsloth_pack", ""):  # they are said when the model is loaded
        model: Any = auto_class(config).from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        if adapter.tuning != "full":
            model.requires_grad_(False)
        patch_model(model)
        return adapt(model, adapter, None, {}, o.training.use_gradient_checkpointing)


def check_memory(o: TrainOptions) -> RunEstimate | None:
    """Estimate a run on this process's GPU; None without one. Warn where it may not fit.

    Raises:
        InputError: its weights and the state of its optimizer alone exceed the memory.
    """
    if not torch.cuda.is_available():
        return None
    estimate = estimate_run(o, Gpu.here())
    if o.training.deepspeed is not None:  # shards by rules of its own
        return estimate
    assert estimate.gpu is not None
    if estimate.memory.at_rest > estimate.gpu.memory:
        need = f"{estimate.memory.at_rest / 2**30:.1f} GiB of weights and optimizer state"
        raise InputError(
            f"{o.model.model_name} needs {need}, and {estimate.gpu.name} has "
            f"{estimate.gpu.memory / 2**30:.1f}; {remedies(o, estimate.gpu)}"
        )
    if not estimate.fits:
        logger.warning("the run may run out of memory: about %s; %s", estimate, remedies(o, estimate.gpu))
    return estimate


def remedies(o: TrainOptions, gpu: Gpu) -> str:
    """Name the first change, of those that change a run least, with which it is expected to fit."""
    rows = o.training.per_device_train_batch_size or 1
    half = max(64, o.model.max_seq_length // 2 // 64 * 64)
    changes: list[dict[str, Any]] = [{"use_gradient_checkpointing": "auto"}]
    changes += [{"per_device_train_batch_size": 1}] * (rows > 1)
    changes += [{"load_in_4bit": True}] * (o.adapter.tuning == "lora")
    changes += [{"tuning": "lora"}, {"optim": "adamw_8bit"}] * (o.adapter.tuning == "full")
    changes += [{"max_seq_length": half}]
    tried: dict[str, Any] = {}
    for change in changes:
        tried |= change
        if estimate_run(changed(o, tried), gpu).fits:
            return "give " + " ".join(f"--{name} {written(value)}" for name, value in tried.items())
    return "use a smaller model, a larger GPU, or several with --fsdp"
