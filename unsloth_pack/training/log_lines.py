"""Log lines of training that do not hold up the GPU.

transformers reads the loss of an update as soon as it is launched. So the host waits until the GPU has
computed it, and then the GPU waits until the host has launched the next update. Here the numbers of a line
set out for the host behind the update, and the line is written once the next update is launched. It says the
same.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.host_copy import HostCopy
from unsloth_pack.modules.sharding import whole
from unsloth_pack.patching.late_metrics import noted_sums, reads_late


class LogLines:
    """Writes the line of each update that has one: at once, or when the next update is launched."""

    def __init__(self) -> None:
        self._waiting: LogLine | None = None

    def see_to(self, trainer: Any, loss: Tensor, grad_norm: Any, learning_rate: float) -> None:
        """An update is launched: write the line that waits, and make its own if it is to have one.

        Args:
            loss, grad_norm, learning_rate: as `LogLine` takes them.
        """
        is_due = trainer.control.should_log  # writing takes it back
        self._write(trainer)
        is_due = is_due or _has_to_be_written(trainer)
        if is_due and trainer.state.global_step > trainer._globalstep_last_logged:
            self._waiting = LogLine(trainer, loss, grad_norm, learning_rate)
            if not _may_wait(trainer):
                trainer.store_flos()
                self._write(trainer)
        trainer.control.should_log = False

    @contextmanager
    def not_lost(self, trainer: Any) -> Iterator[None]:
        """An error inside this context does not take the line that waits with it."""
        self._waiting = None
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a device that has failed
                self._write(trainer, judge=False)
            raise

    def _write(self, trainer: Any, judge: bool = True) -> None:
        line, self._waiting = self._waiting, None
        if line is None:
            return
        logs = line.read(trainer)
        with line.as_of_then(trainer.state):
            trainer.write_line(logs)
        for step in line.left_out if judge else ():
            trainer.finite_updates.handle(trainer, step)


class LogLine:
    """What a line says of the updates since the line before it, on its way to the host.

    With several processes all of them have to make it: one exchange gathers what each has.

    Args:
        loss: the trainer's sum over these updates, which becomes zero.
        grad_norm: of the last of them.
        learning_rate: that the last of them was made with.

    Attributes:
        left_out: the updates that were left out; once it is read.
    """

    def __init__(self, trainer: Any, loss: Tensor, grad_norm: Any, learning_rate: float):
        state = trainer.state
        self._step, self._epoch = state.global_step, state.epoch
        self._n_updates = state.global_step - trainer._globalstep_last_logged
        trainer._globalstep_last_logged = state.global_step
        self._learning_rate = learning_rate
        self._noted = noted_sums(trainer)
        self._of_all = HostCopy(trainer.accelerator.gather(self._of_this_process(loss)[None]))
        loss.zero_()
        self._steps, finite = trainer.finite_updates.take_verdicts()
        self._finite = HostCopy(finite)
        self._grad_norm = _Number(whole(grad_norm))
        self._tokens = _Number(trainer.counts.tokens)
        self.left_out: list[int] = []

    def _of_this_process(self, loss: Tensor) -> Tensor:
        numbers = loss.double().view(1)
        return numbers if self._noted is None else torch.cat([numbers, self._noted.sums.flatten()])

    def read(self, trainer: Any) -> dict[str, float]:
        """What transformers logs; TRL's metrics are put where its `log` looks. Waits for the numbers."""
        of_all = self._of_all.read()
        loss_sum = of_all[:, 0].float().mean().item()  # the mean of all processes
        trainer._total_loss_scalar += loss_sum
        finite = self._finite.read().tolist()
        self.left_out = [step for step, is_finite in zip(self._steps, finite, strict=True) if not is_finite]
        metrics = trainer._metrics["train"]
        if self._noted is not None:
            of_batches = of_all[:, 1:].unflatten(1, self._noted.sums.shape)
            metrics.update(self._noted.metrics(of_batches))
        if metrics:  # TRL does not count rows that come again so that all ranks have some
            metrics["num_tokens"] = [int(self._tokens.read())]
        logs = {"loss": math.nan if self.left_out else loss_sum / self._n_updates}
        if (grad_norm := self._grad_norm.read()) is not None:
            logs["grad_norm"] = grad_norm
        return logs | {"learning_rate": self._learning_rate}

    @contextmanager
    def as_of_then(self, state: Any) -> Iterator[None]:
        """The trainer's state stands at this line's update, for whoever listens to the log."""
        now = state.global_step, state.epoch
        state.global_step, state.epoch = self._step, self._epoch
        try:
            yield
        finally:
            state.global_step, state.epoch = now


class _Number:
    """A number that may be on the device."""

    def __init__(self, number: Any):
        self._number = HostCopy(number) if isinstance(number, Tensor) else number

    def read(self) -> Any:
        return self._number.read().item() if isinstance(self._number, HostCopy) else self._number


def _has_to_be_written(trainer: Any) -> bool:
    """Whether the updates so far have to be looked at now: they are saved, or were the last."""
    control, state = trainer.control, trainer.state
    return control.should_save or control.should_training_stop or state.global_step >= state.max_steps


def _may_wait(trainer: Any) -> bool:
    """Whether a line may be written once the next update is launched, and something is gained."""
    if trainer.control.should_evaluate or _has_to_be_written(trainer):
        return False
    return _computes_while_the_host_goes_on(trainer) and reads_late(trainer)


def _computes_while_the_host_goes_on(trainer: Any) -> bool:
    return trainer.args.device.type == "cuda"
