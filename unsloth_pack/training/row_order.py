"""The order in which packed rows are trained on: even work for every rank, by `PackedSampler`."""

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsloth_pack.packing import PackedSampler


class PackedRows(Trainer):
    """A trainer whose rows, where they have `seq_lengths`, are dealt out by `packed_sampler`."""

    packed_sampler: PackedSampler | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        rows: Any = self.train_dataset
        if "seq_lengths" not in rows.column_names:
            return
        self.packed_sampler = PackedSampler(
            rows.with_format("arrow")["seq_lengths"].to_pylist(),
            self.args.world_size,
            rows_per_rank=self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps,
            batch_size=self.args.per_device_train_batch_size,
            seed=self.args.seed,
        )
        self.add_callback(_TurnToEpoch(self.packed_sampler))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.packed_sampler is None:
            return super()._get_train_sampler(train_dataset)
        return _DealtInTurn(self.packed_sampler)


class _DealtInTurn(Sampler[int]):
    """All ranks' rows, in the order in which accelerate deals them out."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def __copy__(self) -> "_DealtInTurn":
        return _DealtInTurn(copy.copy(self.sampler))

    def __len__(self) -> int:
        return len(self.sampler) * self.sampler.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler.dealt_in_turn().tolist())

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


class _TurnToEpoch(TrainerCallback):
    """Tells the sampler the epoch; accelerate does not where several ranks skip batches of a resumed one."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))
