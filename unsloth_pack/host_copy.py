"""Copy tensors to the host without waiting for later work of the device."""

import torch
from torch import Tensor


class HostCopy:
    """Copy a tensor to the host now, to read it later.

    Start the copy before the decoder and read it after the decoder's launch, so that the GPU stays busy.
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
        """Return the tensor on the host; waits for the copy only."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
