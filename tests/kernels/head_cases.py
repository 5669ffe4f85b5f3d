"""Inputs of the kernels over a head, and its plain logits."""

import torch
import torch.nn.functional as F
from exactness import DEVICE


def make(*shape: int, V: int, dtype=torch.float32, unlabelled=0.3, bias=False, trains_head=True):
    """hidden, weight and perhaps bias, which want gradients, and labels that reach both ends of V."""
    tensors = [torch.randn(*shape), torch.randn(V, shape[-1]) / shape[-1] ** 0.5]
    tensors += [torch.randn(V)] if bias else []
    labels = torch.randint(0, V, shape[:-1])
    labels[torch.rand(shape[:-1]) < unlabelled] = -100
    labels.view(-1)[:2] = torch.tensor([0, V - 1])[: labels.numel()]
    tensors = [x.to(DEVICE, dtype).requires_grad_(i == 0 or trains_head) for i, x in enumerate(tensors)]
    return tensors, labels.to(DEVICE)


def leaves(tensors, dtype=None):
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_(x.requires_grad) for x in tensors]


def plain_logits(hidden, weight, bias, extra):
    """The logits as transformers rounds them."""
    logits = F.linear(hidden, weight, bias)
    if extra is not None and extra.b is not None:
        return logits + F.linear(extra.h, extra.b)
    return logits if extra is None else logits.index_copy(-1, extra.outputs, extra.h)
