"""Forked processes end with the one that forked them, where that is asked for."""

import subprocess
import sys

import psutil

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
