"""Processes that have everything imported as they begin, and groups of them.

They are forked from one process a session, which has trained a model once and has never run on more than one
thread. On a CUDA device they import everything anew: a process that has used the device cannot fork.
"""

import atexit
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

import datasets
import pytest
import torch

ROOT = Path(__file__).parents[1]
SECONDS = 300
_FORKS = not torch.cuda.is_available()
context = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
if _FORKS:
    context.set_forkserver_preload(["warm_imports"])


def start(run: Callable, *arguments, stdout=None, stderr=None, cwd=None, environment: Mapping | None = None):
    """A process that calls `run(*arguments)`, a function that can be imported.

    Its exit code is 0, that of a `SystemExit`, or 1 after any other exception. Its output goes to files.
    """
    cwd, environment = cwd or Path.cwd(), dict(os.environ if environment is None else environment)
    files = [stdout or os.devnull, stderr or os.devnull]
    process = context.Process(target=_begin, args=(files, cwd, environment, run, arguments))
    warm_up()
    process.start()
    return process


def warm_up() -> None:
    """Start the process that others are forked from; `context` does so by itself, but without our imports."""
    if _FORKS:
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, sys.path)), OMP_NUM_THREADS="1"):
            forkserver.ensure_running()


def call(run: Callable, *arguments, **options) -> subprocess.CompletedProcess:
    """What `subprocess.run` would return of a process of `start`."""
    return _ended([lambda **outputs: start(run, *arguments, **outputs, **options)], run)


def program(path, *arguments, **options) -> subprocess.CompletedProcess:
    """`python path *arguments`."""
    return call(run_program, path, arguments, **options)


def code(source: str, *arguments, **options) -> subprocess.CompletedProcess:
    """`python -c source *arguments`."""
    return call(run_code, source, arguments, **options)


def open_outputs() -> None:
    """Python's outputs anew, after their descriptors have been replaced: a pipe is not read as a file is."""
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def in_two_processes(run: Callable, *arguments) -> None:
    """`run(rank, *arguments)` in each of two gloo processes on the CPU."""
    done = _group(2, _in_group, (run, *arguments), os.environ)
    if done.returncode:
        pytest.fail(done.stderr)


def two_ranks(run: Callable, *arguments) -> None:
    """`run(rank, *arguments)` in each of two processes, which begin as those of torchrun: without a group."""
    done = _group(2, _with_rank, (run, *arguments), os.environ)
    if done.returncode:
        pytest.fail(done.stderr)


def torchrun(processes, *arguments, program=ROOT / "cli.py", error_file=None, real=False, **flags):
    """What `subprocess.run` returns of torchrun; without it, unless it is to be `real`."""
    arguments = [*map(str, arguments), *(f"--{name}={value}" for name, value in flags.items())]
    if not real:
        return _group(processes, run_program, (program, arguments), os.environ, error_file)
    path = os.pathsep.join(map(str, [ROOT, *sys.path]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if error_file is not None:
        environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


def run_program(path, arguments):
    sys.argv = [str(path), *map(str, arguments)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(str(path), run_name="__main__")


def run_code(source, arguments):
    sys.argv = ["-c", *map(str, arguments)]
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def _group(processes, run, arguments, environment, error_file=None):
    """As torchrun starts it: the store of the group is here, and the first that fails ends the others.

    What that one has left in its `TORCHELASTIC_ERROR_FILE` is copied to `error_file`.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    common |= {"TORCHELASTIC_RESTART_COUNT": 0, "GROUP_RANK": 0}

    def starter(rank):
        of_rank = environment | {name: str(value) for name, value in common.items()}
        of_rank |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        of_rank["TORCHELASTIC_ERROR_FILE"] = f"{error_files}/{rank}.json"
        return lambda **outputs: start(run, *arguments, **outputs, environment=of_rank)

    with tempfile.TemporaryDirectory() as error_files:
        done = _ended([starter(rank) for rank in range(processes)], run)
        left = sorted(Path(error_files).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        if error_file is not None and left:
            shutil.copy(left[0], error_file)
    return done


def _ended(starters, name):
    """The result of processes that share their outputs; its code is 1 if one of several fails."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder, name) for name in ("stdout", "stderr")}
        for path in outputs.values():
            path.touch()
        processes = [start_one(**outputs) for start_one in starters]
        deadline = time.monotonic() + SECONDS
        while running := [process for process in processes if process.exitcode is None]:
            if any(process.exitcode for process in processes):
                for process in running:
                    process.terminate()
                deadline = min(deadline, time.monotonic() + 30)
            wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                for process in running:
                    process.kill()
                pytest.fail(f"{name} does not end: {outputs['stderr'].read_text()}")
        codes = [process.exitcode for process in processes]
        said = {name: path.read_text() for name, path in outputs.items()}
    return subprocess.CompletedProcess(name, codes[0] if len(codes) == 1 else int(any(codes)), **said)


def _begin(files, cwd, environment, run, arguments):
    """Give the process what a new one has: environment, folder and output. End it as Python would."""
    assert not _FORKS or "warm_imports" in sys.modules
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    open_outputs()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if "HF_DATASETS_CACHE" in environment:  # read as datasets is imported
        datasets.config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    code = 0
    try:
        run(*arguments)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_group(run, *arguments):
    torch.distributed.init_process_group("gloo")
    run(torch.distributed.get_rank(), *arguments)
    # A process that ends while the other still holds the group can leave it waiting for ever
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _with_rank(run, *arguments):
    run(int(os.environ["RANK"]), *arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
