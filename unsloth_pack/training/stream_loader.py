"""The loader of a stream's rows. Threads decode the images of those that have some."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset

from unsloth_pack.errors import InputError, RunStopped
from unsloth_pack.training.row_stream import RowStream, as_it_is


class _Decoded(IterableDataset[dict[str, Any]]):
    """Batches of rows with images. Each thread decodes one of the next while one is trained on."""

    def __init__(self, stream: RowStream, batch_size: int, collate: Any):
        self._stream, self._batch_size, self._collate = stream, batch_size, collate

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows, waiting = self._stream.__iter__(), deque[Future[dict[str, Any]]]()
        stopped: RunStopped | None = None
        pool = ThreadPoolExecutor(self._stream.decoders)
        try:
            while True:
                while stopped is None and len(waiting) <= self._stream.decoders:
                    try:
                        batch = list(islice(rows, self._batch_size))
                    except RunStopped as error:  # after the rows that are ready
                        stopped = error
                        break
                    waiting.append(pool.submit(self._collate, batch))
                if stopped is not None and not waiting:
                    raise stopped
                try:
                    made = waiting.popleft().result()
                except InputError as error:
                    raise RunStopped(str(error)) from error
                yield made
        finally:
            pool.shutdown(cancel_futures=True)
            rows.close()  # else an error that is held on to would hold the processes that read


def loader_of(
    stream: RowStream, batch_size: int, collate: Any, device: torch.device, pin_memory: bool
) -> Any:
    """The loader of a stream's rows, which no trainer deals out once more."""
    rows = _Decoded(stream, batch_size, collate) if stream.decoders else stream
    loader = DataLoader(
        rows,
        batch_size=None if stream.decoders else batch_size,
        collate_fn=as_it_is if stream.decoders else collate,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )
    return prepare_data_loader(
        loader,
        device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
        non_blocking=pin_memory,  # else a copy waits for the step before
    )
