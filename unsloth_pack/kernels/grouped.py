"""GEMMs of groups of rows, each group with a matrix of its own, as routed experts have them.

The rows of a group lie one after another, and where the groups end is read on the device: torch's grouped
GEMM does so in bfloat16 on GPUs of compute capability 8.0 and above. Elsewhere the groups run one by one,
which reads on the host where they end.

S rows in E groups, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import reference_experts as reference

_BYTES = 16  # that rows of a grouped GEMM are multiples of


def grouped_mm(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of every group times the group's matrix: `[S, O]`. Without autograd.

    Args:
        x_SI: rows, sorted by group; every row is in one.
        weight_EIO: of the same dtype; a transposed view is read in place.
        ends_E: int32, the first row after each group.
    """
    if _run_grouped(x_SI, weight_EIO, x_SI.shape[1], weight_EIO.shape[2]):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    return reference.grouped_mm(x_SI, weight_EIO, ends_E)


def grouped_outer(left_SI: Tensor, right_SO: Tensor, ends_E: Tensor) -> Tensor:
    """leftᵀ right of the rows of every group: `[E, I, O]`, zeros of groups without rows. Without autograd.

    Args:
        left_SI, right_SO: rows, sorted by group, of one dtype.
        ends_E: as for `grouped_mm`.
    """
    if _run_grouped(left_SI, right_SO, left_SI.shape[1], right_SO.shape[1]):
        product_EIO = F.grouped_mm(left_SI.t(), right_SO, offs=ends_E)
        # A GEMM of no rows may leave what was in the memory before
        is_empty_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
        return product_EIO.masked_fill_(is_empty_E[:, None, None], 0)
    return reference.grouped_outer(left_SI, right_SO, ends_E)


def why_not_grouped(dtype: torch.dtype, device: torch.device, *sizes: int) -> str | None:
    """Why GEMMs in a dtype run group by group; None where they are one grouped GEMM.

    Args:
        sizes: the inputs and outputs of all of them.
    """
    if dtype != torch.bfloat16:
        return f"torch has no grouped GEMM in {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's grouped GEMM needs compute capability 8.0"
    if odd := [size for size in sizes if size * dtype.itemsize % _BYTES]:
        return f"torch's grouped GEMM needs sizes that are multiples of 8, one is {odd[0]}"
    return None


def _run_grouped(left: Tensor, right: Tensor, *sizes: int) -> bool:
    is_aligned = left.data_ptr() % _BYTES == right.data_ptr() % _BYTES == 0
    return is_aligned and len(left) > 0 and why_not_grouped(right.dtype, right.device, *sizes) is None
