"""Gradients that are applied as they come: an update is over when its backward pass is.

A backward pass makes the gradients from the last layer to the first. Each is applied and freed at once, so
that no more than those of one layer are held, where an update after the backward pass needs all together.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from unsloth_pack.errors import InputError, at_once
from unsloth_pack.lora.vision_targets import VisionParts
from unsloth_pack.modules import check_matches, compile_patterns
from unsloth_pack.training.cpu_master_weights import CpuMasterWeights, leave_out, step_one


class InBackward:
    """Applies and frees every gradient in the backward pass that makes it.

    The optimizer stays an ordinary one: its state and its checkpoints are those of updates after the backward
    pass, and its own `step` finds nothing left to do. A parameter whose gradient, or one before it in the
    same backward pass, is not finite keeps its value, and after a loss that is not finite all of them do.

    Args:
        optimizer: of all that trains, not wrapped.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._hooks: list[Any] = []
        self._norms: list[Tensor] = []
        self._applied: set[Tensor] = set()
        self._is_bad = torch.zeros((), dtype=torch.bool)
        self._is_new = True

    def begin(self, loss: Tensor) -> None:
        """The next backward pass is of this loss, and makes an update."""
        self.end()
        if self._is_new:
            self._optimizer.step()  # without gradients: bitsandbytes sets itself up for all weights at once
            self._is_new = False
        self._norms.clear()
        self._applied.clear()
        self._is_bad = ~torch.isfinite(loss.detach())
        for group in self._optimizer.param_groups:
            apply = self._applied_in(group)
            self._hooks += [p.register_post_accumulate_grad_hook(apply) for p in group["params"]]

    def end(self) -> None:
        """The backward pass is over, or was broken off: gradients stay where they are made from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def norm(self) -> Tensor:
        """The norm of all gradients of the last backward pass, in float32."""
        return torch.linalg.vector_norm(torch.stack(self._norms)) if self._norms else torch.zeros(())

    def _applied_in(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        def apply(parameter: Tensor) -> None:
            if parameter in self._applied:
                raise InputError(
                    "a weight got its gradient in parts, and the first part has been applied already; leave "
                    "out --optimizer_in_backward, or --use_gradient_checkpointing"
                )
            self._applied.add(parameter)
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            self._norms.append(norm)
            self._is_bad = self._is_bad | ~torch.isfinite(norm)
            if isinstance(self._optimizer, CpuMasterWeights):
                return self._optimizer.send(parameter, group, self._is_bad)
            leave_out(self._optimizer, [parameter], self._is_bad)
            step_one(self._optimizer, parameter, group)
            parameter.grad = None

        return apply


# Learning rates by group: of LoRA's second matrices, of the embeddings, of modules by their names.

Groups = list[dict[str, Any]]  # as an optimizer takes them
_OPTIONS = {"tower": "vit_lr", "aligner": "aligner_lr"}  # that set the rates of parts


@dataclass(frozen=True)
class LearningRates:
    """What learns at a rate of its own; the most particular one counts.

    Args:
        lora_plus_ratio: LoRA+ (Hayou et al. 2024): by how much faster LoRA's B learns than A.
        of_embeddings: what trains of the embeddings and the head.
        by_name: by regular expression over names of modules; the first that matches counts.
        of_tower, of_aligner: of a model of vision and language, what trains of these parts.
    """

    lora_plus_ratio: float | None = None
    of_embeddings: float | None = None
    by_name: Mapping[str, float] = field(default_factory=dict)
    of_tower: float | None = None
    of_aligner: float | None = None

    def __bool__(self) -> bool:
        return bool(self.lora_plus_ratio or self.of_embeddings or self.by_name or self.of_parts)

    @property
    def of_parts(self) -> dict[str, float]:
        """The rates of the parts of a model of vision and language, by `VisionParts.kind`."""
        given = {"tower": self.of_tower, "aligner": self.of_aligner}
        return {part: rate for part, rate in given.items() if rate is not None}


def check_rates(model: nn.Module, rates: LearningRates) -> None:
    """Refuse rates of what does not train, all at once.

    Raises:
        InputError: names the regular expression or the option.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    embeddings = _embeddings(model, trained) if rates.of_embeddings else set()
    at_once(
        [
            partial(check_patterns, [*rates.by_name], trained),
            partial(_check_lora_plus, rates, trained),
            partial(_check_parts, model, rates, trained),
            partial(check_rate_of_embeddings, rates, embeddings),
        ]
    )


def check_patterns(patterns: Sequence[str], names: Iterable[str]) -> Iterator[InputError]:
    """Refuse a pattern that matches nothing, or that earlier ones leave nothing for.

    Args:
        patterns: of learning rates, in their order.
        names: of the parameters that train.
    """
    known = [*names]
    check_matches("learning_rates", patterns, known, "trains", "correct it, or leave it out")
    for number, pattern in enumerate(patterns):
        meant = [name for name in known if compile_patterns([pattern])(name)]
        earlier = [one for one in patterns[:number] if any(map(compile_patterns([one]), meant))]
        if not meant or not all(map(compile_patterns(earlier), meant)):
            continue
        alone = [one for one in earlier if all(map(compile_patterns([one]), meant))]
        before = " and ".join(map(repr, alone[:1] or earlier))
        yield InputError(
            f"learning_rates holds {pattern!r} after {before}, by which all that it stands for has a rate; "
            f"put {pattern!r} before, or leave it out",
            about=f"learning_rates.{pattern}",
        )


def _check_lora_plus(rates: LearningRates, trained: Sequence[str]) -> Iterator[InputError]:
    if rates.lora_plus_ratio and not any(".lora_B." in name for name in trained):
        yield InputError(
            f"lora_plus_ratio is {rates.lora_plus_ratio:g}, and the model has no LoRA that trains; leave it "
            "out",
            about="lora_plus_ratio",
        )


def _check_parts(model: nn.Module, rates: LearningRates, trained: Sequence[str]) -> Iterator[InputError]:
    part_of = _part_of(model, rates)
    for part, rate in rates.of_parts.items():
        if not any(part_of(name) == part for name in trained):
            yield InputError(
                f"the learning rate of the {part} is {rate:g}, and nothing of it trains; leave it out",
                about=_OPTIONS[part],
            )


def check_rate_of_embeddings(rates: LearningRates, names: Collection[str]) -> Iterator[InputError]:
    """Refuse a rate of embeddings and head where neither trains, or all of them have another by their names.

    Args:
        names: of the parameters in them that train.
    """
    if rates.of_embeddings and names and all(map(compile_patterns(rates.by_name), names)):
        yield InputError(
            f"embedding_learning_rate is {rates.of_embeddings:g}, and learning_rates holds a rate for all "
            "that trains of embeddings and head; leave out one of them",
            about=("embedding_learning_rate", "learning_rates"),
        )
    if rates.of_embeddings and not names:
        yield InputError(
            f"embedding_learning_rate is {rates.of_embeddings:g}, and neither embeddings nor head train; "
            "leave it out, or have them train by --trainable_token_indices, --modules_to_save or "
            "--target_modules",
            about="embedding_learning_rate",
        )


def grouped(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], rates: LearningRates, learning_rate: float
) -> Groups:
    """Groups of parameters, divided further by their learning rates.

    Args:
        groups: as the trainer makes them, with weight decay or without.
        learning_rate: of all else.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings = _embeddings(model, names.values())
    plus = _rates_of_lora_plus(model, rates, learning_rate)
    by_name = [(compile_patterns([pattern]), rate) for pattern, rate in rates.by_name.items()]
    part_of = _part_of(model, rates)

    def rate_of(parameter: nn.Parameter) -> float:
        name = names[id(parameter)]
        of_name = next((rate for is_meant, rate in by_name if is_meant(name)), None)
        if of_name is not None:
            return of_name
        if rates.of_embeddings and name in embeddings:
            return rates.of_embeddings
        if (part := part_of(name)) in rates.of_parts:
            return rates.of_parts[part]
        return plus.get(id(parameter), learning_rate)

    found: Groups = []
    for group in groups:
        by_rate: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rate_of(parameter), []).append(parameter)
        found += [{**group, "params": params, "lr": rate} for rate, params in by_rate.items()]
    return found


def _rates_of_lora_plus(model: Any, rates: LearningRates, learning_rate: float) -> dict[int, float]:
    """The rate of each LoRA parameter as PEFT's LoRA+ sets it, by the parameter's id."""
    if not rates.lora_plus_ratio:
        return {}
    made = create_loraplus_optimizer(
        model,
        torch.optim.SGD,
        lr=learning_rate,
        loraplus_lr_ratio=rates.lora_plus_ratio,
        loraplus_lr_embedding=learning_rate,
    )
    # It speeds up every vector as well, such as a norm that trains; LoRA+ is about B
    is_of_lora = {id(parameter) for name, parameter in model.named_parameters() if ".lora_" in name}
    return {
        id(parameter): group["lr"]
        for group in made.param_groups
        for parameter in group["params"]
        if id(parameter) in is_of_lora
    }


def _part_of(model: Any, rates: LearningRates) -> Callable[[str], str]:
    """The part of a model of vision and language that a parameter is in; "" where no part has a rate."""
    if not rates.of_parts:
        return lambda name: ""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = VisionParts.locate(base)
    inside = next(path for path, module in model.named_modules() if module is base)
    return lambda name: parts.kind(name.removeprefix(f"{inside}."))


def _embeddings(model: Any, names: Any) -> set[str]:
    """Those of the names of parameters that lie in the embedding or the head, or in what wraps them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    held = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    inside = {name for name, parameter in model.named_parameters() if id(parameter) in held}
    return inside.intersection(names)
