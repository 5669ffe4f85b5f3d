"""What to change when the GPU's memory runs out, from what was measured until then."""

from dataclasses import dataclass

_USABLE = 0.95  # of the memory; the rest is lost in fragments
_GRAIN = 64  # tokens that a row length is rounded down to


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the GPU when an allocation failed.

    Args:
        there: that this process could have.
        at_rest: held between steps: weights, gradients and the optimizer's state.
        peak, tokens: of the largest micro-batch that went through; if none did, of the one that failed, until
            then.
        failed_tokens: of the micro-batch that failed.
    """

    there: int
    at_rest: int
    peak: int
    tokens: int
    failed_tokens: int

    @property
    def per_token(self) -> float:
        """Bytes that one more token takes."""
        return max(1.0, (self.peak - self.at_rest) / self.tokens)

    @property
    def tokens_that_fit(self) -> int:
        """Tokens of a micro-batch that fit, as memory grows with them; 0 if not even the weights do."""
        return max(0, int((self.there * _USABLE - self.at_rest) / self.per_token))


@dataclass(frozen=True)
class MemoryAdvice:
    """What to change in a run that needs more memory than there is; `str()` says it, in flags with values.

    Args:
        use: what was measured.
        max_seq_length: tokens of the longest row.
        batch_size: rows of a micro-batch.
        accumulation: micro-batches of an update.
        recomputes_all: whether every layer is recomputed in the backward pass.
        quantised: whether the frozen weights are held in 4 bits.
    """

    use: MemoryUse
    max_seq_length: int
    batch_size: int
    accumulation: int
    recomputes_all: bool
    quantised: bool

    def __str__(self) -> str:
        use = self.use
        need = _gib(use.failed_tokens * use.per_token)
        said = (
            f"a step of {use.failed_tokens:,} tokens needs about {need} beside {_gib(use.at_rest)} at rest, "
        )
        said += f"of {_gib(use.there)} in all"
        if use.tokens_that_fit < _GRAIN:
            way = "use a larger GPU" if self.quantised else "give --load_in_4bit in a new run"
            return f"{said}: the weights leave no room; {way}, or a smaller model"
        if use.tokens_that_fit >= use.failed_tokens:
            way = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
            return f"{said}, which would fit: memory is in fragments; {way}"
        recompute = [] if self.recomputes_all else ["give --use_gradient_checkpointing (works with --resume)"]
        return f"{said}; {', or '.join([*recompute, self._smaller_batch()])}"

    def _smaller_batch(self) -> str:
        """The same documents an update in smaller micro-batches, or shorter rows."""
        fits = self.use.tokens_that_fit
        if rows := fits * self.batch_size // self.use.failed_tokens:
            steps = -(-self.batch_size * self.accumulation // rows)
            return f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps} in a new run"
        longest = min(self.max_seq_length, fits // _GRAIN * _GRAIN)
        shorter = f"--max_seq_length {longest} (was {self.max_seq_length})"
        return f"{shorter} --per_device_train_batch_size 1 in a new run"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
