"""From options to all that training needs but the model, and the checks that need no weights."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import SFTConfig

from unsloth_pack.api import _dtype, _load, _resolve
from unsloth_pack.cli import checks
from unsloth_pack.cli.options import TrainOptions
from unsloth_pack.cli.quiet import quieten
from unsloth_pack.data import check_token_ids, load_rows, to_trl
from unsloth_pack.data.tokenize import TokenLedger, check_token_loss, tokenize
from unsloth_pack.demo import HELDOUT_FILE, TRAIN_FILE
from unsloth_pack.packing import pack_dataset, plan_accumulation
from unsloth_pack.trl import sft_config, training_template


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made: the options with their last defaults, TRL's configuration, tokenised rows.

    Args:
        documents: tokenised, one a row.
        rows: what the trainer gets: the documents, or rows packed with them.
        eval_rows, eval_ledger: likewise; None where there is nothing to evaluate on.
    """

    options: TrainOptions
    config: SFTConfig
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    documents: Dataset
    rows: Dataset
    ledger: TokenLedger
    eval_rows: Dataset | None = None
    eval_ledger: TokenLedger | None = None


def prepare(options: TrainOptions) -> Prepared:
    """Read and tokenise the data, and check what the model will be asked to do.

    Raises:
        InputError: the data, the model's architecture, or something the options ask for cannot be used here.
    """
    quieten(show_bars=checks.is_main_process())
    on_gpu = torch.cuda.is_available()
    options = replace(options, optim=options.optim or ("adamw_torch_fused" if on_gpu else "adamw_torch"))
    checks.check_trainer(options)
    raw = {"rows": load_rows(str(TRAIN_FILE) if options.dataset == "demo" else options.dataset)}
    if options.eval_dataset is not None:
        is_demo = options.eval_dataset == "demo"
        raw["eval_rows"] = load_rows(str(HELDOUT_FILE) if is_demo else options.eval_dataset, "test")

    dtype = _dtype(options.dtype, False)
    config = sft_config(
        str(options.output_dir),
        padding_free=options.padding_free or options.sample_packing,
        dtype=dtype,
        **_training_arguments(options),
    )
    checks.check_optimizer(config)
    source, _ = _resolve(options.model_name)
    model_config = _load(AutoConfig, source).get_text_config()
    checks.check_backend(options, model_config, dtype, "cuda" if on_gpu else "cpu")
    tokenizer = _load(AutoTokenizer, source)

    made: dict[str, Any] = {}
    for name, rows in raw.items():
        made[name], ledger = _tokenised(rows, tokenizer, options, model_config.vocab_size)
        path = options.dataset if name == "rows" else str(options.eval_dataset)
        check_token_loss(path, ledger, options.max_token_loss, options.max_seq_length)
        made["ledger" if name == "rows" else "eval_ledger"] = ledger
    made["documents"] = made["rows"]
    if options.sample_packing:
        made["rows"] = pack_dataset(made["rows"], options.max_seq_length)
    if options.keep_examples_per_update:
        config.gradient_accumulation_steps = plan_accumulation(
            documents_per_update(config),
            len(made["documents"]) / len(made["rows"]),
            config.world_size,
            config.per_device_train_batch_size,
        )
    if "eval_rows" in made and (
        options.sample_packing if options.eval_packing is None else options.eval_packing
    ):
        made["eval_rows"] = pack_dataset(made["eval_rows"], options.max_seq_length)
    return Prepared(options, config, dtype, tokenizer, **made)


def documents_per_update(config: SFTConfig) -> int:
    """What an update sees where every row is one document."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size


def _tokenised(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, options: TrainOptions, vocab_size: int
) -> tuple[Dataset, TokenLedger]:
    only_responses = options.train_on_responses_only
    encoded, ledger = tokenize(
        to_trl(rows, chat_template=bool(tokenizer.chat_template)),
        tokenizer,
        max_length=options.max_seq_length,
        train_on_responses_only=only_responses,
        chat_template=training_template(tokenizer) if only_responses else None,
    )
    check_token_ids(encoded, vocab_size)
    return encoded, ledger


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
    return arguments
