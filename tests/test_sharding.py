"""What a patch does where weights were sharded after it, without several processes."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import model_has_dtensor
from tiny import DEVICE, MIXED_LENGTHS, error, random_documents, run_packed, tiny_model
from torch import distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from unsloth_pack import modules, patch_model
from unsloth_pack.checkpoints.sharded import _cut_rows, _list_matrices, gather_layers
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision
from unsloth_pack.layers import layer as fast_layer
from unsloth_pack.memory.checkpointing import enable_checkpointing

DOCUMENTS = random_documents(MIXED_LENGTHS)


@pytest.mark.parametrize("arch", ["qwen3", "gemma4_text", "youtu"])
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
    assert patch.report.not_fused["loss"].endswith("ZeRO-3 gathers the weights of one module at a time")
    assert "loss" not in patch.report.fused
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


@pytest.fixture(scope="module")
def mesh():
    """Of one process: its shards are whole, but gathered and freed all the same."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    distributed.destroy_process_group()


def sharded(model, mesh, *apart):
    """Shards the modules in `apart` and each decoder layer by itself, then the rest; freed when possible."""
    for module in (*apart, *model.get_base_model().base_model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model


def packed_step(model):
    """The loss, the logits and all gradients, whole."""
    ids = torch.cat(DOCUMENTS)[None].to(DEVICE)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, packed_seq_lengths=MIXED_LENGTHS)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return out.loss, out.logits, whole


def assert_same_step(ours, theirs):
    (loss, logits, grads), (their_loss, their_logits, their_grads) = ours, theirs
    torch.testing.assert_close(loss, their_loss)
    assert error(logits.detach(), their_logits.detach()) < 1e-5
    assert grads.keys() == their_grads.keys()
    assert all(error(grads[name], grad) < 1e-5 for name, grad in their_grads.items())


@pytest.mark.parametrize(
    ("arch", "checkpointing"), [("qwen3", False), ("phi3", True), ("gemma4_text", "offload")]
)
def test_fsdp2_makes_the_step_of_whole_weights(arch, checkpointing, mesh, monkeypatch, caplog):
    model = tiny_model(arch)
    patch = patch_model(model)
    patch.skip_probe()
    enable_checkpointing(model, checkpointing)
    whole = packed_step(model)
    patch.undo()
    patch = patch_model(model)
    sharded(model, mesh)
    patch.adapt_to_sharding("FSDP2")
    assert "loss" not in patch.report.fused
    assert patch.report.not_fused["loss"] == "from the logits of all tokens: FSDP shards the head"
    assert "LoRA" not in patch.report.not_fused
    nodes, node = [], fast_layer.gated_mlp
    monkeypatch.setattr(fast_layer, "gated_mlp", lambda *args: nodes.append(args) or node(*args))
    for _ in range(2):  # the second gathers into the memory of the first
        assert_same_step(packed_step(model), whole)
    assert nodes
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert caplog.text.count("not probed for leaks between documents: the parameters are sharded") == 1


def test_factors_that_fsdp2_gathers_by_themselves_are_not_fused(mesh):
    model = tiny_model("llama")
    patch = patch_model(model)
    patch.skip_probe()
    whole = packed_step(model)
    mlp = model.get_base_model().base_model.layers[0].mlp
    attention = model.get_base_model().base_model.layers[1].self_attn
    apart = [mlp.down_proj.lora_A["default"], attention.q_proj.lora_B["default"]]
    sharded(model, mesh, *apart)
    patch.adapt_to_sharding("FSDP2")
    assert patch.report.not_fused["LoRA"] == "2 layers: FSDP2 gathers its factors by themselves"
    assert_same_step(packed_step(model), whole)


# What is asked of modules and parameters


def by_tensor_parallelism(layers, mesh):
    layers[1].weight = nn.Parameter(distribute_tensor(layers[1].weight.detach(), mesh, [Shard(0)]))


@pytest.mark.parametrize(
    ("shard", "how"),
    [
        (lambda layers, mesh: None, None),
        (lambda layers, mesh: setattr(layers[1].bias, "ds_id", 0), "ZeRO-3"),
        (lambda layers, mesh: fully_shard(layers[1], mesh=mesh), "FSDP2"),
        (lambda layers, _: layers.append(nn.ModuleDict({"_fsdp_wrapped_module": layers.pop(1)})), "FSDP1"),
        (by_tensor_parallelism, "tensor parallelism"),
    ],
    ids=lambda value: str(value) if not callable(value) else "",
)
def test_what_shards_a_model(shard, how, mesh):
    layers = nn.Sequential(*(nn.Linear(4, 4, device=DEVICE) for _ in range(3)))
    shard(layers, mesh)
    assert modules.sharded_by(layers) == how


def cut_layers(model, mesh):
    for layer in model.get_base_model().base_model.layers:
        for module, name, weight in _list_matrices([layer]):
            if not weight.requires_grad:
                module._parameters[name] = _cut_rows(weight, mesh)
    gather_layers(model)


@pytest.mark.parametrize(("machines", "how"), [(2, "FSDP2"), (1, None)])
def test_a_trainer_wraps_layers_in_parts_in_ddp(machines, how, mesh, monkeypatch):
    """On GPUs accelerate refuses every `DTensor` under DDP. Here one CPU passes for several of them."""
    monkeypatch.setattr(Accelerator, "multi_device", True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 - machines))
    model = tiny_model("llama")
    patch = patch_model(model)
    whole = packed_step(model)
    cut_layers(model, mesh)
    assert modules.sharded_by(model) == how
    wrapped = Accelerator().prepare_model(model)
    assert isinstance(wrapped, DistributedDataParallel)
    assert Accelerator().prepare_model(wrapped) is wrapped
    patch.skip_probe()
    loss, logits, grads = packed_step(wrapped)
    assert_same_step((loss, logits, {name.removeprefix("module."): g for name, g in grads.items()}), whole)
    assert model_has_dtensor(model)  # which accelerate refuses


@pytest.mark.gpu
def test_steps_over_layers_of_peers_are_captured(mesh, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(CaptureDecision, "is_held_up", lambda *_: True)
    models = [tiny_model("llama", torch.bfloat16, num_hidden_layers=5) for _ in range(2)]
    for model in models:
        patch_model(model, "flash")
    cut_layers(models[1], mesh)
    for seed in range(8):
        ids = torch.cat(random_documents(MIXED_LENGTHS, seed=seed))[None].to(DEVICE)
        for model in models:
            model.zero_grad()
            model(input_ids=ids, labels=ids, packed_seq_lengths=MIXED_LENGTHS).loss.backward()
            if seed % 3 == 2:
                with torch.no_grad():
                    model(input_ids=ids)
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            if ours.requires_grad:
                assert torch.equal(ours.grad, theirs.grad)
    assert all(str(model.get_base_model().model.step_graphs).startswith("captured for") for model in models)
