"""Plant each fault of the ledger in a copy of the package and run the tests that should see it.

Run from the checkout: `python -m tests.planted`. Exits with 0 only where every fault is caught.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

if not torch.cuda.is_available():  # as in tests/conftest.py, before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]


from tests.planted import ROOT, Fault, read_ledger

LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets")  # imported once, for all forked processes
PAGE, TRUST = ROOT / "docs" / "planted-faults.md", ROOT / "docs" / "trust.md"
HEAD = """# Planted faults

`python -m tests.planted` applies each of these {} faults to a copy of the package, one at a time, and runs
the tests of the default tier that should see it. It exits with 0 only where every fault makes a test fail.
`tests/planted/faults` lists them; `--write` writes this page.
"""
TIMEOUT = 900  # seconds; a fault that makes a test wait forever is not caught


class Outcomes:
    """A plugin that notes which test failed first, and writes it down once all is told."""

    def __init__(self, path: Path):
        self.path, self.failed, self.ran, self.code = path, None, 0, 4

    def pytest_runtest_logreport(self, report):
        self.ran += report.when == "call" and not report.skipped
        if report.failed and self.failed is None:
            self.failed = report.nodeid if report.when == "call" else f"{report.when} of {report.nodeid}"

    def pytest_sessionfinish(self, exitstatus):
        self.code = int(exitstatus)

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self):
        libraries = [name for name in sys.modules if name.split(".")[0] in LIBRARIES]
        result = {"code": self.code, "failed": self.failed, "ran": self.ran, "libraries": libraries}
        self.path.write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # what follows collects the garbage of all libraries, for seconds


def run_tests(folder: Path, tests: Iterable[str]) -> None:
    """Run tests in a folder that holds a copy of the checkout; write what happened beside them."""
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    os.chdir(folder / "copy")
    os.environ["PYTHONPATH"] = str(folder / "copy")  # for the processes that tests start
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    sys.path[:] = [str(folder / "copy"), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    signal.alarm(TIMEOUT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest"]
    pytest.main([*options, *tests], [Outcomes(folder / "result.json")])


def copied(source: Path) -> Path:
    """A new folder with a copy of a checkout: package and tests with what is compiled, links to the rest."""
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    (folder / "copy").mkdir()
    for entry in source.iterdir():
        if entry.name in ("unsloth_pack", "tests"):
            shutil.copytree(entry, folder / "copy" / entry.name)
        elif entry.name != ".git":
            (folder / "copy" / entry.name).symlink_to(entry.resolve())
    return folder


def start(folder: Path, tests: Iterable[str]) -> int:
    """Fork a process that runs tests on the copy in a folder."""
    if pid := os.fork():
        return pid
    try:
        os.setpgid(0, 0)
        run_tests(folder, tests)
    finally:
        os._exit(0)


def result_of(pid: int, folder: Path, status: int) -> dict:
    """What became of a process that has ended with a wait status; those that it left are ended too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {"failed": None, "ran": 0}
    result.setdefault("code", os.waitstatus_to_exitcode(status) or -1)
    return result | {"log": (folder / "log.txt").read_text(errors="replace")}


def verdict(result: dict) -> tuple[bool, str]:
    """Whether a fault was caught, and by which test or why not."""
    code, failed = result["code"], result["failed"]
    if code == 1 and failed and " of " not in failed.split("::")[0]:
        return True, failed.removeprefix("tests/")
    if code in (-signal.SIGSEGV, -signal.SIGABRT):  # Triton's interpreter left the memory of an array
        return True, f"the tests end with {signal.Signals(-code).name}"
    why = {0: "NOT CAUGHT", -signal.SIGALRM: "NOT CAUGHT: the tests ran too long"}
    return False, why.get(code, f"LEDGER: pytest exits with {code}, {failed or result['log'][-300:]}")


def plant(source: Path, faults: list[Fault], jobs: int) -> list[tuple[Fault, bool, str]]:
    running, waiting, results = {}, list(faults), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            fault, folder = waiting.pop(0), copied(source)
            (folder / "copy" / "unsloth_pack" / fault.file).write_text(fault.edited())
            pid = start(folder, fault.tests)
            running[pid] = fault, folder, time.monotonic()
        pid, status = os.wait()
        fault, folder, began = running.pop(pid)
        caught, text = verdict(result_of(pid, folder, status))
        shutil.rmtree(folder, ignore_errors=True)
        results[fault.name] = fault, caught, text
        print(
            f"{len(results):4} {time.monotonic() - began:5.1f} s  {fault.file}: {fault.name}: {text}",
            flush=True,
        )
    return [results[fault.name] for fault in faults]


def preload(libraries: Iterable[str]) -> None:
    """Import these modules for all processes to come, and keep the collector away from them."""
    for name in libraries:
        with contextlib.suppress(Exception):  # some can only be imported by another
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def write_table(results: list[tuple[Fault, bool, str]]) -> None:
    """Write the page of planted faults, whose others stay, and their number in docs/trust.md."""
    told = [f"| {fault.file} | {fault.name} | `{test}` |" for fault, _, test in results]
    row_of = {row.rsplit(" | ", 1)[0]: row for row in [*PAGE.read_text().splitlines(), *told]}
    places = (f"| {fault.file} | {fault.name}" for fault in read_ledger())
    rows = [row_of[place] for place in places if place in row_of]
    table = "\n".join(["| file | planted | caught by |", "|---|---|---|", *rows])
    PAGE.write_text(f"{HEAD.format(len(rows))}\n{table}\n")
    TRUST.write_text(
        re.sub(r"plants \d+ small faults", f"plants {len(rows)} small faults", TRUST.read_text())
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", default="", help="only faults whose file or name contains these words")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--write", action="store_true", help="write docs/planted-faults.md")
    arguments = parser.parse_args()
    faults = [fault for fault in read_ledger() if arguments.only in f"{fault.file}: {fault.name}"]
    if not faults:
        parser.error(f"--only {arguments.only!r} names no fault; give words of a file or a name")
    for fault in faults:
        fault.edited()
    for name in LIBRARIES:
        importlib.import_module(name)
    folder = copied(ROOT)  # in which modules are compiled once; the others are copies of it
    try:
        pid = start(folder, dict.fromkeys(test for fault in faults for test in fault.tests))
        _, status = os.waitpid(pid, 0)
        whole = result_of(pid, folder, status)
        if whole["code"]:
            print(whole["log"], f"The tests fail without a fault: {whole['failed']}", sep="\n")
            return 1
        print(f"{whole['ran']} tests pass without a fault", flush=True)
        preload(whole["libraries"])
        results = plant(folder / "copy", faults, arguments.jobs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    caught = sum(caught for _, caught, _ in results)
    print(f"{caught} of {len(results)} planted faults are caught")
    if arguments.write and caught == len(results):
        write_table(results)
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
