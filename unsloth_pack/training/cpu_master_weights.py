"""Weights in 16 bits on the device, and their float32 masters with the optimizer's state on the host.

    device                               host
    gradient, bfloat16  ── copied ──▶    staged, bfloat16, pinned
                                         master, moments: float32; the optimizer steps here
    weight, bfloat16    ◀── copied ──    staged: the master, rounded to nearest

An update that is smaller than a weight's last place in 16 bits is kept by the master, and shows once a few
have added up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsloth_pack.errors import InputError

# An optimizer that steps one parameter, or leaves some out, as the device decides.


def step_one(optimizer: Optimizer, parameter: Tensor, settings: Mapping[str, Any]) -> None:
    """Update a single parameter from its gradient. All others stay as they are, with their gradients.

    Args:
        optimizer: one that keeps nothing in its groups, but all in the state of each parameter.
        settings: of the parameter's group.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**settings, "params": [parameter]}]
    try:
        with _own_settings_of(optimizer, parameter):
            type(optimizer).step(optimizer)  # the instance's own is counted by schedules
    finally:
        optimizer.param_groups = groups


@contextmanager
def _own_settings_of(optimizer: Any, parameter: Tensor) -> Iterator[None]:
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


def leave_out(optimizer: Any, parameters: Iterable[Tensor], is_bad: Tensor) -> None:
    """Let the optimizer's next step do nothing for these parameters if `is_bad`.

    With an optimizer on CUDA that is not fused their gradients become zero, while momentum and weight decay
    still act.

    Args:
        is_bad: a bool, on the device.
    """
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


_MASTER = "master"  # in the state of each parameter, beside what the optimizer keeps
_BYTES = {"master": 4, "moments": 8, "staged": 2}  # of a weight, on the host


def check_host_memory(model: nn.Module) -> None:
    """Refuse a model whose masters do not fit into the host's memory: the system would end the process.

    Raises:
        InputError: says how much they take.
    """
    needed = sum(_BYTES.values()) * sum(p.numel() for p in model.parameters() if p.requires_grad)
    free = psutil.virtual_memory().available
    if needed > free:
        raise InputError(
            f"masters_on_host takes {needed / 2**30:.1f} GiB of host memory, of which {free / 2**30:.1f} GiB "
            "are free; give --optim adamw_torch_8bit --optim_args bf16_stochastic_round=true in its place",
            about="masters_on_host",
        )


@dataclass
class _Sent:
    """A gradient on its way to the host, as the settings of its group were then."""

    parameter: Tensor
    settings: Mapping[str, Any]
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
        master = parameter.detach().to("cpu", torch.float32, copy=True)
        self._masters[parameter] = master
        self._staged[parameter] = torch.empty(
            parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda
        )
        return master

    def send(self, parameter: Tensor, settings: Mapping[str, Any], is_bad: Tensor | None = None) -> None:
        """Take a parameter's gradient to the host, for the next `step`, and free it on the device.

        Args:
            settings: of the parameter's group.
            is_bad: a bool on the device: whether `step` is to leave the parameter as it is.
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
        """In float32, where the next one will lie too: fresh pages of memory cost more than their numbers."""
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
            own |= {name: value for name, value in group.items() if name != "params"}
        saved = self._on_host.state_dict()
        masters = dict(enumerate(self._in_order()))
        states = {place: {**state, _MASTER: masters[place]} for place, state in saved["state"].items()}
        return {**saved, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's. Parameters without a master keep the one that was made of their weight."""
        masters = dict(enumerate(self._in_order()))
        states = {}
        for place, state in state_dict["state"].items():
            states[place] = {name: value for name, value in state.items() if name != _MASTER}
            if _MASTER in state:
                masters[place].copy_(state[_MASTER])
        self._on_host.load_state_dict({**state_dict, "state": states})
        self.state = self._on_host.state
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= {name: value for name, value in loaded.items() if name != "params"}

    def _in_order(self) -> Iterator[Tensor]:
        """The masters, as a state dict numbers them."""
        return (self._masters[parameter] for group in self.param_groups for parameter in group["params"])
