"""Account for every update of a run: its tokens, FLOPs, time and memory, and whether it is finite.

The device decides whether an update is finite, and it leaves out one that is not. The host reads that with
the next log line, and only then searches for the documents that are to blame.
"""

import gc
import json
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from unsloth_pack.cuda_graphs.capture_decision import DeviceTimer
from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.memory.advice import MemoryUse
from unsloth_pack.modules import whole
from unsloth_pack.patching.deferred_logging import DeferredLogging, LogLine, copy_number
from unsloth_pack.training.chips import Chips
from unsloth_pack.training.document_losses import Batch, ChannelLosses
from unsloth_pack.training.flops import ModelFlops, count_keys
from unsloth_pack.training.nonfinite import NonFinite, find_culprits

if TYPE_CHECKING:
    from unsloth_pack.training.trainer import RunTrainer

COUNTS_FILE = "counts.json"  # in a checkpoint
Count = Tensor | float  # a tensor may be on the device, and is not read before somebody asks
_SUMS = ("tokens", "slots", "model_flops", "hardware_flops", "counted")  # of `TokenCounter`
_MAX_SEARCHES = 3  # in a run: each costs a forward and backward pass a document


@dataclass(frozen=True)
class TokenCounter:
    """Seconds, tokens and FLOPs of training."""

    seconds: float = 0.0
    tokens: int = 0  # without padding
    slots: int = 0  # with padding
    counted: int = 0  # that the loss was a mean of
    model_flops: int = 0  # see `training/flops.py`
    hardware_flops: int = 0


class TokenCounts:
    """Counts what `TokenCounter` has; a resumed run goes on from the counts in its checkpoint."""

    def __init__(self, model: nn.Module, args: TrainingArguments) -> None:
        self.chips = Chips.from_args(args, model)
        self._model, self._flops_of = model, cache(ModelFlops)
        self._flops_of(model)  # before a trainer shards it
        self._seconds = 0.0  # until training was started last
        self._started: float | None = None
        self.sums: dict[str, Count] = dict.fromkeys(_SUMS, 0)  # of `trained`
        self._timer = DeviceTimer(args.device)
        self._line: tuple[float, float, Any] = 0.0, 0.0, None  # FLOPs until the last log line, and its mark
        self.broken_images = 0  # that this process has met

    @property
    def trained(self) -> TokenCounter:
        """Return the counts over all processes, and all resumptions."""
        return TokenCounter(self.seconds, **{name: int(n) for name, n in self.sums.items()})

    @property
    def seconds(self) -> float:
        """Return the seconds of `trained`."""
        return self._seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def mark(self) -> Any:
        """Mark the end of the updates launched so far, for `utilisation`."""
        return self._timer.mark()

    def utilisation(self, model_flops: float, hardware_flops: float, end: Any) -> dict[str, float]:
        """Return that of the chips since the last call, from the FLOPs of updates before a passed mark."""
        (model_before, hardware_before, start), self._line = self._line, (model_flops, hardware_flops, end)
        seconds = self._timer.between(start, end)
        return self.chips.utilisation(model_flops - model_before, hardware_flops - hardware_before, seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside this context."""
        started = self._started = time.monotonic()
        self._line = *self._line[:2], self.mark()
        try:
            yield
        finally:
            self._seconds, self._started = self._seconds + time.monotonic() - started, None

    def add(
        self,
        batches: Sequence[Batch],
        counted: Count | None,
        frozen: Iterable[tuple[Any, Batch]],
        accelerator: Accelerator,
    ) -> None:
        """Add the micro-batches of an update, in all processes; `counted` is None where it is not known.

        `frozen` are passes without gradients beside: a model and its batch.
        """
        slots: Count = sum(batch["input_ids"].numel() for batch in batches)
        tokens: Count = sum(
            batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
            for batch in batches
        )
        n_labels = counted.double() if isinstance(counted, Tensor) else counted
        if n_labels is not None:
            n_labels = n_labels / (accelerator.num_processes * max(1, len(batches)))
        passes = [(self._model, batch, True) for batch in batches]
        passes += [(model, batch, False) for model, batch in frozen]
        flops = [self._flops_of(model).count(count_keys(x), n_labels, trains) for model, x, trains in passes]
        sums = [tokens, slots, sum(plain for plain, _ in flops), sum(packed for _, packed in flops)]
        if accelerator.num_processes > 1:
            # Unlike a copy, filling a tensor does not wait for the device. float64 holds every count
            device: Any = accelerator.device
            on_device = [
                x.to(device, torch.float64)
                if isinstance(x, Tensor)
                else torch.full((), x, dtype=torch.float64, device=device)
                for x in sums
            ]
            sums = [*accelerator.reduce(torch.stack(on_device))]
        counts = zip(_SUMS, [*sums, 0 if counted is None else counted], strict=True)
        self.sums = {name: self.sums[name] + count for name, count in counts}

    def save(self, checkpoint: Path) -> None:
        """Write the counts into a checkpoint."""
        (checkpoint / COUNTS_FILE).write_text(json.dumps(asdict(self.trained)), encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        """Go on from the counts in a checkpoint."""
        counts = json.loads((checkpoint / COUNTS_FILE).read_text(encoding="utf-8"))
        self._seconds = float(counts.pop("seconds"))
        self.sums |= counts  # that of an earlier version has no FLOPs
        flops = float(self.sums["model_flops"]), float(self.sums["hardware_flops"])
        self._line = *flops, self._line[-1]


class MemoryWatch:
    """The memory that the largest micro-batch took, for advice when memory runs out."""

    def __init__(self) -> None:
        self._tokens = 0  # of the current micro-batch
        self._largest, self._peak = 0, 0  # tokens of the largest that went through, and the bytes until then

    def begin(self, n_tokens: int) -> None:
        """Note that a micro-batch of so many tokens is about to be trained on."""
        self._tokens = n_tokens

    def end(self) -> None:
        """Note that it went through."""
        if self._tokens > self._largest:
            self._largest, self._peak = self._tokens, most_held()

    def use_at(self, error: BaseException, model: nn.Module, optimizer: Optimizer | None) -> MemoryUse | None:
        """Return the memory in use when `error` was raised; None outside training or without CUDA. Clears the
        frames of `error`, which hold the activations."""
        peak = most_held()
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        available, at_rest = device_memory()
        if not (available and self._tokens and model.training):
            return None
        if not (optimizer and optimizer.state):  # its two moments come with the first update
            at_rest += sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
        if self._largest:
            return MemoryUse(available, at_rest, self._peak, self._largest, self._tokens)
        return MemoryUse(available, at_rest, peak + _failed_bytes(error), self._tokens, self._tokens)


def device_memory() -> tuple[int, int]:
    """Return the bytes of the GPU that this process could have, and those it holds; 0 without one."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def most_held() -> int:
    """Return the peak of GPU memory in bytes, which the host knows without waiting for the device."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _failed_bytes(error: BaseException) -> int:
    """Read the bytes of the failed allocation from torch's message."""
    match = re.search(r"Tried to allocate ([\d.]+) ([KMG])iB", str(error))
    return int(float(match[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[match[2]]) if match else 0


def leave_out(optimizer: Any, parameters: Iterable[Tensor], is_bad: Tensor) -> None:
    """Let the optimizer's next step do nothing for these parameters if `is_bad`, a bool on the device. One on
    CUDA that is not fused sees gradients of zero, while momentum and weight decay still act."""
    if is_bad.device.type == "cpu":  # there is nothing to wait for
        if is_bad:
            for parameter in parameters:
                parameter.grad = None  # an optimizer skips weights without a gradient
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, "found_inf"):
        optimizer.found_inf = is_bad.float()
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.masked_fill_(is_bad, 0.0)


class NonFiniteUpdates:
    """Leaves out updates whose loss or gradient is not finite, see `leave_out`.

    Where gradients are applied as they come, the weights before the first that is not finite are updated.
    """

    def __init__(self) -> None:
        self.on_nonfinite = "stop"  # ends the run after such an update, with a checkpoint; "skip" goes on
        self.report: Callable[[NonFinite], None] | None = None  # called with every update left out
        self.stopped_by: NonFinite | None = None  # the update that ended the run
        self.left_out = 0
        self._losses: list[Tensor] = []  # of the micro-batches of this update
        self._verdicts: list[tuple[int, Tensor]] = []  # since the last log line: update, whether it is finite

    def note_loss(self, loss: Tensor) -> Tensor:
        """Keep a micro-batch's loss for `judge`; return it for the trainer's sum, without NaN."""
        self._losses.append(loss)
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def judge(self, trainer: Trainer, norm: Tensor | float) -> Tensor | float:
        """Leave out this update if its losses or its gradients' `norm` are not finite; returns `norm`."""
        norm = whole(norm)
        total = torch.stack(self._losses).sum()
        if trainer.args.world_size > 1:
            total = trainer.accelerator.reduce(total)  # all processes leave out the same updates
        has_scaler = trainer.accelerator.scaler is not None  # it expects infinite gradients, and skips them
        is_finite = torch.isfinite(total if has_scaler else total + norm)
        self._losses.clear()
        self._verdicts.append((trainer.state.global_step + 1, is_finite))
        if not has_scaler:
            optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            leave_out(optimizer, (p for group in optimizer.param_groups for p in group["params"]), ~is_finite)
        return norm

    def take_verdicts(self) -> tuple[list[int], Tensor]:
        """Return the updates since the last call, and whether each is finite, on the device."""
        verdicts, self._verdicts = self._verdicts, []
        finite = torch.stack([finite for _, finite in verdicts]) if verdicts else torch.empty(0)
        return [step for step, _ in verdicts], finite

    def handle(self, trainer: "RunTrainer", step: int) -> None:
        """Search for the documents that an update was left out for, report it, and stop the run or go on."""
        update = find_culprits(trainer, step, searches=self.left_out < _MAX_SEARCHES)
        self.left_out += 1
        if self.report is not None:
            self.report(update)
        if self.on_nonfinite == "stop":
            self.stopped_by = self.stopped_by or update
            trainer.control.should_training_stop = trainer.control.should_save = True


class RunLine(LogLine):
    """A log line that knows the updates left out, and the tokens and FLOPs of all processes."""

    def __init__(self, trainer: "RunTrainer", *numbers: Any):
        self._end = trainer.counts.mark()  # before the copies, which `read` waits for
        super().__init__(trainer, *numbers)
        if trainer.rollouts is not None:
            self._trl_metrics |= trainer.rollouts.take_metrics()
        self._steps, finite = trainer.nonfinite_updates.take_verdicts()
        self._finite = HostCopy(finite)
        names = ("tokens", "model_flops", "hardware_flops")
        self._sums = {name: copy_number(trainer.counts.sums[name]) for name in names}
        self.left_out: list[int] = []  # once it is read

    def read(self, trainer: Any) -> dict[str, float]:
        logs, metrics = super().read(trainer), self._trl_metrics
        finite = self._finite.read().tolist()
        self.left_out = [step for step, is_finite in zip(self._steps, finite, strict=True) if not is_finite]
        if metrics:  # TRL does not count rows that come again so that all ranks have some
            metrics["num_tokens"] = [int(self._sums["tokens"].read())]
        _, model_flops, hardware_flops = (float(copied.read()) for copied in self._sums.values())
        logs |= trainer.counts.utilisation(model_flops, hardware_flops, self._end)
        return logs | ({"loss": math.nan} if self.left_out else {})


class RunLogging(DeferredLogging):
    """Writes every log line of a run, and searches for what made an update non-finite."""

    is_of_run = True
    kind_of_line = RunLine

    def __init__(self, channels: ChannelLosses):
        super().__init__()
        self._channels, self.put_metrics = channels, channels.put_metrics

    def sums_of(self, outputs: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return super().sums_of(outputs, inputs) + self._channels.sums(outputs, inputs.get("position_ids"))

    def write(self, trainer: Any) -> LogLine | None:
        line = super().write(trainer)
        for step in line.left_out if isinstance(line, RunLine) else ():
            trainer.nonfinite_updates.handle(trainer, step)
        return line
