"""Seeds of LoRA dropout. A layer that is computed again has to draw the same ones again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_here = threading.local()  # the backward pass computes layers again in a thread of autograd's


class SeedTape:
    """The seeds that were drawn while this was first played, in order. Every later time hands them out again.

    `torch.utils.checkpoint` puts the generator back instead, which a CUDA graph cannot do.
    """

    def __init__(self) -> None:
        self._seeds: list[Tensor] = []
        self._next = 0

    @contextmanager
    def played(self) -> Iterator[None]:
        """Seeds come from the beginning of this tape."""
        before, self._next = getattr(_here, "tape", None), 0
        _here.tape = self
        try:
            yield
        finally:
            _here.tape = before

    def next_seed(self, device: torch.device) -> Tensor:
        if self._next == len(self._seeds):
            self._seeds.append(_drawn(device))
        self._next += 1
        return self._seeds[self._next - 1]


def new_seed(device: torch.device) -> Tensor:
    """`[1]` int64, drawn on the device, so that nothing waits for it."""
    tape: SeedTape | None = getattr(_here, "tape", None)
    return _drawn(device) if tape is None else tape.next_seed(device)


def _drawn(device: torch.device) -> Tensor:
    return torch.randint(2**62, (1,), device=device)
