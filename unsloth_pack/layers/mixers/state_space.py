"""Run layers that carry a state from token to token: recurrences and short convolutions.

transformers' own forward computes them. The state, and the last tokens of a convolution, must not pass into
the next document. So a packed row goes through the forward once, with the boundaries of the documents, if the
installed kernels restart the state at each, which `StateMixer` tries. Else documents of similar length go
through in stacks, padded on the right: no later token reaches an earlier one.

Shapes: B rows of T tokens, N = B * T, S documents of a stack of L tokens each, C channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from unsloth_pack.errors import first_line
from unsloth_pack.layers.mixers.contract import Choice, Mixer, Report, Request
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import attribute_set, has_hooks, is_gathered_by_module, no_compile
from unsloth_pack.packed_row.row import PackedRow

IN_ONE_ROW, BY_DOCUMENT = "kernels", "document by document"  # the two ways, for reports
_TRIED_LENGTHS = (37, 64, 5)  # of the documents that the kernels are tried with
_ROUNDING = 0.01  # of the greatest output; a leaking state changes outputs by much more
_CHUNK = 64  # tokens; transformers' torch code builds a product for each pair of tokens in a chunk

Boundaries = Callable[[PackedRow], Mapping[str, Tensor]]


def seq_idx(row: PackedRow) -> dict[str, Tensor]:
    """Return `[1, N]` int32, the number of each token's document, for causal-conv1d and mamba_ssm."""
    numbers = np.arange(len(row.lengths), dtype=np.int32)
    return {"seq_idx": row.once("seq_idx", lambda: row.upload(np.repeat(numbers, row.lengths)[None]))}


class FastStateLayer(nn.Module):
    """Replaces the class of a transformers module that carries a state."""

    # Builds arguments by which transformers' forward keeps documents apart; None if it cannot
    boundaries: Boundaries | None
    rounds_together = False  # its kernels subtract sums over several documents, which change its rounding

    @no_compile
    def forward(
        self,
        hidden_states: Tensor,
        *args: object,
        packed_row: PackedRow | None = None,
        seq_idx: PackedRow | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Compute `[B, T, C]`; layers of some versions pass `packed_row` on as `seq_idx` only."""
        row = seq_idx if packed_row is None else packed_row
        if row is None:
            return self.run_whole(hidden_states, *args, **kwargs)
        hidden_NC = hidden_states.flatten(0, 1)
        if self.boundaries is not None and len(hidden_NC) > 1:  # see `run_whole`
            out = self.run_whole(hidden_NC[None], **self.boundaries(row))
        else:
            stacks, unstack = row.stacks
            out = torch.cat([self.run_stack(hidden_NC[stack]).flatten(0, 1) for stack, _ in stacks])[unstack]
        return out.view(*hidden_states.shape[:2], -1)

    def run_whole(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run transformers' forward; a lone token gets another: causal-conv1d trains no rows of one."""
        cache = kwargs.get("cache_params", kwargs.get("past_key_values"))
        if hidden_states.shape[1] > 1 or cache is not None or not torch.is_grad_enabled():
            out: Tensor = super().forward(hidden_states, *args, **kwargs)
            return out
        out = super().forward(F.pad(hidden_states, (0, 0, 0, 1)), *args, **kwargs)
        return out[:, :1]

    def run_stack(self, hidden_SLC: Tensor) -> Tensor:
        """Compute `[S, L, C]` for a stack of documents."""
        return self.run_whole(hidden_SLC)


@dataclass(frozen=True)
class StateMixer(Mixer):
    """Layers that carry a state."""

    kind: str  # for the report
    attribute: str
    boundaries: Boundaries  # see `FastStateLayer`
    packages: Mapping[str, str]  # the modules of the kernels that take boundaries, and what installs each
    known_names: str  # parameters, submodules and attributes of transformers' modules, in any version
    forward: type[FastStateLayer] = FastStateLayer

    def choose(self, module: nn.Module, spec: ArchSpec, request: Request) -> Choice:
        why_not_captured = f"a {self.kind} reads the row on the host"
        missing = [name for package, name in self.packages.items() if find_spec(package) is None]
        if missing:
            why_not: str | None = f"{' and '.join(missing)} not installed"
            remedy = f"pip install {' '.join(missing)}"
        else:
            why_not = self._why_not_in_one_row(module, request)
            remedy = f"install other releases of {' and '.join(self.packages.values())}"
        if why_not is None:
            return Choice(IN_ONE_ROW, f"{self.kind}: its kernels take the boundaries", why_not_captured)
        slow = f"{self.kind} layers run document by document, which is slow: {why_not}; {remedy}"
        warning = slow if request.device_type == "cuda" else None
        return Choice(BY_DOCUMENT, f"{self.kind}: {why_not}", why_not_captured, remedy=warning)

    def attributes(self, spec: ArchSpec, backend: str, choice: Choice) -> dict[str, Any]:
        return {"boundaries": self.boundaries if choice.name == IN_ONE_ROW else None}

    def what_is_fused(self, module: nn.Module, spec: ArchSpec, how: str) -> tuple[Report, Report]:
        return {}, {self.kind: "as transformers wrote it, documents kept apart; its LoRA layers one by one"}

    def _why_not_in_one_row(self, module: nn.Module, request: Request) -> str | None:
        own = getattr(module, "original_module", module)
        theirs = type(own).__bases__[1] if isinstance(own, FastStateLayer) else type(own)
        if theirs not in request.tried:
            request.tried[theirs] = self._try_kernels(theirs, own, request)
        return request.tried[theirs]

    def _try_kernels(self, kind: type[nn.Module], own: nn.Module, request: Request) -> str | None:
        """Return why a module of this kind does not keep the documents of a row apart, or None.

        No gradient of the last document may reach those before. Changing them may change it by no more than
        another equal run does or, where kernels sum over several documents, by rounding.
        """
        config, device = request.config, torch.device(request.device_type)
        assert config is not None
        row = PackedRow.of_lengths(_TRIED_LENGTHS, device)
        start = int(row.starts[-1])
        cuda = [torch.cuda.current_device()] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=cuda), torch.enable_grad(), torch.device(device):
                torch.manual_seed(0)
                module = _rebuild(kind, config, own).to(request.dtype)
                for parameter in module.parameters():
                    nn.init.normal_(parameter, std=0.1)
                inputs, mixed = torch.randn(2, 1, row.n_tokens, config.hidden_size).to(request.dtype)
                mixed[:, start:] = inputs[:, start:]
                inputs.requires_grad_()
                for training in (True, False):
                    module.train(training)
                    runs = (module(x, **self.boundaries(row))[0, start:] for x in (inputs, mixed, inputs))
                    before, after, again = runs
                    (reached,) = torch.autograd.grad(before.sum(), inputs)  # some refuse it on some GPUs
                    if not before.isfinite().all() or not before.any() or not reached[:, start:].any():
                        return "the installed kernels give nothing"
                    allowed = (again - before).abs().max()
                    if self.forward.rounds_together:
                        allowed = torch.maximum(allowed, _ROUNDING * before.abs().max())
                    if reached[:, :start].any() or not (after - before).abs().max() <= allowed:
                        return "the installed kernels do not keep documents apart"
        except Exception as error:  # from Triton, a missing operator, or an unknown argument
            return f"the installed kernels do not run ({type(error).__name__}: {first_line(error)})"
        return None


def _rebuild(kind: type[nn.Module], config: PreTrainedConfig, own: nn.Module) -> nn.Module:
    """Build another module of its kind, with the buffers that the model around it adds."""
    module = kind(config, own.layer_idx)
    for name, buffer in own.named_buffers(recurse=False):
        if name not in dict(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.clone(), persistent=False)
    return module


class FastMamba2(FastStateLayer):
    """Replaces the class of a transformers Mamba-2 layer (Dao and Gu 2024, "Transformers are SSMs")."""

    rounds_together = True  # mamba_ssm takes a decay as a difference of sums from a chunk's beginning
    training: bool
    chunk_size: int
    out_proj: nn.Module

    def run_whole(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run transformers' forward; in training its kernels ignore adapters and hooks of `out_proj`."""
        if not self.training or _is_plain(self.out_proj):
            return super().run_whole(hidden_states, *args, **kwargs)
        with attribute_set([self], "training", False):  # it means nothing else in this module
            return super().run_whole(hidden_states, *args, **kwargs)

    def run_stack(self, hidden_SLC: Tensor) -> Tensor:
        """Run a stack in short chunks, which change time and memory in torch, but not the result."""
        with attribute_set([self], "chunk_size", min(self.chunk_size, _CHUNK)):
            return super().run_stack(hidden_SLC)


def _is_plain(linear: nn.Module) -> bool:
    return type(linear) is nn.Linear and not has_hooks(linear) and not is_gathered_by_module(linear.weight)


MAMBA2 = StateMixer(
    kind="Mamba-2",
    attribute="mamba",
    boundaries=seq_idx,
    packages={"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"},
    known_names="""
        A_log D act activation chunk_size config conv1d conv_dim conv_kernel_size dt_bias
        groups_time_state_size head_dim hidden_size in_proj intermediate_size layer_idx
        layer_norm_epsilon layer_type mamba_rms_norm mup_vector n_groups norm num_heads out_proj
        ssm_in_multiplier ssm_state_size time_step_limit use_bias use_conv_bias use_mem_eff_path
        """,
    forward=FastMamba2,
)


def _delta_net_boundaries(row: PackedRow) -> dict[str, Tensor]:
    """Return document numbers for causal-conv1d, and for fla the ends, on the host too: else it waits."""
    ends = row.once("cu_seqlens_cpu", lambda: torch.tensor([0, *np.cumsum(row.lengths).tolist()]))
    return seq_idx(row) | {"cu_seq_lens_q": row.cu_seqlens, "cu_seqlens_cpu": ends}


# Yang et al. 2024, "Gated Delta Networks"
GATED_DELTA_NET = StateMixer(
    kind="gated delta net",
    attribute="linear_attn",
    boundaries=_delta_net_boundaries,
    packages={"fla": "fla-core", "causal_conv1d": "causal-conv1d"},
    known_names="""
        A_log a_proj activation allow_neg_eigval b_proj config conv1d conv_dim conv_kernel_size dt_bias
        eps g_proj head_k_dim head_v_dim hidden_size in_proj_a in_proj_b in_proj_ba in_proj_qkv
        in_proj_qkvz in_proj_z k_proj key_dim layer_idx layer_norm_epsilon layer_type norm num_k_heads
        num_v_heads o_norm o_proj out_proj q_proj v_proj value_dim
        """,
)


SHORT_CONVOLUTION = StateMixer(
    kind="short convolution",
    attribute="conv",
    boundaries=seq_idx,
    packages={"causal_conv1d": "causal-conv1d"},
    known_names="L_cache bias config conv conv_kernel_size in_proj layer_idx layer_type out_proj",
)
