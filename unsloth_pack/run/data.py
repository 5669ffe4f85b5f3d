"""The data of a run: tokenised rows to train on and to evaluate on, with the checks that read them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from pyarrow import Table
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from trl import SFTConfig

from unsloth_pack.checkpoints.loading import find_model, load_config
from unsloth_pack.config.options import DataOptions, ImageOptions, ModelOptions, RolloutOptions
from unsloth_pack.data import check_token_ids, tokenizer_hash
from unsloth_pack.data.cache import cores
from unsloth_pack.data.columns import check_used
from unsloth_pack.data.labels import Labels
from unsloth_pack.data.mixture import Mixture, Part
from unsloth_pack.data.sources import DataSet
from unsloth_pack.data.streaming import DocumentStream, RowSource, Share
from unsloth_pack.data.token_counts import TokenLedger, check_token_loss
from unsloth_pack.data.tokenize import Documents
from unsloth_pack.errors import InputError
from unsloth_pack.images.prepared import without_images
from unsloth_pack.images.processor import VisionProcessor
from unsloth_pack.packing import PackManifest, find_packs, plan_accumulation, read_manifest, read_packs
from unsloth_pack.packing.dataset import pack_documents
from unsloth_pack.packing.model_columns import TEACHER_IDS
from unsloth_pack.report.terminal import document_lengths
from unsloth_pack.run.documents import (
    DocumentPreparation,
    RowsOfSet,
    RunTokenizer,
    first_of_stream,
    load_all,
    load_training_data,
    open_training_data,
)
from unsloth_pack.run.images import (
    ImagePreparation,
    StreamedImageRows,
    check_files_of_packs,
    image_ids_of,
    image_preparation,
    refuse_image_tokens,
    saved_with_model,
    takes_images,
)
from unsloth_pack.run.resolve import evaluation_sets
from unsloth_pack.run.rollouts import load_function
from unsloth_pack.run.teacher import check_reference
from unsloth_pack.training.rollouts import RolloutStream
from unsloth_pack.training.streaming import RowStream
from unsloth_pack.training.trl_setup import rows_of_an_update, training_template

_MOST_WORKERS = 8  # that decode images, unless the options say how many


@dataclass(frozen=True)
class PreparedRows:
    """Tokenised rows for the trainer.

    Args:
        rows: documents, or rows packed with them.
        ledger: token counts of the data; of a stream, those of its first rows.
        fingerprint: of the documents, see `rows_hash`, or of the packs on disk.
        packs: the manifest, if the rows were packed on disk.
        parts: the data sets of the rows; empty for packs.
        channels: what the logs call the data sets, if rows say which one a document is of; else empty.
    """

    rows: Dataset | RowStream
    ledger: TokenLedger
    fingerprint: str
    packs: PackManifest | None = None
    parts: tuple[Part, ...] = ()
    channels: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    Args:
        images: how the images of the rows are prepared; None where no row has any.
        saved_with_model: the tokenizer or processor to save beside the model.
        labels: of the documents, where those are learned; None where the text is.
    """

    train: PreparedRows
    evaluation: PreparedRows | None
    images: ImagePreparation | None
    saved_with_model: PreTrainedTokenizerBase | VisionProcessor
    labels: Labels | None = None

    @property
    def is_scored(self) -> bool:
        """Whether all rows hold what the reference of preferences says of them."""
        packs = [each.packs for each in (self.train, self.evaluation) if each is not None]
        return all(each is not None and each.reference is not None for each in packs)


def build_data(
    model: ModelOptions,
    data: DataOptions,
    image_options: ImageOptions,
    tokenizer: RunTokenizer,
    config: SFTConfig,
    init_adapter: str | None = None,
    *,
    objective: str = "sft",
    teacher: str = "base",
    rollouts: RolloutOptions | None = None,
) -> TrainingData:
    """Read and tokenise the data.

    Args:
        config: of the trainer, which is adapted to rows with images and to `keep_examples_per_update`.
        init_adapter: the adapter that the run begins with.
        objective: what the run trains for.
        teacher: where it distils.
        rollouts: how the prompts of the data become targets, where they do.

    Raises:
        InputError: the data cannot be trained on.
    """
    reads_teacher = objective == "distill" and teacher == "stored"
    data_sets: list[DataSet] = []
    stream, loaded = None, []
    packs, eval_packs = (
        find_packs(named) if isinstance(named, str) else None for named in (data.dataset, data.eval_dataset)
    )
    if data.streaming:
        data_sets, stream = open_training_data(data, config.seed)
    elif packs is None:
        loaded = load_training_data(data)
    sets = [] if eval_packs else evaluation_sets(data)
    eval_loaded = load_all(sets, data.num_proc, data.sample_limit, split="test")

    rows = [each.rows for each in (*loaded, *eval_loaded)]
    if stream is not None and takes_images(model.model_name):
        rows += first_of_stream(stream)
    manifests = {folder: read_manifest(folder) for folder in (packs, eval_packs) if folder is not None}
    labels = None
    if data.task == "classify":
        if packs is not None or eval_packs is not None:
            raise InputError(
                f"task is 'classify' and {packs or eval_packs} holds packed rows; give their text"
            )
        named = ((each.data_set.name, each.rows) for each in loaded)
        labels = Labels.of(data.label_column or "label", named)
        config.padding_free = True  # whatever shares a batch shares a row
    source = init_adapter or model.model_name
    are_expected = data.streaming and image_options.image_folder is not None
    images = image_preparation(
        source, tokenizer.tokenizer, image_options, rows, manifests, are_expected=are_expected
    )
    if images is not None:
        _adapt_to_images(config, image_options)
    if reads_teacher:
        config.remove_unused_columns = False  # its columns are none that TRL knows

    prepare = DocumentPreparation(
        tokenizer.tokenizer,
        model.max_seq_length,
        data.train_on_responses_only,
        data.num_proc,
        images,
        labels,
        objective,
        has_channels=objective == "sft" and labels is None,
    )
    builder = _Builder(model.model_name, data, config, prepare, tokenizer.new_tokens, reads_teacher, source)
    evaluation = None
    if stream is not None and objective == "rollouts" and rollouts is not None:
        train = builder.rollouts(stream, data_sets, rollouts)
    elif stream is not None:
        train = builder.stream(stream, data_sets)
    elif packs is not None:
        train = builder.packed_rows(packs)
    else:
        train, evaluation = builder.training_rows(loaded)
    if data.keep_examples_per_update and isinstance(train.rows, Dataset):
        _keep_examples_per_update(config, train.rows)
    if eval_packs is not None:
        evaluation = builder.packed_rows(eval_packs)
    elif eval_loaded:
        evaluation = builder.evaluation_rows(eval_loaded)
    beside = saved_with_model(tokenizer.tokenizer, images, image_options, init_adapter)
    return TrainingData(train, evaluation, images, beside, labels)


def _adapt_to_images(config: SFTConfig, options: ImageOptions) -> None:
    """Have images decoded by workers, and the documents of a batch share one row."""
    workers = options.dataloader_num_workers
    if workers is None:
        workers = min(_MOST_WORKERS, cores()) if config.device.type == "cuda" else 0
    config.dataloader_num_workers, config.padding_free = workers, True
    config.remove_unused_columns = False  # that of the images is none that TRL knows


def _keep_examples_per_update(config: SFTConfig, rows: Dataset) -> None:
    """Accumulate over so few rows that an update sees as many documents as if each were a row."""
    rows_per_step = config.per_device_train_batch_size
    config.gradient_accumulation_steps = plan_accumulation(
        rows_per_step * config.gradient_accumulation_steps * config.world_size,
        len(document_lengths(rows)) / len(rows),
        config.world_size,
        rows_per_step,
    )


class _Builder:
    """Makes rows of the data of a run."""

    def __init__(
        self,
        model_name: str,
        data: DataOptions,
        config: SFTConfig,
        prepare: DocumentPreparation,
        new_tokens: Iterable[int],
        reads_teacher: bool,
        source: str,  # the model or the adapter that the run begins with
    ):
        self._data, self._config, self._prepare = data, config, prepare
        self._reads_teacher, self._source = reads_teacher, source
        self._tokenizer, self._capacity, self._images = prepare.tokenizer, prepare.max_length, prepare.images
        text: PretrainedConfig = load_config(find_model(model_name)[0]).get_text_config()
        self._vocab_size = max([text.vocab_size, *(token + 1 for token in new_tokens)])
        self._n_positions = text.max_position_embeddings
        self._image_ids = image_ids_of(model_name, self._tokenizer)  # None if it takes no images

    def packed_rows(self, folder: Path) -> PreparedRows:
        """Rows that were packed on disk."""
        reads_teacher = self._reads_teacher
        packs, rows = read_packs(folder, tokenizer_hash(self._tokenizer), reads_teacher=reads_teacher)
        for column in ("input_ids", *([TEACHER_IDS] if reads_teacher else [])):
            check_token_ids(rows, self._vocab_size, column)
        if packs.reference is not None and self._prepare.objective in ("dpo", "kto"):
            check_reference(packs.reference, self._source, folder)
        if packs.images is not None and self._images is not None:
            check_files_of_packs(folder, rows, self._images)
        elif packs.images is None:
            if (ids := self._image_ids) is not None:
                refuse_image_tokens(rows, ids, f"{folder} row", "pack the data anew, with its images")
            rows = rows if self._images is None else without_images(rows, is_packed=True)
        self._check_token_loss(str(folder), packs.ledger, packs.capacity, are_packed=True)
        return PreparedRows(rows, packs.ledger, packs.data_fingerprint, packs)

    def training_rows(self, loaded: list[RowsOfSet]) -> tuple[PreparedRows, PreparedRows | None]:
        """The rows to train on, and those that are held out."""
        data = self._data
        how: dict[str, Any] = {"how": data.mixture, "seed": self._config.seed, "most": data.sample_limit}
        mixture = self._mixture(loaded, eval_fraction=data.eval_fraction, **how)
        train = self._rows_of(mixture.train, data.sample_packing, mixture.parts)
        if mixture.held_out is None:
            return train, None
        held_out = self._rows_of(mixture.held_out, data.packs_evaluation)
        return train, replace(held_out, channels=train.channels)

    def evaluation_rows(self, loaded: list[RowsOfSet]) -> PreparedRows:
        mixture = self._mixture(loaded, seed=0)
        return self._rows_of(mixture.train, self._data.packs_evaluation, mixture.parts)

    def stream(self, source: RowSource, data_sets: Sequence[DataSet]) -> PreparedRows:
        """The rows of a stream, of which the first documents have been checked."""
        config, images, image_ids = self._config, self._images, self._image_ids
        only_responses = self._data.train_on_responses_only

        def check_text(table: Table, what: str) -> None:
            if image_ids is not None:
                refuse_image_tokens(Dataset(table), image_ids, what)

        documents = DocumentStream(
            source,
            self._tokenizer,
            vocab_size=self._vocab_size,
            max_length=self._capacity,
            responses_only=only_responses,
            chat_template=training_template(self._tokenizer) if only_responses else None,
            images=StreamedImageRows(images, self._capacity, only_responses) if images else None,
            check_text=check_text,
        )
        unused = documents.unused_columns
        for number, data_set in enumerate(data_sets):
            check_used(data_set.columns, unused[number])
        ledger = documents.first_ledger
        self._check_token_loss(f"{source.name}, in its first {ledger.rows_read:,} rows,", ledger)
        decoders = 0 if images is None else max(1, config.dataloader_num_workers)
        given_out_early = 1 if images is None else 2 + decoders
        ahead = 2 * rows_of_an_update(config) + config.per_device_train_batch_size * given_out_early
        workers = self._data.num_proc or 1
        return self._streamed(documents, data_sets, unused, n_workers=workers, ahead=ahead, decoders=decoders)

    def rollouts(
        self, source: RowSource, data_sets: Sequence[DataSet], options: RolloutOptions
    ) -> PreparedRows:
        """The targets of the prompts of a stream; the model that generates is set later."""
        if self._images is not None:
            raise InputError("objective is 'rollouts', and the rows have images; take rows of text")
        function = load_function(options.rollout_function)
        targets = RolloutStream(source, self._tokenizer, function, options, self._capacity, self._config.seed)
        least = (rows_of_an_update(self._config) + 1) * self._capacity  # no target is older than it must be
        return self._streamed(targets, data_sets, {}, n_workers=0, ahead=1, buffer_tokens=least)

    def _streamed(
        self,
        documents: DocumentStream | RolloutStream,
        data_sets: Sequence[DataSet],
        unused_columns: Mapping[int, tuple[str, ...]],
        **options: int,
    ) -> PreparedRows:
        share = Share(self._config.process_index, self._config.world_size)
        parts = tuple(
            Part(data_set.name, data_set.weight, unused_columns.get(number, ()))
            for number, data_set in enumerate(data_sets)
        )
        channels = self._prepare.channels([part.name for part in parts])
        options["seed"] = self._config.seed
        rows = RowStream(documents, self._capacity, share=share, has_channels=bool(channels), **options)
        return PreparedRows(rows, documents.first_ledger, documents.fingerprint, None, parts, channels)

    def _mixture(self, loaded: list[RowsOfSet], **how: Any) -> Mixture:
        """The documents of data sets, all of whose tokens have an embedding, and not too many are lost."""
        mixture = self._prepare.mixture(loaded, **how)
        documents = mixture.train
        if documents.least_id < 0 or documents.last_id >= self._vocab_size:
            check_token_ids(documents.rows, self._vocab_size)
        if self._images is None and self._image_ids is not None:
            refuse_image_tokens(documents.rows, self._image_ids, "document")
        self._check_token_loss(", ".join(each.data_set.name for each in loaded), documents.ledger)
        return mixture

    def _check_token_loss(
        self, name: str, ledger: TokenLedger, capacity: int | None = None, are_packed: bool = False
    ) -> None:
        most, length = self._data.max_token_loss, capacity or self._capacity
        check_token_loss(name, ledger, most, length, self._n_positions, are_packed=are_packed)

    def _rows_of(self, documents: Documents, is_packed: bool, parts: tuple[Part, ...] = ()) -> PreparedRows:
        rows = documents.rows
        if is_packed:
            rows = pack_documents(documents, self._capacity, self._data.num_proc)
        channels = self._prepare.channels([part.name for part in parts])
        return PreparedRows(rows, documents.ledger, documents.fingerprint, None, parts, channels)
