"""The labels of a call of a causal language model.

Shapes: B rows of T tokens, V outputs of the head.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.forwards.call import Call
from unsloth_pack.losses.fusable import has_own_loss, outputs_of_head
from unsloth_pack.row.labels import ContradictingLabels, CountedLabels, checked_labels, watch_gradient
from unsloth_pack.row.packed_row import IGNORE_INDEX, PackedRow


class StepLabels:
    """The labels of a call: checked, and masked where no loss may see them. Made before the decoder runs.

    Args:
        model: a `FastCausalLM`.
        call: what belongs to the loss alone is taken out of its `rest`.
        labels: `[B, T]`, or None.
        asked_by_trl: whether one of TRL's trainers asks, which counts labels without telling the model.
    """

    def __init__(self, model: Any, call: Call, labels: Tensor | None, asked_by_trl: bool):
        self.ignore_index: int = call.rest.pop("ignore_index", IGNORE_INDEX)
        self.num_items = call.rest.pop("num_items_in_batch", None)
        self._model, self._row = model, call.row
        self._late: list[CountedLabels | ContradictingLabels] = []
        shape = None if call.row is None else call.row.shape
        n_outputs = None if has_own_loss(model) else outputs_of_head(model)

        def checked(name: str, given: Tensor | None) -> Tensor | None:
            return None if given is None else checked_labels(name, given, shape, n_outputs, self.ignore_index)

        self.labels = checked("labels", labels)
        self.shift_labels = checked("shift_labels", call.rest.pop("shift_labels", None))
        if call.row is not None:
            self._mask(call.row, asked_by_trl)

    def shifted(self) -> Tensor:
        """`[B, T]`: of every token, the label that it predicts."""
        if self.shift_labels is not None:
            return self.shift_labels
        if self.labels is None:
            raise InputError("fused_lm_head=True scores labels, and there are none; give labels")
        return F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]

    def as_given(self) -> dict[str, Any]:
        """What another forward gets for its loss."""
        given = {
            "labels": self.labels,
            "shift_labels": self.shift_labels,
            "num_items_in_batch": self.num_items,
            "ignore_index": None if self.ignore_index == IGNORE_INDEX else self.ignore_index,
        }
        return {name: value for name, value in given.items() if value is not None}

    def watch(self, logits: Tensor) -> None:
        """Look at the logits' gradient: the caller may compute a loss from them, with labels of its own."""
        if self._row is None or not (logits.requires_grad and self._model.training):
            return
        is_counted = self.num_items is not None and self.labels is None
        if logits.shape[:-1] == self._row.shape and (is_counted or self._is_first_look()):
            watch_gradient(self._row, logits, is_counted)

    def _is_first_look(self) -> bool:
        """Labels that nobody has counted are looked at in one step: on a device the look waits for it."""
        is_first = not self._model.boundary_labels_sought
        self._model.boundary_labels_sought = True
        return is_first

    def refuse(self) -> None:
        """After the decoder: refuse what could be known only now.

        Raises:
            InputError: labels of document starts that were counted; labels that contradict each other.
        """
        for check in self._late:
            check.refuse()

    def _mask(self, row: PackedRow, asked_by_trl: bool) -> None:
        if self.num_items is not None:
            if self.shift_labels is not None:  # trainers count these rather than `labels`
                counted = CountedLabels(
                    row, self.shift_labels, is_shifted=True, ignore_index=self.ignore_index
                )
                self._look(counted)
            elif self.labels is not None:
                self._look(CountedLabels(row, self.labels, ignore_index=self.ignore_index))
        elif asked_by_trl and self.labels is not None and self._model.training and self._is_first_look():
            CountedLabels(row, self.labels).warn()
        if self.labels is not None:
            self.labels = row.mask_labels(self.labels, self.ignore_index)
        if self.shift_labels is not None:
            self.shift_labels = row.mask_shifted_labels(self.shift_labels, self.ignore_index)
        if self.labels is not None and self.shift_labels is not None:
            self._look(ContradictingLabels(self.labels, self.shift_labels, self.ignore_index))

    def _look(self, check: CountedLabels | ContradictingLabels) -> None:
        """On the host at once, and on a device when the decoder has run."""
        if check.is_on_host:
            check.refuse()
        else:
            self._late.append(check)
