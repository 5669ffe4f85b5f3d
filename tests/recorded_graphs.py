"""CUDA graphs on a CPU: what runs in a capture is recorded, and computed again over the same tensors."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


class Asked(list):
    """The calls made while this device was the current one, and the graphs that share the pool."""

    device = 0

    def __init__(self):
        self.sharing = set()


class Recorder(TorchDispatchMode):
    """What is computed inside is computed again, over the same tensors, by `replay`: a graph on a CPU."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, made in self.calls:
            again = tree_leaves(function(*args, **kwargs))
            for first, second in zip(tree_leaves(made), again, strict=True):
                if isinstance(first, torch.Tensor):
                    first.copy_(second)


def record_graphs(monkeypatch):
    """Capture without a GPU. A replay computes again.

    Returns:
        What captures and warm-ups ask of CUDA, in order.
    """
    asked = Asked()

    @contextmanager
    def graph(graph, pool, stream, capture_error_mode="global"):
        asked.append(("capture", pool, stream, capture_error_mode))
        with graph.recorder:
            yield
        asked.sharing.add(graph)

    class Graph:
        def __init__(self):
            self.recorder = Recorder()

        def pool(self):
            return (asked.device, 1)

        def reset(self):
            asked.sharing.discard(self)

        def replay(self):
            self.recorder.replay()

    @contextmanager
    def use_mem_pool(pool):
        asked.append(("warm-up", pool.id))
        yield

    def stream():
        return SimpleNamespace(wait_stream=lambda other: asked.append(("wait",)), device_index=asked.device)

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **at: zeros(*shape, **(at | {"device": CPU})))
    for name, made in {
        "CUDAGraph": Graph,
        "current_device": lambda: asked.device,
        "empty_cache": lambda: None,
        "Stream": stream,
        "current_stream": stream,
        "stream": nullcontext,
        "set_stream": nullcontext,
        "graph": graph,
        "use_mem_pool": use_mem_pool,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    return asked
