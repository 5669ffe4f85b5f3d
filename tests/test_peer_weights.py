"""Layers whose weights lie in parts in two processes: passes in any order, and captured steps."""

from types import SimpleNamespace

import pytest
import torch
from recorded_graphs import record_graphs
from test_graph import TinyDecoder
from torch import nn
from torch.distributed.tensor import DTensor
from warm import in_two_processes

from unsloth_pack.checkpoints.sharded import _cut_rows, _make_mesh
from unsloth_pack.cuda_graphs.capture import CapturedShape
from unsloth_pack.cuda_graphs.memory import GraphMemory
from unsloth_pack.cuda_graphs.shapes import ShapeBucket
from unsloth_pack.layers import peer_weights
from unsloth_pack.layers.peer_weights import PeerLayer, read_from_peers
from unsloth_pack.packed_row.row import PackedRow

CPU = torch.device("cpu")


class Decoder(TinyDecoder):
    """Frozen layers of other sizes, one of a single row, over embeddings that train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        nn.init.normal_(self._embedding.weight)
        sizes = [4, 6, 1, 3, 6, 4]
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:])).requires_grad_(False)

    def _packed_forward(self, row, input_ids, inputs_embeds):
        hidden = self._embedding(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return SimpleNamespace(last_hidden_state=hidden, router_logits=None)

    def parameters(self):
        yield from (*self._embedding.parameters(), *self.layers.parameters())


def make_decoders():
    """A whole decoder, and one whose layers are in parts."""
    whole, cut = Decoder(), Decoder()
    mesh = _make_mesh("cpu")
    for layer in cut.layers:
        layer.weight = _cut_rows(layer.weight, mesh)
    cut.peer_weights = read_from_peers(cut.layers)
    return whole, cut


def step(decoder, ids):
    hidden = decoder._packed_forward(None, ids, None).last_hidden_state
    (gradient,) = torch.autograd.grad(hidden.square().sum(), decoder._embedding.weight)
    return hidden, gradient


def assert_same_step(decoders, ids):
    for ours, theirs in zip(*(step(decoder, ids) for decoder in decoders), strict=True):
        assert torch.equal(ours, theirs)


def any_order(rank):
    whole, cut = decoders = make_decoders()
    assert all(isinstance(layer, PeerLayer) for layer in cut.layers)
    torch.manual_seed(rank)  # the processes need not do the same
    for number in [4, 0, 3, 3, 1, 2, 4, *torch.randint(5, (20 + rank,))]:
        x = torch.randn(3, whole.layers[number].in_features, requires_grad=True)
        outputs = [decoder.layers[number](x) for decoder in decoders]
        assert_same_step(decoders, torch.randint(8, (1, 5)))  # between the passes of a layer
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in outputs]
        assert torch.equal(*outputs)
        assert torch.equal(*gradients)
    assert all(isinstance(layer.weight, DTensor) for layer in cut.layers)
    with pytest.raises(RuntimeError, match="shapes"):
        cut.layers[1](torch.randn(3, 5))
    assert all(isinstance(layer.weight, DTensor) for layer in cut.layers)
    assert_same_step(decoders, torch.randint(8, (1, 5)))


def test_layers_run_in_any_order():
    in_two_processes(any_order)


def captured(rank):
    whole, cut = decoders = make_decoders()
    with pytest.MonkeyPatch.context() as patch:
        record_graphs(patch)
        forms = [CapturedShape(cut, ShapeBucket(n, 64, n, None), CPU, GraphMemory()) for n in (64, 128)]
        for number in range(12):
            form, n_ids = forms[number % 3 == 0], 9 + number
            ids = torch.randint(8, (1, n_ids))
            row = PackedRow.of_lengths([n_ids], CPU)
            hidden = form.output(row, form.launch(row, ids)).hidden
            if number % 4 == 1:
                assert_same_step(decoders, torch.randint(8, (1, 5)))
            gradient, *_ = torch.autograd.grad(hidden.square().sum(), form.parameters)
            wanted, wanted_gradient = step(whole, ids)
            torch.testing.assert_close(hidden, wanted)
            torch.testing.assert_close(gradient, wanted_gradient)
            if number % 4 == 2:
                cut.layers[3](torch.randn(2, 3))
            if number % 4 == 3:
                assert_same_step(decoders, torch.randint(8, (1, 5)))


def test_captured_steps_copy_what_is_not_there():
    in_two_processes(captured)


def unreadable(rank):
    def fail(*_):
        raise RuntimeError("peer access is not supported between these two devices")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_weights, ["_open", "_share"][rank], fail)
        cut = make_decoders()[1]
    assert cut.peer_weights is None
    assert not any(isinstance(layer, PeerLayer) for layer in cut.layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        assert make_decoders()[1].peer_weights is None
    assert make_decoders()[1].peer_weights is not None


def test_memory_that_one_process_cannot_read():
    in_two_processes(unreadable)
