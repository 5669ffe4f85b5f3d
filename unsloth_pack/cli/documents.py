"""From what `--dataset` and `--model_name` name to tokenised documents; the same for every subcommand."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unsloth_pack import loading
from unsloth_pack.data import load_rows, to_trl
from unsloth_pack.data.tokenize import TokenLedger, tokenize
from unsloth_pack.demo import HELDOUT_FILE, TRAIN_FILE
from unsloth_pack.trl import training_template

_DEMO_FILES = {"train": TRAIN_FILE, "test": HELDOUT_FILE}


def read_rows(dataset: str, split: str = "train") -> Dataset:
    """The rows that `dataset` names, as they are.

    Raises:
        InputError: as `load_rows`.
    """
    return load_rows(str(_DEMO_FILES[split]) if dataset == "demo" else dataset, split)


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or of an adapter's base model.

    Raises:
        InputError: it cannot be found or loaded.
    """
    return loading.load_tokenizer(loading.resolve(model_name)[0])


def tokenise(
    rows: Dataset, tokenizer: Any, max_length: int, train_on_responses_only: bool = False
) -> tuple[Dataset, TokenLedger]:
    """Rows of any known format to documents, see `tokenize`."""
    return tokenize(
        to_trl(rows, chat_template=bool(tokenizer.chat_template)),
        tokenizer,
        max_length=max_length,
        train_on_responses_only=train_on_responses_only,
        chat_template=training_template(tokenizer) if train_on_responses_only else None,
    )
