"""AdamW over one tensor of all trained weights, and the gradients of a graph in one tensor.

A model has hundreds of small adapter weights. Clipping and updating them one by one takes Python milliseconds
and the GPU dozens of launches. In one tensor it takes a norm, a product and a launch of AdamW. The weights
have few shapes; those of one shape are neighbours, so that cutting takes one operation for each shape.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from unsloth_pack.cuda_graphs.memory import alias_memory


class FlatLayout:
    """The layout of tensors of these shapes in one; None leaves one out."""

    def __init__(self, shapes: Sequence[torch.Size | None]):
        places: dict[torch.Size, list[int]] = {}
        for place, shape in enumerate(shapes):
            if shape is not None:
                places.setdefault(shape, []).append(place)
        self.order = [*chain.from_iterable(places.values())]  # indices in `shapes`
        self._blocks = [(len(alike), *shape) for shape, alike in places.items()]
        self._sizes = [len(alike) * shape.numel() for shape, alike in places.items()]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Cut `flat` into its parts, one for each of `order`."""
        parts: list[Tensor] = []
        for block, shape in zip(flat.split(self._sizes), self._blocks, strict=True):
            parts.extend(block.view(shape).unbind())
        return parts


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


_ADAM_OPTION = "decoupled_weight_decay"  # by which torch turns Adam into AdamW
State = dict[str, Tensor]  # of a weight: "step", a number; moments, of the shape of the weight


class FlatAdamW(AdamW):
    """`torch.optim.AdamW`, computed over all weights at once.

    Groups hold the model's own parameters, which become views of one tensor, and `state_dict()` holds the
    state of each, so that either optimizer continues from the other's checkpoint. An update with gradients
    for only some of the weights turns it into plain AdamW. Parameters of one group, dtype and device share a
    tensor.
    """

    _flat: AdamW | None = None  # over the flat tensors, while all weights step together

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **options)
        self._flatten()

    @classmethod
    def in_place_of(cls, optimizer: AdamW) -> "FlatAdamW":
        """Build one with the groups and options of an optimizer before its first step."""
        options = {name: value for name, value in optimizer.defaults.items() if name != _ADAM_OPTION}
        return cls(optimizer.param_groups, **options)

    def flat_weights(self) -> list[Tensor]:
        """Return the flat weights with their gradients, shared with the weights'; empty if one has none."""
        if self._flat is None or not all(block.join_gradients() for block in self._blocks):
            return []
        return [block.weights for block in self._blocks]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As AdamW's."""
        if closure is None and all(p.grad is None for group in self.param_groups for p in group["params"]):
            return None
        if closure is not None or not self.flat_weights():
            self._split()
            return super().step(closure)
        flat: Any = self._flat
        for flat_group, group in zip(flat.param_groups, self.param_groups, strict=True):
            flat_group |= {name: value for name, value in group.items() if name != "params"}
        for name in ("grad_scale", "found_inf"):  # by these tensors a caller may skip the update
            setattr(flat, name, getattr(self, name, None))
        flat.step()
        flat.zero_grad()  # the weights keep theirs
        if not self.state:
            self._share_state()
        return None

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """As AdamW's."""
        super().add_param_group(param_group)
        self._split()

    def state_dict(self) -> dict[str, Any]:
        """As AdamW's."""
        saved = super().state_dict()
        return saved | {"state": {key: _with_own_step(state) for key, state in saved["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """As AdamW's."""
        super().load_state_dict(state_dict)
        self._flatten()

    def __getstate__(self) -> dict[str, Any]:
        attributes = super().__getstate__()
        return attributes | {"state": {p: _with_own_step(state) for p, state in attributes["state"].items()}}

    def _flatten(self) -> None:
        """Move the weights and their state into one tensor, unless their steps differ."""
        self._split()
        blocks = [_build_blocks(group["params"]) for group in self.param_groups]
        self._blocks = [*chain.from_iterable(blocks)]
        states = [block.join_state(self.state) for block in self._blocks]
        if None in states or len(set(map(bool, states))) > 1:
            return
        groups = zip(self.param_groups, blocks, strict=True)
        self._flat = AdamW([{**group, "params": [b.weights for b in parts]} for group, parts in groups])
        for block, state in zip(self._blocks, states, strict=True):
            self._flat.state[block.weights].update(state or {})
        self._share_state()

    def _share_state(self) -> None:
        """Set every weight's state to its part of the flat state."""
        flat: Any = self._flat
        for block in self._blocks:
            for name, value in flat.state[block.weights].items():
                parts = block.cut(value) if name != "step" else [value] * len(block.parameters)
                for parameter, part in zip(block.parameters, parts, strict=True):
                    self.state[parameter][name] = part

    def _split(self) -> None:
        """Continue as plain AdamW, without moving the state."""
        if self._flat is not None:
            self.state.update({p: _with_own_step(state) for p, state in self.state.items()})
            self._flat = None


def _with_own_step(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a weight's state with a step count of its own."""
    return {name: value.clone() if name == "step" else value for name, value in state.items()}


class _Block:
    """Parameters of one dtype and device in one flat tensor, of which they become parts."""

    def __init__(self, parameters: Sequence[Tensor]):
        # In the order of a captured step's gradients
        layout = FlatLayout([parameter.shape for parameter in parameters])
        self.parameters = [parameters[place] for place in layout.order]
        self.cut = layout.cut
        starts = accumulate((parameter.numel() for parameter in self.parameters), initial=0)
        self._offsets = [parameters[0].element_size() * start for start in starts]
        own = [parameter.detach() for parameter in self.parameters]
        flat = self._find_flat(own)
        if flat is None:
            flat = join(own)
            for parameter, part in zip(self.parameters, self.cut(flat), strict=True):
                parameter.data = part
        self.weights = flat.requires_grad_()

    def join_gradients(self) -> bool:
        """Set the gradient of `weights`; False if a parameter has none or is no part of it any more."""
        self.weights.grad = None
        gradients = [grad for p in self.parameters if (grad := p.grad) is not None]
        if len(gradients) < len(self.parameters) or not self._are_parts(self.weights, self.parameters):
            return False
        flat = self._find_flat(gradients)
        if flat is None:
            flat = join(gradients)
            for parameter, part in zip(self.parameters, self.cut(flat), strict=True):
                parameter.grad = part
        self.weights.grad = flat
        return True

    def join_state(self, states: Mapping[Tensor, State]) -> State | None:
        """Join the state of all parameters: empty if none has any, None if their steps differ."""
        own = [states.get(parameter, {}) for parameter in self.parameters]
        if any(state.keys() != own[0].keys() for state in own):
            return None
        if not own[0]:
            return {}
        steps = torch.stack([state["step"] for state in own])
        if bool((steps != steps[0]).any()):
            return None
        moments = {name: join([state[name] for state in own]) for name in own[0] if name != "step"}
        return {"step": steps[0].clone(), **moments}

    def _find_flat(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the flat tensor that these tensors are parts of, or None."""
        first = tensors[0]
        n_bytes = first.storage_offset() * first.element_size() + self._offsets[-1]
        if first.untyped_storage().nbytes() < n_bytes:
            return None
        flat = first.as_strided((self._offsets[-1] // first.element_size(),), (1,))
        return flat if self._are_parts(flat, tensors) else None

    def _are_parts(self, flat: Tensor, tensors: Sequence[Tensor]) -> bool:
        """True if these tensors are the consecutive parts of `flat`."""
        start = flat.data_ptr()
        are_there = [tensor.data_ptr() - start for tensor in tensors] == self._offsets[:-1]
        return are_there and all(map(Tensor.is_contiguous, tensors))


def _build_blocks(parameters: Sequence[Tensor]) -> list[_Block]:
    """Build a block for each dtype and device of a group's parameters."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(map(_Block, alike.values()))


class FlatGradients:
    """The gradients of many parameters in one tensor that a graph writes; `dtype` is that of `copies`."""

    def __init__(self, grads: Sequence[Tensor | None], dtype: torch.dtype):
        self._layout = FlatLayout([None if grad is None else grad.shape for grad in grads])
        order = self._layout.order
        self._flat = join([grad for place in order if (grad := grads[place]) is not None])
        self._dtype = dtype
        # The number of each gradient in `order`; of a parameter without one that of the None in `copies`
        numbers = {place: number for number, place in enumerate(order)}
        self._numbers = [numbers.get(place, -1) for place in range(len(grads))]

    def release_to_pool(self) -> None:
        """Let other graphs use the memory after a capture: copies are taken right after a replay."""
        self._flat = alias_memory(self._flat)

    def copies(self) -> tuple[Tensor | None, ...]:
        """Copy every parameter's gradient: the next replay overwrites the originals."""
        flat = self._flat.to(self._dtype, copy=True)
        cut: list[Tensor | None] = [*self._layout.cut(flat), None]
        return tuple([cut[number] for number in self._numbers])
