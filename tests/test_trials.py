"""A step is captured where launching was measured to hold the device up, and where memory allows it."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tiny import random_documents, tiny_model

from unsloth_pack import patch_model
from unsloth_pack.cuda_graphs.capture import StepOutput
from unsloth_pack.cuda_graphs.capture_decision import CaptureDecision, DeviceTimer
from unsloth_pack.cuda_graphs.step import StepGraphs
from unsloth_pack.packed_row.row import PackedRow

CPU = torch.device("cpu")
GIB = 2**30


class Machine:
    """A host and a device with clocks of their own; takes the place of a `Gauge`.

    A mark is the moment in which the device reaches it.
    """

    def __init__(self, free=80.0):
        self.host = self.done = 0.0  # seconds: now, and when the device will have done its work
        self.bytes_held = self.bytes_most = 0
        self.bytes_in_all = int(free * GIB)
        self.n_waits = self.n_marks = 0

    def runs(self, host, device, keeps=0.0):
        """A forward pass: the device starts at once, and ends no earlier than its last launch."""
        self.done = max(max(self.host, self.done) + device, self.host + host)
        self.host += host
        self.takes(keeps)

    def takes(self, gib):
        self.bytes_held += int(gib * GIB)
        self.bytes_most = max(self.bytes_most, self.bytes_held)

    def wait(self):
        self.n_waits += 1
        self.host = max(self.host, self.done)

    def now(self):
        return self.host

    def mark(self):
        self.n_marks += 1
        return max(self.host, self.done)

    def has_passed(self, mark):
        return self.host >= mark

    def between(self, start, end):
        return end - start

    def allocated(self):
        return self.bytes_held

    def peak(self):
        return self.bytes_most

    def free(self):
        return self.bytes_in_all - self.bytes_held


def trials_on(machine):
    return CaptureDecision(lambda device: machine)


def try_rows(trials, machine, *rows, tokens=1024, pause=1.0):
    for host, device in rows:
        with trials.trial(tokens, CPU):
            machine.runs(host, device)
        machine.host += pause  # the rest of the step


@pytest.mark.parametrize(
    ("host", "device", "is_held_up"),
    [
        (0.020, 0.005, True),
        (0.071, 0.100, True),
        (0.069, 0.100, False),
        (0.012, 0.045, False),
        (0.370, 0.410, True),
        (0.545, 0.763, False),  # a row of 32,768 tokens of 8B: the queue of launches is full
    ],
)
def test_launching_holds_the_device_up_from_a_share_of_its_time_on(host, device, is_held_up):
    machine = Machine()
    trials = trials_on(machine)
    assert trials.is_held_up(1024) is None
    assert trials.times(1024) is None
    try_rows(trials, machine, (host, device))
    assert trials.is_held_up(1024) is None  # the first row compiles: one is not enough
    try_rows(trials, machine, (host, device))
    assert trials.is_held_up(1024) is is_held_up
    assert trials.times(1024) == (f"{1e3 * max(host, device):.1f} ms", f"{1e3 * host:.1f} ms")


def need(text):
    """GiB of the graphs, of a step, and free."""
    return [float(word) for word in text.split() if word.replace(".", "").isdigit()]


def test_graphs_leave_room_for_a_step_with_its_backward_pass():
    for free, is_enough in ((20.1, True), (19.9, False)):
        machine = Machine(free)
        trials = trials_on(machine)
        with trials.trial(1024, CPU):
            machine.runs(0.02, 0.005, keeps=10)
        machine.takes(-10)
        why = trials.why_too_large(1024, CPU, 0)
        assert (why is None) == is_enough
        assert is_enough or need(why) == [10, 10, 19.9]
        assert trials.why_too_large(512, CPU, 0) is None
        assert need(trials.why_too_large(1024, CPU, 2**30))[:2] == [11, 10]
        assert need(trials.why_too_large(2048, CPU, 0))[0] == 20
    machine = Machine(30)
    trials = trials_on(machine)
    for gib in (25, -20):  # as the weights were loaded: a peak that no step has set
        machine.takes(gib)
    for backward, expected in ((0, None), (20, [24, 24, 25])):
        with trials.trial(1024, CPU):
            machine.runs(0.02, 0.005, keeps=4)
        machine.takes(backward)
        machine.takes(-backward - 4)
        why = trials.why_too_large(1024, CPU, 0)
        assert (why and need(why)) == expected
    for gib in (25, -25):  # what a capture takes is no step's
        machine.takes(gib)
    assert need(trials.why_too_large(1024, CPU, 0)) == [24, 24, 25]


# In a decoder's graphs


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.setattr("unsloth_pack.cuda_graphs.step.CapturedShape", lambda *_: CAPTURED)
    model = tiny_model("llama", device="cpu")
    patch_model(model)
    return model.get_decoder()


CAPTURED = SimpleNamespace(launch=lambda *_: None, output=lambda *_: "replayed")
IDS = torch.zeros(1, 64, dtype=torch.int64)


def steps(graphs, decoder, machine, n, host, device, keeps=0.0):
    """What is returned for rows of one shape, which run uncaptured where it is nothing."""
    row, found = PackedRow.of_lengths([64], CPU), []
    for _ in range(n):
        found.append(graphs.run(decoder, row, IDS))
        if found[-1] is None:
            with graphs.tried(row):
                machine.runs(host, device, keeps)
            machine.takes(-keeps)
        machine.host += 1
    return found


def graphs_on(machine):
    graphs = StepGraphs(None)
    graphs._trials = defaultdict(lambda: trials_on(machine))
    return graphs


def test_a_step_that_waits_for_python_is_captured(decoder):
    machine = Machine()
    graphs = graphs_on(machine)
    assert steps(graphs, decoder, machine, 4, 0.0213, 0.005) == [None, None, "replayed", "replayed"]
    assert graphs.why_not is None
    said = "captured for 1 shapes of rows, of 64 tokens; the GPU computes 0.0 ms, Python launches 21.3 ms"
    assert str(graphs) == said


def test_a_step_that_python_keeps_busy_is_not_captured(decoder):
    machine = Machine()
    graphs = graphs_on(machine)
    assert steps(graphs, decoder, machine, 2, 0.0121, 0.0452) == [None, None]
    assert graphs.why_not is None
    assert steps(graphs, decoder, machine, 6, 0.0121, 0.0452) == [None] * 6
    why = "the GPU computes longer than Python launches: 45.2 ms against 12.1 ms"
    assert graphs.why_not == why
    assert str(graphs) == f"not captured: {why}"
    assert machine.n_waits == 4
    longer = PackedRow.of_lengths([300], CPU)
    assert graphs.run(decoder, longer, torch.zeros(1, 300, dtype=torch.int64)) is None
    assert graphs.why_not == why  # from the first row on


class Slow(DeviceTimer):
    """A device that computes ten times as long as it is launched for."""

    def between(self, start, end):
        return 10 * super().between(start, end)


@pytest.mark.parametrize(("gauge", "is_captured"), [(DeviceTimer, True), (Slow, False)])
def test_rows_of_a_patched_model_are_tried(gauge, is_captured, monkeypatch):
    replayed = []

    def replay(row, ids):
        replayed.append(row)
        return StepOutput(torch.randn(*ids.shape, 64), None)

    captured = SimpleNamespace(launch=lambda row, ids: ids, output=replay)
    monkeypatch.setattr("unsloth_pack.cuda_graphs.step.CapturedShape", lambda *_: captured)
    model = tiny_model("llama", device="cpu")
    patch_model(model)
    graphs = model.get_decoder().step_graphs
    graphs.why_never, graphs._trials = None, defaultdict(lambda: CaptureDecision(gauge))
    ids = torch.cat(random_documents([40, 20]))[None]
    for _ in range(6):
        model(input_ids=ids, labels=ids, packed_seq_lengths=[40, 20])
    assert len(replayed) == 4 * is_captured
    assert str(graphs).startswith("captured for" if is_captured else "not captured: the GPU computes longer")
