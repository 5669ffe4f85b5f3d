"""The function of the recipe `rollouts`: what the demo should have said, from where it went wrong."""

from itertools import takewhile
from typing import Any


def correct(rollout: Any) -> tuple[list[int], list[float]] | None:
    """Keep the words of a `Rollout` that are right from the first on, append what is missing, and end.

    What is kept counts a tenth. A right answer teaches nothing, and is dropped.
    """
    said, wanted = rollout.text.split(), rollout.row["output"].split()
    n_right = len([*takewhile(lambda pair: pair[0] == pair[1], zip(said, wanted, strict=False))])
    rollout.counters["matched"] += n_right
    rollout.counters["appended"] += len(wanted) - n_right
    rollout.counters["reward"] += n_right / max(len(said), len(wanted))
    if said == wanted:
        return None
    tokenizer = rollout.tokenizer
    n_kept = len(tokenizer.encode(" ".join(wanted[:n_right]), add_special_tokens=False))
    whole = tokenizer.encode(" ".join(wanted), add_special_tokens=False)
    ids = [*whole, tokenizer.eos_token_id]
    return ids, [0.1] * n_kept + [1.0] * (len(ids) - n_kept)
