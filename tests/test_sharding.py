"""What a patch does where weights were sharded after it, without several processes."""

import pytest
import torch
from tiny import MIXED_LENGTHS, error, random_documents, run_packed, tiny_model

from unsloth_pack import patch_model

DOCUMENTS = random_documents(MIXED_LENGTHS)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "olmo2"])
def test_weights_of_zero3_are_read_by_their_own_modules_alone(arch):
    model = tiny_model(arch)
    patch = patch_model(model)
    fused = run_packed(model, DOCUMENTS)
    running, called = [], []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: running.append(module))
        module.register_forward_hook(lambda module, *_: called.append(running.pop()))
    for parameter in model.parameters():
        parameter.ds_id = 0  # as DeepSpeed marks them
    patch.adapt_to_sharding("ZeRO-3")
    assert patch.report.not_fused["LoRA"].endswith("ZeRO-3 gathers the weights of one module at a time")
    assert "LoRA" not in patch.report.fused
    assert "QK norm" not in patch.report.fused
    apart = run_packed(model, DOCUMENTS)
    owners = {id(module) for module in model.modules() if [*module.parameters(recurse=False)]}
    assert owners <= {id(module) for module in called}
    assert error(apart.logits, fused.logits) < 1e-5
    assert all(error(apart.grads[name], grad) < 1e-4 for name, grad in fused.grads.items())


def test_sharded_weights_are_not_captured():
    model = tiny_model("llama")
    patch = patch_model(model)
    patch.adapt_to_sharding("FSDP2")
    assert patch.report.not_fused["step"] == "not captured in CUDA graphs: FSDP2 shards the parameters"
    assert "LoRA" in patch.report.fused
    graphs = model.get_base_model().base_model.step_graphs
    row, ids = None, torch.zeros(1, 4, dtype=torch.int64)
    assert graphs.run(None, row, ids) is None
    assert "FSDP2" in str(graphs)
