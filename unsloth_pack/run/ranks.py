"""What the processes of a run tell each other before they train: their errors, and which files they have."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain
from typing import TypeVar

from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, MODEL_CONFIG
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.errors import InputError, RunStopped
from unsloth_pack.run.machine import count_processes

_T = TypeVar("_T")
_ENDED = "another process has ended before the training began; see its line"
_END = 2**16  # bytes at either end of a file of weights: names and shapes, and numbers


@contextmanager
def refused_together() -> Iterator[None]:
    """End all processes if one meets an error inside this context, where none may wait for another.

    Otherwise the others would wait for it: for half an hour, if they are on another machine.

    Raises:
        InputError: bad input in another process.
        RunStopped: any other error there, or it has ended.
    """
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            _exchange(str(error) if isinstance(error, InputError) else "")
        raise
    for rank, said in enumerate(_exchange(None)):
        if said is not None:
            raise InputError(f"rank {rank}: {said}") if said else RunStopped(_ENDED)


def check_same_model(name: str) -> None:
    """Refuse to train where a process has another base model or adapter than rank 0."""
    from unsloth_pack.checkpoints.loading import find_model

    if count_processes() == 1:
        return
    with refused_together():
        contents = dict(chain.from_iterable(map(_contents_of, filter(None, find_model(name)))))
    _check_same(name, contents)


def check_same_rows(name: str, ledger: TokenLedger, fingerprint: str) -> None:
    """Refuse to train where a process has prepared other rows than rank 0."""
    _check_same(name, {**asdict(ledger), "fingerprint": fingerprint})


def _check_same(name: str, contents: Mapping[str, object]) -> None:
    first, *others = _exchange(contents)
    for rank, of_rank in enumerate(others, 1):
        if different := [part for part in {**first, **of_rank} if first.get(part) != of_rank.get(part)]:
            raise InputError(
                f"{name} on rank {rank} is not that of rank 0: its {different[0]} differs; give all the same"
            )


def _contents_of(source: str) -> Iterator[tuple[str, object]]:
    """Identify a folder by configuration and both ends of its weights, a name on the hub by its commit."""
    if not os.path.isdir(source):
        from unsloth_pack.checkpoints.loading import load_config

        yield "revision", load_config(source)._commit_hash
        return
    for name in sorted(os.listdir(source)):
        if name in (MODEL_CONFIG, ADAPTER_CONFIG) or name.endswith(".safetensors"):
            with open(os.path.join(source, name), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _END))
                last = file.read()
                file.seek(0)
                yield name, (size, hashlib.sha256(file.read(_END) + last).hexdigest())


def _exchange(own: _T) -> list[_T]:
    """Give every process what each has, by rank."""
    if count_processes() == 1:
        return [own]
    from accelerate import PartialState
    from accelerate.utils import gather_object

    try:
        PartialState()
        return list(gather_object([own]))
    except RuntimeError as error:
        raise RunStopped(_ENDED) from error
