"""Log the loss and TRL's metrics of a patched model without waiting for the GPU.

TRL's `compute_loss` reads entropy, accuracy and tokens on the host after each forward pass, before the
backward pass is launched. transformers reads the loss of an update as soon as it is launched. Each time the
GPU runs out of work. For a patched model and TRL's default loss, the loss is computed here, and the sums stay
on the device. The numbers of a log line are copied to the host behind their update, and the line is written
once the next update is launched. It has the same numbers. The lines of an update that is evaluated or saved,
and the last line, are written at once. Everything else goes through TRL's methods.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.host_copy import HostCopy
from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.layers.decoder import has_fast_decoder
from unsloth_pack.modules import whole

# The methods of `SFTTrainer`: the original first, then its own arguments.


def compute_loss(
    original: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    logging = logging_of(trainer)
    if return_outputs or not replaces_loss(trainer):
        logging.count_tokens(trainer)
        return original(trainer, model, inputs, return_outputs, num_items_in_batch)
    loss, outputs = default_loss(trainer, model, inputs, num_items_in_batch)
    logging.note(trainer, outputs, inputs)
    return loss


def log(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    hand_over_metrics(trainer)
    original(trainer, *args, **kwargs)


def log_save_evaluate(
    original: Callable[..., Any], trainer: Any, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any
) -> None:
    logging_of(trainer).log_update(trainer, tr_loss, grad_norm, kwargs["learning_rate"], args[-1])
    original(trainer, tr_loss, grad_norm, *args, **kwargs)


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    with logging_of(trainer).lose_no_line(trainer):
        return original(trainer, *args, **kwargs)


def is_patched(model: Any) -> bool:
    """Whether a causal language model, with or without an adapter of PEFT, is patched."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return isinstance(model, FastCausalLM)


def replaces_loss(trainer: Any) -> bool:
    """Whether TRL would compute the loss as `default_loss` does, of a patched model.

    Reading the sums gathers them. So with several processes, all of them have to log.
    """
    arguments = trainer.args
    return (
        arguments.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and trainer.accelerator.parallelism_config is None
        and (trainer.accelerator.num_processes == 1 or logging_of(trainer).is_of_run)
        and is_patched(trainer.model)
    )


def default_loss(
    trainer: Any, model: Any, inputs: dict[str, Any], num_items: Tensor | int | None
) -> tuple[Tensor, Any]:
    """Compute TRL's loss of a micro-batch; returns it with the model's output.

    Args:
        num_items: labels of the update, in all processes; None to divide by those of this micro-batch.
    """
    options = {"use_cache": False, "fused_lm_head": True}
    if trainer.aux_loss_enabled:  # of routed experts
        options["output_router_logits"] = True
    outputs = model(**inputs | options)
    divisor = outputs.label_mask.sum() if num_items is None else torch.as_tensor(num_items)
    loss = (-outputs.log_probs).sum() / divisor.clamp(min=1)
    if num_items is not None and trainer.args.average_tokens_across_devices:
        loss = loss * trainer.accelerator.num_processes
    if trainer.aux_loss_enabled:
        n_steps = 1 if num_items is None else trainer.current_gradient_accumulation_steps
        loss = loss + trainer.router_aux_loss_coef * outputs.aux_loss / n_steps
    return loss, outputs


# Metrics of micro-batches, which wait on the device for the log.


class DeferredNumber:
    """A number that may be on the device: copied to the host now, read later."""

    def __init__(self, number: Any):
        self._number = HostCopy(number) if isinstance(number, Tensor) else number

    def read(self) -> Any:
        return self._number.read().item() if isinstance(self._number, HostCopy) else self._number


@dataclass(frozen=True)
class MetricSums:
    """The sums behind the metrics of several micro-batches, in this process.

    Args:
        sums: `[micro-batches, 3]`, or 4 with routed experts; float64, on the device.
        n_ranks: for each micro-batch, the number of processes that count; None for all.
        tokens: for each micro-batch of training.
    """

    sums: Tensor
    n_ranks: Sequence[int | None]
    tokens: Sequence[DeferredNumber]

    def put(self, trainer: Any, metrics: dict[str, list[float]], gathered: Tensor) -> None:
        """Append the values of every micro-batch to metrics, and count the trainer's tokens.

        Args:
            metrics: by TRL's names.
            gathered: the sums of all processes, `[processes, micro-batches, 3 or 4]`, on the host.
        """
        for number, n_ranks in enumerate(self.n_ranks):
            for name, value in _metrics_of(gathered[:n_ranks, number]):
                metrics.setdefault(name, []).append(value)
        trainer._total_train_tokens += sum(n.read() for n in self.tokens)
        metrics["num_tokens"] = [trainer._total_train_tokens]


def hand_over_metrics(trainer: Any) -> None:
    """Put the metrics since the last call where TRL's `log` looks for them.

    With several processes, all of them have to call this.
    """
    logging = logging_of(trainer)
    if not logging.is_writing and (noted := logging.take(trainer)) is not None:
        gathered = trainer.accelerator.gather(noted.sums[None]).cpu()
        noted.put(trainer, trainer._metrics[_mode(trainer)], gathered)


def _mode(trainer: Any) -> str:
    """As TRL names the metrics of training and of evaluation."""
    return "train" if trainer.model.training else "eval"


def _tokens_as_trl_counts(inputs: dict[str, Any]) -> Tensor | int:
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    return inputs["position_ids"].size(1) if "position_ids" in inputs else inputs["input_ids"].numel()


def _metrics_of(sums: Tensor) -> Iterator[tuple[str, float]]:
    """Yield a micro-batch's metrics by TRL's names, from the sums `[ranks, 3 or 4]`."""
    n_labels, entropy, n_correct, *aux_loss = sums.sum(dim=0).float()
    yield "entropy", float(entropy / n_labels) if n_labels > 0 else 0.0
    yield "mean_token_accuracy", float(n_correct / n_labels) if n_labels > 0 else 0.0
    for total in aux_loss:
        yield "aux_loss", float(total / len(sums))


# Log lines of training, which wait for the next update to be launched.


class LogLine:
    """The numbers of a log line, on their way to the host.

    With several processes all of them have to make it: one exchange gathers the numbers of each.

    Args:
        loss: the trainer's sum since the line before, which becomes zero.
        grad_norm: of the last update.
        learning_rate: of the last update.
        start_time: of the training, as the trainer's `log` takes it.
    """

    def __init__(
        self, trainer: Any, loss: Tensor, grad_norm: Any, learning_rate: float, start_time: float | None
    ):
        self._learning_rate, self._start_time = learning_rate, start_time
        self._step, self._epoch = trainer.state.global_step, trainer.state.epoch
        self._n_updates = self._step - trainer._globalstep_last_logged
        trainer._globalstep_last_logged = self._step
        self._trl_metrics = _take_trl_metrics(trainer)
        self._sums = logging_of(trainer).take(trainer)
        numbers = loss.double().view(1)
        if self._sums is not None:
            numbers = torch.cat([numbers, self._sums.sums.flatten()])
        self._numbers = HostCopy(trainer.accelerator.gather(numbers[None]))
        loss.zero_()
        self._grad_norm = DeferredNumber(whole(grad_norm))

    def read(self, trainer: Any) -> dict[str, float]:
        """Return what transformers logs, after waiting for the numbers."""
        numbers = self._numbers.read()
        loss_sum = numbers[:, 0].float().mean().item()  # the mean of all processes
        trainer._total_loss_scalar += loss_sum
        if self._sums is not None:
            self._sums.put(trainer, self._trl_metrics, numbers[:, 1:].unflatten(1, self._sums.sums.shape))
        logs = {"loss": loss_sum / self._n_updates}
        if (grad_norm := self._grad_norm.read()) is not None:
            logs["grad_norm"] = grad_norm
        return logs | {"learning_rate": self._learning_rate}

    def write(self, trainer: Any, logs: dict[str, float]) -> None:
        """Log what `read` returned, with the step and the metrics of this line instead of later ones."""
        state, logging, of_trl = trainer.state, logging_of(trainer), trainer._metrics["train"]
        now = state.global_step, state.epoch
        later = _take_trl_metrics(trainer)
        state.global_step, state.epoch = self._step, self._epoch
        of_trl.update(self._trl_metrics)
        logging.is_writing = True
        try:
            trainer.log(logs, self._start_time)
        finally:
            state.global_step, state.epoch = now
            of_trl.clear()
            of_trl.update(later)
            logging.is_writing = False


class DeferredLogging:
    """What a trainer has not logged yet: sums of its metrics on the device, and the line that waits."""

    is_of_run = False  # True: the trainer logs in every process, and counts its tokens itself

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor, int | None]]] = {"train": [], "eval": []}
        self._tokens: list[Tensor | int] = []  # of training
        self._line: LogLine | None = None
        self.is_writing = False  # that line, which has metrics of its own

    def note(self, trainer: Any, outputs: Any, inputs: dict[str, Any]) -> None:
        """Keep the sums of a micro-batch, from the model's output to `fused_lm_head=True`."""
        sums = [outputs.label_mask.sum(), outputs.entropy.detach().sum(), outputs.is_top1.sum()]
        if outputs.aux_loss is not None:  # of routed experts, where it is part of the loss
            sums.append(outputs.aux_loss.detach())
        mode, state = _mode(trainer), trainer.accelerator.gradient_state
        # `gather_for_metrics` would leave the other processes out of the last batch
        n_ranks = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        # float64 holds every count and every float32
        self._sums[mode].append((torch.stack([x.double() for x in sums]), n_ranks))
        if mode == "train" and not self.is_of_run:
            self._tokens.append(_tokens_as_trl_counts(inputs))

    def take(self, trainer: Any) -> MetricSums | None:
        """Return the sums since the last call, of training or evaluation, without waiting for the device."""
        noted = self._sums[_mode(trainer)]
        if not noted:
            return None
        sums, n_ranks = zip(*noted, strict=True)
        tokens = [*map(DeferredNumber, self._tokens)]
        noted.clear()
        self._tokens.clear()
        return MetricSums(torch.stack(sums), n_ranks, tokens)

    def count_tokens(self, trainer: Any) -> None:
        """Add the tokens since the last call to the trainer's."""
        trainer._total_train_tokens += sum(map(int, self._tokens))
        self._tokens.clear()

    def log_update(
        self, trainer: Any, loss: Tensor, grad_norm: Any, learning_rate: float, start_time: float
    ) -> None:
        """Write the line that waits; put off the line of the update just launched, if it may wait.

        Args:
            loss, grad_norm, learning_rate, start_time: as `LogLine` takes them.
        """
        self.write(trainer)
        if is_line_due(trainer) and can_line_wait(trainer):
            self.put_off(trainer, LogLine(trainer, loss, grad_norm, learning_rate, start_time))

    def put_off(self, trainer: Any, line: LogLine) -> None:
        """Write a line later."""
        self._line, trainer.control.should_log = line, False

    def write(self, trainer: Any) -> LogLine | None:
        """Write the line that waits, and return it. A line that is due stays due."""
        line, is_due = self._line, trainer.control.should_log
        if line is not None:
            logs = line.read(trainer)
            self._line = None  # before callbacks see it, which may raise an error
            line.write(trainer, logs)
            trainer.control.should_log = is_due
        return line

    @contextmanager
    def lose_no_line(self, trainer: Any) -> Iterator[None]:
        """Write the line that waits when training ends, by an error too."""
        try:
            yield
        finally:
            with suppress(RuntimeError):  # of a device that has failed
                DeferredLogging.write(self, trainer)
            self._line = None


def logging_of(trainer: Any) -> DeferredLogging:
    """Return the trainer's `DeferredLogging`, made when first asked for."""
    logging: DeferredLogging | None = vars(trainer).get("unsloth_pack_logging")
    if logging is None:
        logging = trainer.unsloth_pack_logging = DeferredLogging()
    return logging


def _take_trl_metrics(trainer: Any) -> dict[str, list[float]]:
    """Take the metrics of training that are where TRL's `log` looks for them."""
    metrics = dict(trainer._metrics["train"])
    trainer._metrics["train"].clear()
    return metrics


def is_line_due(trainer: Any) -> bool:
    """Whether an update was made since the last line and has to be logged."""
    n_updates: int = trainer.state.global_step
    return trainer.control.should_log and n_updates > trainer._globalstep_last_logged


def is_saved_or_last(trainer: Any) -> bool:
    """Whether the update just launched is saved, or is the last one."""
    control, state = trainer.control, trainer.state
    return control.should_save or control.should_training_stop or state.global_step >= state.max_steps


def can_line_wait(trainer: Any) -> bool:
    """Whether a line may be written once the next update is launched, and that saves time."""
    control = trainer.control
    if control.should_evaluate or control.should_epoch_stop or is_saved_or_last(trainer):
        return False
    counts_tokens = trainer.args.include_num_input_tokens_seen != "no"  # on the host, in every update
    return is_on_gpu(trainer.args) and replaces_loss(trainer) and not counts_tokens


def is_on_gpu(arguments: Any) -> bool:
    """Whether a trainer with these arguments trains on a GPU, which computes while the host goes on."""
    return arguments.device.type == "cuda"


class NanFilterCallback(TrainerCallback):
    """Switch `logging_nan_inf_filter` off while a patched model trains on a GPU.

    The filter, on by default, leaves losses that are not finite out of the logs. It reads the loss on the
    host before clipping and the optimizer are launched. Without it such a loss is logged as it is.
    """

    def __init__(self) -> None:
        self._was_on = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        if is_on_gpu(args) and has_fast_decoder(model):
            self._was_on |= args.logging_nan_inf_filter  # still so after training that ended in an error
            args.logging_nan_inf_filter = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._was_on:
            self._was_on, args.logging_nan_inf_filter = False, True
