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


def advise(
    use: MemoryUse,
    *,
    max_seq_length: int,
    batch_size: int,
    accumulation: int,
    recomputes_all: bool,
    quantised: bool,
) -> str:
    """Advise on a run that exceeds the memory: flags with values, if memory grows linearly with tokens.

    Args:
        max_seq_length: tokens of the longest row.
        batch_size, accumulation: rows of a micro-batch, and micro-batches of an update.
        recomputes_all: True if every layer is recomputed in the backward pass.
        quantised: True if the frozen weights are in 4 bits.
    """
    per_token = max(1.0, (use.peak - use.at_rest) / use.tokens)
    fits = max(0, int((use.there * _USABLE - use.at_rest) / per_token))  # tokens of a micro-batch
    need, at_rest, there = (
        f"{n / 2**30:.2f} GiB" for n in (use.failed_tokens * per_token, use.at_rest, use.there)
    )
    step = f"a step of {use.failed_tokens:,} tokens needs about {need} beside {at_rest} at rest"
    problem = f"{step}, of {there} in all"
    if fits < _GRAIN:
        way = "use a larger GPU" if quantised else "give --load_in_4bit in a new run"
        return f"{problem}: the weights leave no room; {way}, or a smaller model"
    if fits >= use.failed_tokens:
        way = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
        return f"{problem}, which would fit: memory is in fragments; {way}"
    recompute = "" if recomputes_all else "give --use_gradient_checkpointing (works with --resume), or "
    if rows := fits * batch_size // use.failed_tokens:
        steps = -(-batch_size * accumulation // rows)
        smaller = f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {steps}"
    else:
        longest = min(max_seq_length, fits // _GRAIN * _GRAIN)
        smaller = f"--max_seq_length {longest} (was {max_seq_length}) --per_device_train_batch_size 1"
    return f"{problem}; {recompute}{smaller} in a new run"
