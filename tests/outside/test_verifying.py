"""`verify` as a person meets it: what it calls a fault, and what it says meanwhile."""

import signal

import pytest
import torch
from outside_models import plain_and_patched

from unsloth_pack import verify
from unsloth_pack.cli import main

DOCUMENTS = [[1], [2, 3, 4, 5, 6], [7], [8] * 9]


def rounds_otherwise(shape):
    """A hook that rounds the embeddings of `[rows, tokens]` as other kernels would."""

    def hook(module, args, output):
        return (
            output * (1 + 3e-5 * torch.arange(output.shape[-1]).cos()) if output.shape[:2] == shape else None
        )

    return hook


def test_kernels_of_one_token_alone_may_round_otherwise():
    """Their products are less exact than those of many tokens, and a trained model raises that tenfold."""
    _, model = plain_and_patched()
    model.model.embed_tokens.register_forward_hook(rounds_otherwise((1, 1)))
    report = verify(model, documents=DOCUMENTS)
    assert report.passed, str(report)
    assert max(check.value for check in report.checks if "against alone" in check.name) > 1e-6


def test_packed_rows_may_not():
    _, model = plain_and_patched()
    model.model.embed_tokens.register_forward_hook(rounds_otherwise((1, sum(map(len, DOCUMENTS)))))
    failed = {check.name for check in verify(model, documents=DOCUMENTS).checks if not check.passed}
    assert {"logits against alone", "embedding gradients against alone"} <= failed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_ends_in_one_line(number, model_folder, capsys):
    calls = []

    def interrupt(module, args):
        if hasattr(module, "lm_head"):
            calls.append(module)
            if len(calls) == 9:
                signal.raise_signal(number)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(interrupt)
    try:
        assert main(["verify", f"--model_name={model_folder}"]) == 128 + number
    finally:
        hook.remove()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("unsloth-pack: interrupted")
