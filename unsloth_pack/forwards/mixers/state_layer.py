"""Layers that carry a state from token to token: recurrences and short convolutions.

transformers' own forward computes them. A packed row goes through it in one of two ways, with one result:

- once, with the boundaries of the documents, where kernels are installed that restart the state at each;
- without such kernels in stacks of documents of similar length, each in a row of its own, padded on the
  right. What comes later reaches no token of such a layer, so padding changes nothing.

Which of the two is tried out, see `why_not_in_one_row`: kernels that are missing, or that do not know the
boundaries, are found there and not by a version number.

Shapes: B rows of T tokens, N = B * T, S documents of a stack of L tokens each, C channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.errors import first_line
from unsloth_pack.forwards.mixers.contract import Choice, Request
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules.eager import runs_eagerly
from unsloth_pack.row.packed_row import PackedRow

IN_ONE_ROW = "kernels"  # the names of the two ways, for reports
BY_DOCUMENT = "document by document"
_TRIED_LENGTHS = (37, 64, 5)  # of the documents that the kernels are tried with
_ROUNDING = 0.01  # of the greatest output; what carries over changes outputs by much more

Boundaries = Callable[[PackedRow], Mapping[str, Any]]


def seq_idx(row: PackedRow) -> dict[str, Any]:
    """`[1, N]` int32, the number of each token's document, as causal-conv1d and mamba_ssm take it."""

    def made() -> Tensor:
        return row.upload(np.repeat(np.arange(len(row.lengths), dtype=np.int32), row.lengths)[None])

    return {"seq_idx": row.once("seq_idx", made)}


class FastStateLayer(nn.Module):
    """Takes the place of the class of a transformers module that carries a state.

    Args:
        boundaries: makes the arguments by which transformers' forward keeps the documents of a row apart;
            None where it cannot.
        rounds_together: whether its kernels sum over several documents on the way, and take such sums apart
            again. Then what stands beside a document changes how its numbers round.
    """

    boundaries: Boundaries | None
    rounds_together = False

    @runs_eagerly
    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        packed_row: PackedRow | None = None,
        seq_idx: PackedRow | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`[B, T, C]` for `[B, T, C]`.

        Args:
            packed_row: the documents of the rows.
            seq_idx: likewise: transformers' layers hand only this on in some versions.
        """
        row = seq_idx if packed_row is None else packed_row
        if row is None:
            return self.run_whole(hidden_states, *args, **kwargs)
        hidden_NC = hidden_states.flatten(0, 1)
        if self.boundaries is not None and len(hidden_NC) > 1:  # see `run_whole`
            out = self.run_whole(hidden_NC[None], **self.boundaries(row))
        else:
            stacks = [self.run_stack(hidden_NC[stack_SL]).flatten(0, 1) for stack_SL in row.stacks]
            out = torch.cat(stacks)[row.unstack]
        return out.view(*hidden_states.shape[:2], -1)

    def run_whole(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """transformers' forward. A lone token gets another one behind it, which changes nothing of it:
        causal-conv1d's backward pass refuses rows of one token."""
        cache = kwargs.get("cache_params", kwargs.get("past_key_values"))
        if hidden_states.shape[1] > 1 or cache is not None or not torch.is_grad_enabled():
            return super().forward(hidden_states, *args, **kwargs)
        return super().forward(F.pad(hidden_states, (0, 0, 0, 1)), *args, **kwargs)[:, :1]

    def run_stack(self, hidden_SLC: Tensor) -> Tensor:
        """`[S, L, C]` for a stack of documents."""
        return self.run_whole(hidden_SLC)


@dataclass(frozen=True)
class StateMixer:
    """A `Mixer` of layers that carry a state.

    Args:
        kind: for the report.
        attribute: see `Mixer`.
        boundaries: see `FastStateLayer`.
        packages: the modules of the kernels that take them, and what installs each.
        known_names: of parameters, submodules and attributes that transformers' modules have, in any version.
        forward: see `Mixer`.
    """

    kind: str
    attribute: str
    boundaries: Boundaries
    packages: Mapping[str, str]
    known_names: str
    forward: type[FastStateLayer] = FastStateLayer

    def choose(self, module: Any, spec: ArchSpec, request: Request) -> Choice:
        captured = f"a {self.kind} reads the row on the host"
        missing = [name for package, name in self.packages.items() if find_spec(package) is None]
        if missing:
            why_not: str | None = f"{' and '.join(missing)} not installed"
            remedy = f"pip install {' '.join(missing)}"
        else:
            why_not = self._why_not_in_one_row(module, request)
            remedy = f"install other releases of {' and '.join(self.packages.values())}"
        if why_not is None:
            return Choice(IN_ONE_ROW, f"{self.kind}: its kernels take the boundaries", captured)
        slow = f"{self.kind} layers run document by document, which is slow: {why_not}; {remedy}"
        remedy_said = slow if request.device_type == "cuda" else None
        return Choice(BY_DOCUMENT, f"{self.kind}: {why_not}", captured, remedy=remedy_said)

    def attributes(self, spec: ArchSpec, backend: str, choice: Choice) -> dict[str, Any]:
        return {"boundaries": self.boundaries if choice.name == IN_ONE_ROW else None}

    def what_is_fused(self, module: Any, spec: ArchSpec, how: str) -> tuple[dict[str, str], dict[str, str]]:
        return {}, {self.kind: "as transformers wrote it, documents kept apart; its LoRA layers one by one"}

    def known(self, spec: ArchSpec) -> frozenset[str]:
        """The names that this mixer accounts for in transformers' module."""
        return frozenset(self.known_names.split())

    def _why_not_in_one_row(self, module: Any, request: Request) -> str | None:
        own = getattr(module, "original_module", module)
        theirs = type(own).__bases__[1] if isinstance(own, FastStateLayer) else type(own)
        assert request.config is not None
        make = partial(_made_anew, theirs, request.config, own)
        place = torch.device(request.device_type), request.dtype, request.config.hidden_size
        try_out = partial(why_not_in_one_row, make, self.boundaries, *place, self.forward.rounds_together)
        why_not: str | None = request.once((self.kind, theirs), try_out)
        return why_not


def _made_anew(kind: type[nn.Module], config: Any, own: Any) -> nn.Module:
    """Another module of its kind, with the buffers that the model around it gives such modules."""
    made = kind(config, own.layer_idx)
    for name, buffer in own.named_buffers(recurse=False):
        if name not in dict(made.named_buffers(recurse=False)):
            made.register_buffer(name, buffer.clone(), persistent=False)
    return made


def why_not_in_one_row(
    make: Callable[[], nn.Module],
    boundaries: Boundaries,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    rounds_together: bool,
) -> str | None:
    """Try out whether a module keeps the documents of a row apart. None where it does.

    No gradient of the last document may reach those before, and changing them may change it by no more than
    another equal run does: by no bit, where its kernels add up in one order.

    Args:
        make: the module with fresh weights, which are replaced.
        width: C of its input.
        rounds_together: see `FastStateLayer`; then its rounding may change, too.
    """
    row = PackedRow.of_lengths(_TRIED_LENGTHS, device)
    start = int(row.starts[-1])
    cuda = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), torch.device(device):
            torch.manual_seed(0)
            module = make().to(dtype)
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.1)
            given, mixed = torch.randn(2, 1, row.n_tokens, width).to(dtype)
            mixed[:, start:] = given[:, start:]
            given.requires_grad_()
            for training in (True, False):
                module.train(training)
                before, after, again = (
                    module(x, **boundaries(row))[0, start:] for x in (given, mixed, given)
                )
                (reached,) = torch.autograd.grad(before.sum(), given)  # which some refuse on some GPUs
                if not before.isfinite().all() or not before.any() or not reached[:, start:].any():
                    return "the installed kernels give nothing"
                allowed = (again - before).abs().max()
                if rounds_together:
                    allowed = torch.maximum(allowed, _ROUNDING * before.abs().max())
                if reached[:, :start].any() or not (after - before).abs().max() <= allowed:
                    return "the installed kernels do not keep documents apart"
    except Exception as error:  # of Triton, of a missing operator, of an argument that nothing takes
        return f"the installed kernels do not run ({type(error).__name__}: {first_line(error)})"
    return None
