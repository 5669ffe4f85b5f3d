"""What is asked to train and is frozen, or left out, at once."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unsloth_pack.checkpoints.new_tokens import rows_to_train
from unsloth_pack.config.options import AdapterOptions, ImageOptions, TrainOptions
from unsloth_pack.errors import InputError, at_once
from unsloth_pack.lora.targets import NO_LAYERS, limit_to_text_model, list_expert_layers
from unsloth_pack.lora.trained_parts import (
    TrainedParts,
    VisionParts,
    build_pattern,
    list_aligner_modules,
    list_tower_layers,
    vision_targets,
)
from unsloth_pack.modules import compile_patterns
from unsloth_pack.run.from_adapter import adapted_by, adapted_by_options, modules_meant, saved_config
from unsloth_pack.training.optimizers import (
    LearningRates,
    check_rate_of_embeddings,
    check_rates,
    check_rates_by_name,
)


def check_frozen(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse `freeze_modules` where it freezes what other options train, and new tokens that do not train.

    A pattern of `train_modules` may hold frozen modules, if something else that it chooses trains.

    Args:
        model: the base model, with or without weights.
    """
    yield from _check_new_rows(model, adapter)
    if adapter.tuning != "full":
        yield from _check_targets(model, adapter)
    if not adapter.freeze_modules:
        return
    yield from _check_patterns(model, adapter)
    if adapter.tuning != "full":
        yield from _check_whole(model, adapter)
    yield from _check_rows(model, adapter)


def _check_new_rows(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse new tokens in full tuning whose embeddings are not among what trains."""
    if adapter.tuning != "full" or adapter.add_tokens is None or adapter.train_modules is None:
        return
    is_trained, weight = compile_patterns(adapter.train_modules), model.get_input_embeddings().weight
    paths = [path for path, one in model.named_parameters(remove_duplicate=False) if one is weight]
    if not any(map(is_trained, paths)):
        name = paths[0].split(".")[-2]
        yield InputError(
            f"add_tokens adds rows to {name}, and train_modules leaves {name} out, so that they would not "
            f"train; name {name} in train_modules too, or leave out train_modules",
            about=("train_modules", "add_tokens"),
        )


def _check_targets(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    """Refuse names of layers, and numbers, of which nothing is left for an adapter though some layers are."""
    is_frozen = compile_patterns(adapter.freeze_modules or ())
    targets, layers = adapter.target_modules, adapter.layers_to_transform
    if layers is None and not adapter.freeze_modules:
        return
    if all(map(is_frozen, adapted_by_options(model, targets, None, layers))):
        return
    asked: list[tuple[str, str | int, Any, Any]] = []
    if targets is not None and not isinstance(targets, str):
        asked += [("target_modules", name, [name], layers) for name in targets]
    asked += [("layers_to_transform", number, targets, [number]) for number in layers or ()]
    for option, value, names, numbers in asked:
        meant = adapted_by_options(model, names, None, numbers)
        other, why = "freeze_modules", "freeze_modules freezes all that it stands for"
        remedy = f"leave {value!r} out of {option}, or freeze less"
        if option == "target_modules" and not meant:
            other, why = "layers_to_transform", "it lies in no layer that layers_to_transform names"
            remedy = f"leave it out, or name all in one regular expression of whole paths in {option}"
        if all(map(is_frozen, meant)) and (meant or option == "target_modules"):
            yield InputError(f"{option} holds {value!r}, and {why}; {remedy}", about=(option, other))


def _check_patterns(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    is_frozen = compile_patterns(adapter.freeze_modules or ())
    named = [*model.named_parameters(remove_duplicate=False)]
    # A weight that is tied is one in full tuning; beside an adapter, a head gets a copy of its own
    shared = {id(one) for path, one in named if is_frozen(path)} if adapter.tuning == "full" else set()
    for pattern in adapter.train_modules or ():
        is_meant = compile_patterns([pattern])
        meant = [is_frozen(path) or id(one) in shared for path, one in named if is_meant(path)]
        if meant and all(meant):
            yield InputError(
                f"train_modules holds {pattern!r}, and freeze_modules freezes all that it stands for; leave "
                f"{pattern!r} out of train_modules, or freeze less",
                about=("train_modules", "freeze_modules"),
            )


def _check_whole(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    is_frozen = compile_patterns(adapter.freeze_modules or ())
    for name in adapter.modules_to_save or ():
        meant = modules_meant(model, [name])
        held = {path: [one for one, _ in model.get_submodule(path).named_parameters()] for path in meant}
        frozen = [path for path in sorted(meant) if any(is_frozen(f"{path}.{one}") for one in held[path])]
        named = [path for path in sorted(meant) if f".{path}".endswith(f".{name}")]
        own = [path for path in named if path in frozen]
        for path in (own or frozen)[:1]:
            remedy = f"leave {name} out of modules_to_save"
            if named and not own:  # PEFT reads the name as the end of others
                remedy = f"give whole paths in modules_to_save, such as {named[0]}"
            yield InputError(
                f"modules_to_save names {name}, by which {path} trains as a whole, and freeze_modules "
                f"freezes it; {remedy}, or freeze less",
                about=("modules_to_save", "freeze_modules"),
            )


def _check_rows(model: Any, adapter: AdapterOptions) -> Iterator[InputError]:
    is_frozen, is_full = compile_patterns(adapter.freeze_modules or ()), adapter.tuning == "full"
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    asked = {"add_tokens": [embedding] if is_full or head is None else [embedding, head]}
    asked |= {} if is_full else {"trainable_token_indices": [embedding]}
    for option, holders in asked.items():
        if getattr(adapter, option) is None:
            continue
        weights = [holder.weight for holder in holders]
        for path, one in model.named_parameters(remove_duplicate=False):
            if is_frozen(path) and any(one is weight for weight in weights):
                yield InputError(
                    f"{option} trains rows of {path.rpartition('.')[0]}, and freeze_modules freezes that; "
                    f"freeze less, or leave out {option}",
                    about=(option, "freeze_modules"),
                )
                break


# Compare learning rates by name with the names that will train, before the weights are loaded.

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
            partial(check_rates_by_name, rates, names),
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


# Choose the trained parts of a model of vision and language: tower, aligner, language model.

_FROZEN = {"tower": "freeze_vit", "aligner": "freeze_aligner", "decoder": "freeze_llm"}


def with_parts(model: Any, arguments: dict[str, Any], images: ImageOptions) -> dict[str, Any]:
    """Arguments of `get_peft_model` that put an adapter on the parts that are not frozen.

    Args:
        arguments: for the language model.

    Raises:
        InputError: the tower is to have an adapter beside all linear layers of a model with experts, or a
            module is to train whole in a part that an option freezes.
    """
    _refuse_frozen(model, arguments["modules_to_save"] or (), images)
    whole = [] if images.freeze_aligner else [*list_aligner_modules(model)]
    saved = [*dict.fromkeys([*(arguments["modules_to_save"] or ()), *whole])]
    targets = _targets(model, arguments["target_modules"], images)
    return arguments | {"target_modules": targets, "modules_to_save": saved or None}


def _refuse_frozen(model: Any, modules: Collection[str], images: ImageOptions) -> None:
    """Refuse modules that train whole, by the ends of their paths, in a part that does not train."""
    parts = VisionParts.locate(model)
    for path, _ in model.named_modules():
        name = next((name for name in modules if path == name or path.endswith(f".{name}")), None)
        option = _FROZEN[parts.owner(path)]
        if name is not None and option != "freeze_vit" and getattr(images, option):  # that is its default
            raise InputError(
                f"{option} is true, and modules_to_save names {name}, of what it freezes; leave out one of "
                "them",
                about=(option, "modules_to_save"),
            )


def _targets(model: Any, given: str | Collection[str] | None, images: ImageOptions) -> Any:
    if isinstance(given, str) and given != "all-linear":  # a pattern of whole paths, of any part
        return given
    if images.freeze_vit:
        return NO_LAYERS if images.freeze_llm else given
    if images.freeze_llm or given is None:
        trained = TrainedParts(vision_layers=True, language_layers=not images.freeze_llm, aligner=False)
        return vision_targets(model, trained)[0]
    of_experts = list_expert_layers(model)
    if of_experts and given == "all-linear":
        raise InputError(
            "freeze_vit is false and target_modules 'all-linear', which would mean routers of experts too; "
            "give --target_modules names",
            about=("freeze_vit", "target_modules"),
        )
    of_text = limit_to_text_model(model, given if isinstance(given, str) else [*given], {}, [])
    named = [path for path in of_experts if path.rpartition(".")[2] in given]
    return build_pattern([*list_tower_layers(model), *of_text, *named])


def freeze_parts(model: Any, images: ImageOptions, begun_with: str | None = None) -> None:
    """Freeze the parts that the options freeze in a model whose weights train already.

    Args:
        begun_with: the adapter that the run goes on with; each part that is not frozen has to train in it.

    Raises:
        InputError: a part that is to train does not, or nothing is left.
    """
    parts = VisionParts.locate(_base_of(model))
    trains = dict.fromkeys(_FROZEN, False)
    for path, parameter in model.named_parameters():
        part = parts.owner(path.removeprefix("base_model.model."))
        if getattr(images, _FROZEN[part]):
            parameter.requires_grad_(False)
        else:
            trains[part] = trains[part] or parameter.requires_grad
    for name, option in _FROZEN.items():
        if begun_with is not None and not getattr(images, option) and not trains[name]:
            raise InputError(
                f"{option} is false, and init_adapter {begun_with!r} has nothing of that part; give "
                f"--{option}, or --merge_init_adapter to train a new adapter on top of it",
                about=(option, "init_adapter"),
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the options freeze all that would train; freeze less")


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
