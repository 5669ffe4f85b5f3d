"""`ExtraLogits` whose tensors are leaves at the end of a kernel's, for tests that vary and cast these."""

from functools import partial

import torch

from unsloth_pack.kernels import ExtraLogits

RANK = 3
KINDS_OF_EXTRA = ("an adapter", "an adapter's A alone", "trained tokens")


def with_extra(kind, tensors):
    """Append the leaves, and return the options of a kernel's call that read them."""
    hidden, weight, *bias = tensors
    like = {"dtype": hidden.dtype, "device": hidden.device}
    tensors.append(torch.randn(*hidden.shape[:-1], RANK, **like).requires_grad_())
    if kind != "trained tokens":
        b = torch.randn(len(weight), RANK, **like) / RANK
        tensors.append(b.requires_grad_(kind == "an adapter"))
    return {"extra": partial(of_leaves, kind), "with_bias": bool(bias)}


def of_leaves(kind, tensors):
    if kind != "trained tokens":
        return ExtraLogits(tensors[-2], b=tensors[-1])
    V = len(tensors[1])
    return ExtraLogits(tensors[-1], outputs=torch.tensor([V - 1, 0, V // 2], device=tensors[-1].device))
