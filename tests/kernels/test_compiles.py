"""The head's kernels compile for a GPU. The interpreter does not tell: it knows no types of variables."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
CODE = """
import itertools, sys
from importlib import import_module

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

scores = import_module("unsloth_pack.kernels.token_scores")
loss = import_module("unsloth_pack.kernels.linear_cross_entropy")
POINTERS = ("log_probs", "entropies", "tops", "means", "squares", "losses", "g_log_probs", "g_entropies")
TYPES = {"logits": "*bf16", "labels": "*i64", "scale": "fp32", "softcap": "fp32", "V": "i32"}
TYPES |= dict.fromkeys(POINTERS, "*fp32")
for kernel in (scores._score_kernel, scores._gradient_kernel, loss._cross_entropy_kernel):
    flags = [name for name in kernel.arg_names if name.isupper() and name not in ("V", "BLOCK")]
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    for values in itertools.product([False, True], repeat=len(flags)):
        if len(flags) > 3 and len(set(values[1:-1])) > 1:
            continue  # every score or none: each is a branch of its own
        constants = dict(zip(flags, values)) | {"BLOCK": 1024}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        print("compiled", kernel.__name__, constants)
"""


def test_the_kernels_of_the_head_compile_for_hopper(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}  # what was compiled before proves nothing
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=540, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("compiled") == 8 + 8 + 4
