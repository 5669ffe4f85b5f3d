"""Log the loss and TRL's metrics of a patched model without waiting for the GPU.

TRL reads entropy, accuracy and tokens on the host after each forward pass, and transformers the loss after
each update. Each time the GPU runs out of work. For a patched model and TRL's default loss, the loss is
computed here, the sums stay on the device, and a log line is written once the next update is launched. The
lines of an update that is evaluated or saved, and the last line, are written at once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.utils import ModelOutput

from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.modules import base_of, whole

if TYPE_CHECKING:
    from trl import SFTTrainer

LOSS_WEIGHTS = "loss_weights"  # of a batch: `[B, T]`, what the loss of a token is multiplied by

# The methods of `SFTTrainer`: the original first, then its own arguments.


def compute_loss(
    original: Callable[..., Any],
    trainer: "SFTTrainer",
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    logging = logging_of(trainer)
    if return_outputs or not model.training or not replaces_loss(trainer):
        logging.count_tokens(trainer)
        return original(trainer, model, inputs, return_outputs, num_items_in_batch)
    loss, outputs = default_loss(trainer, model, inputs, num_items_in_batch)
    logging.add_micro_batch(trainer, outputs, inputs)
    return loss


def log(original: Callable[..., None], trainer: "SFTTrainer", *args: object, **kwargs: object) -> None:
    hand_over_metrics(trainer)
    original(trainer, *args, **kwargs)


def log_save_evaluate(
    original: Callable[..., None],
    trainer: "SFTTrainer",
    loss: Tensor,
    grad_norm: Tensor | float | None,
    *args: object,
    **kwargs: object,
) -> None:
    logging_of(trainer).log_update(trainer, loss, grad_norm, kwargs["learning_rate"], args[-1])
    original(trainer, loss, grad_norm, *args, **kwargs)


def train(original: Callable[..., Any], trainer: "SFTTrainer", *args: object, **kwargs: object) -> Any:
    with logging_of(trainer).lose_no_line(trainer):
        return original(trainer, *args, **kwargs)


def is_patched(model: object) -> bool:
    """True if a causal language model, with or without an adapter of PEFT, is patched."""
    return isinstance(base_of(model), FastCausalLM)


def replaces_loss(trainer: "SFTTrainer") -> bool:
    """True if TRL would compute the loss as `default_loss` does, and all processes log: sums are gathered."""
    args: Any = trainer.args
    return (
        args.loss_type == "nll"
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and trainer.accelerator.parallelism_config is None
        and (trainer.accelerator.num_processes == 1 or logging_of(trainer).is_of_run)
        and is_patched(trainer.model)
    )


def default_loss(
    trainer: "SFTTrainer", model: nn.Module, inputs: dict[str, object], num_items: Tensor | int | None
) -> tuple[Tensor, ModelOutput]:
    """Compute TRL's loss of a micro-batch, over `num_items` labels or its own; return the output too.

    `loss_weights` among the inputs multiply the loss of each token.
    """
    options = {"use_cache": False, "fused_lm_head": True}
    inputs = dict(inputs)
    weights: Any = inputs.pop(LOSS_WEIGHTS, None)
    if trainer.aux_loss_enabled:  # of routed experts
        options["output_router_logits"] = True
    outputs = model(**inputs | options)
    divisor = outputs.label_mask.sum() if num_items is None else torch.as_tensor(num_items)
    losses = -outputs.log_probs if weights is None else -outputs.log_probs * weights[:, 1:]
    loss = losses.sum() / divisor.clamp(min=1)
    if num_items is not None and trainer.args.average_tokens_across_devices:
        loss = loss * trainer.accelerator.num_processes
    if trainer.aux_loss_enabled:
        n_steps = 1 if num_items is None else trainer.current_gradient_accumulation_steps
        loss = loss + trainer.router_aux_loss_coef * outputs.aux_loss / n_steps
    return loss, outputs


def hand_over_metrics(trainer: "SFTTrainer") -> None:
    """Put the metrics of training since the last call where TRL's `log` looks for them, in all processes."""
    logging, model = logging_of(trainer), trainer.model
    if not logging.is_writing and model is not None and model.training:
        sums, tokens = logging.take_sums()
        if sums:
            gathered = trainer.accelerator.gather(torch.stack(sums)[None]).cpu()
            logging.put_metrics(trainer, trainer._metrics["train"], gathered, int(tokens))


def put_metrics(trainer: "SFTTrainer", metrics: dict[str, list[float]], sums: Tensor, n_tokens: int) -> None:
    """Append the values of every micro-batch to TRL's metrics, from `[processes, micro-batches, 3 or 5]`."""
    for n_labels, entropy, n_correct, *aux in sums.sum(dim=0).float():
        values = {"entropy": entropy / n_labels, "mean_token_accuracy": n_correct / n_labels}
        for name, value in values.items():
            metrics.setdefault(name, []).append(float(value) if n_labels > 0 else 0.0)
        if aux:
            metrics.setdefault("aux_loss", []).append(float(aux[0] / aux[1]))
    trainer._total_train_tokens += n_tokens
    metrics["num_tokens"] = [trainer._total_train_tokens]


class LogLine:
    """The numbers of a log line, on their way to the host; one exchange gathers those of all processes.

    `loss` is the trainer's sum since the line before, and becomes zero.
    """

    def __init__(
        self,
        trainer: "SFTTrainer",
        loss: Tensor,
        grad_norm: Tensor | float | None,
        learning_rate: float,
        start_time: float | None,
    ):
        self._learning_rate, self._start_time = learning_rate, start_time
        self._step, self._epoch = trainer.state.global_step, trainer.state.epoch
        self._n_updates = self._step - trainer._globalstep_last_logged
        trainer._globalstep_last_logged = self._step
        self._trl_metrics = _take_trl_metrics(trainer)
        sums, tokens = logging_of(trainer).take_sums()
        self._n_micro_batches = len(sums)
        numbers = torch.cat([loss.double().view(1), *sums])
        self._numbers = HostCopy(trainer.accelerator.gather(numbers[None]))
        self._tokens = copy_number(tokens)
        self._grad_norm = None if grad_norm is None else copy_number(whole(grad_norm))
        loss.zero_()

    def read(self, trainer: "SFTTrainer") -> dict[str, float]:
        """Return what transformers logs, after waiting for the numbers."""
        numbers = self._numbers.read()
        loss_sum = numbers[:, 0].float().mean().item()  # the mean of all processes
        trainer._total_loss_scalar += loss_sum
        if self._n_micro_batches:
            sums = numbers[:, 1:].unflatten(1, (self._n_micro_batches, -1))
            logging_of(trainer).put_metrics(trainer, self._trl_metrics, sums, int(self._tokens.read()))
        logs = {"loss": loss_sum / self._n_updates}
        if self._grad_norm is not None:
            logs["grad_norm"] = self._grad_norm.read().item()
        return logs | {"learning_rate": self._learning_rate}

    def write(self, trainer: "SFTTrainer", logs: dict[str, float]) -> None:
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

    is_of_run = False  # True: the trainer logs in every process, counts its tokens and writes all lines here
    kind_of_line: type[LogLine] = LogLine

    def __init__(self) -> None:
        self.put_metrics = put_metrics  # what the sums of `add_sums` mean
        self._sums: list[Tensor] = []
        self._tokens: Tensor | int = 0
        self._line: LogLine | None = None
        self.is_writing = False  # that line, which has metrics of its own

    def add_micro_batch(self, trainer: "SFTTrainer", outputs: Any, inputs: Mapping[str, Tensor]) -> None:
        """Add the sums of a micro-batch, from the model's output to `fused_lm_head=True`."""
        self.add_sums(trainer, self.sums_of(outputs, inputs), inputs)

    def sums_of(self, outputs: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return what `put_metrics` gets of a micro-batch."""
        sums = [outputs.label_mask.sum(), outputs.entropy.detach().sum(), outputs.is_top1.sum()]
        if outputs.aux_loss is not None:  # of routed experts, where it is part of the loss
            sums += [outputs.aux_loss.detach(), torch.ones_like(outputs.aux_loss)]
        return sums

    def add_sums(self, trainer: "SFTTrainer", sums: list[Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Add numbers of a micro-batch that are summed over processes; every micro-batch has as many."""
        together = torch.stack([x.double() for x in sums])  # float64 holds every count and every float32
        state = trainer.accelerator.gradient_state
        if state.end_of_dataloader and 0 < state.remainder <= trainer.accelerator.process_index:
            together = torch.zeros_like(together)  # rows that come again, as `gather_for_metrics` drops them
        self._sums.append(together)
        if not self.is_of_run:
            self._tokens = self._tokens + _tokens_as_trl_counts(inputs)

    def take_sums(self) -> tuple[list[Tensor], Tensor | int]:
        """Return the sums of every micro-batch since the last call, and the tokens of all."""
        sums, tokens = self._sums, self._tokens
        self._sums, self._tokens = [], 0
        return sums, tokens

    def count_tokens(self, trainer: "SFTTrainer") -> None:
        """Add the tokens since the last call to the trainer's."""
        trainer._total_train_tokens += int(self._tokens)
        self._tokens = 0

    def log_update(self, trainer: "SFTTrainer", *numbers: Any) -> None:
        """Write the line that waits; put off the line of the update just launched, if it may wait."""
        self.write(trainer)
        control, state = trainer.control, trainer.state
        is_saved_or_last = (
            control.should_save or control.should_training_stop or state.global_step >= state.max_steps
        )
        is_due = control.should_log or (self.is_of_run and is_saved_or_last)
        can_wait = not is_saved_or_last and can_line_wait(trainer)
        if is_due and state.global_step > trainer._globalstep_last_logged and (can_wait or self.is_of_run):
            self._line = self.kind_of_line(trainer, *numbers)
            control.should_log = False
            if not can_wait:
                trainer.store_flos()
                self.write(trainer)

    def write(self, trainer: "SFTTrainer") -> LogLine | None:
        """Write the line that waits, and return it. A line that is due stays due."""
        line, is_due = self._line, trainer.control.should_log
        if line is not None:
            logs = line.read(trainer)
            self._line = None  # before callbacks see it, which may raise an error
            line.write(trainer, logs)
            trainer.control.should_log = is_due
        return line

    @contextmanager
    def lose_no_line(self, trainer: "SFTTrainer") -> Iterator[None]:
        """Write the line that waits when training ends, by an error too."""
        try:
            yield
        finally:
            with suppress(RuntimeError):  # of a device that has failed
                DeferredLogging.write(self, trainer)
            self._line = None


def logging_of(trainer: "SFTTrainer") -> DeferredLogging:
    """Return the trainer's `DeferredLogging`, made at the first call."""
    logging: DeferredLogging | None = vars(trainer).get("unsloth_pack_logging")
    if logging is None:
        logging = vars(trainer)["unsloth_pack_logging"] = DeferredLogging()
    return logging


def can_line_wait(trainer: "SFTTrainer") -> bool:
    """True if a line may be written once the next update is launched, and that saves time."""
    control = trainer.control
    if control.should_evaluate or control.should_epoch_stop:
        return False
    counts_tokens = trainer.args.include_num_input_tokens_seen != "no"  # on the host, in every update
    return is_on_gpu(trainer.args) and replaces_loss(trainer) and not counts_tokens


def is_on_gpu(args: TrainingArguments) -> bool:
    """True if a trainer with these arguments trains on a GPU."""
    return args.device.type == "cuda"


def copy_number(number: Tensor | float) -> HostCopy:
    """Copy a number to the host, which may be there; `torch.full` waits for no device."""
    return HostCopy(number if isinstance(number, Tensor) else torch.full((), number, dtype=torch.float64))


def _take_trl_metrics(trainer: "SFTTrainer") -> dict[str, list[float]]:
    """Take the metrics of training that are where TRL's `log` looks for them."""
    metrics = dict(trainer._metrics["train"])
    trainer._metrics["train"].clear()
    return metrics


def _tokens_as_trl_counts(inputs: Mapping[str, Tensor]) -> Tensor | int:
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    return inputs["position_ids"].size(1) if "position_ids" in inputs else inputs["input_ids"].numel()
