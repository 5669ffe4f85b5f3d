"""Copies to the host that do not wait for the work that the device gets after them."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor that is copied to the host now and read later.

    Start the copy before the decoder and read it after the decoder was launched. By then the copy is usually
    done, and if not, the host waits for the copy alone: the device keeps the decoder's work and stays busy.
    """

    def __init__(self, tensor: Tensor):
        self._copy, self._arrived = tensor, None
        if tensor.is_cuda:
            with torch.cuda.device_of(tensor):
                self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                self._copy.copy_(tensor, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> Tensor:
        """The tensor on the host; on a CPU, itself."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
