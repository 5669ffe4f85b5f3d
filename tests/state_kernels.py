"""Stand-ins for the kernels of flash-linear-attention, causal-conv1d and mamba_ssm, which need a GPU.

They have the signatures of the kernels and are found as transformers finds those. They check the boundaries
that they get, and go through every document token by token, as the papers define it.
"""

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from tiny import tiny_config
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback


class Kernels:
    """The stand-ins, and how often each ran."""

    def __init__(self):
        self.carrying = set()  # names of those that carry over from document to document
        self.calls = []

    def install(self, monkeypatch, arch):
        """As if the packages had been installed before transformers was imported."""
        config = tiny_config(arch)
        # Imported before the packages are there: what it finds then, it keeps
        modeling = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
        functions = [
            ("fla", self.chunk_gated_delta_rule),
            ("causal_conv1d", self.causal_conv1d_fn),
            ("mamba_ssm", self.mamba_chunk_scan_combined),
            ("mamba_ssm", self.mamba_split_conv1d_scan_combined),
        ]
        packages = {name: ModuleType(name) for name in ("fla", "causal_conv1d", "mamba_ssm")}
        for name, package in packages.items():
            package.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, package)
        for theirs, (package, function) in {
            "torch_chunk_gated_delta_rule": functions[0],
            "causal_conv1d_fn": functions[1],
            "mamba2_chunk_scan": functions[2],
            "mamba2_split_conv1d_scan_combined": functions[3],
        }.items():
            setattr(packages[package], function.__name__, function)
            if (original := getattr(modeling, theirs, None)) is not None:
                found = use_kernel_func_from_hub_with_fallback(function.__name__, package)
                monkeypatch.setattr(modeling, theirs, found(inspect.unwrap(original)))

    def causal_conv1d_fn(
        self, x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
        final_states_out=None, activation=None,
    ):  # fmt: skip
        """`[B, C, T]`."""
        assert seq_idx is None or x.stride(1) == 1  # which causal-conv1d asks for
        width = weight.shape[1]
        outs = [
            F.conv1d(F.pad(part, (width - 1, 0)), weight[:, None], bias, groups=len(weight))
            for part in self._parts("causal_conv1d_fn", x, 2, _lengths_of(seq_idx, x.shape[0], x.shape[2]))
        ]
        out = torch.cat(outs, 2)
        return out if activation is None else F.silu(out)

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
    ):  # fmt: skip
        """Yang et al. 2024, equation 10; `[B, T, H, D]`."""
        assert (kwargs, initial_state, use_qk_l2norm_in_kernel) == ({}, None, True)
        lengths = None
        if cu_seqlens is not None:
            assert len(q) == 1
            assert cu_seqlens.dtype in (torch.int32, torch.int64)
            assert cu_seqlens_cpu.dtype == torch.int64
            assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist()
            lengths = cu_seqlens.diff().tolist()
            assert sum(lengths) == q.shape[1]
        n_groups = v.shape[2] // q.shape[2]
        q, k = (_normed(x).repeat_interleave(n_groups, 2) for x in (q, k))
        parts = [
            self._parts("chunk_gated_delta_rule", x, 1, lengths)
            for x in (q * q.shape[-1] ** -0.5, k, v, g.exp(), beta)
        ]
        outs = []
        for q_BTHK, k_BTHK, v_BTHV, decay_BTH, beta_BTH in zip(*parts, strict=True):
            state_BHKV = v.new_zeros(len(v), v.shape[2], q.shape[-1], v.shape[-1])
            for t in range(q_BTHK.shape[1]):
                state_BHKV = state_BHKV * decay_BTH[:, t, :, None, None]
                seen = torch.einsum("bhk,bhkv->bhv", k_BTHK[:, t], state_BHKV)
                new = (v_BTHV[:, t] - seen) * beta_BTH[:, t, :, None]
                state_BHKV = state_BHKV + torch.einsum("bhk,bhv->bhkv", k_BTHK[:, t], new)
                outs.append(torch.einsum("bhk,bhkv->bhv", q_BTHK[:, t], state_BHKV))
        return torch.stack(outs, 1).to(v.dtype), None

    def mamba_chunk_scan_combined(
        self, x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
        cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
        return_varlen_states=False,
    ):  # fmt: skip
        """Dao and Gu 2024, equation 1; `[B, T, H, P]`."""
        assert (z, initial_states, cu_seqlens, return_final_states) == (None, None, None, False)
        lengths = _lengths_of(seq_idx, *x.shape[:2])
        dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
        n_heads = x.shape[2] // B.shape[2]
        each = (x, dt, A * dt, B.repeat_interleave(n_heads, 2), C.repeat_interleave(n_heads, 2))
        outs = []
        for x_BTHP, dt_BTH, decay_BTH, b_BTHN, c_BTHN in zip(
            *(self._parts("mamba_chunk_scan_combined", part, 1, lengths) for part in each), strict=True
        ):
            state_BHPN = x.new_zeros(*x[:, 0].shape, B.shape[-1])
            for t in range(x_BTHP.shape[1]):
                step = dt_BTH[:, t, :, None] * x_BTHP[:, t]
                state_BHPN = state_BHPN * decay_BTH[:, t].exp()[..., None, None]
                state_BHPN = state_BHPN + torch.einsum("bhp,bhn->bhpn", step, b_BTHN[:, t])
                outs.append(torch.einsum("bhpn,bhn->bhp", state_BHPN, c_BTHN[:, t]))
        return (torch.stack(outs, 1) + D[:, None] * x).to(x.dtype)

    def mamba_split_conv1d_scan_combined(
        self, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None,
        seq_idx=None, dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu",
        rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None,
        ngroups=1, norm_before_gate=True,
    ):  # fmt: skip
        """All of the above between the two projections, and the second one."""
        assert (activation, norm_before_gate) == ("silu", False)
        self.calls.append("mamba_split_conv1d_scan_combined")
        width, n_states = len(A) * headdim, (len(conv1d_weight) - len(A) * headdim) // 2
        z, xbc, dt = zxbcdt.split([width, len(conv1d_weight), len(A)], -1)
        xbc = self.causal_conv1d_fn(
            xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation
        ).transpose(1, 2)
        x, b, c = xbc.split([width, n_states, n_states], -1)
        out = self.mamba_chunk_scan_combined(
            x.unflatten(-1, (-1, headdim)),
            dt,
            A,
            b.unflatten(-1, (ngroups, -1)),
            c.unflatten(-1, (ngroups, -1)),
            chunk_size,
            D,
            dt_bias=dt_bias,
            seq_idx=seq_idx,
            dt_limit=dt_limit,
        ).flatten(-2)
        gated = (out * F.silu(z)).unflatten(-1, (ngroups, -1))
        if rmsnorm_weight is None:
            return F.linear(gated.flatten(-2), outproj_weight, outproj_bias)
        normed = gated * (gated.square().mean(-1, keepdim=True) + rmsnorm_eps).rsqrt()
        return F.linear(normed.flatten(-2) * rmsnorm_weight, outproj_weight, outproj_bias)

    def _parts(self, name, x, dim, lengths):
        """The documents, or all as one where there are no boundaries or the kernel carries over."""
        self.calls.append(name)
        return [x] if lengths is None or name in self.carrying else x.split(lengths, dim)


def _normed(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _lengths_of(seq_idx, n_rows, n_tokens):
    if seq_idx is None:
        return None
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape == (n_rows, n_tokens) == (1, n_tokens)
    numbers, counts = seq_idx[0].unique_consecutive(return_counts=True)
    assert numbers.tolist() == list(range(len(numbers)))
    return counts.tolist()
