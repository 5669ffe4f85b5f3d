"""The log lines of a run, which nobody waits for, and what they say of updates that are not finite."""

import math
from typing import Any

from torch import Tensor

from unsloth_pack.host_copy import HostCopy
from unsloth_pack.patching.late_lines import (
    LateLines,
    LogLine,
    OnItsWay,
    has_to_be_written,
    is_due,
    may_wait,
)


class RunLine(LogLine):
    """A line that also says which updates were left out, and counts the tokens of all processes.

    Attributes:
        left_out: the updates that were left out; once it is read.
    """

    def __init__(self, trainer: Any, loss: Tensor, grad_norm: Any, learning_rate: float):
        super().__init__(trainer, loss, grad_norm, learning_rate)
        self._steps, finite = trainer.finite_updates.take_verdicts()
        self._finite = HostCopy(finite)
        self._tokens = OnItsWay(trainer.counts.tokens)
        self.left_out: list[int] = []

    def read(self, trainer: Any) -> dict[str, float]:
        logs, metrics = super().read(trainer), self._of_trl
        finite = self._finite.read().tolist()
        self.left_out = [step for step, is_finite in zip(self._steps, finite, strict=True) if not is_finite]
        if metrics:  # TRL does not count rows that come again so that all ranks have some
            metrics["num_tokens"] = [int(self._tokens.read())]
        return logs | ({"loss": math.nan} if self.left_out else {})


class RunLines(LateLines):
    """Writes the line of each update that has one: at once, or when the next update is launched."""

    def see_to(self, trainer: Any, loss: Tensor, grad_norm: Any, learning_rate: float) -> None:
        """An update is launched: write the line that waits, and make its own if it is to have one.

        Args:
            loss, grad_norm, learning_rate: as `LogLine` takes them.
        """
        self.write(trainer)
        if has_to_be_written(trainer):
            trainer.control.should_log = True
        if is_due(trainer):
            at_once = not may_wait(trainer)
            self.put_off(trainer, RunLine(trainer, loss, grad_norm, learning_rate))
            if at_once:
                trainer.store_flos()
                self.write(trainer)
        trainer.control.should_log = False

    def write(self, trainer: Any) -> LogLine | None:
        line = super().write(trainer)
        for step in line.left_out if isinstance(line, RunLine) else ():
            trainer.finite_updates.handle(trainer, step)
        return line
