import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices are faster so; read when torch is imported

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read as triton's own functions are imported
    import triton

    triton.knobs.runtime.interpret = True  # and as ours are
    del os.environ["TRITON_INTERPRET"]  # the processes that tests start run plain torch, as a user's do
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.dont_write_bytecode = False  # pytest keeps the asserts that it rewrote: half of what collecting takes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background inherits none
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup has it ignored, by all that tests start too

gc.disable()  # until all is collected: passes through half a million objects that stay, a quarter of its time

from tiers import QUICK, nightly_models  # noqa: E402

TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    """`-m quick` reads no other files: importing them takes longer than the quick tests."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return collection_path.relative_to(TESTS).as_posix() not in QUICK or None
    return None


def pytest_addoption(parser):
    parser.addoption(
        "--shard", default="0/1", metavar="I/N", help="a share of the tests: the Ith, from 0, of N"
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in QUICK:
            item.add_marker(pytest.mark.quick)
    for item in nightly_models(items):
        item.add_marker(pytest.mark.nightly)
    tiers = {tier for tier in ("nightly", "extras") if tier not in config.option.markexpr}
    tiers |= {"gpu"} if not torch.cuda.is_available() else set()
    shard, shards = map(int, config.option.shard.split("/"))
    left_out = {
        item
        for item in items
        if tiers & {mark.name for mark in item.iter_markers()}
        or crc32(item.nodeid.partition("[")[0].encode()) % shards != shard
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # extensions complain of what is left at the exit


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """Trainers collect garbage often: half a second each through all that torch and transformers keep."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_environment(monkeypatch):
    """`datasets` leaves a copy in its place after work in several processes, which rich does not see."""
    monkeypatch.setattr(os, "environ", os.environ)


@pytest.fixture(autouse=True, scope="module")
def plain_torch_on_a_cpu():
    """What a user without a GPU runs; the interpreter, which truncates to bfloat16, is for tests/kernels."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unsloth_pack.kernels.launch.INTERPRETED", False)
        yield


@pytest.fixture(autouse=True, scope="module")
def no_figures():
    """Five of them take longer than a short run: they are empty. Returns what draws them."""
    from unsloth_pack.report import html

    empty, draw = {"svg": b"<svg></svg>", "png": b"\x89PNG"}, html.render
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(html, "render", lambda draw, file_format, **_: empty[file_format])
        yield draw


@pytest.fixture(autouse=True)
def figures_where_they_are_tested(request, no_figures, monkeypatch):
    if "draws" in request.keywords:
        monkeypatch.setattr("unsloth_pack.report.html.render", no_figures)


@pytest.fixture(autouse=True)
def quick_tests_start_no_process(request, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a quick test starts no process")

    if "quick" in request.keywords:
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(os, "fork", refuse)


@pytest.fixture
def leak(monkeypatch):
    """Attention whose first boundary is off by one."""
    from unsloth_pack.packed_row.row import PackedRow

    right = PackedRow.stacks.func

    def shifted(row):
        if len(row.lengths) < 2 or row.parent is not None:
            return right(row)
        return right(
            PackedRow.of_lengths((row.lengths[0] + 1, row.lengths[1] - 1, *row.lengths[2:]), row.device)
        )

    monkeypatch.setattr(PackedRow, "stacks", property(shifted))
    monkeypatch.setattr("unsloth_pack.layers.leak_probe._LENGTHS", (7, 3, 16, 2))


@pytest.fixture
def described(monkeypatch):
    """The shapes of the rows that were described."""
    from unsloth_pack.packed_row import describe as from_call

    shapes, describe = [], from_call.describe_row

    def counted(shape, *args, **kwargs):
        shapes.append(shape)
        return describe(shape, *args, **kwargs)

    monkeypatch.setattr(from_call, "describe_row", counted)
    return shapes


@pytest.fixture
def no_chunked_head(monkeypatch):
    """TRL's own head must not run."""
    from trl.trainer import utils

    def refuse(*args):
        raise AssertionError("TRL's chunked head was called")

    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", refuse)


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """A folder of its own for what a test writes beside itself."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def one_thread():
    """As processes of the command line have here; more threads would change bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def interpreted(monkeypatch):
    """Without a GPU, Triton's kernels run under its interpreter; caches of what can run are cleared."""
    pytest.importorskip("triton")
    from unsloth_pack.attention import choose_backend, why_unavailable

    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()
    if not torch.cuda.is_available():
        monkeypatch.setattr("unsloth_pack.kernels.launch.INTERPRETED", True)
    yield
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()
