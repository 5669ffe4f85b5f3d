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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import Trainer

from unsloth_pack.errors import InputError, raise_together
from unsloth_pack.lora.trained_parts import VisionParts
from unsloth_pack.modules import base_of, compile_patterns
from unsloth_pack.training.updates import leave_out

Settings = dict[str, Any]  # of a group of an optimizer, with its "params"


@dataclass(frozen=True)
class LearningRates:
    """Rates of some of the weights; the most particular one counts."""

    lora_plus_ratio: float | None = None  # how much faster B learns than A (LoRA+, Hayou et al. 2024)
    of_embeddings: float | None = None  # and of the head, where they train
    by_name: Mapping[str, float] = field(default_factory=dict)  # regular expression -> rate; the first counts
    of_tower: float | None = None  # this and the aligner are of a model of vision and language
    of_aligner: float | None = None

    def __bool__(self) -> bool:
        return any(vars(self).values())


def check_rates(model: Any, rates: LearningRates) -> None:
    """Refuse rates of weights that do not train, all at once."""
    raise_together(
        InputError(f"{option} is {rate:g}, and no weight that it is for trains; correct it, or leave it out")
        for option, rate, names in _rates_by_option(model, rates, default=1.0)
        if not names
    )


def use_rates(trainer: Trainer, model: Any, rates: LearningRates) -> None:
    """Divide the weights by these rates, too, in the optimizer that the trainer will make."""
    args, decays = trainer.args, trainer.get_decay_parameter_names(model)
    rate_of: dict[str, float] = {}
    for _, rate, names in _rates_by_option(model, rates, args.learning_rate):
        rate_of |= dict.fromkeys(names, rate)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = name not in decays, rate_of.get(name, args.learning_rate)
            groups.setdefault(key, []).append(parameter)
    kind, options = trainer.get_optimizer_cls_and_kwargs(args, model)
    options["params"] = [
        {"params": parameters, "lr": rate, "weight_decay": 0.0 if is_spared else args.weight_decay}
        for (is_spared, rate), parameters in sorted(groups.items(), key=lambda group: group[0][0])
    ]
    trainer.optimizer_cls_and_kwargs = kind, options


def _rates_by_option(
    model: Any, rates: LearningRates, default: float
) -> Iterator[tuple[str, float, Collection[str]]]:
    """Yield each option, its rate and the names of its weights that train; the most particular comes last."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if rates.lora_plus_ratio:  # of B and of vectors in LoRA, as in PEFT's `create_loraplus_optimizer`
        faster = [n for n, p in trained.items() if ".lora_B" in n or (".lora_" in n and p.ndim == 1)]
        yield "lora_plus_ratio", rates.lora_plus_ratio * default, faster
    of_parts = {"vit_lr": ("tower", rates.of_tower), "aligner_lr": ("aligner", rates.of_aligner)}
    for option, (part, rate) in of_parts.items():
        if rate is not None:
            base = base_of(model)
            parts, path = VisionParts.locate(base), next(p for p, m in model.named_modules() if m is base)
            of_part = [name for name in trained if parts.kind(name.removeprefix(f"{path}.")) == part]
            yield option, rate, of_part
    if rates.of_embeddings:
        yield "embedding_learning_rate", rates.of_embeddings, _embedding_names(model) & trained.keys()
    for pattern, rate in reversed([*rates.by_name.items()]):
        yield f"learning_rates {pattern!r}", rate, [*filter(compile_patterns([pattern]), trained)]


def _embedding_names(model: Any) -> set[str]:
    """Return the names of the parameters in the embedding or the head, or in a wrapper of these."""
    base = base_of(model)
    ends = filter(None, (base.get_input_embeddings(), base.get_output_embeddings()))
    inside = {id(parameter) for end in ends for parameter in end.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


# Updates of single parameters


def step_one(optimizer: Optimizer, parameter: Tensor, settings: Mapping[str, object]) -> None:
    """Update a single parameter, with the settings of its group, by an optimizer that has all its state in
    that of each parameter. All others stay as they are, with their gradients."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**settings, "params": [parameter]}]
    # bitsandbytes keeps settings of single weights, as 32 bits for embeddings, by their place in the groups
    manager = getattr(optimizer, "mng", None) or SimpleNamespace(index2config={}, pid2config={})
    by_place, own = manager.index2config, manager.pid2config.get(id(parameter))
    manager.index2config = {} if own is None else {(0, 0): own}
    try:
        type(optimizer).step(optimizer)  # the instance's own is counted by schedules
    finally:
        optimizer.param_groups, manager.index2config = groups, by_place


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
    """Refuse a model whose masters do not fit into the host's memory: the system would end the process."""
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
    """

    found_inf: Tensor | None = None  # a number on the device; if it is not 0 the next step changes nothing

    def __init__(self, optimizer: Optimizer):
        """Take over one of torch's optimizers, over the weights of a model, that has not stepped yet."""
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
        """Take a parameter's gradient to the host, for the next `step`, and free it on the device. `step`
        does nothing for it if `is_bad`, a bool on the device."""
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the masters from the gradients that are there or were sent, and the weights from these."""
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
