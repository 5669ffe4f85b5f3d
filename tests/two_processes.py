"""Runs a function in two processes of one group."""

import os
import socket
import time

import pytest
import torch
import torch.multiprocessing as mp

SECONDS = 240


def in_two_processes(run, *arguments):
    """`run(rank, *arguments)` in each of two gloo processes on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = mp.spawn(_run, (port, run, arguments), nprocs=2, join=False)
    deadline = time.monotonic() + SECONDS
    while not processes.join(timeout=5):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            pytest.fail("the processes do not end")


def _run(rank, port, run, arguments):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    run(rank, *arguments)
    # A process that ends while the other still holds the group can leave it waiting for ever
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
