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


def lengths_of(step):
    """Rows of one shape: about 200 tokens in documents that change."""
    return [[90, 60, 45], [120, 1, 80], [30, 31, 33, 100], [64, 136], [100, 95]][step % 5]


def graphs_of(model):
    return model.get_base_model().model.step_graphs
