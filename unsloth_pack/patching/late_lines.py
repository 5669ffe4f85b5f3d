"""Log lines of training that do not hold up the GPU.

transformers reads the loss of an update as soon as it is launched. So the host waits until the GPU has
computed it, and then the GPU waits until the host has launched the next update. Here the numbers of a line
set out for the host behind the update, and the line is written once the next update is launched. It says the
same. The lines of an update that is evaluated or saved, and of the last one, are written at once.

`SFTTrainer` is wrapped once for all trainers; it acts for patched models on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.host_copy import HostCopy
from unsloth_pack.modules.sharding import whole
from unsloth_pack.patching.late_metrics import (
    metrics_so_far,
    noted_sums,
    only_these_metrics,
    reads_late,
    sft_trainer_of,
    takes_over_itself,
)

_LINES = "unsloth_pack_late_lines"  # where a trainer holds the line that waits


class WritesLinesLate(TrainerCallback):
    """Wraps TRL's trainer when the first one of a patched model is made, or begins to train."""

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        if (trainer_class := sft_trainer_of(model)) is not None:
            _wrap(trainer_class)

    on_train_begin = on_init_end


def _wrap(trainer_class: Any) -> None:
    if hasattr(trainer_class, _LINES):
        return
    see_to, train = trainer_class._maybe_log_save_evaluate, trainer_class._inner_training_loop

    @wraps(see_to)
    def see_to_all(self: Any, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if not takes_over_itself(self):
            lines = _lines_of(self)
            lines.write(self)
            if is_due(self) and may_wait(self):
                *_, start_time = args
                lines.put_off(self, LogLine(self, tr_loss, grad_norm, kwargs["learning_rate"], start_time))
        see_to(self, tr_loss, grad_norm, *args, **kwargs)

    @wraps(train)
    def train_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _lines_of(self).not_lost(self):
            return train(self, *args, **kwargs)

    trainer_class._maybe_log_save_evaluate, trainer_class._inner_training_loop = see_to_all, train_all
    setattr(trainer_class, _LINES, None)  # wrapped


def _lines_of(trainer: Any) -> "LateLines":
    lines: LateLines = vars(trainer).setdefault(_LINES, LateLines())
    return lines


class LogLine:
    """What a line says of the updates since the line before it, on its way to the host.

    With several processes all of them have to make it: one exchange gathers what each has.

    Args:
        loss: the trainer's sum over these updates, which becomes zero.
        grad_norm: of the last of them.
        learning_rate: that the last of them was made with.
        start_time: of the training, as the trainer's `log` takes it.
    """

    def __init__(
        self,
        trainer: Any,
        loss: Tensor,
        grad_norm: Any,
        learning_rate: float,
        start_time: float | None = None,
    ):
        self._start_time = start_time
        self._state = trainer.state
        self._step, self._epoch = self._state.global_step, self._state.epoch
        self._n_updates = self._step - trainer._globalstep_last_logged
        trainer._globalstep_last_logged = self._step
        self._learning_rate = learning_rate
        self._of_trl, self._noted = metrics_so_far(trainer), noted_sums(trainer)
        self._of_all = HostCopy(trainer.accelerator.gather(self._of_this_process(loss)[None]))
        loss.zero_()
        self._grad_norm = OnItsWay(whole(grad_norm))

    def _of_this_process(self, loss: Tensor) -> Tensor:
        numbers = loss.double().view(1)
        return numbers if self._noted is None else torch.cat([numbers, self._noted.sums.flatten()])

    def is_of(self, trainer: Any) -> bool:
        """Whether the trainer is still at the training that this line is of."""
        return trainer.state is self._state

    def write(self, trainer: Any, logs: dict[str, float]) -> None:
        """Log what `read` has found, as of this line's update."""
        with self._as_of_then(), only_these_metrics(trainer, self._of_trl):
            trainer.log(logs, self._start_time)

    def read(self, trainer: Any) -> dict[str, float]:
        """What transformers logs. Waits for the numbers. What TRL adds to them is ready then, too."""
        of_all, metrics = self._of_all.read(), self._of_trl
        loss_sum = of_all[:, 0].float().mean().item()  # the mean of all processes
        trainer._total_loss_scalar += loss_sum
        if self._noted is not None:
            self._noted.put(trainer, metrics, of_all[:, 1:].unflatten(1, self._noted.sums.shape))
        logs = {"loss": loss_sum / self._n_updates}
        if (grad_norm := self._grad_norm.read()) is not None:
            logs["grad_norm"] = grad_norm
        return logs | {"learning_rate": self._learning_rate}

    @contextmanager
    def _as_of_then(self) -> Iterator[None]:
        """The trainer's state stands at this line's update, for whoever listens to the log."""
        state = self._state
        now = state.global_step, state.epoch
        state.global_step, state.epoch = self._step, self._epoch
        try:
            yield
        finally:
            state.global_step, state.epoch = now


class OnItsWay:
    """A number that may be on the device, read later."""

    def __init__(self, number: Any):
        self._number = HostCopy(number) if isinstance(number, Tensor) else number

    def read(self) -> Any:
        return self._number.read().item() if isinstance(self._number, HostCopy) else self._number


class LateLines:
    """Holds the line that waits for the next update to be launched."""

    def __init__(self) -> None:
        self._waiting: LogLine | None = None

    def put_off(self, trainer: Any, line: LogLine) -> None:
        """Write a line later."""
        self._waiting, trainer.control.should_log = line, False

    def write(self, trainer: Any) -> LogLine | None:
        """Write the line that waits; returns it. A line that is due stays due."""
        line, is_due = self._waiting, trainer.control.should_log
        if line is None or not line.is_of(trainer):
            return None
        logs = line.read(trainer)
        self._waiting = None  # before anybody is told, who may raise an error
        line.write(trainer, logs)
        trainer.control.should_log = is_due
        return line

    @contextmanager
    def not_lost(self, trainer: Any) -> Iterator[None]:
        """An error inside this context does not take the line that waits with it."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a device that has failed
                LateLines.write(self, trainer)
            self._waiting = None
            raise


def is_due(trainer: Any) -> bool:
    """Whether an update was made since the last line, and is to have one."""
    made: int = trainer.state.global_step
    return trainer.control.should_log and made > trainer._globalstep_last_logged


def has_to_be_written(trainer: Any) -> bool:
    """Whether the updates so far have to be looked at now: they are saved, or were the last."""
    control, state = trainer.control, trainer.state
    return control.should_save or control.should_training_stop or state.global_step >= state.max_steps


def may_wait(trainer: Any) -> bool:
    """Whether a line may be written once the next update is launched, and something is gained."""
    control = trainer.control
    if control.should_evaluate or control.should_epoch_stop or has_to_be_written(trainer):
        return False
    counts_tokens = trainer.args.include_num_input_tokens_seen != "no"  # on the host, in every update
    return _computes_while_the_host_goes_on(trainer) and reads_late(trainer) and not counts_tokens


def _computes_while_the_host_goes_on(trainer: Any) -> bool:
    return trainer.args.device.type == "cuda"
