"""What a trainer does: when each update ends, and the tokens, places and loss of each batch."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Watched:
    """What is noted of a trainer from `follow` on.

    Args:
        ends: when each update was done, once the device was.
        tokens, places: of each batch, padding not counted and counted.
        shapes: of the tensors of the last batch, by name.
        losses: of each batch, on the device until somebody reads them.
    """

    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)

    def follow(self, trainer: Any) -> None:
        """Look at a trainer from now on. Batches may have several masks, as those of DPO."""
        import torch
        from transformers import TrainerCallback

        class Clock(TrainerCallback):
            def on_step_end(_, *args: Any, **kwargs: Any) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self.ends.append(time.perf_counter())

        trainer.add_callback(Clock())
        step = trainer.training_step

        def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(inputs, Mapping):  # GRPO makes its batch inside of the step
                masks = [mask for name, mask in inputs.items() if name.endswith("attention_mask")]
                whole = masks or [inputs["input_ids"]]
                self.places.append(sum(each.numel() for each in whole))
                self.tokens.append(sum(int(mask.sum()) for mask in masks) if masks else self.places[-1])
                self.shapes = {name: [*x.shape] for name, x in inputs.items() if hasattr(x, "shape")}
            loss = step(model, inputs, *args, **kwargs)
            self.losses.append(loss.detach().clone())  # read at the end, without a wait now
            return loss

        trainer.training_step = counted

    def seconds(self, warm: int) -> list[float]:
        """Of all updates but the first `warm`."""
        return [after - before for before, after in pairwise(self.ends)][warm - 1 :]
