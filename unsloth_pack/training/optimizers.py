"""Optimizers of a run: learning rates by group, gradients applied as they come, float32 masters on the host.

A backward pass makes the gradients from the last layer to the first. `InBackward` applies and frees each at
once, so that no more than those of one layer are on the device. `CpuMasterWeights` trains 16-bit weights:

    device                               host
    gradient, bfloat16  ── copied ──▶    staged, bfloat16, pinned
                                         master, moments: float32; the optimizer steps here
    weight, bfloat16    ◀── copied ──    staged: the master, rounded to nearest

An update that is smaller than a weight's last place in 16 bits is kept by the master, and shows once a few
have added up.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import Trainer

from unsloth_pack.errors import InputError, errors_of, raise_together
from unsloth_pack.lora.trained_parts import VisionParts
from unsloth_pack.modules import check_matches, compile_patterns
from unsloth_pack.training.nonfinite import leave_out

Settings = dict[str, Any]  # of a group of an optimizer, with its "params"
_PART_OPTIONS = {"tower": "vit_lr", "aligner": "aligner_lr"}


@dataclass(frozen=True)
class LearningRates:
    """Rates of some of the weights; the most particular one counts.

    Args:
        lora_plus_ratio: LoRA+ (Hayou et al. 2024): by how much faster LoRA's B learns than A.
        of_embeddings: of trained embeddings and head.
        by_name: by regular expression over names of modules; the first that matches counts.
        of_tower, of_aligner: of these parts of a model of vision and language.
    """

    lora_plus_ratio: float | None = None
    of_embeddings: float | None = None
    by_name: Mapping[str, float] = field(default_factory=dict)
    of_tower: float | None = None
    of_aligner: float | None = None

    def __bool__(self) -> bool:
        return bool(self.lora_plus_ratio or self.of_embeddings or self.by_name or self.of_parts)

    @property
    def of_parts(self) -> dict[str, float]:
        """Return the rates of the parts of a model of vision and language, by `VisionParts.kind`."""
        rates = {"tower": self.of_tower, "aligner": self.of_aligner}
        return {part: rate for part, rate in rates.items() if rate is not None}


def check_rates(model: nn.Module, rates: LearningRates) -> None:
    """Refuse rates of weights that do not train, all at once.

    Raises:
        InputError: names the regular expression or the option.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    raise_together(errors_of(check_rates_by_name, rates, trained), _unused_rates(model, rates, trained))


def check_rates_by_name(rates: LearningRates, trained: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the trained parameters' names."""
    check_matches("learning_rates", [*rates.by_name], trained, "trains", "correct it, or leave it out")


def check_rate_of_embeddings(rates: LearningRates, trained: Collection[str]) -> Iterator[InputError]:
    """Refuse a rate of embeddings and head where neither trains; `trained` names the parameters that do."""
    if rates.of_embeddings and not trained:
        yield InputError(
            f"embedding_learning_rate is {rates.of_embeddings:g}, and neither embeddings nor head train; "
            "leave it out, or have them train by --trainable_token_indices, --modules_to_save or "
            "--target_modules"
        )


def _unused_rates(model: nn.Module, rates: LearningRates, trained: Sequence[str]) -> Iterator[InputError]:
    if rates.lora_plus_ratio and not any(".lora_B." in name for name in trained):
        yield InputError(
            f"lora_plus_ratio is {rates.lora_plus_ratio:g}, and the model has no LoRA that trains; leave it "
            "out"
        )
    trained_parts = {*map(_part_of(model, rates), trained)}
    for part, rate in rates.of_parts.items():
        if part not in trained_parts:
            yield InputError(
                f"{_PART_OPTIONS[part]} is {rate:g}, and nothing of the {part} trains; leave it out"
            )
    yield from check_rate_of_embeddings(rates, embedding_names(model).intersection(trained))


def use_rates(trainer: Trainer, model: Any, rates: LearningRates) -> None:
    """Divide the weights by these rates, too, in the optimizer that the trainer will make."""
    args, decays = trainer.args, trainer.get_decay_parameter_names(model)
    rate_of = _rate_by_name(model, rates, args.learning_rate)
    groups: list[Settings] = []
    for has_decay in (True, False):
        by_rate: dict[float, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (name in decays) == has_decay:
                by_rate.setdefault(rate_of(name), []).append(parameter)
        decay = args.weight_decay if has_decay else 0.0
        groups += [{"params": some, "lr": rate, "weight_decay": decay} for rate, some in by_rate.items()]
    kind, options = trainer.get_optimizer_cls_and_kwargs(args, model)
    trainer.optimizer_cls_and_kwargs = kind, {**options, "params": groups}


def _rate_by_name(model: nn.Module, rates: LearningRates, default: float) -> Callable[[str], float]:
    """Return the function from the name of a parameter to its learning rate."""
    embeddings = embedding_names(model) if rates.of_embeddings else set()
    plus = _lora_plus_rates(model, rates.lora_plus_ratio, default) if rates.lora_plus_ratio else {}
    by_name = [(compile_patterns([pattern]), rate) for pattern, rate in rates.by_name.items()]
    part_of = _part_of(model, rates)

    def rate_of(name: str) -> float:
        rate = next((rate for matches, rate in by_name if matches(name)), None)
        if rate is not None:
            return rate
        if rates.of_embeddings and name in embeddings:
            return rates.of_embeddings
        if (part := part_of(name)) in rates.of_parts:
            return rates.of_parts[part]
        return plus.get(name, default)

    return rate_of


def _lora_plus_rates(model: Any, ratio: float, default: float) -> dict[str, float]:
    """Return the rate of each LoRA parameter, by name, as PEFT's LoRA+ sets it."""
    optimizer = create_loraplus_optimizer(
        model, torch.optim.SGD, lr=default, loraplus_lr_ratio=ratio, loraplus_lr_embedding=default
    )
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    # It speeds up every vector as well, such as a norm that trains; LoRA+ is about B
    lora = [(name, id(p)) for name, p in model.named_parameters() if ".lora_" in name]
    return {name: rates[key] for name, key in lora if key in rates}


def _part_of(model: Any, rates: LearningRates) -> Callable[[str], str]:
    """Return a function from a name to its part of a model of vision and language, or to "" without rates."""
    if not rates.of_parts:
        return lambda name: ""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = VisionParts.locate(base)
    inside = next(path for path, module in model.named_modules() if module is base)
    return lambda name: parts.kind(name.removeprefix(f"{inside}."))


def embedding_names(model: Any) -> set[str]:
    """Return the names of the parameters in the embedding or the head, or in a wrapper of these."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ends = filter(None, (base.get_input_embeddings(), base.get_output_embeddings()))
    inside = {id(parameter) for end in ends for parameter in end.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


# Updates of single parameters


def step_one(optimizer: Optimizer, parameter: Tensor, settings: Mapping[str, object]) -> None:
    """Update a single parameter, with the settings of its group, by an optimizer that has all its state in
    that of each parameter. All others stay as they are, with their gradients."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**settings, "params": [parameter]}]
    try:
        with _own_settings_of(optimizer, parameter):
            type(optimizer).step(optimizer)  # the instance's own is counted by schedules
    finally:
        optimizer.param_groups = groups


@contextmanager
def _own_settings_of(optimizer: Optimizer, parameter: Tensor) -> Iterator[None]:
    """bitsandbytes keeps settings of single weights, as 32 bits for embeddings, by their place in the groups.
    While one weight is updated alone, at the first place, only its own settings are known."""
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        yield
        return
    by_place, own = manager.index2config, manager.pid2config.get(id(parameter))
    manager.index2config = {} if own is None else {(0, 0): own}
    try:
        yield
    finally:
        manager.index2config = by_place


class InBackward:
    """Applies and frees every gradient in the backward pass that makes it.

    The optimizer stays an ordinary one: its state and its checkpoints are those of updates after the backward
    pass, and its own `step` finds nothing left to do. A parameter whose gradient, or one before it in the
    same backward pass, is not finite keeps its value, and after a loss that is not finite all of them do.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        self._norms: dict[Tensor, Tensor] = {}  # of the gradients applied
        self._is_bad = torch.zeros((), dtype=torch.bool)
        self._is_new = True

    def begin(self, loss: Tensor) -> None:
        """Apply the gradients of the next backward pass, which is of this loss."""
        self.end()
        if self._is_new:
            self._optimizer.step()  # without gradients: bitsandbytes sets itself up for all weights at once
            self._is_new = False
        self._norms.clear()
        self._is_bad = ~torch.isfinite(loss.detach())
        for group in self._optimizer.param_groups:
            apply = partial(self._apply, group)
            self._hooks += [p.register_post_accumulate_grad_hook(apply) for p in group["params"]]

    def end(self) -> None:
        """Leave gradients alone from now on: the backward pass is over, or was broken off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def norm(self) -> Tensor:
        """Return the norm of all gradients of the last backward pass, in float32."""
        norms = [*self._norms.values()]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def _apply(self, group: Settings, parameter: Tensor) -> None:
        if parameter in self._norms:
            raise InputError(
                "a weight got its gradient in parts, and the first part has been applied already; leave "
                "out --optimizer_in_backward, or --use_gradient_checkpointing"
            )
        assert parameter.grad is not None
        norm = self._norms[parameter] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        self._is_bad = self._is_bad | ~torch.isfinite(norm)
        if isinstance(self._optimizer, CpuMasterWeights):
            return self._optimizer.send(parameter, group, self._is_bad)
        leave_out(self._optimizer, [parameter], self._is_bad)
        step_one(self._optimizer, parameter, group)
        parameter.grad = None


_MASTER = "master"  # in the state of each parameter, beside the optimizer's own
_HOST_BYTES = 4 + 8 + 2  # of a weight: the master, its moments, the copy on its way


def check_host_memory(model: nn.Module) -> None:
    """Refuse a model whose masters do not fit into the host's memory: the system would end the process.

    Raises:
        InputError: says how much they take.
    """
    needed = _HOST_BYTES * sum(p.numel() for p in model.parameters() if p.requires_grad)
    free = psutil.virtual_memory().available
    if needed > free:
        raise InputError(
            f"masters_on_host takes {needed / 2**30:.1f} GiB of host memory, of which {free / 2**30:.1f} GiB "
            "are free; give --optim adamw_torch_8bit --optim_args bf16_stochastic_round=true in its place"
        )


class _Sent(NamedTuple):
    """A gradient on its way to the host, with the settings of its group at that time."""

    parameter: Tensor
    settings: Mapping[str, object]
    is_bad: Tensor | None
    arrived: torch.cuda.Event | None


class CpuMasterWeights(Optimizer):
    """An optimizer whose masters and state are on the host.

    `step` frees the gradients: none is there for a second look. It waits for the device, and the device for
    nothing but the weights.

    Args:
        optimizer: one of torch's, over the weights of a model, that has not stepped yet. It is taken over.

    Attributes:
        found_inf: a number on the device; where it is not 0 the next step changes nothing.
    """

    found_inf: Tensor | None = None

    def __init__(self, optimizer: Optimizer):
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._masters: dict[Tensor, Tensor] = {}
        self._staged: dict[Tensor, Tensor] = {}
        self._sent: list[_Sent] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._wide = torch.empty(0)
        for group in optimizer.param_groups:
            group["params"] = [self._master_of(parameter) for parameter in group["params"]]
        self._on_host = optimizer
        self.state = optimizer.state

    def _master_of(self, parameter: Tensor) -> Tensor:
        master = self._masters[parameter] = parameter.detach().to("cpu", torch.float32, copy=True)
        self._staged[parameter] = torch.empty(
            parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda
        )
        return master

    def send(self, parameter: Tensor, settings: Mapping[str, object], is_bad: Tensor | None = None) -> None:
        """Take a parameter's gradient to the host, for the next `step`, and free it on the device.

        `step` leaves the parameter as it is where `is_bad`, a bool on the device.
        """
        gradient, staged = parameter.grad, self._staged[parameter]
        assert gradient is not None
        parameter.grad = None
        if not gradient.is_cuda:
            staged.copy_(gradient)
            self._sent.append(_Sent(parameter, settings, is_bad, None))
            return
        stream = self._stream_of(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            staged.copy_(gradient, non_blocking=True)
            gradient.record_stream(stream)
            if is_bad is not None:
                is_bad.record_stream(stream)
                is_bad = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(is_bad, non_blocking=True)
        self._sent.append(_Sent(parameter, settings, is_bad, stream.record_event()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters from the gradients that are there or were sent, and the weights from these."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        is_bad = None if self.found_inf is None else self.found_inf.bool()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.send(parameter, group, is_bad)
        self.found_inf = None
        for sent in self._sent:
            self._update(sent)
        self._sent.clear()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        return loss

    def _update(self, sent: _Sent) -> None:
        if sent.arrived is not None:
            sent.arrived.synchronize()
        if sent.is_bad is not None and bool(sent.is_bad):
            return
        master, staged = self._masters[sent.parameter], self._staged[sent.parameter]
        master.grad = self._widened(staged)
        step_one(self._on_host, master, sent.settings)
        master.grad = None
        staged.copy_(master)
        if sent.arrived is None:
            sent.parameter.copy_(staged)
            return
        with torch.cuda.stream(self._stream_of(sent.parameter.device)):
            sent.parameter.copy_(staged, non_blocking=True)

    def _widened(self, gradient: Tensor) -> Tensor:
        """Convert to float32, in memory that is used again: fresh pages cost more than their numbers."""
        if gradient.numel() > self._wide.numel():
            self._wide = torch.empty(gradient.numel(), dtype=torch.float32)
        return self._wide[: gradient.numel()].view_as(gradient).copy_(gradient)

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own, with a master in the state of each parameter that has one."""
        for own, group in zip(self._on_host.param_groups, self.param_groups, strict=True):
            own |= _without(group, "params")
        saved, masters = self._on_host.state_dict(), [*self._masters.values()]
        states = {place: {**state, _MASTER: masters[place]} for place, state in saved["state"].items()}
        return {**saved, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's. Parameters without a saved master keep the one of their weight."""
        masters = [*self._masters.values()]
        states = {place: _without(state, _MASTER) for place, state in state_dict["state"].items()}
        for place, state in state_dict["state"].items():
            if _MASTER in state:
                masters[place].copy_(state[_MASTER])
        self._on_host.load_state_dict({**state_dict, "state": states})
        self.state = self._on_host.state
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= _without(loaded, "params")


def _without(settings: Mapping[str, object], name: str) -> Settings:
    return {key: value for key, value in settings.items() if key != name}
