"""From the rows of a data set to tokenised documents, in the same way for every subcommand."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from unsloth_pack.data import check_token_ids
from unsloth_pack.data.formats import Conversion
from unsloth_pack.data.ledger import TokenLedger
from unsloth_pack.data.raw_blocks import RowSource
from unsloth_pack.data.streamed import DocumentStream
from unsloth_pack.data.tokenize import Documents, documents_of
from unsloth_pack.files import loading
from unsloth_pack.training.trl import training_template


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or of an adapter's base model.

    Raises:
        InputError: it cannot be found or loaded.
    """
    return loading.load_tokenizer(loading.resolve(model_name)[0])


def prepare_documents(
    rows: Dataset,
    tokenizer: Any,
    max_length: int,
    train_on_responses_only: bool | None = None,
    num_proc: int | None = None,
) -> Documents:
    """Rows of any known format as token ids and labels, see `tokenize`.

    Args:
        train_on_responses_only: whether only responses carry loss; None if nothing is trained on the rows.
        num_proc: processes that share out the rows; None for as many as there are cores.
    """
    conversion = Conversion(
        rows, chat_template=bool(tokenizer.chat_template), responses_only=train_on_responses_only
    )
    return documents_of(
        rows,
        tokenizer,
        max_length=max_length,
        train_on_responses_only=bool(train_on_responses_only),
        chat_template=training_template(tokenizer) if train_on_responses_only else None,
        num_proc=num_proc,
        conversion=conversion,
    )


def stream_documents(
    source: RowSource, tokenizer: Any, vocab_size: int, max_length: int, train_on_responses_only: bool
) -> DocumentStream:
    """The documents of a stream; its first rows are read now.

    Raises:
        InputError: they cannot be trained on.
    """
    return DocumentStream(
        source,
        tokenizer,
        vocab_size=vocab_size,
        max_length=max_length,
        responses_only=train_on_responses_only,
        chat_template=training_template(tokenizer) if train_on_responses_only else None,
    )


def check_ids(documents: Documents, vocab_size: int) -> None:
    """Refuse documents with token ids that have no embedding, see `check_token_ids`."""
    if documents.least_id < 0 or documents.last_id >= vocab_size:
        check_token_ids(documents.rows, vocab_size)


def to_documents(
    rows: Dataset, tokenizer: Any, max_length: int, train_on_responses_only: bool | None = None
) -> tuple[Dataset, TokenLedger]:
    """The rows and the ledger of `prepare_documents`."""
    documents = prepare_documents(rows, tokenizer, max_length, train_on_responses_only)
    return documents.rows, documents.ledger
