"""Training data: the sources of rows, their formats, and the checks before training begins."""

from unsloth_pack.data.formats import DataFormat, detect_format
from unsloth_pack.data.sources import load_rows
from unsloth_pack.data.tokenize import check_token_ids, rows_hash, tokenizer_hash

__all__ = [
    "DataFormat",
    "check_token_ids",
    "detect_format",
    "load_rows",
    "rows_hash",
    "tokenizer_hash",
]
