"""CUDA graphs on a CPU: what runs in a capture is recorded, and computed again over the same tensors."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


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


class Graph:
    def __init__(self):
        self.recorder = Recorder()

    def pool(self):
        return (0, 1)

    def reset(self):
        pass

    def replay(self):
        self.recorder.replay()


def record_graphs(monkeypatch):
    """Capture without a GPU. A replay computes again."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **at: zeros(*shape, **(at | {"device": CPU})))
    stream = SimpleNamespace(wait_stream=lambda other: None, device_index=0)
    for name, made in {
        "CUDAGraph": Graph,
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "set_stream": nullcontext,
        "graph": lambda graph, *_, **__: graph.recorder,
        "use_mem_pool": nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
