"""TRL's trainer and configuration, as notebooks written for Unsloth call them.

`from unsloth_pack import SFTConfig, SFTTrainer` stands in place of `from trl import SFTConfig, SFTTrainer`.
TRL is not changed. Its own classes train a model just as well, with names and defaults of their own.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeAlias

import torch
import trl
from datasets import Dataset, IterableDataset
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments

from unsloth_pack.errors import InputError, require_real
from unsloth_pack.training.optimizers import LearningRates, check_rates, use_rates

# Fields of the configuration that older TRL took as arguments of the trainer
_OF_CONFIG = ("max_seq_length", "dataset_text_field", "dataset_num_proc", "packing", "dataset_kwargs")
FormattingFunc = Callable[[Any], Any]
Rows: TypeAlias = Dataset | IterableDataset

logger = logging.getLogger("unsloth_pack")


@dataclass
class SFTConfig(trl.SFTConfig):
    """TRL's `SFTConfig` for a model from `FastLanguageModel`.

    It differs in what is left out. `max_length` is the model's `max_seq_length`. The model keeps the gradient
    checkpointing that `get_peft_model` gave it. Without a GPU it trains on the CPU, without mixed precision.

    Args:
        max_seq_length: older name of `max_length`.
        embedding_learning_rate: of the embeddings and the head, where they are trained.
    """

    max_length: int | None = field(default=None, metadata={"help": "Where rows are cut."})
    gradient_checkpointing: bool = field(
        default=None,  # type: ignore[assignment]
        metadata={"help": "Leave it to get_peft_model."},
    )
    max_seq_length: int | None = field(default=None, metadata={"help": "Older name of max_length."})
    embedding_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of trained embeddings and heads."}
    )

    def __post_init__(self) -> None:
        if self.max_seq_length is not None:
            self.max_length = self.max_seq_length
        if self.embedding_learning_rate is not None:
            require_real("embedding_learning_rate", self.embedding_learning_rate, 0, 1e3)
        if not torch.cuda.is_available():
            self.use_cpu = True
            self.bf16 = self.fp16 = False
            self.dataloader_pin_memory = False
        super().__post_init__()


class SFTTrainer(trl.SFTTrainer):
    """TRL's `SFTTrainer`, which also takes what older notebooks give it.

    `tokenizer` is `processing_class`. `max_seq_length`, `dataset_text_field`, `dataset_num_proc`, `packing`
    and `dataset_kwargs` are those of the configuration. Rows of text that begin with the token that the
    tokenizer puts before every text get it once. `formatting_func` may take a batch of rows and return a list
    of texts, as in Unsloth. Only its texts are trained on.

    Args:
        model, args, kwargs: as in TRL.

    Raises:
        InputError: two values for one argument, or no rows.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        args: TrainingArguments | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ):
        if tokenizer is not None and kwargs.setdefault("processing_class", tokenizer) is not tokenizer:
            raise InputError("tokenizer and processing_class are both given; give one of them")
        config = _configuration(args, {name: kwargs.pop(name) for name in _OF_CONFIG if name in kwargs})
        if config.max_length is None:
            config.max_length = getattr(model, "max_seq_length", None)
        if (rows := kwargs.get("train_dataset")) is not None and next(iter(rows), None) is None:
            raise InputError("train_dataset has no rows; give at least one")
        self._cut_at = config.max_length
        if config.padding_free and not config.packing:
            config.max_length = None  # TRL refuses another value, although it cuts rows all the same
        super().__init__(model, config, **kwargs)
        config.max_length = self._cut_at

    def _prepare_dataset(
        self,
        dataset: Rows,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
        args: trl.SFTConfig,
        packing: bool,
        formatting_func: FormattingFunc | None,
        name: str,
    ) -> Rows:
        config = copy.copy(args)
        config.max_length = self._cut_at
        rows = _rows_of_text(dataset, tokenizer, config, formatting_func)
        left = formatting_func if rows is dataset else None
        if isinstance(rows, Dataset):
            rows = _without_empty(rows, config.dataset_text_field, name)
        if not isinstance(rows, Dataset) or len(rows):
            rows = super()._prepare_dataset(rows, tokenizer, config, packing, left, name)
        if isinstance(rows, Dataset) and not len(rows):
            raise InputError(
                f"none of the {len(dataset)} rows of {name} data has a token to learn; raise max_length, "
                "or correct them"
            )
        return rows

    def create_optimizer(self, *args: object, **kwargs: object) -> Optimizer:
        """Create TRL's optimizer; embeddings with a learning rate of their own get a group of their own."""
        rate = getattr(self.args, "embedding_learning_rate", None)
        if rate is not None and self.optimizer is None:
            rates = LearningRates(of_embeddings=rate)
            check_rates(self.model, rates)
            use_rates(self, self.model, rates)
        return super().create_optimizer(*args, **kwargs)


UnslothTrainer = SFTTrainer
UnslothTrainingArguments = SFTConfig


def _configuration(args: TrainingArguments | None, more: Mapping[str, object]) -> trl.SFTConfig:
    """Copy `args` as a configuration, with `more` of the arguments of the trainer."""
    if args is None:
        config: trl.SFTConfig = SFTConfig(output_dir="trainer_output")
    elif isinstance(args, trl.SFTConfig):
        config = copy.copy(args)
    else:
        names = {each.name for each in fields(SFTConfig) if each.init}
        values = {name: value for name, value in args.to_dict().items() if name in names}
        config = SFTConfig(**values | {"hub_token": args.hub_token})
    for name, value in more.items():
        if value is not None:
            setattr(config, "max_length" if name == "max_seq_length" else name, value)
    return config


def _rows_of_text(
    dataset: Rows, tokenizer: Any, config: trl.SFTConfig, formatting_func: FormattingFunc | None
) -> Rows:
    """Apply `formatting_func`, and remove the token from texts that the tokenizer puts before every text.

    Rows that TRL does not prepare, or refuses to, come back as they are.
    """
    row: Any = next(iter(dataset), None)
    is_map = isinstance(dataset, Dataset)
    if not isinstance(row, Mapping) or "input_ids" in row or (is_map and dataset.format["type"] == "custom"):
        return dataset
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    token = getattr(tokenizer, "bos_token", None) or ""
    if tokenizer(token + "a")["input_ids"][:2] != [tokenizer.bos_token_id] * 2:
        token = ""
    columns = (config.dataset_text_field, "prompt")
    make = None
    if formatting_func is not None:
        make = partial(_text_of, formatting_func, _takes_batches(formatting_func, row))
    elif not token or not any(isinstance(row.get(name), str) for name in columns):
        return dataset
    return dataset.map(
        _begin_once,
        fn_kwargs={"make": make, "columns": columns, "token": token},
        remove_columns=list(row) if make else None,  # TRL would train on `messages` beside the text
        **{"num_proc": config.dataset_num_proc} if is_map else {},
    )


def _without_empty(rows: Dataset, column: str, name: str) -> Dataset:
    """Leave out rows of empty text, of which nothing is learned, and say how many."""
    if rows.column_names.count(column) == 0 or {"input_ids", "messages", "prompt"} & {*rows.column_names}:
        return rows
    full = rows.filter(lambda texts: [text != "" for text in texts], input_columns=column, batched=True)
    if len(full) < len(rows):
        logger.warning(
            "%d of the %d rows of %s data are empty and left out", len(rows) - len(full), len(rows), name
        )
    return full


def _begin_once(
    row: dict[str, object], make: FormattingFunc | None, columns: tuple[str, ...], token: str
) -> dict[str, str]:
    texts = {columns[0]: make(row)} if make else {name: row.get(name) for name in columns}
    return {name: text.removeprefix(token) for name, text in texts.items() if isinstance(text, str)}


def _takes_batches(function: FormattingFunc, row: Mapping[str, object]) -> bool:
    """True for a formatting function of batches, as Unsloth's: it makes two texts of a batch of two, and none
    of a row alone."""
    with suppress(Exception):  # a function of batches may fail on a row, and the other way round
        if isinstance(function(dict(row)), str):
            return False
    with suppress(Exception):
        texts = function({name: [value, value] for name, value in row.items()})
        return isinstance(texts, list) and [*map(type, texts)] == [str, str]
    return False


def _text_of(function: FormattingFunc, takes_batches: bool, row: Mapping[str, object]) -> str:
    text = function({name: [value] for name, value in row.items()} if takes_batches else row)
    if isinstance(text, list) and len(text) == 1:
        (text,) = text
    if not isinstance(text, str):
        raise InputError(f"formatting_func returns a {type(text).__name__} for a row; return its text")
    return text
