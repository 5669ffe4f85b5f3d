"""AdamW over one tensor that holds all trained weights, one after the other.

A model has hundreds of adapter weights, all of them small. Clipping and updating them one by one takes Python
milliseconds, and the GPU dozens of launches. In one tensor it takes a norm, a product and a launch of AdamW.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from unsloth_pack.cuda_graphs.memory import alias_memory

# Many tensors in one, those of one shape next to each other.
#
# A model has hundreds of trained parameters and a few shapes. So cutting the tensor takes one operation for
# each shape, not one for each parameter.


class FlatLayout:
    """Where tensors of these shapes lie in one.

    Args:
        shapes: of the tensors; None for one that is left out.

    Attributes:
        order: the places, in `shapes`, of the tensors as they lie one after the other.
    """

    def __init__(self, shapes: Sequence[torch.Size | None]):
        places: dict[torch.Size, list[int]] = {}
        for place, shape in enumerate(shapes):
            if shape is not None:
                places.setdefault(shape, []).append(place)
        self.order = [*chain.from_iterable(places.values())]
        self._blocks = [(len(alike), *shape) for shape, alike in places.items()]
        self._sizes = [len(alike) * shape.numel() for shape, alike in places.items()]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, one for each of `order`."""
        parts: list[Tensor] = []
        for block, shape in zip(flat.split(self._sizes), self._blocks, strict=True):
            parts.extend(block.view(shape).unbind())
        return parts


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor that holds these, one after the other; an empty one of none."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


_OF_ADAM = "decoupled_weight_decay"  # an option by which torch makes AdamW of Adam
State = dict[str, Tensor]  # of a weight: "step", a number; moments, of the shape of the weight


class FlatAdamW(AdamW):
    """`torch.optim.AdamW`, computed over all weights at once.

    From outside it is AdamW: groups hold the model's own parameters, which become views of one tensor, and
    `state_dict()` holds the state of each, so that either optimizer goes on from the other's checkpoint. It
    goes on as AdamW does once an update has gradients for some of the weights alone.

    Args:
        params: as AdamW takes them. Those of one group, dtype and device lie in one tensor.
        options: AdamW's.
    """

    _flat: AdamW | None = None  # over the tensors that hold the weights, as long as these step together

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **options)
        self._flatten()

    @classmethod
    def in_place_of(cls, optimizer: AdamW) -> "FlatAdamW":
        """One with the groups and options of an optimizer that has not made a step."""
        options = {name: value for name, value in optimizer.defaults.items() if name != _OF_ADAM}
        return cls(optimizer.param_groups, **options)

    def flat_weights(self) -> list[Tensor]:
        """The tensors that hold the weights, with their gradients; empty if a weight has no gradient.

        A gradient changes with that of the weights, and the other way round.
        """
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
        for name in ("grad_scale", "found_inf"):  # tensors by which a caller may leave out the update
            setattr(flat, name, getattr(self, name, None))
        flat.step()
        flat.zero_grad()  # the weights keep theirs
        if not self.state:
            self._share_state()
        return None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As AdamW's."""
        super().add_param_group(param_group)
        self._split()

    def state_dict(self) -> dict[str, Any]:
        """As AdamW's."""
        saved = super().state_dict()
        return saved | {"state": {key: _with_own_step(state) for key, state in saved["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW's."""
        super().load_state_dict(state_dict)
        self._flatten()

    def __getstate__(self) -> dict[str, Any]:
        held = super().__getstate__()
        return held | {"state": {p: _with_own_step(state) for p, state in held["state"].items()}}

    def _flatten(self) -> None:
        """Put the weights, and the state that there is, into one tensor; not if their steps differ."""
        self._split()
        blocks = [_blocks_of(group["params"]) for group in self.param_groups]
        self._blocks = [*chain.from_iterable(blocks)]
        states = [block.joined_state(self.state) for block in self._blocks]
        if None in states or len(set(map(bool, states))) > 1:
            return
        groups = zip(self.param_groups, blocks, strict=True)
        self._flat = AdamW([{**group, "params": [b.weights for b in of_group]} for group, of_group in groups])
        for block, state in zip(self._blocks, states, strict=True):
            self._flat.state[block.weights].update(state or {})
        self._share_state()

    def _share_state(self) -> None:
        """Give every weight its part of the state."""
        flat: Any = self._flat
        for block in self._blocks:
            for name, value in flat.state[block.weights].items():
                parts = block.cut(value) if name != "step" else [value] * len(block.parameters)
                for parameter, part in zip(block.parameters, parts, strict=True):
                    self.state[parameter][name] = part

    def _split(self) -> None:
        """Go on as AdamW does, with the state where it is."""
        if self._flat is not None:
            self.state.update({p: _with_own_step(state) for p, state in self.state.items()})
            self._flat = None


def _with_own_step(state: Mapping[str, Any]) -> dict[str, Any]:
    """A weight's state, with a count of steps that it shares with no other weight."""
    return {name: value.clone() if name == "step" else value for name, value in state.items()}


class _Block:
    """Parameters that lie in one tensor, one after the other.

    Args:
        parameters: of one dtype, on one device. Where they do not lie so, they become views of a new tensor.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        # In the order of a captured step's gradients
        by_shape = FlatLayout([parameter.shape for parameter in parameters])
        self.parameters = [parameters[place] for place in by_shape.order]
        self._layout = FlatLayout([parameter.shape for parameter in self.parameters])
        starts = accumulate((parameter.numel() for parameter in self.parameters), initial=0)
        self._offsets = [parameters[0].element_size() * start for start in starts]
        in_one = self._in_one([parameter.detach() for parameter in self.parameters])
        self.weights = self._moved() if in_one is None else in_one
        self.weights.requires_grad_()

    def _moved(self) -> Tensor:
        weights = joined([parameter.detach() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, self.cut(weights), strict=True):
            parameter.data = part
        return weights

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Its part for each parameter, in the parameter's shape."""
        return self._layout.cut(flat)

    def join_gradients(self) -> bool:
        """Give `weights` the parameters' gradients.

        Returns:
            Whether there is one for each, and the parameters still are parts of `weights`.
        """
        self.weights.grad = None
        gradients = [grad for p in self.parameters if (grad := p.grad) is not None]
        if len(gradients) < len(self.parameters) or not self._are_parts(self.weights, self.parameters):
            return False
        in_one = self._in_one(gradients)
        if in_one is None:
            in_one = joined(gradients)
            for parameter, part in zip(self.parameters, self.cut(in_one), strict=True):
                parameter.grad = part
        self.weights.grad = in_one
        return True

    def joined_state(self, states: Mapping[Tensor, State]) -> State | None:
        """The state of `weights`: empty if no parameter has any, None if their steps differ."""
        found = [states.get(parameter, {}) for parameter in self.parameters]
        if any(state.keys() != found[0].keys() for state in found):
            return None
        if not found[0]:
            return {}
        steps = torch.stack([state["step"] for state in found])
        if bool((steps != steps[0]).any()):
            return None
        moments = {name: joined([state[name] for state in found]) for name in found[0] if name != "step"}
        return {"step": steps[0].clone(), **moments}

    def _in_one(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The tensor of which these, of the parameters' shapes, are the parts; None if there is none."""
        first = tensors[0]
        n_bytes = first.storage_offset() * first.element_size() + self._offsets[-1]
        if first.untyped_storage().nbytes() < n_bytes:
            return None
        flat = first.as_strided((self._offsets[-1] // first.element_size(),), (1,))
        return flat if self._are_parts(flat, tensors) else None

    def _are_parts(self, flat: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether these, of the parameters' shapes, lie in `flat` one after the other."""
        start = flat.data_ptr()
        lie_there = [tensor.data_ptr() - start for tensor in tensors] == self._offsets[:-1]
        return lie_there and all(map(Tensor.is_contiguous, tensors))


def _blocks_of(parameters: Sequence[Tensor]) -> list[_Block]:
    """The parameters of a group by dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [_Block(of_kind) for of_kind in alike.values()]


# The gradients that a graph computes, in one tensor, from which every replay hands out copies.


class FlatGradients:
    """Gradients of many parameters in one tensor.

    Args:
        grads: of every parameter; None where none reaches it. They are copied, in a capture by the graph.
        dtype: of the copies that are handed out.
    """

    def __init__(self, grads: Sequence[Tensor | None], dtype: torch.dtype):
        self._layout = FlatLayout([None if grad is None else grad.shape for grad in grads])
        order = self._layout.order
        self._flat = joined([grad for place in order if (grad := grads[place]) is not None])
        self._dtype = dtype
        found = {place: number for number, place in enumerate(order)}
        # Behind all gradients stands a None, for parameters that have none; it is picked twice more and left
        # out, so that there are always two, of which `itemgetter` makes a tuple
        self._in_order = itemgetter(*(found.get(place, -1) for place in range(len(grads))), -1, -1)

    def lend_memory(self) -> None:
        """After a capture: other graphs may use the memory, as copies are taken right after a replay."""
        self._flat = alias_memory(self._flat)

    def copies(self) -> tuple[Tensor | None, ...]:
        """A copy of every parameter's gradient: the next replay overwrites the originals."""
        flat = self._flat.to(self._dtype, copy=True)
        cut: list[Tensor | None] = [*self._layout.cut(flat), None]
        return self._in_order(cut)[:-2]
