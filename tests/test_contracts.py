"""The seams at which features come in: a second, trivial mixer and a second, trivial loss fit them."""

from dataclasses import replace

import pytest
import torch
from tiny import DEVICE, error, random_documents, tiny_model
from torch import nn

from unsloth_pack import patch_model, verify
from unsloth_pack.errors import InputError
from unsloth_pack.layers import mixers
from unsloth_pack.layers.mixers import Choice
from unsloth_pack.patching import patch as patching

LENGTHS = [5, 1, 9, 3]


class Mean(nn.Module):
    """As a transformers module: every token gets the mean of what came before it, its own included."""

    def __init__(self, width):
        super().__init__()
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states, **kwargs):
        counts = torch.arange(1, hidden_states.shape[1] + 1, device=hidden_states.device)[:, None]
        return self.out_proj(hidden_states.cumsum(1) / counts), None


class FastMean(nn.Module):
    """The same, of each document by itself."""

    scale: float

    def forward(self, hidden_states, packed_row=None, **kwargs):
        if packed_row is None:
            return super().forward(hidden_states, **kwargs)
        parts = hidden_states.flatten(0, 1).split(packed_row.lengths)
        counts = [torch.arange(1, len(part) + 1, device=part.device)[:, None] for part in parts]
        means = [part.cumsum(0) / count for part, count in zip(parts, counts, strict=True)]
        return self.scale * self.out_proj(torch.cat(means).view_as(hidden_states)), None


class MeanMixer:
    """A `Mixer`, of layers whose type is "mean"."""

    attribute = "mean"
    takes_branches = False
    forward = FastMean

    def choose(self, module, spec, request):
        return Choice("mean", f"asked for by {request.source}", "a mean has no graph")

    def known(self, spec):
        return frozenset(("out_proj",))

    def attributes(self, spec, backend, choice):
        return {"scale": 1.0}

    def what_is_fused(self, module, spec, how):
        return {}, {"mean": "a loop over documents"}


@pytest.fixture
def with_means(monkeypatch):
    """A model of two layers, the first of which attends and the second of which takes means."""
    spec = replace(patching.arch_spec_for("llama"), mixers={"mean": "mean"})
    monkeypatch.setitem(mixers.MIXERS, "mean", MeanMixer())
    monkeypatch.setattr(patching, "arch_spec_for", lambda model_type: spec)

    def made(dtype):
        model = tiny_model("llama", dtype)
        decoder = model.get_base_model().get_decoder()
        layer = decoder.layers[1]
        torch.manual_seed(0)
        layer.mean = Mean(decoder.config.hidden_size).to(DEVICE, dtype)
        del layer.self_attn
        layer.forward = _takes_the_mean.__get__(layer)
        decoder.config.layer_types = ["full_attention", "mean"]
        return model

    return made


def _takes_the_mean(self, hidden_states, **kwargs):
    mixed, _ = self.mean(self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + mixed
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_a_mixer_of_another_kind_is_patched_verified_and_undone(with_means):
    documents = random_documents(LENGTHS)
    ids = torch.cat(documents).to(DEVICE)[None]
    truth = torch.cat(
        [
            with_means(torch.float64)(input_ids=d[None].to(DEVICE), use_cache=False).logits[0]
            for d in documents
        ]
    )
    model = with_means(torch.float32)
    classes = [type(module) for module in model.modules()]
    alone = torch.cat([model(input_ids=d[None].to(DEVICE), use_cache=False).logits[0] for d in documents])
    patch = patch_model(model)
    assert patch.report.attn_backend == "sdpa and mean" or DEVICE == "cuda"
    assert patch.report.not_fused["mean"] == "a loop over documents"
    assert "attention" in patch.report.fused
    packed = model(input_ids=ids, packed_seq_lengths=LENGTHS).logits[0]
    assert error(packed.double(), truth) <= 1.5 * error(alone.double(), truth)
    assert verify(model).passed
    patch.undo()
    assert [type(module) for module in model.modules()] == classes


class Surprise:
    """A `Loss`: the mean square of what each label costs, and how many documents it was told of."""

    documents = 0

    def __call__(self, labelled, hidden_BTC, row, num_items):
        self.documents += row.is_padding.count(False)
        cost = labelled.scores(hidden_BTC).log_prob
        return cost.square().sum() / (num_items or labelled.mask.sum())


@pytest.mark.parametrize("num_items", [None, 7])
def test_a_loss_of_another_kind_takes_the_place_of_cross_entropy(num_items):
    documents = random_documents(LENGTHS)
    ids = torch.cat(documents).to(DEVICE)[None]
    labels = ids.index_fill(1, torch.tensor([0, *LENGTHS[:-1]], device=DEVICE).cumsum(0), -100)
    plain, model = tiny_model("llama", torch.float64), tiny_model("llama", torch.float64)
    expected, counted = 0.0, num_items or sum(LENGTHS) - len(LENGTHS)
    for document in documents:
        logits = plain(input_ids=document[None].to(DEVICE), use_cache=False).logits[0, :-1]
        costs = torch.nn.functional.cross_entropy(logits, document[1:].to(DEVICE), reduction="none")
        loss = costs.square().sum() / counted
        if costs.numel():
            loss.backward()
        expected += loss.item()
    patch_model(model)
    surprise = model.get_base_model().training_loss = Surprise()
    counting = {} if num_items is None else {"num_items_in_batch": num_items}
    out = model(input_ids=ids, labels=labels, packed_seq_lengths=LENGTHS, **counting)
    out.loss.backward()
    assert surprise.documents == len(LENGTHS)
    assert abs(out.loss.item() / expected - 1) < 1e-7  # rotary tables are in float32
    for (name, got), (_, true) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if true.grad is not None:
            assert error(got.grad, true.grad) < 1e-6, name


def test_a_loss_that_needs_the_head_is_refused_where_the_head_cannot_be_fused():
    model = tiny_model("llama", torch.float32)
    patch_model(model)
    model.get_base_model().training_loss = Surprise()
    model.get_base_model().lm_head.register_forward_hook(lambda *_: None)
    ids = torch.cat(random_documents(LENGTHS)).to(DEVICE)[None]
    with pytest.raises(InputError, match="training_loss needs the head: the head has hooks; set it back"):
        model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS)
