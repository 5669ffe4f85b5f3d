"""The order in which packed rows are trained on: even work for every rank, by `PackedSampler`."""

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsloth_pack.packing import PackedSampler
from unsloth_pack.training.attention_work import attention_share
from unsloth_pack.training.image_rows import COLUMN, ImageRowCollator
from unsloth_pack.training.vision_work import vision_work


def packed_sampler(
    rows: Any, arguments: TrainingArguments, model: Any, image_rows: ImageRowCollator | None = None
) -> PackedSampler | None:
    """What deals out these rows to the ranks; None if they are not packed, and have no `seq_lengths`.

    Args:
        model, image_rows: what trains, and what makes its batches, where rows may have images.
    """
    if "seq_lengths" not in rows.column_names:
        return None
    seq_lengths = rows.with_format("arrow")["seq_lengths"].to_pylist()
    work: dict[str, Any] = {}  # of one process the shares are all of it
    if arguments.world_size > 1:
        work["attention_weight"] = attention_share(model, seq_lengths)
        if image_rows is not None:
            work["vision_work"] = vision_work(rows, COLUMN, model, image_rows.make_images)
    return PackedSampler(
        seq_lengths,
        arguments.world_size,
        rows_per_rank=arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps,
        batch_size=arguments.per_device_train_batch_size,
        seed=arguments.seed,
        **work,
    )


class DealtInTurn(Sampler[int]):
    """All ranks' rows, in the order in which accelerate deals them out."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def __copy__(self) -> "DealtInTurn":
        return DealtInTurn(copy.copy(self.sampler))

    def __len__(self) -> int:
        return len(self.sampler) * self.sampler.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler.dealt_in_turn().tolist())

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


class TurnToEpoch(TrainerCallback):
    """Tells the sampler the epoch. accelerate does not, if several ranks skip batches of a resumed epoch."""

    def __init__(self, sampler: PackedSampler):
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))
