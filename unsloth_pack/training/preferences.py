"""Train by a `PreferenceLoss`: batches of answers to prompts, and what is logged.

A document is a prompt with its answers, one after another; `parts` says to which each token belongs. In a
batch the answers of a pair continue their prompt, which is computed once, where the model can do so:

    document   p p p c c r r r        row   p p p c c r r r     or   p p p c c p p p r r r
    parts      0 0 0 1 1 2 2 2        parent  -1, 0, 0

Rows of packs may hold what the reference says of their answers, see `packing/model_columns.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsloth_pack.data.rows import CHOSEN, MISMATCHED, PARTS, PROMPT, REJECTED
from unsloth_pack.lora.base_model import FrozenCopy, base_model, name_trained_in_place
from unsloth_pack.losses.preferences import ANSWERS, Answers, KtoLoss, OrpoLoss, PreferenceLoss
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow
from unsloth_pack.packing.model_columns import REFERENCE
from unsloth_pack.training.document_losses import Batch, DocumentLosses
from unsloth_pack.training.objective import Objective, causal_lm

_CPU = torch.device("cpu")
MISMATCHED_BATCH = "mismatched"  # of a batch: a batch of prompts with answers to others
_REPEATED = -1  # the part of a prompt that the row has already
Document = tuple[np.ndarray, np.ndarray]  # ids and parts


def make_reference(model: Any, copies: bool = False) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which a patched model that is to train is as it is now.

    It is the model without its adapter, or with a frozen copy of what trains: if it `copies`, since the
    adapter is not new, and where weights train that are not an adapter's.
    """
    base = causal_lm(model)
    if copies or name_trained_in_place(model) is not None:
        return FrozenCopy(base).in_place
    return partial(base_model, base)


class PreferenceCollator:
    """Join rows of documents, packed or not, into one packed row.

    Args:
        shares: both answers of a pair continue one prompt; else each has a prompt of its own.
        learns_prompts: prompts carry labels too, once.
    """

    def __init__(self, shares: bool, learns_prompts: bool = False):
        self._shares, self._learns_prompts = shares, learns_prompts

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        documents = [document for example in examples for document in _documents(example)]
        batch = self._join(documents, (CHOSEN, REJECTED))
        if any((parts == MISMATCHED).any() for _, parts in documents):
            in_place = np.array([PROMPT, REJECTED, REJECTED, CHOSEN])  # of the answers to these prompts
            others = self._join([(ids, in_place[parts]) for ids, parts in documents], (CHOSEN,))
            batch[MISMATCHED_BATCH] = others
        if REFERENCE in examples[0]:
            stored_D4 = np.concatenate([example[REFERENCE] for example in examples]).reshape(-1, 4)
            batch[ANSWERS].reference = stored_D4[:, [PROMPT, CHOSEN, REJECTED]]
            if MISMATCHED_BATCH in batch:
                others[ANSWERS].reference = stored_D4[:, [PROMPT, MISMATCHED, PROMPT]]
        return batch

    def _join(self, documents: Sequence[Document], answers: Sequence[int]) -> Batch:
        segments: list[tuple[int, np.ndarray, np.ndarray, int]] = []  # document, ids, parts, parent
        for number, (ids, parts) in enumerate(documents):
            is_prompt = parts == PROMPT
            own = [parts == part for part in answers if (parts == part).any()]
            if self._shares and len(own) > 1 and is_prompt.any():
                prefix = len(segments)
                segments.append((number, ids[is_prompt], parts[is_prompt], -1))
                segments += [(number, ids[answer], parts[answer], prefix) for answer in own]
                continue
            for answer in own:
                whole = is_prompt | answer
                segments.append((number, ids[whole], parts[whole], -1))
                parts = np.where(is_prompt, _REPEATED, parts)
        numbers, all_ids, all_parts, parent = zip(*segments, strict=True)
        lengths, is_root = tuple(map(len, all_ids)), np.array(parent) < 0
        row = PackedRow.of_lengths(lengths, _CPU, None if is_root.all() else parent)
        ids, parts = np.concatenate(all_ids), np.concatenate(all_parts)
        is_labelled = parts >= (PROMPT if self._learns_prompts else CHOSEN)
        is_labelled[row.starts[is_root]] = False
        of_documents = 3 * np.repeat(numbers, lengths) + np.maximum(parts, PROMPT)
        n_labels = np.bincount(of_documents[is_labelled], minlength=3 * len(documents))
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "labels": torch.from_numpy(np.where(is_labelled, ids, IGNORE_INDEX))[None],
            "packed_row": row,
            ANSWERS: Answers(np.append(of_documents[1:], 0), n_labels.reshape(-1, 3)),
        }


def _documents(example: Mapping[str, Any]) -> Iterator[Document]:
    ids, parts = (np.asarray(example[name], dtype=np.int64) for name in ("input_ids", PARTS))
    ends = np.cumsum(example.get("seq_lengths", [len(ids)]))[:-1]
    return zip(np.split(ids, ends), np.split(parts, ends), strict=True)


class Preferences(Objective):
    """The objective of a `PreferenceLoss`: means over documents, under TRL's names."""

    def __init__(self, trainer: Any, loss: PreferenceLoss):
        super().__init__(trainer, loss)
        decoder = self._model.fast_decoder
        trainer.args.remove_unused_columns = False  # TRL does not know the column of parts
        # NEFTune's noise depends on the length of a document
        shares = decoder.why_no_branches is None and not trainer.args.neftune_noise_alpha
        trainer.data_collator = PreferenceCollator(shares, learns_prompts=isinstance(loss, OrpoLoss))

    def list_frozen_passes(self, batches: Sequence[Batch]) -> list[tuple[Any, Batch]]:
        loss: Any = self.loss
        mismatched = [batch[MISMATCHED_BATCH] for batch in batches if MISMATCHED_BATCH in batch]
        of_reference = [] if loss.reference is None else [*batches, *mismatched]
        return [(self._model, batch) for batch in (*of_reference, *mismatched)]

    def begin_update(self, batches: Sequence[Batch], n_labels: Tensor | int | None) -> Tensor | int | None:
        """Count the documents; estimate KTO's KL term over all of them, whichever share a micro-batch."""
        answers = [batch[ANSWERS].n_labels for batch in batches]
        counts = torch.tensor([sum(map(len, answers)), sum(each[:, :2].sum() for each in answers)])
        n_documents: Tensor
        n_documents, n_tokens = self._reduce(counts.double())
        if isinstance(self.loss, OrpoLoss):
            self.loss.tokens_a_document = n_tokens / n_documents
        if isinstance(self.loss, KtoLoss):
            self._trainer.model.train()
            ratios = self._measure_ratios(
                batch[MISMATCHED_BATCH] for batch in batches if MISMATCHED_BATCH in batch
            )
            self.loss.set_kl(*self._reduce(ratios))
        return n_documents

    def compute_loss(
        self, model: nn.Module, inputs: Batch, num_items: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        inputs = dict(inputs)
        mismatched = inputs.pop(MISMATCHED_BATCH, None)
        if not model.training:  # each batch of an evaluation is by itself
            if isinstance(self.loss, OrpoLoss):
                self.loss.tokens_a_document = None
            if isinstance(self.loss, KtoLoss):
                self.loss.set_kl(*self._measure_ratios([mismatched] if mismatched else []))
        return super().compute_loss(model, inputs, num_items)

    def _reduce(self, sums: Tensor) -> Tensor:
        """Sum numbers over all processes, without waiting for the device."""
        trainer = self._trainer
        if trainer.args.device.type == "cuda" and not sums.is_cuda:
            sums = sums.pin_memory().to(trainer.args.device, non_blocking=True)
        summed: Tensor = trainer.accelerator.reduce(sums) if trainer.args.world_size > 1 else sums
        return summed

    @torch.no_grad()
    def _measure_ratios(self, batches: Iterable[Batch]) -> Tensor:
        """Sum the log-ratios of answers to other prompts, and count the answers: `[2]` float64."""
        trainer, loss = self._trainer, self.loss
        total = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        for batch in batches:
            with trainer.compute_loss_context_manager():
                self.run(trainer.model, trainer._prepare_inputs(batch))
            total += torch.stack([loss.values["ratio"].sum(), loss.values["n_chosen"].sum()])
        return total

    def losses_of_evaluation(self) -> DocumentLosses:
        return DocumentLosses(
            lambda *_: self.loss.values,
            lambda values: self.loss.means({name: float(x.sum()) for name, x in values.items()}),
        )
