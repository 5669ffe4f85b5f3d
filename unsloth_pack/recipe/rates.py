"""Learning rates by name: held against the names that will train, before the weights are loaded."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unsloth_pack.checkpoints.new_tokens import rows_to_train
from unsloth_pack.config.options import AdapterOptions, TrainOptions
from unsloth_pack.errors import at_once
from unsloth_pack.recipe.second_stage import adapted_by, adapted_by_options, modules_meant, saved_config
from unsloth_pack.training.optimizers import (
    LearningRates,
    check_patterns,
    check_rate_of_embeddings,
    check_rates,
)

# How PEFT's names go on behind the path of an adapted layer. An ending that no layer has is told later.
_OF_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def rates_of(options: TrainOptions) -> LearningRates:
    """The learning rates of groups of weights."""
    training, images = options.training, options.images
    return LearningRates(
        training.lora_plus_ratio,
        training.embedding_learning_rate,
        dict(training.learning_rates or {}),
        images.vit_lr,
        images.aligner_lr,
    )


def check_names_of_rates(options: TrainOptions, model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse rates of what will not train, all at once.

    Of a model of vision and language only the data tells which parts train; it is looked at later.

    Args:
        model: without weights. In full tuning its parameters say whether they train.
        arguments: of the adapter, see `adapter_arguments`; none in full tuning.

    Raises:
        InputError: names the pattern or the option.
    """
    adapter, rates = options.adapter, replace(rates_of(options), of_tower=None, of_aligner=None)
    if not rates or hasattr(model.config, "vision_config"):
        return
    if adapter.tuning == "full":
        check_rates(model, rates)
        return
    goes_on = adapter.init_adapter is not None and not adapter.merge_init_adapter
    trained = _of_saved(model, adapter) if goes_on else _of_new(model, adapter, arguments)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    of_ends = tuple(f"{path}." for path, module in model.named_modules() if module in ends)
    names = [*trained.names(model)]
    at_once(
        [
            partial(check_patterns, [*rates.by_name], names),
            partial(check_rate_of_embeddings, rates, [name for name in names if name.startswith(of_ends)]),
        ]
    )


@dataclass(frozen=True)
class _Trained:
    """What trains beside the frozen weights of a model.

    Args:
        adapted: the paths of layers and stacks with an adapter.
        whole: the ends of the paths of modules that train as a whole.
        of_tokens: the ends of the paths of layers of which some rows train alone.
        bias: as in PEFT's `LoraConfig`.
    """

    adapted: Collection[str]
    whole: Collection[str]
    of_tokens: Collection[str]
    bias: str

    def names(self, model: Any) -> Iterator[str]:
        """Those of the parameters, as PEFT makes them."""
        for path in sorted(self.adapted):
            yield from (f"{path}.{end}.default.weight" for end in _OF_LORA)
        for path in sorted(modules_meant(model, self.whole)):
            inside = model.get_submodule(path).named_parameters()
            yield from (f"{path}.modules_to_save.default.{name}" for name, _ in inside)
        for path in modules_meant(model, self.of_tokens):
            yield f"{path}.token_adapter.trainable_tokens_delta.default"
        names = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
        for path in (name.removesuffix(".bias") for name in names):
            if path in self.adapted and self.bias != "none":
                yield f"{path}.base_layer.bias"
            elif self.bias == "all":
                yield f"{path}.bias"


def _of_new(model: Any, adapter: AdapterOptions, arguments: Mapping[str, Any]) -> _Trained:
    excluded, layers = arguments.get("exclude_modules"), arguments.get("layers_to_transform")
    adapted = adapted_by_options(model, adapter.target_modules, excluded, layers)
    tokens = arguments.get("trainable_token_indices")
    if adapter.add_tokens is not None:
        tokens = rows_to_train(model, tokens or [])
    return _Trained(adapted, arguments["modules_to_save"] or (), _holding(model, tokens), adapter.bias)


def _of_saved(model: Any, adapter: AdapterOptions) -> _Trained:
    saved = saved_config(str(adapter.init_adapter))
    tokens = _holding(model, saved.get("trainable_token_indices"))
    whole = saved.get("modules_to_save") or ()
    return _Trained(adapted_by(model, saved), whole, tokens, saved.get("bias", "none"))


def _holding(model: Any, tokens: Any) -> Collection[str]:
    """The ends of the paths of layers whose rows PEFT's `trainable_token_indices` names."""
    if tokens is None or isinstance(tokens, Mapping):
        return [*(tokens or ())]
    embedding = model.get_input_embeddings()
    return [path for path, module in model.named_modules() if module is embedding]
