"""Run layers whose weights are divided among the processes of one machine.

A process copies the parts that it lacks from the memory of the others. Frozen weights never change, so no
process waits for another. The copy engines of a GPU copy a layer while the one before it is computed, into
one of two places that all layers share. Such copies can be captured in CUDA graphs, unlike the gathering of
FSDP2, which Python starts anew for every layer and pass.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ALIGNMENT = 256  # bytes, of every weight: as torch allocates


class PeerLayer(nn.Module):
    """Replaces the class of a layer: its weights are there while it runs."""

    layer_number: int
    peer_weights: "PeerWeights"

    def forward(self, *args: object, **kwargs: object) -> Any:
        weights, number = self.peer_weights, self.layer_number
        with weights.present(number):
            output = super().forward(*args, **kwargs)
        for each in [output] if isinstance(output, Tensor) else output:
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: weights.use(number))  # autograd has saved the place, not a copy
        return output


@dataclass
class _Weight:
    """A weight of a layer: this process's rows, which the module has, and the place of the whole."""

    module: nn.Module
    name: str
    rows: Any  # a parameter, and a `DTensor`
    parts: list[Tensor]  # the rows of every process
    whole: nn.Parameter = field(init=False)
    into: list[Tensor] = field(init=False)  # the same rows of the whole

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        n_bytes: int = self.rows.numel() * self.rows.dtype.itemsize
        return n_bytes

    def place(self, memory: Tensor) -> None:
        """Put the whole into this memory, uint8 of at least its bytes."""
        values = memory[: self.nbytes].view(self.rows.dtype).view(self.rows.shape)
        # `data` has a version of its own: autograd would take copies into the memory for changes of a weight
        self.whole = nn.Parameter(values.data, requires_grad=False)
        self.into = [*values.split([*map(len, self.parts)])]


class PeerWeights:
    """The weights of all layers, two of which are whole at a time; of none where no layer is in parts."""

    def __init__(
        self, layers: Sequence[list[_Weight]] = (), rank: int = 0, device: torch.device | None = None
    ):
        self._layers, self._rank = layers, rank
        sizes = [[-(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT for weight in layer] for layer in layers]
        n_bytes = max(map(sum, sizes), default=0)
        places = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for number, (layer, own) in enumerate(zip(layers, sizes, strict=True)):
            for weight, memory in zip(layer, places[number % 2][: sum(own)].split(own), strict=True):
                weight.place(memory)
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._last, self._way = 0, 1  # the layer that ran last, and where to: 1 forward, -1 backward
        self.reset()

    @contextmanager
    def present(self, number: int) -> Iterator[None]:
        """Give a layer its whole weights inside this context."""
        self.use(number)
        for weight in self._layers[number]:
            weight.module._parameters[weight.name] = weight.whole
        try:
            yield
        finally:
            for weight in self._layers[number]:
                weight.module._parameters[weight.name] = weight.rows

    def reset(self) -> None:
        """Take no layer as copied."""
        self.held: list[int | None] = [None, None]  # the layer in each place
        self._copied: list[Any] = [None, None]  # the event after the copies into each place

    def join(self) -> None:
        """Have the current stream wait for all copies."""
        for copied in filter(None, self._copied):
            torch.cuda.current_stream().wait_event(copied)
        self._copied = [None, None]

    def hold(self, layers: Sequence[int | None]) -> None:
        """Have these layers in the places, as when a graph was captured."""
        for number in layers:
            if number is not None:
                self._fetch(number)
        self.join()

    def use(self, number: int) -> None:
        """Have a layer whole in its place, and start to copy the next one in the direction of the pass."""
        if number != self._last:
            self._way = 1 if number > self._last else -1
        if number in (0, len(self._layers) - 1):  # where a pass turns
            self._way = -1 if number else 1
        self._last = number
        self._fetch(number)
        if (copied := self._copied[number % 2]) is not None:
            torch.cuda.current_stream().wait_event(copied)
        if 0 <= number + self._way < len(self._layers):
            self._fetch(number + self._way)

    def _fetch(self, number: int) -> None:
        """Start to copy a layer; what is launched before may still read the one in its place."""
        place = number % 2
        if self.held[place] == number:
            return
        self.held[place] = number
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream), torch.no_grad():
            weights, own = self._layers[number], self._rank
            for rank in range(len(weights[0].parts)):
                if rank != own:
                    for weight in weights:
                        weight.into[rank].copy_(weight.parts[rank])
            # A copy within a device is a kernel, which delays the GEMMs: one for all weights
            torch._foreach_copy_([each.into[own] for each in weights], [each.parts[own] for each in weights])
        self._copied[place] = None if self._stream is None else self._stream.record_event()


def read_from_peers(layers: Sequence[nn.Module]) -> PeerWeights | None:
    """Give layers with `DTensor`s their weights from the memory of all processes; every process calls this.

    Returns:
        The weights. None if the processes are not on one machine, or one cannot read another's memory.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != dist.get_world_size():
        return None
    places = [[*_list_parts(layer)] for layer in layers]
    own = [rows.to_local() for layer in places for _, _, rows in layer]
    parts = _read_parts(own)
    if parts is None:
        return None
    each, device = iter(parts), own[0].device
    all_weights = [[_Weight(*place, next(each)) for place in layer] for layer in places]
    weights = PeerWeights(all_weights, dist.get_rank(), device)
    kinds: dict[type[nn.Module], Any] = {
        kind: type(kind.__name__, (PeerLayer, kind), {"__module__": kind.__module__})
        for kind in {*map(type, layers)}
    }
    for number, layer in enumerate(layers):
        layer.__class__ = kinds[type(layer)]
        vars(layer).update(layer_number=number, peer_weights=weights)
    return weights


def _list_parts(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in layer.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, DTensor):
                yield module, name, weight


def _read_parts(own: list[Tensor]) -> list[list[Tensor]] | None:
    """Return the tensors of all processes in place of each of this one's; None if one cannot read them.

    Those of the others appear on the device of this process, which reads them over a link.
    """
    device, opened = own[0].device, list[list[Tensor]]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    shared = _gather_results(lambda: [_share(tensor) for tensor in own])
    if shared is None:
        return None

    def open_all() -> bool:
        for rank, each in enumerate(shared):
            opened.append(own if rank == dist.get_rank() else [_open(tensor, device) for tensor in each])
        return True

    return None if _gather_results(open_all) is None else [[*parts] for parts in zip(*opened, strict=True)]


def _gather_results(function: Callable[[], Any]) -> list[Any] | None:
    """Call a function in every process and gather the results; None if it raises a RuntimeError in one."""
    result = None
    with suppress(RuntimeError):
        result = function()
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, result)
    return None if any(each is None for each in of_all) else of_all


def _share(tensor: Tensor) -> Any:
    """Return what `_open` needs in another process of this machine."""
    handle, storage = None, cast(Any, tensor.untyped_storage())
    if tensor.numel():
        handle = storage._share_cuda_() if tensor.is_cuda else storage._share_filename_cpu_()
    return handle, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _open(shared: Any, device: torch.device) -> Tensor:
    """Open the memory of another process as a tensor on a device of this one.

    Opened on the other's device it would take a context there, which is hundreds of megabytes.
    """
    handle, start, shape, stride, dtype = shared
    if handle is None:
        return torch.empty(shape, dtype=dtype, device=device)
    kind: Any = torch.UntypedStorage
    if device.type == "cuda":
        _, *memory, counter, number, event, _ = handle
        storage = kind._new_shared_cuda(device.index, *memory, counter, number, event, False)
        kind._release_ipc_counter_cuda(counter, number)  # the other would warn as it ends
    else:
        storage = kind._new_shared_filename_cpu(*handle)
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device=device).set_(storage, start, shape, stride)
