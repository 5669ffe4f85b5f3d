"""`bench`: four runs, each in a process of its own, and the breakdown of a step."""

import functools
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.autograd import DeviceType

from unsloth_pack.bench.breakdown import CATEGORIES, break_down, kernel_category
from unsloth_pack.bench.measure import Case, Figures, measure, measure_apart
from unsloth_pack.cli import bench, main

LINES = ["patched, packed", "patched, padded", "plain, packed", "plain, padded"]


@pytest.fixture
def benched(model, data, capsys):
    """Runs the command and returns its exit code and its JSON."""

    def run(*flags):
        code = main(["bench", "--model_name", model, "--dataset", data, "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_four_runs_and_a_breakdown(benched, monkeypatch, tmp_path_factory, tmp_path):
    folder = tmp_path_factory.mktemp("runs")
    here = functools.partial(measure, folder=folder, started=time.time())  # a process each would take long
    monkeypatch.setattr("unsloth_pack.bench.measure.measure_apart", here)
    flags = ["--max_seq_length=200", "--steps=2", "--per_device_train_batch_size=2", "--rounds=1"]
    code, found = benched(*flags)
    assert code == 0
    runs = {f"{run['model']}, {run['rows']}": run for run in found["runs"]}
    assert list(runs) == LINES
    assert "would leak without flash-attn" in runs.pop("plain, packed")["why_not"]
    for run in runs.values():
        figures = run["figures"]
        assert run["why_not"] is None
        assert figures["tokens_per_second"] * figures["step_ms"] / 1e3 <= run["rows_per_step"] * 200
        assert figures["peak_memory_bytes"] > 2**20
        for name in ("startup_seconds", "first_step_seconds", "documents_per_second", "tflops"):
            assert figures[name] > 0
        assert run["step_ms_by_round"] == [figures["step_ms"]]
    assert runs["patched, packed"]["rows_per_step"] == 2
    assert runs["patched, packed"]["figures"]["tokens_padded"] == 0
    assert runs["plain, padded"]["figures"]["tokens_padded"] > 0
    assert runs["plain, padded"]["figures"]["step_graphs"] is None
    breakdown = found["breakdown_ms"]
    assert list(breakdown) == [*CATEGORIES, "host gaps"]
    for name in ("attention", "GEMMs", "loss", "optimizer", "other"):
        assert breakdown[name] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def answers(monkeypatch):
    """The runs' figures, one for each round, or what they fail with, in place of training."""
    figures = bench_figures()
    asked = []

    def measure(case):
        asked.append(case)
        answer = planned.get((case.is_patched, case.is_packed, case.is_profiled), figures)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    kernel_ms = dict.fromkeys(CATEGORIES, 1.0) | {"fused kernels": 0.0, "GEMMs": 2.0}
    planned = {(True, True, True): bench_figures(kernel_ms=kernel_ms, busy_ms=6.0)}
    monkeypatch.setattr("unsloth_pack.bench.measure.measure_apart", measure)
    return planned, asked


def bench_figures(**changes):
    times = {"startup_seconds": 3.0, "first_step_seconds": 1.0, "step_ms": 10.0}
    speeds = {"tokens_per_second": 12345.0, "documents_per_second": 67.0, "tokens_padded": 0.25}
    speeds |= {"tflops": 543.2, "mfu": 0.549, "hfu": None}
    memory = {"peak_memory_bytes": 2**31, "peak_memory_of": "process memory"}
    return Figures("sdpa", "not captured: why", **(times | speeds | memory | changes))


def test_the_tables(model, data, answers, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    planned, asked = answers
    planned[False, False, False] = torch.OutOfMemoryError("CUDA out of memory")
    flags = ["--steps", "7", "--use_gradient_checkpointing", "offload", "--max_seq_length", "200"]
    assert main(["bench", "--model_name", model, "--dataset", data, *flags]) == 0
    shown = capsys.readouterr().out
    figures = (
        "12,345",
        "2.00 GiB",
        "25.0%",
        "543",
        "54.9%",
        "40.0%",
    )  # of the gaps: 10 ms, of which 6 were busy
    for said in (*LINES, *figures, "plain, padded: OutOfMemoryError", "GEMMs", "host gaps"):
        assert said in shown
    for absent in ("fused kernels", "too busy"):
        assert absent not in shown
    assert [case.steps for case in asked] == [7, 7, 7, 7, 7, bench._PROFILED]  # none again that failed
    assert {case.use_gradient_checkpointing for case in asked} == {"offload"}
    assert [case.rows_per_step for case in asked] == [1, 2, 2, 1, 2, 1]


def test_runs_take_turns_and_the_fastest_round_counts(benched, answers):
    planned, asked = answers
    planned[True, True, False] = [
        bench_figures(step_ms=ms, tokens_per_second=1e3 / ms) for ms in (12, 10, 11)
    ]
    planned[False, False, False] = [bench_figures(), torch.OutOfMemoryError("CUDA out of memory")]
    _, found = benched("--rounds=3")
    turns = [(case.is_patched, case.is_packed) for case in asked]
    a_round = [(True, True), (True, False), (False, False)]
    assert turns == [*a_round * 2, *a_round[:2], (True, True)]
    packed, padded, _, plain = found["runs"]
    assert packed["step_ms_by_round"] == [12, 10, 11]
    assert (packed["figures"]["step_ms"], packed["figures"]["tokens_per_second"]) == (10, 100)
    assert padded["step_ms_by_round"] == [10, 10, 10]
    assert (plain["figures"], plain["why_not"]) == (None, "OutOfMemoryError: CUDA out of memory")
    assert found["too_busy"] is None


def test_it_says_when_the_machine_is_too_busy(model, data, answers, capsys):
    planned, _ = answers
    planned[False, False, False] = [bench_figures(step_ms=ms) for ms in (10.0, 26.04)]
    assert main(["bench", "--model_name", model, "--dataset", data]) == 0
    says = "a step of plain, padded took 10.0 ms in one round, 26.0 ms in another"
    assert f"the machine is too busy to compare speeds: {says}; run bench again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load_in_4bit", "--load_in_fp8"], "load_in_4bit and load_in_fp8 are set together; choose one"),
        (["--steps", "0"], "it should be greater than or equal to 1"),
        (["--max_seq_length", "1000"], "max_seq_length is 1000"),
        (["--attn_backend", "flash"], "attn_backend 'flash' cannot run"),
        (["--model_name", "no-such-folder/"], "no-such-folder"),
        (["--dataset", "no-such.json"], "no-such.json"),
    ],
)
def test_bad_input(flags, message, model, data, capsys):
    given = [] if "--dataset" in flags else ["--dataset", data]
    assert main(["bench", "--model_name", model, *given, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def case(model, tmp_path):
    rows = tmp_path / "rows"
    documents = [[*range(length)] for length in (9, 5, 3)]
    Dataset.from_dict({"input_ids": documents, "labels": documents}).save_to_disk(rows)
    return Case(model, str(rows), False, True, max_seq_length=16, rows_per_step=2, steps=1)


@pytest.mark.nightly
def test_a_process_of_its_own(case):
    assert measure_apart(case).startup_seconds > 0.5  # imports are part of it
    with pytest.raises(FileNotFoundError):
        measure_apart(replace(case, rows="nowhere"))


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)", "attention"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN", "GEMMs"),
        ("_gated_lora_backward_kernel", "fused kernels"),
        ("_forward_kernel", "loss"),
        ("multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_what_a_kernel_counts_as(kernel, category):
    assert kernel_category(kernel) == category


def gpu_event(name, start, end, is_annotation=False):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name, device_type=DeviceType.CUDA, time_range=span, is_user_annotation=is_annotation
    )


def cpu_event(name, parent=None, **kernels):
    launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels.items()]
    return SimpleNamespace(name=name, device_type=DeviceType.CPU, cpu_parent=parent, kernels=launched)


def test_a_kernel_belongs_to_the_loss_that_launched_it():
    loss = cpu_event("ChunkedLogProbFunction")
    events = [
        gpu_event("sm90_xmma_gemm", 0, 3000),  # of the loss
        gpu_event("sm90_xmma_gemm", 3000, 8000),  # from a graph
        gpu_event("Memcpy HtoD", 7000, 9000),  # on another stream
        gpu_event("Optimizer.step#AdamW.step", 0, 20000, is_annotation=True),
        loss,
        cpu_event("aten::mm", loss, sm90_xmma_gemm=3000),
        cpu_event("cudaGraphLaunch", None, sm90_xmma_gemm=5000),
    ]
    found = break_down(events, steps=2, on_gpu=True)
    expected = {"loss": 1.5, "GEMMs": 2.5, "other": 1.0}
    assert found == (dict.fromkeys(CATEGORIES, 0.0) | expected, 4.5)
