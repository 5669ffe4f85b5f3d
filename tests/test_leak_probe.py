"""A patched model probes itself for leaks before its first packed row in training, and leaves no trace."""

import copy
import logging
import random

import pytest
import torch
from datasets import Dataset
from tiny import patched, random_documents
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from unsloth_pack import LeakFound, patch_model, probe
from unsloth_pack.layers import leak_probe
from unsloth_pack.packed_row.row import PackedRow

LENGTHS = [9, 14, 5]
ROW = {
    "input_ids": torch.cat(random_documents(LENGTHS))[None],
    "labels": torch.cat(random_documents(LENGTHS))[None],
    "packed_seq_lengths": LENGTHS,
}


@pytest.fixture
def looks(monkeypatch):
    """The looks that have been taken."""
    seen, look = [], leak_probe.look_for_leaks
    monkeypatch.setattr(leak_probe, "look_for_leaks", lambda probed: seen.append(probed) or look(probed))
    return seen


def trainer_of(kind, model, folder):
    options = {"output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2}
    options |= {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    options |= {"disable_tqdm": True, "save_strategy": "no"}
    ids = [document.tolist() for document in random_documents([9, 14, 5, 22])]
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    if kind is SFTTrainer:
        from model_folder import byte_tokenizer

        config = SFTConfig(**options, packing=False, padding_free=True, max_length=None)
        return SFTTrainer(model, config, train_dataset=rows, processing_class=byte_tokenizer())
    arguments = TrainingArguments(**options)
    return Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithFlattening())


MESSAGE = r"attention sdpa first in layer 0 \(LlamaDecoderLayer\)"


@pytest.mark.parametrize("kind", [SFTTrainer, Trainer])
def test_a_leaking_model_trains_under_no_trainer(kind, leak, tmp_path):
    model = patched()
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(LeakFound, match=MESSAGE):
        trainer_of(kind, model, tmp_path).train()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_leaking_model_does_not_train_in_a_bare_loop(leak):
    model = patched()
    for _ in range(2):  # it does not get used to it
        with pytest.raises(LeakFound, match=MESSAGE):
            model(**ROW)
    model.get_decoder().leak_probe = None  # as documented
    model(**ROW).loss.backward()


@pytest.mark.parametrize("apart", [1, 2])
def test_every_pair_of_lengths_side_by_side_or_with_one_between_is_seen(apart, monkeypatch):
    """One document of this length reaches one of that, in this direction, and no other reaches any."""

    class OnePair:
        attn_backend, vocab_size, parent = "none", 9, None
        pair = None

        def reached_embeddings(self, documents, scored):
            own = [float(i in scored) for i in range(len(documents))]
            lengths = [len(document) for document in documents]
            for start in range(len(lengths) - apart):
                ends = (start, start + apart)[:: self.direction]
                if (lengths[ends[0]], lengths[ends[1]]) == self.pair and ends[0] in scored:
                    own[ends[1]] += 1e-30  # however weakly
            return own

    monkeypatch.setattr(leak_probe, "find_leaking_layer", lambda *_: "layer 0")
    probed = OnePair()
    probed.direction = 1
    assert leak_probe.look_for_leaks(probed) is None
    lengths = leak_probe._LENGTHS[: len(leak_probe._LENGTHS) // 2]
    for start in range(len(lengths) - apart):
        for probed.direction in (1, -1):
            probed.pair = (lengths[start], lengths[start + apart])[:: probed.direction]
            with pytest.raises(LeakFound):
                leak_probe.look_for_leaks(probed)


LAYER = r"layer {} \(LlamaDecoderLayer\)"


@pytest.mark.parametrize(("source", "victim"), [(0, 3), (3, 0), (1, 2)])
@pytest.mark.parametrize(
    ("place", "where"),
    [("layers.0", LAYER.format(0)), ("layers.1", LAYER.format(1)), ("norm", "a module after the layers")],
)
def test_the_first_layer_that_lets_one_through_is_named(place, where, source, victim):
    """The last token of a document is added to that of another, before or behind it."""
    model = patched()
    last = torch.tensor(leak_probe._LENGTHS).cumsum(0) - 1

    def mix(module, args):
        return args[0].index_add(1, last[[victim]], args[0][:, last[[source]]])

    model.get_decoder().get_submodule(place).register_forward_pre_hook(mix)
    with pytest.raises(LeakFound, match=f"with attention sdpa first in {where};"):
        probe(model)
    assert not any(module._forward_hooks for module in model.modules())


def noted_calls(model):
    """Filled by hooks on all modules and gradients of a model."""
    calls = []
    for module in model.get_decoder().layers.modules():
        module.register_forward_hook(lambda *_: calls.append("forward"))
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append("gradient"))
    return calls


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_tells(checkpointing, autocast, looks):
    """Gradients bit for bit, states, hooks, with checkpointing of either kind."""
    found = []
    for is_probed in (True, False):
        model = patched("qwen2", attention_dropout=0.3)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        if not is_probed:
            model.get_decoder().leak_probe = None
        calls = noted_calls(model)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**ROW).loss
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((loss, grads, calls, [random.getstate(), torch.get_rng_state().tolist()]))
        assert model.training
    assert len(looks) == 1
    (loss, grads, calls, states), (loss_without, grads_without, calls_without, states_without) = found
    assert torch.equal(loss, loss_without)
    assert grads
    assert all(map(torch.equal, grads, grads_without))
    assert calls == calls_without
    assert states == states_without


def test_the_probe_runs_once_and_only_on_packed_rows_in_training(looks, caplog):
    model = patched()
    one = {"input_ids": ROW["input_ids"], "packed_seq_lengths": [28]}
    model(**one)
    model(input_ids=ROW["input_ids"])
    model.eval()(**ROW)
    model.train()
    with torch.no_grad():
        model(**ROW)
    with torch.inference_mode():
        model(**ROW)
    assert not looks
    graphs = model.get_decoder().step_graphs
    graphs.why_never = None  # as on a GPU
    for _ in range(2):
        model(**ROW)
    assert len(looks) == 1
    assert sum(graphs._rows_seen.values()) == 2  # the look is not captured, nor counted towards a capture
    patch_model(model)
    model(**ROW)
    assert len(looks) == 2
    patch_model(model)
    probe(model)  # after which it does not look again
    model(**ROW)
    assert len(looks) == 2
    assert not caplog.records


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_sharded_parameters_are_left_alone(process_group, looks, caplog):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    decoder = patched().get_decoder()
    fully_shard(decoder.layers[0], mesh=init_device_mesh("cpu", (1,)))
    with caplog.at_level(logging.WARNING, "unsloth_pack"):
        decoder.leak_probe.look(decoder, PackedRow.of_lengths((2, 3), decoder.device))
    assert "not probed for leaks between documents: the parameters are sharded" in caplog.text
    assert not looks
