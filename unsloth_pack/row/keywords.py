"""The keywords of a model call that describe a packed row, and names that are nearly one of them."""

from difflib import get_close_matches
from functools import lru_cache

# What a model call may carry beside position_ids and attention_mask
ROW_KEYWORDS = (
    "packed_seq_lengths",
    "seq_lengths",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
_ELSEWHERE = dict.fromkeys(("segment_ids", "document_ids", "doc_ids", "sequence_ids"), "seq_idx")
_NEAR = 0.75  # of 1, how alike two names are


@lru_cache
def keyword_meant(name: str) -> str | None:
    """The row keyword that `name` seems to stand for, or None.

    transformers ignores keywords that it does not know, so a misspelt one would make the row one document.
    """
    if name in ROW_KEYWORDS:
        return None
    return _ELSEWHERE.get(name) or next(iter(get_close_matches(name, ROW_KEYWORDS, 1, _NEAR)), None)
