"""The rows of a stream, packed as its documents come, and where it stood after each of the last ones.

    one process of several:   blocks of rows -> its share, tokenised -> PackingStream -> rows
                              (loader's workers, in turn)               (this process)

A row that is given out is not trained on yet: loaders read ahead. A checkpoint holds the place after the last
row that was trained on, with the documents that waited there. So a resumed run sees the rows that follow.
"""

import atexit
import json
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from traceback import clear_frames
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unsloth_pack.data.rows import CHANNEL, DOCUMENT, IMAGES, image_field
from unsloth_pack.data.streaming import DocumentBlock, Place, Share
from unsloth_pack.data.token_counts import SpanCounts, TokenLedger
from unsloth_pack.errors import InputError, RunStopped
from unsloth_pack.packing import PackingStream
from unsloth_pack.training.checkpoints import STREAM_FILES
from unsloth_pack.training.image_rows import COLUMN

Collate = Callable[[list[Any]], dict[str, Any]]
_WHOLE = ("input_ids", "labels")  # columns of whole numbers
_BUFFER = 2048  # documents that are planned together, unless they have more tokens than
_BUFFER_TOKENS, _BUFFER_ROWS = 1 << 20, 16  # so many, or so many rows
_VERSION = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Documents(Protocol):
    """Makes the documents of a stream, see `DocumentStream`."""

    n_parts: int
    has_images: bool

    def blocks(
        self, place: Place, share: Share, worker: int = 0, workers: int = 1
    ) -> Iterator[DocumentBlock]: ...


@dataclass(frozen=True)
class Stand:
    """Where a stream stands after a row."""

    rows: int  # that this process has given out
    place: Place  # between the source's rows
    tally: SpanCounts  # of the rows that were read
    packer: Mapping[str, Any]  # state of the `PackingStream`, with the documents that wait


class RowStream(IterableDataset[dict[str, Any]]):
    """Packed rows of a stream for one of the processes that train together. They never end."""

    def __init__(
        self,
        documents: Documents,
        capacity: int,  # tokens of a row
        *,
        seed: int,  # of the order of rows that are planned together
        share: Share,  # of the documents that this process takes
        n_workers: int,  # processes that read and tokenise; their number changes no row
        # Rows that are ready before one is given out. After a refused document this many still come, so that
        # all processes stop after the same update. A loader of images takes `decoders + 1` batches.
        ahead: int,
        decoders: int = 0,  # threads that decode images, each those of a batch; 0 where no row has any
        buffer_tokens: int | None = None,  # that are planned together
        has_channels: bool = False,  # rows have the column `CHANNEL`
    ):
        self.documents, self.share, self.n_workers, self.ahead = documents, share, n_workers, ahead
        self.decoders, self._has_channels = decoders, has_channels
        self.error: InputError | None = None  # why no rows come after those that are ready
        self._file = STREAM_FILES.replace("*", str(share.number))  # of this process, in a checkpoint
        self.packer = PackingStream(
            capacity,
            _BUFFER,
            seed=seed,
            buffer_tokens=buffer_tokens or max(_BUFFER_TOKENS, _BUFFER_ROWS * capacity),
            by_document=[IMAGES] * documents.has_images + [CHANNEL] * has_channels,
        )
        begin = Stand(0, Place(), SpanCounts(), self.packer.state_dict())
        self._stands: deque[Stand] = deque([begin], maxlen=ahead + 2)  # of the last rows
        self._read = begin  # where the reading is, perhaps ahead of the last row
        self._unread: Iterator[DocumentBlock] | None = None

    def has_failed(self) -> bool:
        return self.error is not None

    def __iter__(self) -> Generator[dict[str, Any]]:
        """Yield the rows after the last one that was given out."""
        try:
            while True:
                self._fill(self.ahead)
                row = self.packer.pop()
                if row is None:
                    raise RunStopped(str(self.error)) from self.error
                self._read = replace(self._read, rows=self._read.rows + 1, packer=self.packer.state_dict())
                self._stands.append(self._read)
                row |= {name: row[name].astype(np.int64) for name in _WHOLE}
                if (images := row.pop(IMAGES, None)) is not None:
                    row[COLUMN] = [one | {DOCUMENT: n} for n, of_one in enumerate(images) for one in of_one]
                yield row
        finally:
            self._unread = None

    def fill(self, n_rows: int) -> None:
        """Have so many rows ready now, unless there is an error; `save` then writes them too.

        No row may be read that is not trained on.
        """
        self._fill(n_rows)
        self._stands[-1] = self._read = replace(self._read, packer=self.packer.state_dict())

    def _fill(self, n_rows: int) -> None:
        while self.packer.ready < n_rows and self.error is None:
            if self._unread is None:
                self._unread = self._blocks()
            try:
                block = next(self._unread)
            except InputError as error:
                self.error = error
                break
            for document in block.documents():
                self.packer.push(document | {CHANNEL: block.part} if self._has_channels else document)
            if block.ends_pass:
                self.packer.finish()
            tally = self._read.tally + block.tally.coarse()
            self._read = replace(self._read, tally=tally, place=block.end)

    def after(self, rows: int) -> Stand:
        """Return where the stream stood after so many rows of this process, not long ago."""
        return next(stand for stand in self._stands if stand.rows == rows)

    def save(self, checkpoint: Path, rows: int) -> None:
        """Write where the stream stood after so many rows of this process."""
        stand = self.after(rows)
        state = dict(stand.packer)
        groups = [*state.pop("ready"), state.pop("buffer")]
        documents = [document for group in groups for document in group]
        names = [name for name in (documents[0] if documents else _WHOLE) if name not in (IMAGES, CHANNEL)]
        none = [] if documents else [np.zeros(0, np.int32)]
        tensors = {name: np.concatenate([*none, *(each[name] for each in documents)]) for name in names}
        tensors["lengths"] = np.array([len(document["labels"]) for document in documents], np.int64)
        tensors["groups"] = np.array(list(map(len, groups)), np.int64)
        if self._has_channels:
            tensors[CHANNEL] = np.array([document[CHANNEL] for document in documents], np.int64)
        if self.documents.has_images:
            tensors[IMAGES] = _as_bytes([document[IMAGES] for document in documents])
        about = {
            "version": _VERSION,
            "rows": rows,
            "place": stand.place.as_json(),
            "tally": {"sums": stand.tally.sums, "lengths": list(stand.tally.lengths.items())},
            "packer": state,
        }
        save_file(tensors, checkpoint / self._file, {"stream": json.dumps(about)})

    def load(self, checkpoint: Path) -> None:
        """Go on where a stream stood when it was saved, or refuse a file of a stream of other arguments."""
        path = checkpoint / self._file
        with safe_open(path, "np") as file:
            about = json.loads(file.metadata()["stream"])
            tensors = {name: file.get_tensor(name) for name in [*file.keys()]}
        if about["version"] != _VERSION:
            raise InputError(f"{path}: of another release (version {about['version']}); start anew")
        groups = _grouped(tensors)
        self.packer.load_state_dict(about["packer"] | {"ready": groups[:-1], "buffer": groups[-1]})
        tally = SpanCounts(Counter(about["tally"]["sums"]), Counter(dict(about["tally"]["lengths"])))
        place = Place(**about["place"])
        self._read = Stand(about["rows"], place, tally, self.packer.state_dict())
        self._stands.append(self._read)

    def _blocks(self) -> Iterator[DocumentBlock]:
        source = _Blocks(self.documents, self._read.place, self.share)
        options: dict[str, Any] = {}
        if self.n_workers:
            can_fork = "fork" in multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("fork" if can_fork else None)
            options = {"worker_init_fn": _begin_worker, "multiprocessing_context": context}
        loader = DataLoader(
            source,
            batch_size=None,
            num_workers=self.n_workers,
            collate_fn=as_it_is,
            generator=torch.Generator(),  # the run's own random numbers are not drawn from
            **options,
        )
        # Python waits for worker processes at its end, and these wait for work as long as this is referenced
        batches = [iter(loader)]
        atexit.register(stop := batches.clear)
        try:
            while (block := next(batches[0], None)) is not None:
                yield block
        except Exception as error:
            clear_frames(error.__traceback__)  # whoever keeps the error would keep the loader's processes
            if not isinstance(error, RuntimeError) or "DataLoader worker" not in str(error):
                raise
            why = "a process that reads the data was killed, perhaps because memory ran out"
            raise RunStopped(f"{why}; give a smaller --num_proc") from error
        finally:
            atexit.unregister(stop)
            stop()


@dataclass(frozen=True)
class StreamTotals:
    """What all processes have read of a stream, and have trained on."""

    ledger: TokenLedger  # of the rows that were read; lengths in it are rounded up by at most a 64th
    turns: int  # passes over the data that every process has completed
    rows: int  # with their documents and tokens: packed rows that were trained on
    documents: int
    tokens: int
    waiting: int  # documents that were read and not trained on
    read_of_parts: tuple[tuple[int, int], ...] = ()  # rows and tokens of each data set of a mixture


def totals(stream: RowStream, rows: int) -> StreamTotals:
    """Return the totals after so many rows of each process. Every process has to call this."""
    stand = stream.after(rows)
    by_process = gather_object([(stand.tally, stand.packer["counts"], stand.place.turn)])
    tally, packed = SpanCounts(), Counter[str]()
    n_parts = stream.documents.n_parts
    for of_process, counts, _ in by_process:
        tally += of_process
        packed.update(counts)
    return StreamTotals(
        ledger=tally.ledger,
        turns=min(turn for *_, turn in by_process),
        rows=packed["packs"],
        documents=packed["documents"],
        tokens=packed["tokens"],
        waiting=packed["examples"] - packed["documents"],
        read_of_parts=tuple(map(tally.read_of, range(n_parts if n_parts > 1 else 0))),
    )


class _Blocks(IterableDataset[DocumentBlock]):
    """The blocks of a share; workers take them in turn, so that a loader gives them in their order."""

    def __init__(self, documents: Documents, place: Place, share: Share):
        self._documents, self._place, self._share = documents, place, share

    def __iter__(self) -> Iterator[DocumentBlock]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        return self._documents.blocks(self._place, self._share, number, of)


def as_it_is(block: object) -> object:
    """Collate nothing."""
    return block


def _begin_worker(number: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for each in _SIGNALS:  # the training process hears them, and ends this one
        signal.signal(each, signal.SIG_IGN)


def _as_bytes(images: list[list[dict[str, object]]]) -> np.ndarray:
    """Write the images of each document as a stream of Arrow."""
    table = pa.table([pa.array(images, image_field().type)], pa.schema([image_field()]))
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def _grouped(tensors: Mapping[str, np.ndarray]) -> list[list[dict[str, Any]]]:
    ends = np.cumsum(tensors["lengths"]).tolist()
    of_tokens = tensors.keys() - {"lengths", "groups", IMAGES, CHANNEL}
    documents: list[dict[str, Any]] = [
        {name: tensors[name][start:end] for name in of_tokens}
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    if IMAGES in tensors:
        with pa.ipc.open_stream(pa.py_buffer(tensors[IMAGES])) as reader:
            of_documents = reader.read_all()[IMAGES].to_pylist()
        documents = [each | {IMAGES: own} for each, own in zip(documents, of_documents, strict=True)]
    if CHANNEL in tensors:
        channels = tensors[CHANNEL].tolist()
        documents = [each | {CHANNEL: own} for each, own in zip(documents, channels, strict=True)]
    bounds = np.cumsum(tensors["groups"]).tolist()
    return [documents[start:end] for start, end in zip([0, *bounds], bounds, strict=False)]


# The loader of a stream's rows. Threads decode the images of those that have some.


class _Decoded(IterableDataset[dict[str, Any]]):
    """Batches of rows with images. Each thread decodes one of the next while one is trained on."""

    def __init__(self, stream: RowStream, batch_size: int, collate: Collate):
        self._stream, self._batch_size, self._collate = stream, batch_size, collate

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows, pool = self._stream.__iter__(), ThreadPoolExecutor(self._stream.decoders)
        batches = self._submit(rows, pool)
        try:
            waiting = deque(islice(batches, self._stream.decoders + 1))
            while waiting:
                try:
                    batch = waiting.popleft().result()
                except InputError as error:
                    raise RunStopped(str(error)) from error
                yield batch
                waiting.extend(islice(batches, 1))
        finally:
            pool.shutdown(cancel_futures=True)
            rows.close()  # else an error that is held on to would hold the processes that read

    def _submit(
        self, rows: Iterator[dict[str, Any]], pool: ThreadPoolExecutor
    ) -> Iterator[Future[dict[str, Any]]]:
        """Submit batch after batch. What stops the stream comes after the batches before it."""
        try:
            while True:
                yield pool.submit(self._collate, list(islice(rows, self._batch_size)))
        except RunStopped as error:
            stopped: Future[dict[str, Any]] = Future()
            stopped.set_exception(error)
            yield stopped


def loader_of(
    stream: RowStream, batch_size: int, collate: Collate, device: torch.device, pin_memory: bool
) -> DataLoader[Any]:
    """Make the loader of a stream's rows, which no trainer deals out once more."""
    rows = _Decoded(stream, batch_size, collate) if stream.decoders else stream
    loader = DataLoader(
        rows,
        batch_size=None if stream.decoders else batch_size,
        collate_fn=as_it_is if stream.decoders else collate,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
        non_blocking=pin_memory,  # else a copy waits for the step before
    )
    return prepared
