"""Times of calls on a CUDA device, and how fast it copies."""

import statistics
from collections.abc import Callable, Iterator

import torch

WORKING_SET = 2**29  # bytes of inputs and outputs that the calls rotate through, many times the L2 cache
MAX_SETS = 128
ROUNDS = 30


def eager_ms(calls: list[Callable[[], object]]) -> float:
    """Milliseconds of one call: the median over rounds, each of which makes all calls in turn."""

    def a_round() -> None:
        kept = [call() for call in calls]  # so that each call writes memory of its own
        del kept

    return statistics.median(timed(a_round)) / len(calls)


def graph_ms(calls: list[Callable[[], object]]) -> float:
    """The same for calls replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    ms = statistics.median(timed(graph.replay))
    del kept
    return ms / len(calls)


def timed(run: Callable[[], object]) -> Iterator[float]:
    """Milliseconds of each of ROUNDS runs."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return (start.elapsed_time(end) for start, end in events)


def copy_bandwidth() -> float:
    """GB/s of a 2 GiB device-to-device copy, bytes read and written both counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(timed(lambda: target.copy_(source))) / 1e6
