"""Out of GPU memory: which setting to change to what, from what was measured until then."""

import gc
import re
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

_USABLE = 0.95  # of what there is: the rest goes to fragments
_GRAIN = 64  # tokens that a row length is rounded down to
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the GPU when an allocation failed.

    Args:
        there: that this process could have.
        at_rest: held between steps: weights, gradients and the optimizer's state.
        peak, tokens: of the largest micro-batch that went through; where none did, of the one that failed,
            which got so far.
        failed_tokens: of the micro-batch that failed.
    """

    there: int
    at_rest: int
    peak: int
    tokens: int
    failed_tokens: int

    @property
    def per_token(self) -> float:
        """Bytes that one token more takes."""
        return max(1.0, (self.peak - self.at_rest) / self.tokens)

    @property
    def tokens_that_fit(self) -> int:
        """Tokens of a micro-batch that fit, as memory grows with them; 0 where not even the weights do."""
        return max(0, int((self.there * _USABLE - self.at_rest) / self.per_token))


class MemoryWatch(Trainer):
    """A trainer that knows the memory its largest micro-batch took. Costs two look-ups a step on the host."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._largest, self._peak, self._tokens = 0, 0, 0

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self._tokens = inputs["input_ids"].numel()
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self._tokens > self._largest:
            self._largest, self._peak = self._tokens, most_held()
        return loss

    def memory_use(self, error: BaseException) -> MemoryUse | None:
        """What is known after `error`, whose frames are cleared; None outside training or without CUDA."""
        peak = most_held()
        traceback.clear_frames(error.__traceback__)  # they hold the activations
        gc.collect()
        there, at_rest = device_memory()
        model: Any = self.model
        if not (there and self._tokens and model.training):
            return None
        if not (self.optimizer and self.optimizer.state):  # its two moments come with the first update
            at_rest += sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
        if self._largest:
            return MemoryUse(there, at_rest, self._peak, self._largest, self._tokens)
        return MemoryUse(there, at_rest, peak + _asked_for(error), self._tokens, self._tokens)


def device_memory() -> tuple[int, int]:
    """Bytes of the GPU that this process could have, and that it holds; 0 without one."""
    if not torch.cuda.is_available():
        return 0, 0
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def most_held() -> int:
    """Bytes of the GPU that this process held at most; the host knows them without waiting for the device."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _asked_for(error: BaseException) -> int:
    """Bytes of the allocation that failed, as torch's message says."""
    found = re.search(r"Tried to allocate ([\d.]+) ([KMG]iB)", str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def remedy(
    use: MemoryUse,
    *,
    max_seq_length: int,
    batch_size: int,
    accumulation: int,
    recomputes_all: bool,
    quantised: bool,
) -> str:
    """What to change, in flags with their values; the first that helps is named first."""
    fits, need = use.tokens_that_fit, use.failed_tokens * use.per_token
    there = f"{_gib(use.at_rest)} at rest, of {_gib(use.there)} there"
    said = f"a step of {use.failed_tokens:,} tokens needs about {_gib(need)} beside {there}"
    if fits < _GRAIN:
        way = "use a larger GPU" if quantised else "give --load_in_4bit in a new run"
        return f"{said}: the weights leave no room; {way}, or a smaller model"
    if fits >= use.failed_tokens:
        way = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
        return f"{said}, which would fit: memory is in fragments; {way}"
    ways = [] if recomputes_all else ["give --use_gradient_checkpointing (works with --resume)"]
    if rows := fits * batch_size // use.failed_tokens:
        steps = -(-batch_size * accumulation // rows)
        ways.append(
            f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps} in a new run"
        )
    else:
        longest = min(max_seq_length, fits // _GRAIN * _GRAIN)
        shorter = f"--max_seq_length {longest} (was {max_seq_length})"
        ways.append(f"{shorter} --per_device_train_batch_size 1 in a new run")
    return f"{said}; {', or '.join(ways)}"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
