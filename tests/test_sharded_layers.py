"""A base in parts, one a process: weights, loss and gradients of a whole one, in a share of its memory.

The grid has every architecture (`test_grid.py`); adapters of other layers than its own are here.
"""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from model_folder import save_model
from mxfp4_folder import save_in_mxfp4
from own_memory import own_memory
from tiny import MIXED_LENGTHS, random_documents
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from warm import in_two_processes

from unsloth_pack import FastLanguageModel
from unsloth_pack.errors import InputError
from unsloth_pack.lora.quantised import count_weights

SAVED = {"modules_to_save": ["input_layernorm", "o_proj"], "target_modules": ["qkv_proj"]}
CASES = [  # an architecture, and arguments of loading and of the adapter
    ("llama", {}, {}),
    ("llama", {"load_in_4bit": True}, {"use_gradient_checkpointing": True}),
    ("qwen3_moe", {}, {}),  # transformers stacks its experts as it loads
    ("qwen3_moe", {"load_in_4bit": True}, {}),
    ("gpt_oss in MXFP4", {}, {}),
    ("phi3", {}, {"use_gradient_checkpointing": True, **SAVED}),
    ("gemma3_text", {}, {"target_modules": ["q_proj"]}),
]


def loaded(folder, sharded, arguments):
    return FastLanguageModel.from_pretrained(folder, max_seq_length=128, sharded=sharded, **arguments)[0]


def as_whole(weight):
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
    return weight.as_subclass(torch.Tensor)


def as_own(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


def step(model):
    """The loss and the gradients of a packed row, another one in every process."""
    ids = torch.cat(random_documents(MIXED_LENGTHS, seed=dist.get_rank()))[None, :200]
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, packed_seq_lengths=[60, 13, 127]).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return gradients | {"loss": loss.detach()}


FSDP_INIT = FSDPParam._init_sharded_param


def init_as_torch_2_11(self, param, *args, **kwargs):
    nn.Parameter(param.detach())  # it asks for gradients first
    FSDP_INIT(self, param, *args, **kwargs)


@patch.object(FSDPParam, "_init_sharded_param", init_as_torch_2_11)
def same(rank, folders, cases, machines):
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(2 // machines)
    for folder, (_, arguments, adapter) in zip(folders, cases, strict=True):
        whole, cut = (loaded(folder, sharded, arguments) for sharded in (False, True))
        layers = cut.get_decoder().layers
        assert all(isinstance(weight, DTensor) == (weight.dim() > 1) for weight in layers.parameters())
        expected = dict(whole.named_parameters())
        assert expected.keys() == dict(cut.named_parameters()).keys()
        plain = type(whole.config).from_pretrained(folder)
        n_weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(plain).parameters())
        assert count_weights(whole)[1] == count_weights(cut)[1] == n_weights
        for name, weight in cut.named_parameters():
            assert torch.equal(as_whole(weight), as_whole(expected[name])), (folder, name)
        adapted = [FastLanguageModel.get_peft_model(model, r=4, **adapter) for model in (whole, cut)]
        assert any(isinstance(layer, FSDPModule) for layer in layers) == (machines == 2)
        for ours, theirs in zip(*(model.named_parameters() for model in adapted), strict=True):
            assert ours[0] == theirs[0]
            assert ours[1].requires_grad == theirs[1].requires_grad
            if ours[1].requires_grad:
                torch.manual_seed(0)
                nn.init.normal_(ours[1], std=0.1)
                theirs[1].data.copy_(ours[1])
        for _ in range(2):  # the second gathers into the memory of the first
            gradients, of_cut = map(step, adapted)
            assert gradients.keys() == of_cut.keys()
            for name, gradient in gradients.items():
                assert torch.equal(of_cut[name], gradient), (folder, name)


@pytest.mark.parametrize(("machines", "cases"), [(1, CASES), (2, CASES[1:5])])
def test_layers_in_parts_make_the_step_of_whole_ones(machines, cases, tmp_path):
    folders = [tmp_path / f"{n}-{arch}" for n, (arch, *_) in enumerate(cases)]
    for folder, (arch, *_) in zip(folders, cases, strict=True):
        save_in_mxfp4(folder) if "MXFP4" in arch else save_model(folder, arch)
    in_two_processes(same, [*map(str, folders)], cases, machines)


def measured(rank, folder, share):
    torch.set_num_threads(1)
    loaded(f"{folder}-small", True, {})
    with own_memory() as seen:
        model = loaded(folder, True, {"dtype": "bfloat16"})  # other numbers than in the files
    assert 0.9 * share < sum(as_own(weight).nbytes for weight in model.parameters()) < 1.1 * share
    assert max(seen) - seen[0] < 1.2 * share


@pytest.mark.nightly
def test_a_process_never_holds_more_than_its_part(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "head_dim": 64}
    folder = save_model(tmp_path / "base", "llama", **sizes, num_attention_heads=16, num_key_value_heads=16)
    save_model(tmp_path / "base-small", "llama")
    in_float32 = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert in_float32 > 400e6
    in_two_processes(measured, str(folder), in_float32 / 4)


def test_parts_need_a_group_of_processes(tmp_path):
    with pytest.raises(InputError, match="needs a group of processes; start with torchrun"):
        loaded(str(save_model(tmp_path / "base")), True, {})
