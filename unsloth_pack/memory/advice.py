"""Advise on out-of-memory errors, from measurements of the run."""

from dataclasses import dataclass

_USABLE = 0.95  # of the memory; the rest is lost in fragments
_GRAIN = 64  # tokens that a row length is rounded down to


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the GPU when an allocation failed."""

    there: int  # available to this process
    at_rest: int  # allocated between steps: weights, gradients and the optimizer's state
    peak: int  # peak, tokens: of the largest successful micro-batch; if there is none, of the failed one
    tokens: int
    failed_tokens: int  # of the failed micro-batch

    @property
    def per_token(self) -> float:
        """Bytes of one more token."""
        return max(1.0, (self.peak - self.at_rest) / self.tokens)

    @property
    def tokens_that_fit(self) -> int:
        """Tokens of a micro-batch that fit, if memory grows linearly; 0 if not even the weights fit."""
        return max(0, int((self.there * _USABLE - self.at_rest) / self.per_token))


@dataclass(frozen=True)
class MemoryAdvice:
    """Advice on a run that exceeds the memory; `str()` gives it as flags with values."""

    use: MemoryUse  # the measurements
    max_seq_length: int  # tokens of the longest row
    batch_size: int  # rows of a micro-batch
    accumulation: int  # micro-batches of an update
    recomputes_all: bool  # True if every layer is recomputed in the backward pass
    quantised: bool  # True if the frozen weights are in 4 bits

    def __str__(self) -> str:
        use = self.use
        need = _gib(use.failed_tokens * use.per_token)
        step = f"a step of {use.failed_tokens:,} tokens needs about {need} beside {_gib(use.at_rest)} at rest"
        problem = f"{step}, of {_gib(use.there)} in all"
        if use.tokens_that_fit < _GRAIN:
            way = "use a larger GPU" if self.quantised else "give --load_in_4bit in a new run"
            return f"{problem}: the weights leave no room; {way}, or a smaller model"
        if use.tokens_that_fit >= use.failed_tokens:
            way = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
            return f"{problem}, which would fit: memory is in fragments; {way}"
        recompute = [] if self.recomputes_all else ["give --use_gradient_checkpointing (works with --resume)"]
        return f"{problem}; {', or '.join([*recompute, self._smaller_batch()])}"

    def _smaller_batch(self) -> str:
        """Suggest smaller micro-batches for the same update, or shorter rows."""
        fits = self.use.tokens_that_fit
        if rows := fits * self.batch_size // self.use.failed_tokens:
            steps = -(-self.batch_size * self.accumulation // rows)
            return f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps} in a new run"
        longest = min(self.max_seq_length, fits // _GRAIN * _GRAIN)
        shorter = f"--max_seq_length {longest} (was {self.max_seq_length})"
        return f"{shorter} --per_device_train_batch_size 1 in a new run"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
