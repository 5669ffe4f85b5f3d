"""Warm processes end like others, tell how, and leave nothing to the next one."""

import os
import signal
import sys
import time

import pytest
import torch
import warm
from _pytest.outcomes import Failed

seen = []


def end(how):
    if isinstance(how, signal.Signals):
        os.kill(os.getpid(), how)
    print("so far", flush=True)
    raise SystemExit(how) if isinstance(how, int) else ValueError(how)


@pytest.mark.parametrize(("how", "code"), [(0, 0), (3, 3), (signal.SIGKILL, -9), ("a mistake", 1)])
def test_the_exit_code_is_told(how, code):
    done = warm.call(end, how)
    assert done.returncode == code
    assert done.stdout == ("" if code == -9 else "so far\n")
    assert ("ValueError: a mistake" in done.stderr) == (code == 1)


def fail_on_one(rank, code):
    if rank:
        sys.exit(code)
    time.sleep(600)


def test_the_first_process_that_fails_ends_the_others():
    with pytest.raises(Failed):
        warm.two_ranks(fail_on_one, 3)


def differ(rank):
    numbers = [torch.zeros(1) for _ in range(2)]
    torch.distributed.all_gather(numbers, torch.tensor([rank + 1.0]))
    assert torch.cat(numbers).tolist() == [1.0, 2.0]
    assert not rank, "found on the second"


def test_what_one_of_two_asserts_is_told():
    with pytest.raises(Failed, match="found on the second"):
        warm.in_two_processes(differ)


def leave_something():
    assert not seen
    assert "LEFT" not in os.environ
    assert "warm_imports" in sys.modules
    seen.append(1)
    os.environ["LEFT"] = "1"


def test_nothing_is_left_for_the_next_process():
    for _ in range(2):
        done = warm.call(leave_something)
        assert done.returncode == 0, done.stderr
