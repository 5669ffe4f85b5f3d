"""Numbers on their way to the host, which waits for nothing that the device does after them."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor that is asked for now and read later.

    Asked for before the decoder runs and read after it, the device is well past the place, and the wait that
    remains leaves it all of the decoder's work to do: it never runs dry.
    """

    def __init__(self, tensor: Tensor):
        self._copy, self._arrived = tensor, None
        if tensor.is_cuda:
            with torch.cuda.device_of(tensor):
                self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._copy.copy_(tensor, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> Tensor:
        """The tensor on the host; on a CPU, itself."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
