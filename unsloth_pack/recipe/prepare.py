"""From options to everything that training needs besides the model, with all checks that need no weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from unsloth_pack.data import check_token_ids, load_rows, tokenizer_hash
from unsloth_pack.data.ledger import TokenLedger, check_token_loss
from unsloth_pack.data.raw_blocks import RowSource
from unsloth_pack.data.sources import open_stream
from unsloth_pack.data.streamed import Share
from unsloth_pack.errors import InputError
from unsloth_pack.files.loading import load_config, resolve, weight_dtype
from unsloth_pack.packing import PackManifest, find_packs, plan_accumulation, read_packs
from unsloth_pack.packing.kept_rows import pack_documents
from unsloth_pack.recipe import checks
from unsloth_pack.recipe.documents import check_ids, load_tokenizer, prepare_documents, stream_documents
from unsloth_pack.recipe.flags import flat
from unsloth_pack.recipe.machine import device_type
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.resolve import with_optimizer
from unsloth_pack.recipe.sharding import sharding_arguments
from unsloth_pack.report.fill import document_lengths
from unsloth_pack.training.row_stream import RowStream
from unsloth_pack.training.trl import rows_of_an_update, sft_config

# Options that transformers' `TrainingArguments` take as they are.
_TRAINING_ARGUMENTS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "optim", "weight_decay", "lr_scheduler_type", "warmup_steps", "seed"),
    *("logging_steps", "report_to"),
)


@dataclass(frozen=True)
class PreparedRows:
    """Tokenised rows, as the trainer gets them.

    Args:
        rows: documents, or rows packed with them.
        ledger: where the tokens of the data went; of a stream, those of its first rows.
        fingerprint: of the documents, see `rows_hash`, or of the packs on disk.
        packs: the manifest, if the rows were packed on disk.
    """

    rows: Dataset | RowStream
    ledger: TokenLedger
    fingerprint: str
    packs: PackManifest | None = None


@dataclass(frozen=True)
class Prepared:
    """What `prepare` makes.

    Args:
        options: with all their defaults.
        config: TRL's.
        dtype: of the model's weights.
        train: what is trained on.
        evaluation: what is evaluated on, if anything.
    """

    options: TrainOptions
    config: SFTConfig
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    train: PreparedRows
    evaluation: PreparedRows | None = None


def prepare(options: TrainOptions) -> Prepared:
    """Read and tokenise the data, and check what the model will be asked to do.

    Raises:
        InputError: the data, the model's architecture, or something the options ask for cannot be used here.
    """
    options = with_optimizer(options, device_type())
    checks.check_trainer(options)
    data = options.data
    source: Path | Dataset | RowSource
    if data.streaming:
        source = open_stream(data.dataset)
    else:
        source = find_packs(data.dataset) or load_rows(data.dataset, num_proc=data.num_proc)
    eval_source = None
    if data.eval_dataset is not None:
        eval_source = find_packs(data.eval_dataset) or load_rows(data.eval_dataset, "test", data.num_proc)

    dtype = weight_dtype(options.model.dtype)
    config = _trl_config(options, dtype)
    model_config = _model_config(options, dtype)
    tokenizer = _tokenizer(options.model.model_name)
    if isinstance(source, Path | Dataset):
        train = _rows_of(data.dataset, source, tokenizer, options, data.sample_packing, model_config)
    else:
        train = _stream_of(source, tokenizer, options, config, model_config)
    if data.keep_examples_per_update and isinstance(train.rows, Dataset):
        _keep_examples_per_update(config, train.rows)
    evaluation = None
    if data.eval_dataset is not None and eval_source is not None:
        packing = data.sample_packing if data.eval_packing is None else data.eval_packing
        evaluation = _rows_of(data.eval_dataset, eval_source, tokenizer, options, packing, model_config)
    return Prepared(options, config, dtype, tokenizer, train, evaluation)


def _trl_config(options: TrainOptions, dtype: torch.dtype) -> SFTConfig:
    config = sft_config(
        str(options.folder),
        padding_free=options.data.padding_free or options.data.sample_packing,
        dtype=dtype,
        **_training_arguments(options),
    )
    checks.check_optimizer(config)
    return config


def _training_arguments(options: TrainOptions) -> dict[str, Any]:
    """The options, as transformers' `TrainingArguments` call them."""
    training, save_steps = options.training, options.output.save_steps
    arguments = {name: value for name, value in flat(options).items() if name in _TRAINING_ARGUMENTS}
    arguments |= {"max_steps": training.max_steps or -1, "num_train_epochs": training.num_train_epochs or 1.0}
    arguments |= {"logging_first_step": True, "save_strategy": "no"}
    if save_steps:
        arguments |= {"save_strategy": "steps", "save_steps": save_steps, "save_total_limit": 2}
    if options.data.eval_dataset:
        arguments |= {"eval_strategy": "steps", "eval_steps": 0.1}  # a share of all updates
    if options.data.streaming:  # which goes on at a place of its own, without going through what is done
        arguments |= {"ignore_data_skip": True}
    return arguments | sharding_arguments(options)


def _model_config(options: TrainOptions, dtype: torch.dtype) -> Any:
    """The configuration of the text model, checked to be one that the attention backend can run."""
    base, adapter = resolve(options.model.model_name)
    if adapter is not None:
        raise InputError(
            f"model_name {adapter!r} is an adapter, and a run makes its own; merge it first with "
            "`unsloth-pack merge`, and give the merged model"
        )
    config = load_config(base).get_text_config()
    checks.check_backend(options.model.attn_backend, config, dtype, device_type())
    return config


def _tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(model_name)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise InputError(
            f"the tokenizer of {model_name} has neither pad_token nor eos_token; name one of its tokens in "
            "tokenizer_config.json"
        )
    return tokenizer


def _rows_of(
    name: str,
    source: Path | Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    packing: bool,
    model_config: Any,
) -> PreparedRows:
    """Rows for the trainer.

    Args:
        name: of the data.
        source: the folder of its packs, or its rows.
        packing: whether its rows are to be packed.
        model_config: of the text model.
    """
    vocab_size, n_positions = model_config.vocab_size, model_config.max_position_embeddings
    most_lost, capacity = options.data.max_token_loss, options.model.max_seq_length
    if isinstance(source, Path):
        packs, rows = read_packs(source, tokenizer_hash(tokenizer))
        check_token_ids(rows, vocab_size)
        check_token_loss(name, packs.ledger, most_lost, packs.capacity, n_positions, are_packed=True)
        return PreparedRows(rows, packs.ledger, packs.data_fingerprint, packs)
    only_responses, num_proc = options.data.train_on_responses_only, options.data.num_proc
    documents = prepare_documents(source, tokenizer, capacity, only_responses, num_proc)
    check_ids(documents, vocab_size)
    check_token_loss(name, documents.ledger, most_lost, capacity, n_positions)
    rows = pack_documents(documents, capacity, num_proc) if packing else documents.rows
    return PreparedRows(rows, documents.ledger, documents.fingerprint)


def _stream_of(
    source: RowSource,
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    config: SFTConfig,
    model_config: Any,
) -> PreparedRows:
    """The rows of a stream, of which the first documents have been checked."""
    data, capacity = options.data, options.model.max_seq_length
    vocab_size, n_positions = model_config.vocab_size, model_config.max_position_embeddings
    documents = stream_documents(source, tokenizer, vocab_size, capacity, data.train_on_responses_only)
    name = f"{source.name}, in its first {documents.first_ledger.rows_read:,} rows,"
    check_token_loss(name, documents.first_ledger, data.max_token_loss, capacity, n_positions)
    rows = RowStream(
        documents,
        capacity,
        seed=options.training.seed,
        share=Share(config.process_index, config.world_size),
        n_workers=data.num_proc or 1,
        ahead=2 * rows_of_an_update(config) + config.per_device_train_batch_size,
    )
    return PreparedRows(rows, documents.first_ledger, documents.fingerprint)


def _keep_examples_per_update(config: SFTConfig, rows: Dataset) -> None:
    """Accumulate over so few rows that an update sees as many documents as if each were a row."""
    rows_per_step = config.per_device_train_batch_size
    config.gradient_accumulation_steps = plan_accumulation(
        rows_per_step * config.gradient_accumulation_steps * config.world_size,
        len(document_lengths(rows)) / len(rows),
        config.world_size,
        rows_per_step,
    )
