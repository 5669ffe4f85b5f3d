"""From options to everything that training needs besides the model, with the checks that read the data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from unsloth_pack.checkpoints.loading import load_config, resolve, weight_dtype
from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.config.options import DataOptions, ImageOptions
from unsloth_pack.data import check_token_ids, tokenizer_hash
from unsloth_pack.data.cache import scan
from unsloth_pack.data.columns import check_used
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.mixture import Mixture, Part
from unsloth_pack.data.rows import IMAGES
from unsloth_pack.data.streaming import Place, Share
from unsloth_pack.data.token_counts import TokenLedger, check_token_loss
from unsloth_pack.data.tokenize import Documents
from unsloth_pack.errors import InputError, Together, about
from unsloth_pack.images.prepared import holds_images, source_from_record
from unsloth_pack.images.reading import UnreadableImage
from unsloth_pack.packing import PackManifest, find_packs, plan_accumulation, read_packs
from unsloth_pack.packing.dataset import pack_documents
from unsloth_pack.report.terminal import document_lengths
from unsloth_pack.run.documents import (
    OpenedStream,
    RowsOfSet,
    add_new_tokens,
    check_ids,
    first_of_stream,
    load_all,
    load_training_data,
    mixed_documents,
    open_training_data,
    stream_documents,
    tokenizer_of_run,
)
from unsloth_pack.run.image_rows import (
    PreparedStream,
    images_of_run,
    packs_of_text,
    refuse_lost_images,
    refusing,
    saved_beside_run,
    with_images,
)
from unsloth_pack.run.images import ImagePreparation, image_ids_of, takes_images
from unsloth_pack.run.machine import device_type
from unsloth_pack.run.optimizer import arguments_of, check_optimizer
from unsloth_pack.run.resolve import Named, evaluation_sets, name_of, with_optimizer
from unsloth_pack.run.sharding import sharding_arguments
from unsloth_pack.training.image_rows import COLUMN, ImageRowCollator
from unsloth_pack.training.streaming import RowStream
from unsloth_pack.training.trl_setup import rows_of_an_update, sft_config

# What is checked of a run's images before it begins: their files, and that one of them can be decoded.

_BATCH = 1000  # rows whose images are looked at at a time
_FIRST_DOCUMENTS = 1000  # of a stream, one of which has to have images that can be decoded
_OF_A_FILE = ("path", "size", "mtime_ns", "sha256", "row", "column")


def check_images(
    images: ImagePreparation, train: "PreparedRows", evaluation: "PreparedRows | None", is_resumed: bool
) -> None:
    """Refuse an image folder in which no image lies, and rows of which every image is broken.

    Args:
        is_resumed: the run was started as it is, so its folder stays.

    Raises:
        InputError: names the option, or the first broken image, and the remedy.
    """
    if not is_resumed:
        refuse_unused_folder(images.options, train.has_files or bool(evaluation and evaluation.has_files))
    if images.options.skip_broken_images:
        _check_one_can_be_decoded(images, train.rows, "learned")
        if evaluation is not None:
            _check_one_can_be_decoded(images, evaluation.rows, "evaluated")


def refuse_unused_folder(options: ImageOptions, has_files: bool) -> None:
    """Refuse an image folder where no image of the data is a file.

    Raises:
        InputError: names the folder.
    """
    if options.image_folder is not None and not has_files:
        raise InputError(
            f"image_folder is {options.image_folder!r}, and no image of the data is a file; leave out "
            "--image_folder (null in a config file)",
            about="image_folder",
        )


def check_files_of_packs(packs: Path, rows: Dataset, images: ImagePreparation) -> bool:
    """Refuse packs whose images are files that the image folder does not hold as they were packed.

    Where broken images are skipped, files may be missing or changed.

    Returns:
        Whether an image is a file.

    Raises:
        InputError: names the packs, the row of the data, the file and the remedy.
    """
    has_files = False
    for table in scan(rows, [IMAGES], _BATCH):
        for image in _files_in(table):
            has_files = True
            try:
                source_from_record(image, images.folder)
            except UnreadableImage as error:
                if not images.options.skip_broken_images:
                    raise UnreadableImage(f"{packs}: {error}") from None
            except InputError as error:
                raise InputError(f"{packs}: {error}") from None
    return has_files


def _files_in(table: Any) -> Sequence[dict[str, Any]]:
    """The images of some rows that are files, each file once."""
    found: dict[str, dict[str, Any]] = {}
    for chunk in table[IMAGES].chunks:
        images = chunk.flatten()
        images = images.filter(images.field("path").is_valid())
        columns = (images.field(name).to_pylist() for name in _OF_A_FILE)
        for values in zip(*columns, strict=True):
            found[values[0]] = {"bytes": None, **dict(zip(_OF_A_FILE, values, strict=True))}
    return [*found.values()]


def _check_one_can_be_decoded(images: ImagePreparation, rows: Dataset | RowStream, what: str) -> None:
    """Refuse rows of which nothing is left without the documents whose images cannot be decoded.

    Mostly the first row has a whole image, and is the only one that is decoded.
    """
    skipping = images.collator()
    looked_at: Any = islice(_documents(rows), _FIRST_DOCUMENTS) if isinstance(rows, RowStream) else rows
    first = None
    for row in looked_at:
        given: dict[str, Any] = {**row, COLUMN: row[IMAGES]}
        if (skipping([given])["labels"] != IGNORE_INDEX).any():
            return
        first = first or given
    if first is None:
        return
    try:
        ImageRowCollator(images.make_images, images.token_ids, images.folder)([first])
    except UnreadableImage as error:
        which = "each of the first documents" if isinstance(rows, RowStream) else "each document"
        raise InputError(
            f"nothing would be {what}, since {which} has an image that cannot be used, such as {error}"
        ) from None


def _documents(stream: RowStream) -> Iterator[Mapping[str, Any]]:
    """The documents of the first pass over a stream."""
    for block in stream.documents.blocks(Place(), Share()):
        yield from block.documents()
        if block.ends_pass:
            return


# Options that transformers' `TrainingArguments` take as they are.
_TRAINING_ARGUMENTS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "optim", "max_grad_norm", "weight_decay", "lr_scheduler_type", "warmup_steps", "seed"),
    *("logging_steps", "report_to", "lr_scheduler_kwargs", "neftune_noise_alpha", "load_best_model_at_end"),
)


@dataclass(frozen=True)
class PreparedRows:
    """Tokenised rows, as the trainer gets them.

    Args:
        rows: documents, or rows packed with them.
        ledger: where the tokens of the data went; of a stream, those of its first rows.
        fingerprint: of the documents, see `rows_hash`, or of the packs on disk.
        packs: the manifest, if the rows were packed on disk.
        parts: the data sets that they come from; empty for packs.
        has_files: whether an image of them is a file, or may be.
    """

    rows: Dataset | RowStream
    ledger: TokenLedger
    fingerprint: str
    packs: PackManifest | None = None
    parts: tuple[Part, ...] = ()
    has_files: bool = False


@dataclass(frozen=True)
class Prepared:
    """What `prepare` makes.

    Args:
        options: with all their defaults.
        config: TRL's.
        dtype: of the model's weights.
        saved_with_model: what is saved beside the model, see `saved_beside_run`.
        train: what is trained on.
        evaluation: what is evaluated on, if anything.
        new_tokens: by the id of each token that the run adds, the ids of its description.
        images: how the images of the rows are prepared; None where no row has any.
    """

    options: TrainOptions
    config: SFTConfig
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    saved_with_model: Any
    train: PreparedRows
    evaluation: PreparedRows | None = None
    new_tokens: dict[int, list[int]] = field(default_factory=dict)
    images: ImagePreparation | None = None


def prepare(options: TrainOptions) -> Prepared:
    """Read and tokenise the data, and check what the model will be asked to do.

    Raises:
        InputError: the data, the tokenizer or the optimizer cannot be used here. Options that contradict each
            other, or that the model cannot follow, are for `check_here` to refuse.
    """
    options = with_optimizer(options, device_type())
    data, dtype = options.data, weight_dtype(options.model.dtype, options.adapter.tuning == "full")
    stream, train_rows, eval_rows = None, None, None
    together = Together()
    with together.checked():
        config = _trl_config(options, dtype)
    with together.checked():
        tokenizer = tokenizer_of_run(options)
        new_tokens = add_new_tokens(options, tokenizer)
    with together.checked():
        if data.streaming:
            stream = open_training_data(data, options.training.seed)
        else:
            train_rows = _packs_in(data.dataset) or load_training_data(data)
    with together.checked():
        if data.eval_dataset is not None:
            sets, limit = evaluation_sets(data), data.sample_limit
            eval_rows = _packs_in(data.eval_dataset) or load_all(sets, "test", data.num_proc, limit)
    together.check()
    with about("model_name", "init_adapter"):
        model_config = load_config(resolve(options.model.model_name)[0]).get_text_config()
    model_config.vocab_size = max([model_config.vocab_size, *(token + 1 for token in new_tokens)])
    first: list[Dataset] = []
    if stream is not None and takes_images(options.model.model_name):
        with about("dataset"):
            first = first_of_stream(stream.source)
    with about("init_adapter", "model_name"):
        images = images_of_run(options, tokenizer, train_rows, eval_rows, first)
        if images is not None:
            options = with_images(options, config)
        beside = saved_beside_run(options, tokenizer, images)
    evaluation = None
    if stream is not None:
        with about("dataset"):
            train = _stream_of(stream, tokenizer, options, config, model_config, images)
    elif isinstance(train_rows, Path):
        name = name_of(data.dataset)
        with about("dataset"):
            train = _packed_rows_of(train_rows, name, tokenizer, options, model_config, images)
    else:
        assert train_rows is not None
        with about("dataset"):
            train, evaluation = _training_rows(train_rows, tokenizer, options, model_config, images)
    if data.keep_examples_per_update and isinstance(train.rows, Dataset):
        _keep_examples_per_update(config, train.rows)
    if isinstance(eval_rows, Path):
        name = name_of(data.eval_dataset)
        with about("eval_dataset"):
            evaluation = _packed_rows_of(
                eval_rows, name, tokenizer, options, model_config, images, "eval_dataset"
            )
    elif eval_rows is not None:
        with about("eval_dataset"):
            evaluation = _evaluation_rows(eval_rows, tokenizer, options, model_config, images)
    if images is not None:
        with about("dataset"):
            check_images(images, train, evaluation, is_resumed=options.output.resume)
    return Prepared(options, config, dtype, tokenizer, beside, train, evaluation, new_tokens, images)


def _trl_config(options: TrainOptions, dtype: torch.dtype) -> SFTConfig:
    config = sft_config(
        str(options.folder),
        padding_free=options.data.padding_free or options.data.sample_packing,
        dtype=dtype,
        **_training_arguments(options),
    )
    check_optimizer(config)
    return config


def _training_arguments(options: TrainOptions) -> dict[str, Any]:
    """The options, as transformers' `TrainingArguments` call them."""
    training = options.training
    save_steps: float | None = options.output.save_steps
    arguments = {name: value for name, value in flat(options).items() if name in _TRAINING_ARGUMENTS}
    arguments |= {"max_steps": training.max_steps or -1, "num_train_epochs": training.num_train_epochs or 1.0}
    arguments |= arguments_of(training)
    arguments |= {"logging_first_step": True, "save_strategy": "no"}
    if training.warmup_ratio is not None:
        arguments["warmup_steps"] = training.warmup_ratio  # below 1, a share of all updates
    evaluates = training.eval_steps or 0.1  # a share of all updates
    if options.data.evaluates:
        arguments |= {"eval_strategy": "steps", "eval_steps": evaluates}
    if training.load_best_model_at_end and not save_steps:
        save_steps = evaluates
    if save_steps:
        arguments |= {"save_strategy": "steps", "save_steps": save_steps, "save_total_limit": 2}
    if training.load_best_model_at_end or training.early_stopping_patience:
        arguments |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    if options.data.streaming:  # which goes on at a place of its own, without going through what is done
        arguments |= {"ignore_data_skip": True}
    return arguments | sharding_arguments(options)


def _packs_in(named: Named) -> Path | None:
    """The folder of packed rows that is named."""
    return find_packs(named) if isinstance(named, str) else None


def _packed_rows_of(
    folder: Path,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    model_config: Any,
    images: ImagePreparation | None,
    option: str = "dataset",
) -> PreparedRows:
    """Rows that were packed on disk.

    Args:
        name: of the data.
        model_config: of the text model.
        option: that names the data.
    """
    packs, rows = read_packs(folder, tokenizer_hash(tokenizer))
    check_token_ids(rows, model_config.vocab_size)
    has_files = False
    if packs.images is None:
        rows = packs_of_text(rows, folder, tokenizer, options, images)
    elif images is not None:
        has_files = check_files_of_packs(folder, rows, images)
    n_positions, most_lost = model_config.max_position_embeddings, options.data.max_token_loss
    check_token_loss(
        name, packs.ledger, most_lost, packs.capacity, n_positions, are_packed=True, option=option
    )
    return PreparedRows(rows, packs.ledger, packs.data_fingerprint, packs, has_files=has_files)


def _training_rows(
    given: list[RowsOfSet],
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    model_config: Any,
    images: ImagePreparation | None,
) -> tuple[PreparedRows, PreparedRows | None]:
    """What is trained on, and what is held out of it."""
    data = options.data
    mixture = _checked_mixture(
        given,
        tokenizer,
        options,
        model_config,
        how=data.mixture,
        seed=options.training.seed,
        eval_fraction=data.eval_fraction,
        most=data.sample_limit,
        images=images,
    )
    train = _prepared_rows(mixture.train, data.sample_packing, options, mixture.parts)
    if mixture.held_out is None:
        return train, None
    return train, _prepared_rows(mixture.held_out, _packs_evaluation(data), options)


def _evaluation_rows(
    given: list[RowsOfSet],
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    model_config: Any,
    images: ImagePreparation | None,
) -> PreparedRows:
    mixture = _checked_mixture(given, tokenizer, options, model_config, images=images)
    return _prepared_rows(mixture.train, _packs_evaluation(options.data), options, mixture.parts)


def _packs_evaluation(data: DataOptions) -> bool:
    return data.sample_packing if data.eval_packing is None else data.eval_packing


def _checked_mixture(
    given: list[RowsOfSet],
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    model_config: Any,
    **how: Any,
) -> Mixture:
    """The documents of some data sets, all of whose tokens have an embedding, and not too many are lost."""
    data, capacity = options.data, options.model.max_seq_length
    mixture = mixed_documents(given, tokenizer, capacity, data.train_on_responses_only, data.num_proc, **how)
    check_ids(mixture.train, model_config.vocab_size)
    if how.get("images") is None:
        refuse_lost_images(mixture.train.rows, tokenizer, options, "document", "take it out of the text")
    name = ", ".join(each.data_set.name for each in given)
    n_positions = model_config.max_position_embeddings
    option = given[0].data_set.option.partition(".")[0]
    check_token_loss(name, mixture.train.ledger, data.max_token_loss, capacity, n_positions, option=option)
    return mixture


def _prepared_rows(
    documents: Documents, packing: bool, options: TrainOptions, parts: tuple[Part, ...] = ()
) -> PreparedRows:
    rows, capacity = documents.rows, options.model.max_seq_length
    if packing:
        rows = pack_documents(documents, capacity, options.data.num_proc)
    return PreparedRows(rows, documents.ledger, documents.fingerprint, None, parts, documents.has_files)


def _stream_of(
    stream: OpenedStream,
    tokenizer: PreTrainedTokenizerBase,
    options: TrainOptions,
    config: SFTConfig,
    model_config: Any,
    images: ImagePreparation | None,
) -> PreparedRows:
    """The rows of a stream, of which the first documents have been checked."""
    data, capacity = options.data, options.model.max_seq_length
    vocab_size, n_positions = model_config.vocab_size, model_config.max_position_embeddings
    source = stream.source
    responses_only = bool(data.train_on_responses_only)
    of_images = None if images is None else PreparedStream(images, capacity, responses_only)
    token_ids = image_ids_of(options.model.model_name, tokenizer)
    check_text = None if token_ids is None else refusing(token_ids)
    have_images = holds_images if images is None and token_ids is not None else None
    documents = stream_documents(
        source, tokenizer, vocab_size, capacity, responses_only, of_images, check_text, have_images
    )
    for number, data_set in enumerate(stream.data_sets):
        unused = documents.unused_columns[number]
        check_used(data_set.columns, unused, are_shared=data_set.shares_columns)
    name = f"{source.name}, in its first {documents.first_ledger.rows_read:,} rows,"
    check_token_loss(name, documents.first_ledger, data.max_token_loss, capacity, n_positions)
    decoders = 0 if images is None else max(1, config.dataloader_num_workers)
    given_out_early = 1 if images is None else 2 + decoders
    rows = RowStream(
        documents,
        capacity,
        seed=options.training.seed,
        share=Share(config.process_index, config.world_size),
        n_workers=data.num_proc or 1,
        ahead=2 * rows_of_an_update(config) + config.per_device_train_batch_size * given_out_early,
        decoders=decoders,
    )
    parts = tuple(
        Part(data_set.name, data_set.weight, documents.unused_columns[number])
        for number, data_set in enumerate(stream.data_sets)
    )
    # Later rows may have files
    return PreparedRows(rows, documents.first_ledger, documents.fingerprint, None, parts, has_files=True)


def _keep_examples_per_update(config: SFTConfig, rows: Dataset) -> None:
    """Accumulate over so few rows that an update sees as many documents as if each were a row."""
    rows_per_step = config.per_device_train_batch_size
    config.gradient_accumulation_steps = plan_accumulation(
        rows_per_step * config.gradient_accumulation_steps * config.world_size,
        len(document_lengths(rows)) / len(rows),
        config.world_size,
        rows_per_step,
    )
