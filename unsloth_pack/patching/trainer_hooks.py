"""Everything that a patch changes outside its model: callbacks of trainers and methods of classes.

`METHODS` and `CALLBACKS` list it all. The last patch takes it back.

Batches: `RowCollator` describes packed rows on the host, so that the model reads nothing back from the
device, and the next batches are loaded as soon as an update is launched, while the host would wait.

The optimizer: an adapter has hundreds of small weights. One by one they cost Python 4 to 6 ms an update of a
0.5B model, in which the GPU computes for 16. So they are clipped and updated as one tensor, where that
computes the same.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW
from unsloth_pack.errors import InputError
from unsloth_pack.layers.decoder import has_fast_decoder
from unsloth_pack.modules import is_read_from_peers, sharded_by
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_row
from unsloth_pack.packed_row.padded_batch import PaddedBatch, is_one_run_a_row, padding_has_labels
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow
from unsloth_pack.patching import deferred_logging, parts

_CPU = torch.device("cpu")
_COLUMN = "seq_lengths"
_N_ROWS = 32  # to look for a row of several documents in
# Stands for the rows of a stream, which must not be read early
_EXAMPLE = {"input_ids": [0, 0, 0], "labels": [-100, -100, 0], _COLUMN: [1, 2]}
Collate = Callable[[list[Any]], Mapping[str, Any]]


class RowCollator:
    """Replace the tensors by which TRL's collator describes a batch, padded or not, by a `packed_row`.

    `position_ids` stay, as TRL's trainer counts tokens by them.
    """

    def __init__(self, collate: Collate):
        self.collate = collate

    def __call__(self, examples: list[Mapping[str, Sequence[int]]]) -> dict[str, object]:
        batch = dict(self.collate(examples))
        if "attention_mask" in batch:
            return batch | _describe_padding(batch)
        for name in ROW_KEYWORDS:
            batch.pop(name, None)
        lengths = tuple(n for row in examples for n in row.get(_COLUMN, [len(row["input_ids"])]) if n)
        n_tokens = batch["input_ids"].shape[1]
        if sum(lengths) == n_tokens:
            return batch | {"packed_row": PackedRow.of_lengths(lengths, _CPU)}
        return batch | {"packed_row": describe_row((1, n_tokens), _CPU, packed_seq_lengths=lengths)}


def _describe_padding(batch: Mapping[str, Any]) -> dict[str, PaddedBatch]:
    """Describe where a padded batch has tokens, unless the model has to look at it itself."""
    real, labels = batch["attention_mask"].bool(), batch["labels"]
    if not bool(real[:, 0].all()) or not is_one_run_a_row(real.numpy()):  # TRL pads on the right
        return {}
    if labels.shape != real.shape or padding_has_labels(labels, real, IGNORE_INDEX, is_shifted=False):
        return {}
    return {"packed_row": PaddedBatch.of_mask(real.numpy(), _CPU)}


def is_trls(collate: object) -> bool:
    """True for TRL's own collator for language models, whose batches `RowCollator` knows."""
    name = f"{type(collate).__module__}.{type(collate).__name__}"
    return name == "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"


def check_collator(loader: Any) -> None:
    """Refuse a collator that drops where the documents of packed rows end."""
    row = _find_packed_row(getattr(loader, "dataset", None))
    documents = None if row is None else _document_lengths(loader.collate_fn, row)
    if row is None or documents is None:
        return
    lengths = [n for n in row[_COLUMN] if n]
    # A collator may pad after them: TRL makes every pad token a document
    if documents[: len(lengths)] != lengths:
        raise InputError(
            f"train_dataset has the column {_COLUMN}, but the collator drops where documents end; give "
            "SFTConfig(padding_free=True, packing=False, max_length=None), or Trainer default_data_collator"
        )


def _find_packed_row(dataset: Any) -> Mapping[str, Any] | None:
    """Return a row whose `seq_lengths` list several documents, or None."""
    if isinstance(dataset, IterableDataset):
        is_list = hasattr((getattr(dataset, "features", None) or {}).get(_COLUMN), "feature")
        return _EXAMPLE if is_list else None
    for number in range(min(len(dataset or ()), _N_ROWS)):
        row = dataset[number]
        if (
            not isinstance(row, Mapping) or np.ndim(row.get(_COLUMN, 0)) != 1
        ):  # not a column that packing makes
            return None
        if sum(n > 0 for n in row[_COLUMN]) > 1:
            return row
    return None


def _document_lengths(collate: Collate, row: Mapping[str, object]) -> list[int] | None:
    """Return the lengths of the documents that the model sees in this row's batch; None if unknown."""
    try:
        batch = collate([row])
        if "packed_row" in batch:  # `RowCollator` and its like drop nothing
            return None
        names = (*ROW_KEYWORDS, "position_ids", "attention_mask")
        arguments = {name: batch[name] for name in names if name in batch}
        described = describe_row(tuple(batch["input_ids"].shape), _CPU, **arguments)
    except Exception:  # the first step raises it with a better message
        return None
    if described is None:
        return []
    pairs = zip(described.lengths, described.is_padding, strict=True)
    return [length for length, is_padding in pairs if not is_padding]


class PrefetchIterator:
    """An iterator that can load items before they are asked for."""

    def __init__(self, batches: Iterator[object]):
        self._batches = batches
        self._loaded: deque[object] = deque()  # an exception stands for the batch that raised it

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        batch = self._loaded.popleft() if self._loaded else next(self._batches)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def prefetch(self, n_batches: int) -> None:
        """Load up to `n_batches`, or as many as there are. An error is raised when its batch is due."""
        for _ in range(n_batches - len(self._loaded)):
            try:
                self._loaded.append(next(self._batches))
            except Exception as error:  # StopIteration too
                return self._loaded.append(error)


def _is_safe_to_read_early(dataset: Any) -> bool:
    """True if reading a row has no side effect: a data set of a user's may depend on the training so far."""
    datasets = sys.modules.get("datasets")
    is_theirs = datasets is not None and isinstance(dataset, datasets.Dataset)
    return is_theirs and dataset.format["type"] != "custom"


class PatchedTraining(TrainerCallback):
    """Acts in the training of patched models: checks the collator, prefetches batches, frees spare memory.

    `logging_nan_inf_filter`, on by default, leaves losses that are not finite out of the logs. On a GPU it
    reads each loss on the host before clipping and the optimizer are launched, so it is off while we train,
    and such a loss is logged as it is.
    """

    def __init__(self) -> None:
        self._batches: PrefetchIterator | None = None  # of this epoch
        self._had_filter = False

    def on_init_end(self, *_: object, **__: object) -> None:
        HOOKS.replace_methods()  # a patch does not import TRL; it is imported by now

    def on_train_begin(
        self,
        args: TrainingArguments,
        *_: object,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        **__: object,
    ) -> None:
        self._batches = None
        if not has_fast_decoder(model):
            return
        check_collator(train_dataloader)
        if deferred_logging.is_on_gpu(args):
            self._had_filter |= args.logging_nan_inf_filter  # off since training that ended in an error
            args.logging_nan_inf_filter = False
        # accelerate's loader moves the batches of this one
        loader: Any = getattr(train_dataloader, "base_dataloader", None)
        if type(loader) is not DataLoader or args.n_gpu > 1:
            return
        if is_trls(loader.collate_fn):
            loader.collate_fn = RowCollator(loader.collate_fn)
        if loader.pin_memory:
            train_dataloader._non_blocking = True
        if loader.num_workers == 0 and _is_safe_to_read_early(loader.dataset):
            iterate = loader.__iter__

            def begin_epoch() -> Iterator[object]:
                self._batches = PrefetchIterator(iterate())
                return self._batches

            vars(loader)["__iter__"] = begin_epoch  # accelerate calls it by this name

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, *_: object, **__: object
    ) -> None:
        if self._batches is not None and state.global_step + 1 < state.max_steps:
            self._batches.prefetch(args.gradient_accumulation_steps)

    def on_train_end(
        self, args: TrainingArguments, *_: object, model: nn.Module | None = None, **__: object
    ) -> None:
        if self._had_filter:
            self._had_filter, args.logging_nan_inf_filter = False, True
        if torch.cuda.is_initialized() and has_fast_decoder(model):
            torch.cuda.empty_cache()  # torch keeps the memory of the largest step, which a notebook needs


# The methods of `Trainer` for the optimizer: the original first, then its own arguments.


def create_optimizer(
    original: Callable[..., Optimizer], trainer: Trainer, *args: object, **kwargs: object
) -> Optimizer:
    is_users_own = trainer.optimizer is not None
    optimizer = original(trainer, *args, **kwargs)
    if not is_users_own:
        optimizer = trainer.optimizer = flattened(trainer, optimizer)
    return optimizer


def clip_grad_norm(
    original: Callable[..., Tensor | float], trainer: Trainer, model: nn.Module
) -> Tensor | float:
    """Clip the joined gradient and return its norm, where the gradients are joined."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    flat = optimizer.flat_weights() if isinstance(optimizer, FlatAdamW) else []
    if not flat:
        return original(trainer, model)
    norm: Tensor = trainer.accelerator.clip_grad_norm_(flat, trainer.args.max_grad_norm)
    return norm


def why_not_flat(args: TrainingArguments, model: nn.Module | None) -> str | None:
    """Say why the optimizer of a run takes the weights one by one, or return None."""
    if not getattr(model, "peft_config", None) or getattr(model, "full_finetuning", False):
        return "all of the model trains, and a second copy of its gradients would take much memory"
    if not has_fast_decoder(model):
        return "the model is not patched"
    if args.fsdp or args.deepspeed:
        return "they are sharded"
    return None if args.optim == "adamw_torch_fused" else "not adamw_torch_fused"


def flattened(trainer: Trainer, optimizer: Optimizer) -> Optimizer:
    """Return a `FlatAdamW` in place of an optimizer, where that computes the same; else the optimizer."""
    model: Any = trainer.model
    has_parts = any(isinstance(weight, DTensor) for weight in model.parameters() if weight.requires_grad)
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or has_parts
    if type(optimizer) is not AdamW or is_sharded or why_not_flat(trainer.args, model) is not None:
        return optimizer
    return FlatAdamW.in_place_of(optimizer)


def prepare_model(
    original: Callable[..., nn.Module],
    accelerator: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Wrap a model in DDP that gathers its frozen layers: on a GPU accelerate refuses every `DTensor`."""
    is_ours = is_read_from_peers(model) or sharded_by(model) == "FSDP2"
    gathers_itself = is_ours and accelerator.distributed_type != DistributedType.FSDP
    if evaluation_mode or not gathers_itself or isinstance(model, DistributedDataParallel):
        return original(accelerator, model, device_placement, evaluation_mode)
    prepared = original(accelerator, model, device_placement=False, evaluation_mode=True)
    del prepared._is_accelerate_prepared
    device_ids = [accelerator.device] if accelerator.device.type == "cuda" else None
    settings = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler else {}
    wrapped = DistributedDataParallel(prepared, device_ids=device_ids, **settings)
    vars(wrapped)["_is_accelerate_prepared"] = True
    return wrapped


_TRAINER = "transformers.trainer", "Trainer"
_SFT_TRAINER = "trl.trainer.sft_trainer", "SFTTrainer"
_PEFT_MODEL = "peft.peft_model", "PeftModel"
# Our function gets the original, then the method's own arguments. It leaves unpatched models to the original.
Method = tuple[str, str, str]  # module, class, name
METHODS: dict[Method, Callable[..., Any]] = {
    ("accelerate.accelerator", "Accelerator", "prepare_model"): prepare_model,
    (*_TRAINER, "create_optimizer"): create_optimizer,
    (*_TRAINER, "_clip_grad_norm"): clip_grad_norm,
    (*_SFT_TRAINER, "compute_loss"): deferred_logging.compute_loss,
    (*_SFT_TRAINER, "log"): deferred_logging.log,
    (*_SFT_TRAINER, "_maybe_log_save_evaluate"): deferred_logging.log_save_evaluate,
    (*_SFT_TRAINER, "_inner_training_loop"): deferred_logging.train,
    (*_PEFT_MODEL, "__init__"): parts.refuse_new_adapter,
    (*_PEFT_MODEL, "add_adapter"): parts.refuse_new_adapter,
}
CALLBACKS = (PatchedTraining,)  # of every trainer that is made meanwhile
_DEFAULTS: list[Any] = DEFAULT_CALLBACKS
_INHERITED = object()


class TrainerHooks:
    """All changes outside a model: `METHODS` and `CALLBACKS`, in force while anybody has them installed."""

    def __init__(self) -> None:
        self._n_users = 0
        self._replaced: dict[Method, tuple[object, object]] = {}  # the class's own attribute, and ours

    def install(self) -> None:
        """Put the changes in force, until as many calls of `uninstall`."""
        self._n_users += 1
        _DEFAULTS.extend(callback for callback in CALLBACKS if callback not in _DEFAULTS)
        self.replace_methods()

    def replace_methods(self) -> None:
        """Replace the methods of the libraries that are imported by now, if the changes are in force."""
        for method, function in METHODS.items() if self._n_users else ():
            owner, name = _owner(method), method[-1]
            if owner is not None and method not in self._replaced:
                ours = _bind(function, getattr(owner, name))
                self._replaced[method] = vars(owner).get(name, _INHERITED), ours
                setattr(owner, name, ours)

    def uninstall(self) -> None:
        """Take all changes back, if nobody else has them installed."""
        self._n_users -= 1
        if self._n_users:
            return
        _DEFAULTS[:] = [callback for callback in _DEFAULTS if callback not in CALLBACKS]
        for method, (original, ours) in [*self._replaced.items()]:
            owner, name = _owner(method), method[-1]
            if vars(owner).get(name) is not ours:
                continue  # wrapped by another library since; ours stays below, and is not put in twice
            del self._replaced[method]
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def _owner(method: Method) -> Any:
    """Return the class of a method, or None while its module is not imported."""
    return getattr(sys.modules.get(method[0]), method[1], None)


def _bind(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(self: object, *args: object, **kwargs: object) -> Any:
        return function(original, self, *args, **kwargs)

    return method


HOOKS = TrainerHooks()
