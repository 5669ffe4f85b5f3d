"""From options to all that training needs but the model, and the checks that need no weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from unsloth_pack.data import check_token_ids, load_rows, rows_hash, tokenizer_hash
from unsloth_pack.data.ledger import TokenLedger, check_token_loss
from unsloth_pack.errors import InputError
from unsloth_pack.files.loading import load_config, resolve, weight_dtype
from unsloth_pack.packing import PackManifest, find_packs, pack_dataset, plan_accumulation, read_packs
from unsloth_pack.recipe import checks
from unsloth_pack.recipe.documents import load_tokenizer, to_documents
from unsloth_pack.recipe.machine import device_type
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.sharding import sharding_arguments
from unsloth_pack.report.fill import document_lengths
from unsloth_pack.training.trl import sft_config


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made: the options with their last defaults, TRL's configuration, tokenised rows.

    Args:
        rows: what the trainer gets: documents, or rows packed with them.
        fingerprint: of the rows, see `rows_hash`, or of the packs on disk.
        packs: the manifest of the rows where they were packed on disk.
        eval_rows, eval_ledger, eval_fingerprint: likewise; None where there is nothing to evaluate on.
    """

    options: TrainOptions
    config: SFTConfig
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    rows: Dataset
    ledger: TokenLedger
    fingerprint: str
    packs: PackManifest | None = None
    eval_rows: Dataset | None = None
    eval_ledger: TokenLedger | None = None
    eval_fingerprint: str | None = None


def prepare(options: TrainOptions) -> Prepared:
    """Read and tokenise the data, and check what the model will be asked to do.

    Raises:
        InputError: the data, the model's architecture, or something the options ask for cannot be used here.
    """
    device = device_type()
    if options.optim is None:
        options = replace(options, optim="adamw_torch_fused" if device == "cuda" else "adamw_torch")
    checks.check_trainer(options)
    source = find_packs(options.dataset) or load_rows(options.dataset)
    eval_source = None
    if options.eval_dataset is not None:
        eval_source = find_packs(options.eval_dataset) or load_rows(options.eval_dataset, "test")

    dtype = weight_dtype(options.dtype)
    config = sft_config(
        str(options.folder),
        padding_free=options.padding_free or options.sample_packing,
        dtype=dtype,
        **_training_arguments(options),
    )
    checks.check_optimizer(config)
    base, adapter = resolve(options.model_name)
    if adapter is not None:
        raise InputError(
            f"model_name {adapter!r} is an adapter, and a run makes its own; merge it first with "
            "`unsloth-pack merge`, and give the merged model"
        )
    model_config = load_config(base).get_text_config()
    checks.check_backend(options.attn_backend, model_config, dtype, device)
    tokenizer = load_tokenizer(options.model_name)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise InputError(
            f"the tokenizer of {options.model_name} has neither pad_token nor eos_token; name one of its "
            "tokens in tokenizer_config.json"
        )

    rows, ledger, fingerprint, packs = _rows_of(
        options.dataset, source, tokenizer, options, options.sample_packing, model_config
    )
    if options.keep_examples_per_update:
        config.gradient_accumulation_steps = plan_accumulation(
            documents_per_update(config),
            len(document_lengths(rows)) / len(rows),
            config.world_size,
            config.per_device_train_batch_size,
        )
    prepared = Prepared(options, config, dtype, tokenizer, rows, ledger, fingerprint, packs)
    if eval_source is None:
        return prepared
    packing = options.sample_packing if options.eval_packing is None else options.eval_packing
    name = str(options.eval_dataset)
    rows, ledger, fingerprint, _ = _rows_of(name, eval_source, tokenizer, options, packing, model_config)
    return replace(prepared, eval_rows=rows, eval_ledger=ledger, eval_fingerprint=fingerprint)


def documents_per_update(config: SFTConfig) -> int:
    """What an update sees where every row is one document."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size


def _rows_of(
    name: str,
    source: Path | Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    packing: bool,
    model_config: Any,
) -> tuple[Dataset, TokenLedger, str, PackManifest | None]:
    """Rows for the trainer, of packs or of data to tokenise, where their tokens went, and a fingerprint."""
    vocab_size, n_positions = model_config.vocab_size, model_config.max_position_embeddings
    if isinstance(source, Path):
        packs, rows = read_packs(source, tokenizer_hash(tokenizer))
        check_token_ids(rows, vocab_size)
        check_token_loss(
            name, packs.ledger, options.max_token_loss, packs.capacity, n_positions, are_packed=True
        )
        return rows, packs.ledger, packs.data_fingerprint, packs
    rows, ledger = to_documents(source, tokenizer, options.max_seq_length, options.train_on_responses_only)
    check_token_ids(rows, vocab_size)
    check_token_loss(name, ledger, options.max_token_loss, options.max_seq_length, n_positions)
    fingerprint = rows_hash(rows)
    return (pack_dataset(rows, options.max_seq_length) if packing else rows), ledger, fingerprint, None


def _training_arguments(options: TrainOptions) -> dict[str, Any]:
    """The options that go to transformers' `TrainingArguments` as they are, or nearly."""
    names = (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("learning_rate", "optim", "weight_decay", "lr_scheduler_type", "warmup_steps", "seed"),
        *("logging_steps", "report_to"),
    )
    arguments = {name: getattr(options, name) for name in names}
    arguments |= {"max_steps": options.max_steps or -1, "num_train_epochs": options.num_train_epochs or 1.0}
    arguments |= {"logging_first_step": True, "save_strategy": "no"}
    if options.save_steps:
        arguments |= {"save_strategy": "steps", "save_steps": options.save_steps, "save_total_limit": 2}
    if options.eval_dataset:
        arguments |= {"eval_strategy": "steps", "eval_steps": 0.1}  # a share of all updates
    return arguments | sharding_arguments(options)
