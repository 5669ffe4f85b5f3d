"""Forked processes end with the one that forked them, where that is asked for."""

import multiprocessing
import subprocess
import sys
import threading

import psutil
import pytest

from unsloth_pack.forked import children_end_with_this_process

FAMILY = """
import os, time
from unsloth_pack.forked import children_end_with_this_process

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(60)

with children_end_with_this_process():
    if not os.fork():
        os.fork()
        sleep()
time.sleep(60)
"""


def test_children_and_theirs_end_with_a_process_that_is_killed():
    run = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE)
    family = [psutil.Process(int(run.stdout.readline())) for _ in range(2)]
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    for each in alive:
        each.kill()
    assert not alive


@pytest.mark.parametrize("is_asked", [True, False])
def test_only_children_of_the_context_watch_their_parent(is_asked):
    child = multiprocessing.get_context("fork").Process(target=exit_with_the_number_of_threads)
    with children_end_with_this_process():
        if is_asked:
            child.start()
    if not is_asked:
        child.start()
    child.join()
    assert child.exitcode == (2 if is_asked else 1)


def exit_with_the_number_of_threads():
    sys.exit(threading.active_count())
