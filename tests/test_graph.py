"""The captured step against the uncaptured one: the same losses and gradients whatever happens around it."""

import copy
import gc
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace as replace_fields
from types import SimpleNamespace

import pytest
import torch
from recorded_graphs import graphs_of, lengths_of, record_graphs
from tables import table
from tiny import TINY, error, patched, random_documents, tiny_model
from torch import nn
from trl.models.utils import disable_gradient_checkpointing

from unsloth_pack import patch_model, supported_architectures
from unsloth_pack.cuda_graphs.capture import CapturedShape, DecoderState, StepOutput, _Replayed
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision
from unsloth_pack.cuda_graphs.flat_adamw import FlatGradients
from unsloth_pack.cuda_graphs.forward import ForwardGraphs
from unsloth_pack.cuda_graphs.memory import GraphMemory, Token, alias_memory
from unsloth_pack.cuda_graphs.shapes import ShapeBucket
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.layers.leak_probe import side_effect_free_pass
from unsloth_pack.layers.peer_weights import PeerWeights
from unsloth_pack.losses.distillation import DistillationLoss
from unsloth_pack.memory.checkpointing import enable_checkpointing
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.training.distill import make_teacher

CPU = torch.device("cpu")
gpu = pytest.mark.gpu
CAPTURED = [name for name, spec in supported_architectures().items() if not (spec.softcap or spec.mixers)]


def is_routed(name):
    return any("expert" in field for field in TINY[name])


def pair(arch="qwen3", adapter=torch.bfloat16, **overrides):
    """The same patched model twice: one may capture, the other may not."""
    models = []
    backend = "triton" if supported_architectures()[arch].sinks else "flash"
    for why_never in (None, "for comparison"):
        model = tiny_model(arch, torch.bfloat16, **overrides)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.to(adapter)
        patch_model(model, backend)
        graphs = model.get_base_model().model.step_graphs
        assert graphs.why_not is None
        graphs.why_never = why_never
        models.append(model)
    return models


def loss_of(model, step, seed=None, **asked):
    documents = random_documents(lengths_of(step), seed=step if seed is None else seed)
    ids = torch.cat(documents).cuda()[None]
    mixed = next(p for name, p in model.named_parameters() if "lora_" in name).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
        return model(input_ids=ids, labels=ids, packed_seq_lengths=lengths_of(step), **asked).loss


def grads(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def step_both(models, step, seed=None, **asked):
    losses = []
    for model in models:
        loss = loss_of(model, step, seed, **asked)
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_alike(models, losses=None):
    """Captured rows are longer, which changes only how GEMMs round. Forgets the gradients."""
    if losses:
        assert abs(losses[0] / losses[1] - 1) < 2e-3
    ours, theirs = map(grads, models)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert error(ours[name], grad) < 0.02, name
    for model in models:
        model.zero_grad()


def capture(models, n=4, **asked):
    for step in range(n):
        step_both(models, step, **asked)
    assert str(graphs_of(models[0])).startswith("captured for")
    assert str(graphs_of(models[1])).startswith("not captured: ")
    for model in models:
        model.zero_grad()


def captured_form(replay):
    """Stands for a captured shape; `replay` gets a row and what goes in."""
    return SimpleNamespace(launch=lambda row, inputs: inputs, output=replay)


# What a shape is, which needs no GPU


def test_a_form_holds_every_row_that_it_is_of():
    buckets = {"[1]": (64, 64, 64), "[70]": (128, 64, 128), "[600, 600]": (1280, 64, 1024)}
    for lengths in ([1], [64], [70], [600, 600], [2000, 3], [1] * 300, [5, 4000, 90]):
        row = PackedRow.of_lengths(lengths, CPU)
        bucket = ShapeBucket.of(row)
        assert buckets.get(str(lengths), bucket.size) in (
            bucket.size,
            (bucket.tokens, bucket.segments, bucket.longest),
        )
        assert bucket.tokens >= row.n_tokens
        assert bucket.tokens - row.n_tokens < max(64, row.n_tokens / 8)
        static = PackedRow.static(bucket.tokens, bucket.segments, bucket.longest, CPU)
        static.fill(row)
        cu = static.cu_seqlens.tolist()
        assert cu[: len(lengths) + 1] == torch.tensor([0, *lengths]).cumsum(0).tolist()
        assert cu[-1] == bucket.tokens == static.n_tokens
        sizes = torch.tensor(cu).diff()
        assert sizes.min() >= 0
        assert sizes.max() <= static.longest
        expected = [i for size in sizes.tolist() for i in range(size)]
        assert static.position_ids.tolist() == expected
        assert static.positions.max() + 1 >= max(expected) + 1


@pytest.fixture
def autocast_on_a_gpu():
    """As `torch.autocast("cuda", torch.bfloat16)`, which goes without where there is none."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def test_what_a_form_holds():
    bucket = ShapeBucket(tokens=400, segments=4, longest=128, autocast=None)
    held = {"full": [128, 128, 128, 16], "its tail split": [128, 16]}
    too_much = {"documents": [80] * 5, "tail": [20, 30, 40], "length": [129, 64], "tokens": [101] * 4}
    too_much["one token"] = [101, 100, 100, 100]
    for name, lengths in (held | too_much).items():
        assert bucket.holds(PackedRow.of_lengths(lengths, CPU)) == (name in held), name


def test_a_form_reaches_as_far_as_the_positions_of_its_rows():
    row = PackedRow.of_lengths([5, 20], CPU)
    row = replace_fields(row, positions=row.positions + 237)
    assert ShapeBucket.of(row) == ShapeBucket(64, 64, 512, None)
    assert ShapeBucket(64, 64, 257, None).holds(row)
    assert not ShapeBucket(64, 64, 256, None).holds(row)


def test_a_form_is_of_one_autocast(autocast_on_a_gpu):
    row = PackedRow.of_lengths([9], CPU)
    assert ShapeBucket.of(row) == ShapeBucket(64, 64, 64, torch.bfloat16)
    assert ShapeBucket(64, 64, 64, torch.bfloat16).holds(row)
    assert not ShapeBucket(64, 64, 64, torch.float16).holds(row)
    assert not ShapeBucket(64, 64, 64, None).holds(row)


def test_a_static_row_forgets_the_row_before():
    static = PackedRow.static(64, 64, 64, CPU)
    for lengths in ([1] * 40, [50, 14], [3]):
        static.fill(PackedRow.of_lengths(lengths, CPU))
        alone = PackedRow.static(64, 64, 64, CPU)
        alone.fill(PackedRow.of_lengths(lengths, CPU))
        assert torch.equal(static.cu_seqlens, alone.cu_seqlens)
        assert torch.equal(static.position_ids, alone.position_ids)


def test_a_static_row_takes_branches():
    static = PackedRow.static(64, 64, 64, CPU, has_branches=True)
    for lengths, parent in (((9, 5, 5, 20), (-1, 0, 0, -1)), ((3, 1), (-1, 0))):
        row = PackedRow.of_lengths(lengths, CPU, parent)
        assert ShapeBucket.of(row) == ShapeBucket(64, 64, 64, None, branches=True)
        static.fill(row)
        assert static.parents.tolist() == [*parent, *[-1] * (64 - len(parent))]
        assert static.parents.dtype == torch.int32
        ends = torch.tensor(lengths).cumsum(0).tolist()
        assert static.cu_seqlens.tolist() == [0, *ends, *[64] * (64 - len(ends))]
        assert torch.equal(static.position_ids[: row.n_tokens], row.position_ids)
        assert not ShapeBucket(64, 64, 64, None).holds(row)

        whole = PackedRow.of_lengths(lengths, CPU)
        assert ShapeBucket.of(row).holds(whole)
        static.fill(whole)
        assert static.parents.tolist() == [-1] * 64


_OF_ITS_OWN = "gradient checkpointing with use_reentrant=True, or with a function or options of its own"


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        *((mode, None) for mode in (True, "offload", "auto", {"use_reentrant": False})),
        (1, "gradient checkpointing that changes with the free memory"),
        ({"use_reentrant": True}, _OF_ITS_OWN),
        ({"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())}, _OF_ITS_OWN),
        (None, _OF_ITS_OWN),
    ],
)
def test_which_checkpointing_is_captured(mode, why):
    """`mode` is ours, the options of a trainer's, how many layers a plan recomputes, or a flag alone."""
    model = patched()
    decoder = model.get_decoder()
    before = DecoderState(decoder)
    if isinstance(mode, dict):
        model.gradient_checkpointing_enable(mode)
        model.enable_input_require_grads()
    elif mode is None:
        decoder.layers[1].gradient_checkpointing = True
    else:
        enable_checkpointing(model, "auto" if mode == 1 and mode is not True else mode)
        if decoder.recompute_plan is not None:
            decoder.recompute_plan.n_recomputed = int(mode == 1)
    state = DecoderState(decoder)
    assert not before.matches(decoder)
    assert state.why_not_captured() == why


@pytest.mark.parametrize("options", [None, {"use_reentrant": False}])
def test_the_pass_of_a_reference_model_leaves_graphs_as_they_are(options):
    """TRL's DPO switches checkpointing off for it and on again, in every step."""
    model = patched()
    enable_checkpointing(model, True)
    decoder = model.get_decoder()
    with disable_gradient_checkpointing(model, options):  # the first time TRL's options come
        assert not any(layer.gradient_checkpointing for layer in decoder.layers)
    state = DecoderState(decoder)
    assert state.why_not_captured() is None
    for _ in range(2):
        with disable_gradient_checkpointing(model, options):
            pass
        assert state.matches(decoder)
    assert all(layer.gradient_checkpointing for layer in decoder.layers)


@pytest.fixture
def held_up(monkeypatch):
    """Rows of every size are known to wait for Python."""
    monkeypatch.setattr(CaptureDecision, "is_held_up", lambda *_: True)


def test_which_forms_are_captured(held_up, monkeypatch):
    """The third row of a shape, or any longer row once there are graphs; not a row that wastes a little."""
    monkeypatch.setattr(
        "unsloth_pack.cuda_graphs.step.CapturedShape", lambda decoder, bucket, *_: bucket.tokens
    )
    monkeypatch.setattr("unsloth_pack.cuda_graphs.step.MAX_FORMS", 3)
    graphs = StepGraphs(None)

    def graphs_for(*lengths):
        row = PackedRow.of_lengths(lengths, CPU)
        bucket = graphs._bucket_for(None, row, ShapeBucket.of(row))
        return None if bucket is None else graphs._graphs[bucket]

    assert [graphs_for(1000) for _ in range(3)] == [None, None, 1024]
    assert [graphs_for(900) for _ in range(4)] == [1024] * 4
    assert [graphs_for(200) for _ in range(3)] == [1024, 1024, 256]
    assert graphs_for(5000) == 5120
    assert [graphs_for(20) for _ in range(4)] == [256] * 4
    assert graphs_for(6000) is None


def test_a_capture_that_fails_is_the_last(monkeypatch, caplog):
    def fail(*_):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")
        finally:
            raise RuntimeError("operation not permitted when stream is capturing")

    states = []
    generator = SimpleNamespace(clone_state=lambda: "its state", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", {1: generator})
    graphs, bucket = StepGraphs(None), ShapeBucket(64, 64, 64, None)
    graphs._graphs, before = {bucket: "from before"}, graphs._memory
    monkeypatch.setattr(before, "give_back", lambda: states.append(f"{len(graphs._graphs)} graphs left"))
    assert not graphs._try(bucket, fail, torch.device("cuda:1"))
    assert graphs._memory is not before
    assert states.pop(0) == "0 graphs left"
    assert states == ["its state"]
    why = "capture failed (OutOfMemoryError: CUDA out of memory.)"
    assert str(graphs) == f"not captured: {why}"
    assert caplog.messages == [f"the step is not captured in CUDA graphs: {why}"]
    assert graphs.run(None, None, torch.zeros(1, 64)) is None


def test_a_capture_is_of_the_device_of_the_model(held_up, monkeypatch):
    """Another may be the current one. There nothing would be captured, and replays would change nothing."""
    current = []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    def capture_there(*_):
        assert [*map(id, current)] == [id(ids)]
        return captured_form(lambda *_: "replayed")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr("unsloth_pack.cuda_graphs.step.CapturedShape", capture_there)
    model = patched()
    row, ids = PackedRow.of_lengths([64], CPU), torch.zeros(1, 64, dtype=torch.int64)
    graphs = StepGraphs(None)
    graphs._rows_seen[64, ShapeBucket.of(row).kind] = 2
    assert graphs.run(model.get_decoder(), row, ids) == "replayed"
    assert not current


def first_up(decoder):
    return decoder.layers[0].mlp.up_proj


def move(decoder):
    weight = decoder.layers[1].mlp.up_proj.base_layer.weight
    weight.data = weight.data.clone()


def replace_over_the_same_memory(decoder):
    layer = decoder.layers[1].mlp.up_proj.lora_A["default"]
    layer.weight = nn.Parameter(layer.weight.detach())


CHANGES = {  # of a decoder, that its graphs know nothing of
    "scale": lambda decoder: [m.scale_layer(2.0) for m in decoder.modules() if hasattr(m, "scale_layer")],
    "replace": lambda decoder: setattr(decoder.layers[1], "mlp", copy.deepcopy(decoder.layers[1].mlp)),
    "switch off": lambda decoder: first_up(decoder).enable_adapters(False),
    "freeze": lambda decoder: first_up(decoder).lora_A["default"].weight.requires_grad_(False),
    "move": move,
    "drop less": lambda decoder: setattr(first_up(decoder).lora_dropout["default"], "p", 0.1),
    "drop nothing": lambda decoder: first_up(decoder).lora_dropout["default"].eval(),
}
MORE_CHANGES = {
    "replace over the same memory": replace_over_the_same_memory,
    "merge": lambda decoder: first_up(decoder).merge(),
    "drop attention": lambda decoder: setattr(decoder.layers[1].self_attn, "attention_dropout", 0.1),
}


@table("change", (CHANGES | MORE_CHANGES).values(), ids=[*CHANGES, *MORE_CHANGES])
def test_what_a_graph_takes_for_granted_is_looked_at(change):
    decoder = tiny_model("llama", device="cpu", lora={"lora_dropout": 0.5}).get_base_model().model
    state = DecoderState(decoder)
    assert state.matches(decoder)
    assert state.dropout_matches()
    assert not state.matches(copy.copy(decoder))
    change(decoder)
    assert not (state.matches(decoder) and state.dropout_matches())


def test_graphs_outlive_evaluation_and_probes(held_up, monkeypatch):
    captures = []

    def capture_anew(*_):
        captures.append(captured_form(lambda *given: (f"captured anew {len(captures)}", *given)))
        return captures[-1]

    monkeypatch.setattr("unsloth_pack.cuda_graphs.step.CapturedShape", capture_anew)
    model = patched(lora={"lora_dropout": 0.5})
    decoder, row = model.get_decoder(), PackedRow.of_lengths([64], CPU)
    graphs, ids = StepGraphs(None), torch.zeros(1, 64, dtype=torch.int64)
    graphs._state = DecoderState(decoder)
    graphs._graphs[ShapeBucket.of(row)] = captured_form(lambda *given: given)
    assert graphs.run(decoder, row, ids) == (row, ids)
    with torch.no_grad():
        assert graphs.run(decoder, row, ids) is None
    model.eval()
    assert graphs.run(decoder, row, ids) is None
    model.train()
    with side_effect_free_pass(model):
        hook = decoder.embed_tokens.register_forward_hook(lambda *_: None)
        assert graphs.run(decoder, row, ids) is None
        hook.remove()
    assert graphs.run(decoder, row, ids) == (row, ids)
    for number, change in enumerate([CHANGES["drop less"], CHANGES["freeze"]], 1):
        change(decoder)
        assert graphs.run(decoder, row, ids) == (f"captured anew {number}", row, ids)
    assert [*graphs._graphs.values()] == captures[-1:]


@table(
    "change",
    [
        lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
        lambda layer: layer.mlp.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.mlp.register_full_backward_hook(lambda *_: None),
        lambda layer: setattr(layer.input_layernorm, "forward", layer.input_layernorm.forward),
    ],
    ids=["forward hook", "pre-hook", "backward hook", "own forward"],
)
def test_no_hook_is_passed_over(change):
    decoder = patched().get_decoder()
    state = DecoderState(decoder)
    assert state.why_not_captured() is None
    change(decoder.layers[0])
    assert state.why_not_captured() == "modules have hooks"


def without_kernels(memory, weight):
    """A shape whose graphs compute nothing."""
    graph = SimpleNamespace(replay=lambda: None)
    bucket = SimpleNamespace(
        memory=memory,
        forward_graph=graph,
        backward_graph=graph,
        run=lambda graph: graph.replay(),
        outputs=[torch.ones(4, 2), torch.ones(4, 3), torch.ones(4, 5)],
        grads=[torch.ones(4, 2), torch.ones(4, 3), None],
    )
    bucket.gradients = SimpleNamespace(copies=lambda: (torch.ones_like(weight),))
    bucket.input_gradients = []
    return bucket


def test_activations_are_used_once_and_by_their_own_row():
    weight, memory = nn.Parameter(torch.ones(2)), GraphMemory()
    buckets = [without_kernels(memory, weight) for _ in range(2)]
    first = _Replayed.apply(buckets[0], 3, weight)[0].sum()
    assert memory.is_awaited
    first.backward(retain_graph=True)
    assert not memory.is_awaited
    with pytest.raises(RuntimeError, match="once"):
        first.backward()
    second = _Replayed.apply(buckets[1], 4, weight)[0].sum()
    with pytest.raises(RuntimeError, match="once"):
        first.backward()
    assert memory.is_awaited
    second.backward()
    assert weight.grad.tolist() == [2, 2]
    third = _Replayed.apply(buckets[0], 4, weight)[1].sum()
    del third
    assert not memory.is_awaited


def test_a_replay_gives_what_the_next_does_not_overwrite_and_no_gradient_to_the_padding():
    weight, read = nn.Parameter(torch.ones(2)), []
    bucket = without_kernels(GraphMemory(), weight)
    bucket.backward_graph = SimpleNamespace(
        replay=lambda: read.append([bucket.grads[i].tolist() for i in (0, 1)])
    )
    bucket.grads[0].fill_(5)  # as a longer row has left it
    hidden, router_logits, of_the_first_layer = _Replayed.apply(bucket, 3, weight)
    for output in bucket.outputs:
        output.fill_(7)
    assert hidden.tolist() == [[1, 1]] * 3
    assert router_logits.tolist() == [[1, 1, 1]] * 3
    assert router_logits.requires_grad
    assert not of_the_first_layer.requires_grad
    (hidden.sum() + 2 * router_logits.sum()).backward()
    assert read == [[[[1, 1]] * 3 + [[0, 0]], [[2, 2, 2]] * 3 + [[0, 0, 0]]]]


def test_an_output_that_the_loss_does_not_read_gets_no_gradient():
    weight, read = nn.Parameter(torch.ones(2)), []
    bucket = without_kernels(GraphMemory(), weight)
    bucket.backward_graph = SimpleNamespace(
        replay=lambda: read.append([bucket.grads[i].tolist() for i in (0, 1)])
    )
    hidden, _, _ = _Replayed.apply(bucket, 4, weight)
    hidden.sum().backward()
    assert read == [[[[1, 1]] * 4, [[0, 0, 0]] * 4]]


@pytest.fixture
def trusted(held_up, monkeypatch):
    """A decoder whose graphs have been replayed, the graphs, what happens from now on, and a row with ids."""
    happened = []

    def launch(row, ids):
        happened.append("launched")
        return ids

    monkeypatch.setattr(
        "unsloth_pack.cuda_graphs.step.CapturedShape",
        lambda *_: SimpleNamespace(launch=launch, output=lambda row, ids: "replayed"),
    )
    model = patched(lora={"lora_dropout": 0.5})
    decoder, row = model.get_decoder(), PackedRow.of_lengths([64], CPU)
    graphs, ids = decoder.step_graphs, torch.zeros(1, 64, dtype=torch.int64)
    graphs.why_never = None
    assert [graphs.replay(decoder, row, ids) for _ in range(2)] == [None] * 2
    assert [graphs.run(decoder, row, ids) for _ in range(3)] == [None, None, "replayed"]
    matches = DecoderState.matches
    monkeypatch.setattr(DecoderState, "matches", lambda *a: happened.append("looked") or matches(*a))
    happened.clear()
    return decoder, graphs, happened, (row, ids)


def test_the_device_begins_before_the_decoder_is_looked_at(trusted):
    decoder, graphs, happened, given = trusted
    assert graphs._state._memory
    for _ in range(2):
        assert graphs.replay(decoder, *given) == "replayed"
    assert happened == ["launched", "looked"] * 2
    assert graphs.why_not is None


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_launched_for_a_decoder_that_has_changed_is_thrown_away(trusted, change):
    decoder, graphs, happened, given = trusted
    change(decoder)
    assert graphs.replay(decoder, *given) is None
    assert graphs.replay(decoder, *given) is None  # whether it is as captured is not known: nothing begins
    assert happened == ["launched", "looked"]
    assert graphs.run(decoder, *given) == "replayed"  # captured anew
    assert graphs.replay(decoder, *given) == "replayed"


def test_nothing_begins_where_nothing_may_be_replayed(trusted):
    decoder, graphs, happened, (row, ids) = trusted
    with torch.no_grad():
        assert graphs.replay(decoder, row, ids) is None
    decoder.eval()
    assert graphs.replay(decoder, row, ids) is None
    decoder.train()
    assert graphs.replay(decoder, PackedRow.of_lengths([300], CPU), torch.zeros(1, 300)) is None
    assert graphs.replay(decoder, row, ids, True) is None
    token = Token()
    graphs._memory.fill(token)
    assert graphs.replay(decoder, row, ids) is None
    graphs._memory.use_up(token)
    assert not happened
    assert graphs.replay(decoder, row, ids) == "replayed"


class TinyDecoder:
    """A second decoder that can be captured: no module, and nothing but what `CapturableDecoder` declares."""

    training = True
    recompute_plan = None
    peer_weights = PeerWeights()

    def __init__(self, tables=()):
        self._embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Identity()])
        self.rotary_tables = dict(enumerate(tables))

    def modules(self):
        return iter((self._embedding, *self.layers.modules()))

    def parameters(self):
        return self._embedding.parameters()

    def get_input_embeddings(self):
        return self._embedding

    def _packed_forward(self, row, input_ids, inputs_embeds):
        return SimpleNamespace(last_hidden_state=self._embedding(input_ids), router_logits=None)


@pytest.fixture
def recorded(monkeypatch):
    """Graphs are recorded, and computed again at a replay."""
    record_graphs(monkeypatch)


class RoutedDecoder(TinyDecoder):
    """Two routers over the embeddings, of which a gradient reaches the second."""

    def _packed_forward(self, row, input_ids, inputs_embeds, output_router_logits=False):
        hidden = self._embedding(input_ids)
        routers = torch.arange(8.0).view(4, 2), torch.arange(12.0).view(4, 3)
        logits = hidden[0].detach() @ routers[0], hidden[0] @ routers[1]
        return SimpleNamespace(
            last_hidden_state=hidden**2, router_logits=logits if output_router_logits else None
        )


def test_router_logits_are_captured_with_their_gradients(recorded, held_up, monkeypatch):
    """Rows that ask for them and rows that do not have graphs of their own."""
    monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
    monkeypatch.setattr(CaptureDecision, "why_too_large", lambda *_: None)
    decoder, graphs = RoutedDecoder(), StepGraphs(None)
    (weight,) = decoder.parameters()
    for step in range(9):
        asked = step % 3 > 0
        lengths = [9, 3 + step]
        row, ids = PackedRow.of_lengths(lengths, CPU), torch.randint(0, 8, (1, sum(lengths)))
        output, found = graphs.run(decoder, row, ids, asked), []
        assert (output is None) == (step < 4)
        if output is None:
            continue
        assert (output.router_logits is not None) == asked
        wanted = decoder._packed_forward(row, ids, None, output_router_logits=asked)
        for one in (StepOutput(wanted.last_hidden_state, wanted.router_logits), output):
            losses = [(x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in one.tensors]
            (grad,) = torch.autograd.grad(sum(losses), weight)
            found.append((*one.tensors, grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad
    assert str(graphs).startswith("captured for 2 shapes")


def test_a_replay_is_of_the_row_that_came(recorded):
    captured = CapturedShape(TinyDecoder(), ShapeBucket(64, 64, 64, None), CPU, GraphMemory())
    (weight,) = captured.parameters
    for lengths in ([9, 3], [5]):
        ids = torch.randint(8, (sum(lengths),))
        row = PackedRow.of_lengths(lengths, CPU)
        hidden = captured.output(row, captured.launch(row, ids[None])).hidden
        assert torch.equal(hidden[0], weight[ids])
        ends = captured.row.cu_seqlens.tolist()[: len(lengths) + 1]
        assert ends == [0, *torch.tensor(lengths).cumsum(0)]
        of_hidden = torch.randn(hidden.shape)
        (found,) = torch.autograd.grad(hidden, weight, of_hidden)
        torch.testing.assert_close(found, torch.zeros(8, 4).index_add(0, ids, of_hidden[0]))


def test_passes_without_gradients_are_replayed_in_the_shapes_of_steps(recorded, held_up, monkeypatch):
    """As a teacher's or reference's of the same weights: each state of the decoder has a graph of its own."""
    monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
    monkeypatch.setattr(CaptureDecision, "why_too_large", lambda *_: None)
    decoder, graphs = RoutedDecoder(), StepGraphs(None)
    (weight,) = decoder.parameters()
    copied, n_computed = torch.nn.Parameter(torch.randn(8, 4), requires_grad=False), 0
    compute = decoder._packed_forward

    def counted(*args, **options):
        nonlocal n_computed
        n_computed += 1
        return compute(*args, **options)

    decoder._packed_forward = counted
    for step in range(16):
        own, lengths = weight if step % 2 else copied, [9, 3 + step]
        row, ids = PackedRow.of_lengths(lengths, CPU), torch.randint(0, 8, (1, sum(lengths)))
        n_before = n_computed
        trained = graphs.run(decoder, row, ids)
        decoder._embedding.weight, others = own, ids.flip(1)
        with torch.no_grad():  # as TRL's DPO does, before the backward pass of the step
            passed = graphs.run(decoder, row, others)
        decoder._embedding.weight = weight
        if passed is not None:
            assert torch.equal(passed.hidden, own[others] ** 2)
        if trained is not None:
            assert torch.equal(trained.hidden, weight[ids] ** 2)
            (found,) = torch.autograd.grad(trained.hidden.sum(), weight)
            torch.testing.assert_close(found, torch.autograd.grad((weight[ids] ** 2).sum(), weight)[0])
        with torch.no_grad():
            weight.add_(torch.randn(8, 4))
        assert (n_computed == n_before) or step < 6
    assert n_computed == 6  # twice for each capture: of the steps, of both passes
    assert passed is not None


def test_a_decoder_in_ever_new_states_is_not_captured_in_every_pass(recorded):
    graphs, bucket = ForwardGraphs(), ShapeBucket(64, 64, 64, None)
    captured = [graphs.capture(TinyDecoder(), bucket, CPU, ()) for _ in range(9)]
    assert [each is not None for each in captured] == [True] * 3 + [False] * 6


@pytest.mark.parametrize("arch", CAPTURED)
def test_nothing_that_a_warm_up_makes_outlives_it(arch, monkeypatch):
    """Kept in a module or in the static row, it would lie where replays of other shapes write."""

    def living():
        gc.collect()
        return [x for x in gc.get_objects() if torch.Tensor in type(x).__mro__]

    def attend(q, k, v, *_):
        return q[..., : v.shape[-1]] + k.sum() + v.sum()

    monkeypatch.setattr("unsloth_pack.layers.mixers.attention.attend", attend)
    # PEFT drops nothing before experts
    model = tiny_model(arch, device="cpu", lora={"lora_dropout": 0.0 if is_routed(arch) else 0.1})
    patch_model(model)
    decoder, row = model.get_decoder(), PackedRow.static(64, 64, 48, CPU)
    ids, leaves = torch.zeros(1, 64, dtype=torch.int64), [p for p in decoder.parameters() if p.requires_grad]
    for tables in decoder.rotary_tables.values():
        tables.for_row(row)
    before = living()
    hidden = decoder._packed_forward(row, ids, None).last_hidden_state
    torch.autograd.grad(hidden.sum(), leaves, allow_unused=True)
    del hidden
    known = set(map(id, before))
    assert [x.shape for x in living() if id(x) not in known] == []


@pytest.mark.parametrize("shapes", [[(4, 2), (3,), (2, 4), (4, 2), (), (3,), (0, 5)], [(2, 3)]])
@pytest.mark.parametrize("reached", ["all", "not the first"])
def test_every_parameter_gets_its_own_gradient(shapes, reached):
    """Whatever shapes they have, and where no gradient reaches a parameter. The next replay changes none."""
    expected = [torch.randn(shape) for shape in shapes]
    if reached != "all":
        expected.insert(0, None)
    gradients = FlatGradients(expected, torch.float32)
    found = gradients.copies()
    gradients._flat.zero_()  # as the next replay does, in its way
    for grad, own in zip(found, expected, strict=True):
        assert grad is None if own is None else torch.equal(grad, own)


def with_base_as_teacher(model):
    model.get_base_model().training_loss = DistillationLoss(make_teacher(model), kl_weight=1.0)


def test_a_teachers_pass_changes_nothing_that_graphs_assume():
    model = patched(lora={"lora_dropout": 0.1}, attention_dropout=0.1)
    with_base_as_teacher(model)
    decoder, ids = model.get_base_model().get_decoder(), random_documents([12])[0][None]
    state = DecoderState(decoder)
    model(input_ids=ids, labels=ids, packed_seq_lengths=[5, 7]).loss.backward()
    assert state.matches(decoder)
    assert state.dropout_matches()
    assert state.why_not_captured() is None


# On a GPU


@gpu
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=str)
def test_a_teacher_runs_between_replays(adapter):
    models = pair("qwen3", adapter)
    for model in models:
        with_base_as_teacher(model)
    capture(models)
    for step in range(4, 10):
        assert_alike(models, step_both(models, step))


@gpu
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", CAPTURED)
def test_captured_steps_are_uncaptured_steps(arch, adapter, held_up):
    models = pair(arch, adapter)
    capture(models)
    for step in range(4, 10):
        assert_alike(models, step_both(models, step))


@gpu
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_rows_that_branch_are_captured_where_kernels_read_parents(backend):
    models = pair()
    for model, why_never in zip(models, (None, "for comparison"), strict=True):
        patch_model(model, backend)
        graphs_of(model).why_never = why_never
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 256, (6, 90), generator=generator)
        n_alike = 0 if step == 6 else 40 + step  # graphs of rows that branch serve others too
        ids[:, :n_alike] = ids[:1, :n_alike]
        mask = (torch.arange(90) < 90 - 3 * torch.arange(6)[:, None]).long()
        batch = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        losses = []
        for model in models:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        assert_alike(models, losses)
    is_captured = str(graphs_of(models[0])).startswith("captured for")
    assert is_captured == (backend == "triton")


def evaluate(models):
    """Generation and losses without a graph in between."""
    for model in models:
        model.eval()
    with torch.no_grad():
        losses = [loss_of(model, 0).item() for model in models]
        prompt = random_documents([9])[0].cuda()[None]
        texts = [model.generate(prompt, max_new_tokens=5, do_sample=False) for model in models]
    assert abs(losses[0] / losses[1] - 1) < 1e-6
    assert torch.equal(*texts)
    for model in models:
        model.train()


def move_away_and_back(models):
    for model in models:
        model.cpu()
        model.cuda()


@gpu
@pytest.mark.parametrize("between", [evaluate, move_away_and_back])
def test_steps_are_alike_after_what_happens_in_between(between):
    models = pair()
    capture(models)
    between(models)
    assert_alike(models, step_both(models, 7))


@gpu
def test_passes_in_any_order():
    """Gradients add up, rows wait for their backward pass together, one's never comes, a copy goes on.

    Also before any backward pass, and what a step has returned stays as it is.
    """
    models = pair()
    for step in range(4):
        for model in models:
            loss_of(model, step)
    assert_alike(models, step_both(models, 1))
    capture(models)
    for step in range(3):
        step_both(models, step)
    assert_alike(models)
    totals = []
    for model in models:
        total = loss_of(model, 0) + loss_of(model, 1)
        total.backward()
        totals.append(total.item())
    assert_alike(models, totals)
    loss_of(models[0], 3)
    assert_alike(models, step_both(models, 2))
    assert graphs_of(models[0]).why_not is None
    ids = torch.cat(random_documents(lengths_of(0))).cuda()[None]
    returned, kept = [], []
    for tokens in (ids, ids.flip(1)):
        hidden = models[0].get_decoder()(input_ids=tokens, packed_seq_lengths=lengths_of(0)).last_hidden_state
        hidden.sum().backward()
        returned.append([hidden, *(p.grad for p in models[0].parameters() if p.grad is not None)])
        kept.append([x.detach().clone() for x in returned[-1]])
        models[0].zero_grad()
    assert all(map(torch.equal, returned[0], kept[0]))
    twin = copy.deepcopy(models[0])
    assert "no shape of row has come often enough" in str(graphs_of(twin))
    assert_alike([twin, models[1]], step_both([twin, models[1]], 1))


@gpu
def test_rows_of_several_forms_in_turns():
    """All shapes replay in the same memory: what one of them reads again and again lies elsewhere."""
    models = pair()

    def step(lengths, seed=0):
        ids = torch.cat(random_documents(lengths, seed=seed)).cuda()[None]
        losses = [m(input_ids=ids, labels=ids, packed_seq_lengths=lengths).loss for m in models]
        sum(losses).backward()
        assert_alike(models, [loss.item() for loss in losses])
        return len(graphs_of(models[0])._graphs)

    buckets = [[250] * 4, [20] * 150, [2000] * 3]  # no shape holds the next: each has more tokens
    for number in range(12):
        n_forms = step(buckets[number % 3], number)
    assert n_forms == 3
    assert step([250, 240]) == 3  # shorter, and too few to be captured: it runs in graphs that hold it
    assert graphs_of(models[0]).why_not is None
    assert step([*buckets[2], 900]) == 4  # longer than all: captured at once, as the kernels are compiled


@gpu
def test_dropout_is_drawn_anew_every_step():
    model = tiny_model("qwen3", torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.5)})
    patch_model(model, "flash")
    drawn = set()
    for _ in range(6):
        loss = loss_of(model, 0, seed=0)
        loss.backward()
        drawn.add(loss.item())
    assert "captured for" in str(graphs_of(model))
    assert len(drawn) >= 5


@gpu
def test_a_capture_while_another_thread_pins_memory():
    """As a loader's pinning thread does: CUDA calls that a capture forbids in its own thread."""
    models = pair()
    is_over, n_pinned = threading.Event(), 0

    def pin():
        nonlocal n_pinned
        while not is_over.is_set():
            torch.empty(1 << n_pinned % 24, dtype=torch.uint8).pin_memory()
            torch.cuda.Event().query()
            n_pinned += 1

    pinning = threading.Thread(target=pin)
    pinning.start()
    try:
        capture(models)
    finally:
        is_over.set()
        pinning.join()
    assert n_pinned
    assert_alike(models, step_both(models, 1))


@gpu
def test_a_capture_that_breaks(monkeypatch):
    """The device is waited for while capturing, which CUDA forbids: training goes on, dropout included."""
    model, _ = pair()
    decoder = model.get_decoder()
    packed_forward = type(decoder)._packed_forward

    def waiting(self, row, *args, **kwargs):
        out = packed_forward(self, row, *args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            out.last_hidden_state.sum().item()
        return out

    pools_before = reserved_pools()
    monkeypatch.setattr(type(decoder), "_packed_forward", waiting)
    for step in range(5):
        loss_of(model, step).backward()
    assert "capture failed" in str(graphs_of(model))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5).count_nonzero() < 700
    assert reserved_pools() <= pools_before
    assert_cached_memory_is_freed()


def reserved_pools():
    return {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()} - {(0, 0)}


def assert_cached_memory_is_freed():
    """Two tensors that fit after one another, but not beside what the allocator keeps of the first."""
    unit = 2**29
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 3 * unit
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        torch.empty(unit, dtype=torch.uint8, device="cuda")
        torch.empty(5 * unit // 2, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@gpu
def test_a_warm_up_that_breaks_while_a_loss_holds_graphs(monkeypatch):
    """As in a loop that keeps its loss until the next one is there."""
    model, _ = pair()
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
    assert str(graphs_of(model)).startswith("captured for")

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    decoder, lengths = model.get_decoder(), [200, 300]
    with monkeypatch.context() as broken:
        broken.setattr("unsloth_pack.cuda_graphs.capture.PlaceholderParams.__enter__", no_memory)
        ids = torch.cat(random_documents(lengths)).cuda()[None]
        decoder(input_ids=ids, packed_seq_lengths=lengths).last_hidden_state.sum().backward()
    assert "capture failed (OutOfMemoryError" in str(graphs_of(model))
    del loss
    gc.collect()
    loss_of(model, 0).backward()
    assert_cached_memory_is_freed()


@gpu
def test_a_model_that_is_gone_takes_no_workspace_from_another():
    gone, models = pair(), pair()
    capture(gone)
    capture(models)
    del gone
    gc.collect()
    torch.cuda.empty_cache()
    assert_alike(models, step_both(models, 4))


@gpu
@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", [True, "offload", "trainer's"])
def test_recomputed_layers_are_captured(arch, adapter, mode):
    models = pair(arch, adapter)
    for model in models:
        if mode == "trainer's":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        else:
            enable_checkpointing(model, mode)
    capture(models)
    for step in (4, 1, 2):  # one after the other: what lies on the host is that of the row
        assert_alike(models, step_both(models, step))
    models[0].gradient_checkpointing_disable()
    assert_alike(models, step_both(models, 3))


@gpu
@pytest.mark.parametrize("mode", [True, "offload"])
def test_recomputed_layers_that_draw_other_random_numbers_are_not_captured(mode):
    """A float32 base under autocast does not run fused: PEFT's dropout draws for itself."""
    model = tiny_model("llama", torch.float32, lora={"lora_dropout": 0.5})
    patch_model(model, "triton")
    enable_checkpointing(model, mode)
    for _ in range(5):
        loss_of(model, 0, seed=1).backward()
    assert "layers that are computed again draw random numbers" in str(graphs_of(model))


@gpu
def test_a_borrowed_view_has_the_strides_of_what_it_stands_for():
    """The first hidden states of SigLIP's towers are not contiguous."""
    whole = torch.randn(3, 8, 5, device="cuda", dtype=torch.bfloat16)
    for x in (whole, whole.transpose(1, 2), whole[:, 1:4, ::2], whole[:, :1].expand(3, 4, 5), whole[:0]):
        view = alias_memory(x)
        assert torch.equal(view, x)
        assert view.stride() == x.stride() or not x.numel()
        assert view.data_ptr() == x.data_ptr() or not x.numel()
