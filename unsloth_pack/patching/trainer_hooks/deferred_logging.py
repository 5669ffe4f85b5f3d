"""What TRL logs of every micro-batch of a patched model, read from the device when it is logged.

TRL's `compute_loss` reads entropy, accuracy and tokens on the host after each forward pass, so that the
device runs out of work before the backward pass is launched. The function computes the loss too, and has no
hook between the two. So `SFTTrainer.compute_loss` and `SFTTrainer.log` are wrapped, once for all trainers.
For a patched model and TRL's default loss the loss is computed here, and the sums wait on the device for the
log. Everything else goes through TRL's functions.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from unsloth_pack.host_copy import HostCopy
from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.layers.decoder import FastDecoder
from unsloth_pack.modules.sharding import whole

_HOME = "trl.trainer.sft_trainer"  # in sys.modules if a trainer of TRL's can be there
_METRICS = "unsloth_pack_late_metrics"  # where a trainer holds what it has not logged yet


class DeferredMetricsCallback(TrainerCallback):
    """Wraps TRL's trainer before the first training of a patched model."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        if (trainer_class := sft_trainer_of(model)) is not None:
            _wrap(trainer_class)


def sft_trainer_of(model: nn.Module | None) -> Any:
    """TRL's `SFTTrainer`, if it may train this model and the model is patched; else None."""
    home = sys.modules.get(_HOME)
    return None if home is None or model is None or not is_patched(model) else home.SFTTrainer


def _wrap(trainer_class: Any) -> None:
    if hasattr(trainer_class, _METRICS):
        return
    compute, log = trainer_class.compute_loss, trainer_class.log

    @wraps(compute)
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        held = vars(self).setdefault(_METRICS, DeferredMetrics())
        if return_outputs or not reads_late(self):
            held.count_tokens(self)
            return compute(self, model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = default_loss(self, model, inputs, num_items_in_batch)
        held.note(self, outputs, inputs)
        return loss

    @wraps(log)
    def log_all(self: Any, *args: Any, **kwargs: Any) -> None:
        take_over_metrics(self)
        log(self, *args, **kwargs)

    trainer_class.compute_loss, trainer_class.log = compute_loss, log_all
    setattr(trainer_class, _METRICS, None)  # wrapped


def take_over_metrics(trainer: Any) -> None:
    """Put what has been noted since the last call where TRL's `log` looks for it.

    With several processes, all of them have to call this.
    """
    if (held := vars(trainer).get(_METRICS)) is not None:
        held.hand_over(trainer)


def noted_sums(trainer: Any) -> "NotedSums | None":
    """Take what has been noted since the last call, without waiting for the device; None if nothing was."""
    held = vars(trainer).get(_METRICS)
    return None if held is None else held.take(trainer)


def metrics_so_far(trainer: Any) -> dict[str, list[float]]:
    """Take the metrics of training that lie where TRL's `log` looks for them."""
    there = trainer._metrics["train"]
    taken = dict(there)
    there.clear()
    return taken


@contextmanager
def only_these_metrics(trainer: Any, metrics: Mapping[str, list[float]]) -> Iterator[None]:
    """Inside, TRL's `log` adds these metrics of training, and none that are of later updates."""
    put_since, noted_since = metrics_so_far(trainer), vars(trainer).pop(_METRICS, None)
    there = trainer._metrics["train"]
    there.update(metrics)
    try:
        yield
    finally:
        there.clear()
        there.update(put_since)
        if noted_since is not None:
            vars(trainer)[_METRICS] = noted_since


def takes_over_itself(trainer: Any) -> bool:
    """Whether the trainer takes its metrics over before it logs, in every process.

    Such a trainer says so by `takes_over_metrics`, and counts its tokens itself.
    """
    return getattr(trainer, "takes_over_metrics", False)


def reads_late(trainer: Any) -> bool:
    """Whether TRL would compute the loss as `default_loss` does, of a patched model.

    With several processes the trainer has to take its metrics over in all of them: reading the sums gathers
    them.
    """
    arguments = trainer.args
    return (
        arguments.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and trainer.accelerator.parallelism_config is None
        and (trainer.accelerator.num_processes == 1 or takes_over_itself(trainer))
        and is_patched(trainer.model)
    )


def default_loss(
    trainer: Any, model: Any, inputs: dict[str, Any], num_items: Tensor | int | None
) -> tuple[Tensor, Any]:
    """TRL's loss of a micro-batch, and the model's output.

    Args:
        num_items: labels of the update, in all processes; None to divide by those of this micro-batch.
    """
    asked = {"use_cache": False, "fused_lm_head": True}
    if trainer.aux_loss_enabled:  # of routed experts
        asked["output_router_logits"] = True
    outputs = model(**inputs | asked)
    divisor = outputs.label_mask.sum() if num_items is None else torch.as_tensor(num_items)
    loss = (-outputs.log_probs).sum() / divisor.clamp(min=1)
    if num_items is not None and trainer.args.average_tokens_across_devices:
        loss = loss * trainer.accelerator.num_processes
    if trainer.aux_loss_enabled:
        n_steps = 1 if num_items is None else trainer.current_gradient_accumulation_steps
        loss = loss + trainer.router_aux_loss_coef * outputs.aux_loss / n_steps
    return loss, outputs


@dataclass(frozen=True)
class NotedSums:
    """The sums behind the metrics of several micro-batches, in this process.

    Args:
        sums: `[micro-batches, 3]`, or 4 with routed experts; float64, on the device.
        ranks: for each micro-batch, how many processes count; None for all.
        tokens: of training, on their way to the host where they were not known there.
    """

    sums: Tensor
    ranks: Sequence[int | None]
    tokens: Sequence[HostCopy | int]

    def put(self, trainer: Any, metrics: dict[str, list[float]], gathered: Tensor) -> None:
        """Put the values of every micro-batch among metrics, and the trainer's tokens, which go up by these.

        Args:
            metrics: by TRL's names.
            gathered: the sums of all processes, `[processes, micro-batches, 3 or 4]`, on the host.
        """
        for number, n_ranks in enumerate(self.ranks):
            for name, value in _metrics_of(gathered[:n_ranks, number]):
                metrics.setdefault(name, []).append(value)
        tokens = (int(n.read()) if isinstance(n, HostCopy) else n for n in self.tokens)
        trainer._total_train_tokens += sum(tokens)
        metrics["num_tokens"] = [trainer._total_train_tokens]


class DeferredMetrics:
    """The sums behind a trainer's metrics, on the device until somebody reads them."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor, int | None]]] = {"train": [], "eval": []}
        self._tokens: list[Tensor | int] = []  # of training

    def note(self, trainer: Any, outputs: Any, inputs: dict[str, Any]) -> None:
        """Keep the sums of a micro-batch.

        Args:
            outputs: of the model, to `fused_lm_head=True`.
            inputs: of the model.
        """
        sums = [outputs.label_mask.sum(), outputs.entropy.detach().sum(), outputs.is_top1.sum()]
        if outputs.aux_loss is not None:  # of routed experts, where it is part of the loss
            sums.append(outputs.aux_loss.detach())
        mode = _mode(trainer)
        # float64 holds every count and every float32
        self._sums[mode].append((torch.stack([x.double() for x in sums]), _ranks_that_count(trainer)))
        if mode == "train" and not takes_over_itself(trainer):
            self._tokens.append(_tokens_as_trl_counts(inputs))

    def take(self, trainer: Any) -> NotedSums | None:
        """The sums of every micro-batch since the last call, of training or of evaluation."""
        noted = self._sums[_mode(trainer)]
        if not noted:
            return None
        sums, ranks = zip(*noted, strict=True)
        tokens = [HostCopy(n) if isinstance(n, Tensor) else n for n in self._tokens]
        noted.clear()
        self._tokens.clear()
        return NotedSums(torch.stack(sums), ranks, tokens)

    def hand_over(self, trainer: Any) -> None:
        """Put TRL's metrics of every micro-batch since the last call where the trainer keeps them."""
        mode, noted = _mode(trainer), self.take(trainer)
        if noted is None:
            return
        gathered = trainer.accelerator.gather(noted.sums[None]).cpu()
        noted.put(trainer, trainer._metrics[mode], gathered)

    def count_tokens(self, trainer: Any) -> None:
        """Add the tokens noted since the last call to the trainer's."""
        trainer._total_train_tokens += sum(map(int, self._tokens))
        self._tokens.clear()


def is_patched(model: Any) -> bool:
    """Whether a causal language model, with an adapter of PEFT's or without, is patched."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return isinstance(model, FastCausalLM)


def _mode(trainer: Any) -> str:
    """As TRL names the metrics of training and of evaluation."""
    return "train" if trainer.model.training else "eval"


def _ranks_that_count(trainer: Any) -> int | None:
    """How many processes `gather_for_metrics` would not leave out of the batch at hand; None for all."""
    state = trainer.accelerator.gradient_state
    return state.remainder if state.end_of_dataloader and state.remainder > 0 else None


def _tokens_as_trl_counts(inputs: dict[str, Any]) -> Tensor | int:
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    return inputs["position_ids"].size(1) if "position_ids" in inputs else inputs["input_ids"].numel()


def _metrics_of(sums: Tensor) -> Iterator[tuple[str, float]]:
    """A micro-batch's metrics by TRL's names, from the sums `[ranks, 3 or 4]`."""
    n_labels, entropy, n_correct, *aux_loss = sums.sum(dim=0).float()
    yield "entropy", float(entropy / n_labels) if n_labels > 0 else 0.0
    yield "mean_token_accuracy", float(n_correct / n_labels) if n_labels > 0 else 0.0
    for total in aux_loss:
        yield "aux_loss", float(total / len(sums))


# Log lines of training that do not hold up the GPU.
#
# transformers reads the loss of an update as soon as it is launched. So the host waits until the GPU has
# computed it, and then the GPU waits until the host has launched the next update. Here the numbers of a line
# set out for the host behind the update, and the line is written once the next update is launched. It says
# the
# same. The lines of an update that is evaluated or saved, and of the last one, are written at once.
#
# `SFTTrainer` is wrapped once for all trainers; it acts for patched models on a GPU.

_LINES = "unsloth_pack_late_lines"  # where a trainer holds the line that waits


class DeferredLoggingCallback(TrainerCallback):
    """Wraps TRL's trainer when the first one of a patched model is made, or begins to train."""

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        if (trainer_class := sft_trainer_of(model)) is not None:
            _wrap_log(trainer_class)

    on_train_begin = on_init_end


def _wrap_log(trainer_class: Any) -> None:
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


def _lines_of(trainer: Any) -> "DeferredLogging":
    lines: DeferredLogging = vars(trainer).setdefault(_LINES, DeferredLogging())
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


class DeferredLogging:
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
                DeferredLogging.write(self, trainer)
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


# Trainers of patched models do not wait for the GPU to look at the loss of each step.
#
# `logging_nan_inf_filter`, on by default, reads the loss on the host right after the backward pass is
# launched,
# to leave losses that are not finite out of the logs. Clipping and the optimizer are launched only then, and
# the GPU waits for them. Off, such a loss is logged as it is.


class NanFilterCallback(TrainerCallback):
    """Switches the filter off while a patched model trains on a GPU, and back on when training ends."""

    def __init__(self) -> None:
        self._was_on = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        decoders = [] if model is None else [m for m in model.modules() if isinstance(m, FastDecoder)]
        if any(map(_is_on_gpu, decoders)):
            self._was_on |= args.logging_nan_inf_filter  # still so after training that ended in an error
            args.logging_nan_inf_filter = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._was_on:
            self._was_on, args.logging_nan_inf_filter = False, True


def _is_on_gpu(decoder: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in decoder.parameters())
