"""Gated short convolution, as of LFM2: its last tokens would go over to the next document."""

from unsloth_pack.forwards.mixers.state_layer import StateMixer, seq_idx

SHORT_CONVOLUTION = StateMixer(
    kind="short convolution",
    attribute="conv",
    boundaries=seq_idx,
    packages={"causal_conv1d": "causal-conv1d"},
    known_names="L_cache bias config conv conv_kernel_size in_proj layer_idx layer_type out_proj",
)
