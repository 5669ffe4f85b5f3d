"""Estimate the memory and the time of a run before its weights are loaded; refuse what cannot fit."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_pack.checkpoints.loading import auto_class, find_model, load_config, weight_dtype
from unsloth_pack.checkpoints.mxfp4 import is_in_mxfp4
from unsloth_pack.config import TrainOptions, changed, flat
from unsloth_pack.errors import InputError
from unsloth_pack.memory.estimate import CONTEXT, MemoryEstimate, StepSettings, estimate_memory
from unsloth_pack.modules import base_of
from unsloth_pack.packing import length_report
from unsloth_pack.patching.patch import patch_model
from unsloth_pack.report.terminal import document_lengths
from unsloth_pack.run.data_flags import read_documents
from unsloth_pack.run.machine import count_processes, is_main_process
from unsloth_pack.run.model import adapt
from unsloth_pack.run.resolve import packs_in
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

    @property
    def fits_surely(self) -> bool:
        """Whether the memory is enough even if the estimate is a tenth too low."""
        return self.gpu is not None and 1.1 * self.memory.peak + CONTEXT <= self.gpu.memory

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
    is_packed = is_in_mxfp4(model.config)
    is_stored_quantised = getattr(model.config, "quantization_config", None) is not None and not is_packed
    quantised = {"int8": o.model.load_in_8bit, "fp8": o.model.load_in_fp8}
    quantised["nf4"] = o.model.load_in_4bit or is_stored_quantised  # at least
    step = StepSettings(
        tokens=training.rows_of_step * o.model.max_seq_length,
        dtype=dtype,
        checkpointing=training.use_gradient_checkpointing,
        weights=next((name for name, is_set in quantised.items() if is_set), None),
        experts="mxfp4" if is_packed and not is_full else None,
        optimizer=training.optim or "adamw_torch_fused",
        accumulates=training.gradient_accumulation_steps > 1 and not training.optimizer_in_backward,
        on_host=training.masters_on_host,
        shards=count_processes() if training.fsdp is not None else 1,
    )
    memory = estimate_memory(model, step, gpu.memory if gpu else math.inf)
    return RunEstimate(memory, gpu, step.tokens, model)


def with_rows_that_fit(o: TrainOptions, gpu: Gpu | None) -> TrainOptions:
    """Resolve `per_device_train_batch_size auto`: as many of an update's rows as fit at once."""
    if o.training.per_device_train_batch_size != "auto":
        return o
    an_update = o.training.gradient_accumulation_steps  # of one row each until here
    for rows in range(an_update if gpu else 1, 1, -1):
        if an_update % rows == 0:
            values = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": an_update // rows}
            step = changed(o, values)
            if estimate_run(step, gpu).fits_surely:
                return step
    return changed(o, {"per_device_train_batch_size": 1})


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


def plan_updates(o: TrainOptions, estimate: RunEstimate) -> dict[str, Any]:
    """Plan the updates of a run (None if only the end of its data tells), their tokens, and its hours.

    Reads the data if the options name some that can be read as a whole; otherwise rows count as long as they
    may be. Hours are None without updates and without a known GPU.
    """
    data, training, longest = o.data, o.training, o.model.max_seq_length
    processes = count_processes()
    rows = training.rows_of_step * processes
    steps, lengths = training.gradient_accumulation_steps, [longest]
    tokens, n_rows = float(rows * longest), None
    if (o.is_demo or "dataset" in o.given) and not data.streaming and packs_in(data.dataset) is None:
        flags = {name: value for name, value in flat(o).items() if value is not None}
        mixture, _, _ = read_documents(flags, o.model.model_name, longest)
        lengths = document_lengths(mixture.train.rows).tolist()
        n_rows = len(lengths)
        if data.sample_packing:
            n_rows = length_report(lengths, [longest], processes).forecasts[0].packs
        tokens = sum(lengths) / n_rows * rows
    updates = training.max_steps
    if updates is None:
        of_epoch = None if n_rows is None else math.ceil(n_rows / (rows * steps))
        updates = None if of_epoch is None else math.ceil((training.num_train_epochs or 1) * of_epoch)
    seconds = estimate.seconds(lengths, tokens / processes)
    hours = None if seconds is None or updates is None else seconds * steps * updates / 3600
    return {"updates": updates, "tokens_an_update": tokens * steps, "hours": hours}


def check_memory(o: TrainOptions) -> RunEstimate | None:
    """Estimate a run on this process's GPU; None without one, or if it cannot be. Warn where it may not fit.

    Raises:
        InputError: its weights and the state of its optimizer alone exceed the memory.
    """
    gpu = Gpu.here()
    if gpu is None:
        return None
    try:
        estimate = estimate_run(o, gpu)
    except InputError:
        raise
    except Exception as error:  # a model that cannot be built without weights may train all the same
        logger.debug("the run is not estimated: %s", error)
        return None
    if o.training.deepspeed is not None:  # shards by rules of its own
        return estimate
    if estimate.memory.at_rest > gpu.memory:
        need, has = (f"{n / 2**30:.1f} GiB" for n in (estimate.memory.at_rest, gpu.memory))
        said = f"{o.model.model_name}: weights and optimizer take {need}, and {gpu.name} has {has}"
        raise InputError(f"{said}; {remedy(o, gpu)}")
    if not estimate.fits and is_main_process():
        logger.warning("this run may not fit: it takes about %s; %s", estimate, remedy(o, gpu))
    return estimate


def remedy(o: TrainOptions, gpu: Gpu) -> str:
    """Name the first change, of those that change a run least, with which it is expected to fit."""
    rows = o.training.rows_of_step
    half = max(64, o.model.max_seq_length // 2 // 64 * 64)
    changes: list[dict[str, object]] = [{"use_gradient_checkpointing": "auto"}]
    changes += [{"per_device_train_batch_size": 1}] * (rows > 1)
    changes += [{"load_in_4bit": True}] * (o.adapter.tuning == "lora")
    changes += [{"tuning": "lora"}, {"optim": "adamw_8bit"}] * (o.adapter.tuning == "full")
    changes += [{"max_seq_length": half}]
    tried: dict[str, object] = {}
    for change in changes:
        tried |= change
        if estimate_run(changed(o, tried), gpu).fits:
            flags = (f"--{name}" if value is True else f"--{name} {value}" for name, value in tried.items())
            return f"give {' '.join(flags)}"
    return "use a smaller model, a larger GPU, or several with --fsdp"
