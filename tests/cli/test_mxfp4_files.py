"""gpt-oss in MXFP4 on the command line: trained, merged, asked, verified; what cannot hold it is refused."""

import pytest
import torch
from mxfp4_folder import save_in_mxfp4
from tiny import error
from transformers import AutoModelForCausalLM

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.cli import main


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return str(save_in_mxfp4(tmp_path_factory.mktemp("mxfp4"), num_experts_per_tok=4))  # a route never flips


def test_an_adapter_on_its_experts(train, packed, tmp_path, capsys):
    targets = ["q_proj", "v_proj", "gate_up_proj", "down_proj"]
    assert train(model_name=packed, r=4, target_modules=",".join(targets), dtype="bfloat16") == 0
    adapter, merged = str(tmp_path / "out"), str(tmp_path / "merged")
    assert main(["merge", "--model_name", adapter, "--save_path", merged]) == 0
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert not hasattr(plain.config, "quantization_config")
    ours, _ = FastLanguageModel.from_pretrained(adapter, max_seq_length=64, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert error(plain(ids).logits, ours.eval()(ids).logits) < 0.01  # merged in bfloat16
        with ours.disable_adapter():
            assert error(plain(ids).logits, ours(ids).logits) > 0.02, "what was trained matters"
    capsys.readouterr()
    assert main(["generate", "--model_name", adapter, "--prompt", "ab", "--max_new_tokens", "4"]) == 0
    assert capsys.readouterr().out


@pytest.mark.nightly
def test_it_is_verified(packed, capsys):
    assert main(["verify", "--model_name", packed, "--dtype", "float32"]) == 0
    assert "all checks passed" in capsys.readouterr().out


def test_deepspeed_is_refused(packed, capsys):
    assert main(["estimate", "--model_name", packed, "--max_seq_length", "64", "--deepspeed", "zero2"]) == 2
    said = capsys.readouterr().err
    assert "has experts in MXFP4, which it does not take; give --fsdp" in said
