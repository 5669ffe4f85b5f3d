"""From the rows of a data set to tokenised documents, in the same way for every subcommand."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unsloth_pack.data import to_trl
from unsloth_pack.data.ledger import TokenLedger
from unsloth_pack.data.tokenize import tokenize
from unsloth_pack.files import loading
from unsloth_pack.training.trl import training_template


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or of an adapter's base model.

    Raises:
        InputError: it cannot be found or loaded.
    """
    return loading.load_tokenizer(loading.resolve(model_name)[0])


def to_documents(
    rows: Dataset, tokenizer: Any, max_length: int, train_on_responses_only: bool | None = None
) -> tuple[Dataset, TokenLedger]:
    """Rows of any known format as token ids and labels, see `tokenize`.

    Args:
        train_on_responses_only: whether only responses carry loss; None if nothing is trained on the rows.
    """
    return tokenize(
        to_trl(rows, chat_template=bool(tokenizer.chat_template), responses_only=train_on_responses_only),
        tokenizer,
        max_length=max_length,
        train_on_responses_only=bool(train_on_responses_only),
        chat_template=training_template(tokenizer) if train_on_responses_only else None,
    )
