"""Refuse options before anything is loaded or written: all mistakes at once, in two phases.

`validate` takes no time, and imports no torch. `validate_model` looks at the machine and the model.
"""

import os
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from unsloth_pack.checkpoints.names import MODEL_CONFIG, check_model_there, is_adapter
from unsloth_pack.checkpoints.new_tokens import read_new_tokens
from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.config.options import (
    AdapterOptions,
    ImageOptions,
    ModelOptions,
    OutputOptions,
    TrainingOptions,
    names_in,
)
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError, errors_of, raise_together, require_whole, written
from unsloth_pack.run.contradictions import contradictions
from unsloth_pack.run.folder import check_folders
from unsloth_pack.run.from_adapter import init_adapter_mistakes, saved_config
from unsloth_pack.run.hub import check_hub, check_repository
from unsloth_pack.run.machine import device_type
from unsloth_pack.run.optimizer import ROUNDING, check_schedule, check_settings, names_in_library
from unsloth_pack.run.resolve import evaluation_sets, paths_of, training_sets
from unsloth_pack.run.sharding import check_sharding, check_sharding_here

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_TRACKERS = ("integrations/integration_utils", "INTEGRATION_TO_CALLBACK")
_PACKAGES_OF_TRACKERS = {  # of those that have another name, or none
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "kubeflow": ("transformers",),
    "tensorboard": ("tensorboard", "tensorboardX"),
}


def validate(options: TrainOptions) -> None:
    """Refuse all that needs no torch, whose import takes seconds.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    output = options.output
    raise_together(
        _mistakes_anywhere(options),
        _wrong_names(options, tries=False),
        check_sharding_here(options.training),
        _wrong_folders(options),
        errors_of(check_hub, output.push_to_hub) if output.push_to_hub is not None else (),
        _check_tracker_is_installed(output),
    )


def check_output(options: TrainOptions) -> None:
    """Refuse folders that cannot be written to, or hold files that the run would replace.

    Raises:
        InputError: names the option, the folder and what it holds.
    """
    raise_together(_wrong_folders(options))


def _wrong_folders(options: TrainOptions) -> Iterator[InputError]:
    sources = [*paths_of(options.data.dataset), *paths_of(options.data.eval_dataset)]
    return check_folders(options.output, sources, options.adapter.merge_init_adapter)


def validate_model(options: TrainOptions) -> None:
    """Refuse what cannot be on this machine or with this model, and load no weights or data.

    Args:
        options: `validate` has nothing to refuse.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    raise_together(
        _wrong_names(options),
        _check_tracker_is_configured(options.output),
        errors_of(_check_loading, options.model, options.adapter),
        _check_dtype(options.model, options.adapter, options.training),
        _check_model(options),
    )


def validate_file(options: TrainOptions) -> None:
    """Refuse what cannot be on any machine, nor with a model in a folder.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    name = options.model.model_name
    of_model: Iterator[InputError] = iter(())
    if name in BUNDLED_MODELS or os.path.isfile(os.path.join(name, MODEL_CONFIG)):
        of_model = _check_fits(options, str(BUNDLED_MODELS.get(name, name)))
    raise_together(_mistakes_anywhere(options), _wrong_names(options), of_model)


def check_sure(options: TrainOptions, wrong: Collection[str]) -> None:
    """Refuse contradictions and unknown names that are sure although other options are wrong.

    Args:
        options: without those that are wrong.
        wrong: names of these, and of options that misspelt names may mean.

    Raises:
        InputError: names the options and the remedy.
    """
    given = options.given.keys()
    doubtful = [*wrong]
    if "lr_scheduler_type" not in given:
        doubtful.append("lr_scheduler_type")  # the demo has another default

    def are_given(error: InputError) -> bool:
        """A contradiction with an option that is not given may be one with a misspelt option."""
        names = names_in(str(error).partition("; ")[0])
        return len(names) > 1 and {*names} <= given

    contradicting = (error for error in contradictions(options) if are_given(error))
    raise_together(_wrong_names(options, doubtful), contradicting)


def _mistakes_anywhere(options: TrainOptions) -> Iterator[InputError]:
    """Contradictions, and paths at which nothing lies. Names on the hub are not looked up."""
    data, name, repository = options.data, options.model.model_name, options.output.push_to_hub
    yield from contradictions(options)
    yield from init_adapter_mistakes(options.adapter, name, options.given)
    yield from errors_of(raise_together, check_sharding(options.training))
    for each in training_sets(data):
        yield from errors_of(each.check_there, data.streaming)
    for each in evaluation_sets(data):
        yield from errors_of(each.check_there)
    yield from errors_of(check_model_there, name)
    if is_adapter(name):
        yield InputError(
            f"model_name {name!r} is an adapter, and a run makes its own; give --init_adapter {name!r} to "
            "begin with it, or merge it first with `unsloth-pack merge`"
        )
    if options.adapter.add_tokens is not None:
        yield from errors_of(read_new_tokens, options.adapter.add_tokens)
    if repository is not None:
        yield from errors_of(check_repository, repository)


def _wrong_names(
    options: TrainOptions, doubtful: Collection[str] = (), *, tries: bool = True
) -> Iterator[InputError]:
    """Refuse an optimizer, a schedule or a tracker that is unknown, and settings that it does not take.

    Args:
        doubtful: options that are wrong, so that what goes with one of them cannot be judged.
        tries: make the schedule, for which torch is imported.
    """

    def is_judged(*names: str) -> bool:
        return bool({*names} & options.given.keys()) and not {*names} & {*doubtful}

    knows_rate, report_to = "learning_rate" not in doubtful, options.output.report_to
    if is_judged("lr_scheduler_type", "lr_scheduler_kwargs"):
        yield from check_schedule(options.training, knows_rate=knows_rate, tries=tries)
    if is_judged("optim", "optim_args"):
        yield from check_settings(options.training)
    known = ("none", "all", *names_in_library(*_TRACKERS))
    if is_judged("report_to") and report_to not in known:
        yield InputError(f"report_to is {report_to!r}; choose one of {', '.join(known)}")


def _check_tracker_is_installed(output: OutputOptions) -> Iterator[InputError]:
    name = output.report_to
    packages = _PACKAGES_OF_TRACKERS.get(name, (name,))
    if name in names_in_library(*_TRACKERS) and not any(map(find_spec, packages)):
        yield _tracker_missing(name)


def _check_tracker_is_configured(output: OutputOptions) -> Iterator[InputError]:
    """Refuse a tracker that transformers finds no use for: some are installed, and not configured."""
    if output.report_to not in ("none", "all"):
        from transformers.integrations import get_available_reporting_integrations

        if output.report_to not in get_available_reporting_integrations():
            yield _tracker_missing(output.report_to)


def _tracker_missing(name: str) -> InputError:
    return InputError(f"report_to is {name!r}, which is not installed; pip install {name}, or use none")


def _check_loading(model: ModelOptions, adapter: AdapterOptions) -> None:
    from unsloth_pack.checkpoints.loading import check_loading, check_loftq

    check_loading(model.max_seq_length, model.load_in_4bit, model.load_in_8bit, model.load_in_fp8)
    if adapter.loftq_config is not None:
        check_loftq(adapter.loftq_config)


def _check_dtype(
    model: ModelOptions, adapter: AdapterOptions, training: TrainingOptions
) -> Iterator[InputError]:
    """Refuse stochastic rounding and float32 masters where the type of the weights has no use for them."""
    from unsloth_pack.checkpoints.loading import weight_dtype

    is_full, rounds = adapter.tuning == "full", (training.optim_args or {}).get(ROUNDING)
    dtype = str(weight_dtype(model.dtype, is_full)).removeprefix("torch.")
    if str(rounds).lower() == "true" and not (is_full and dtype == "bfloat16"):
        trains = f"dtype is {dtype}" if is_full else "an adapter trains in float32"
        yield InputError(
            f"optim_args has {ROUNDING}, which rounds weights in bfloat16, and {trains}; give --tuning full "
            "--dtype bfloat16, or leave it out"
        )
    if training.masters_on_host and dtype == "float32":
        yield InputError(
            "masters_on_host is set and dtype is float32, in which weights need no masters; give --dtype "
            "bfloat16, or leave it out"
        )


def _check_model(options: TrainOptions) -> Iterator[InputError]:
    """Refuse a model that is not there or does not fit the options, and attention that cannot run it."""
    from unsloth_pack.checkpoints.loading import find_model, load_config, weight_dtype
    from unsloth_pack.models import arch_spec_for

    model, adapter = options.model, options.adapter
    if adapter.init_adapter is not None:
        saved_config(adapter.init_adapter)  # without which nobody knows the model
    base, _ = find_model(model.model_name)
    config = load_config(base).get_text_config()
    dtype = weight_dtype(model.dtype, adapter.tuning == "full")
    yield from _check_fits(options, base)
    if unsupported := errors_of(arch_spec_for, config.model_type):
        yield InputError(f"{model.model_name}: {unsupported[0]}")
    else:
        yield from errors_of(check_backend, model.attn_backend, config, dtype, device_type())


def _check_fits(options: TrainOptions, source: str) -> Iterator[InputError]:
    """Refuse modules, rows and a rank that a model does not have, and options of images where it takes none.

    Args:
        source: folder or name of the base model.
    """
    from unsloth_pack.checkpoints.loading import check_positions, load_config
    from unsloth_pack.run.trained import check_names_of_modules

    model, adapter = options.model, options.adapter
    whole = load_config(source)
    config = whole.get_text_config()
    yield from errors_of(check_positions, model.max_seq_length, model.model_name, config)
    if adapter.tuning != "full":
        yield from errors_of(require_whole, "r", adapter.r, 1, config.hidden_size)
    if not hasattr(whole, "vision_config"):
        yield from image_options_left_out(options.images, f"{model.model_name} takes no images")
    yield from check_names_of_modules(adapter, model, source)


def image_options_left_out(images: ImageOptions, why: str) -> Iterator[InputError]:
    """Refuse options of images that differ from their defaults where a run has none.

    Args:
        why: it has none.
    """
    defaults = flat(ImageOptions())
    for name, value in images:
        if value != defaults[name]:
            yield InputError(f"{name} is {written(value)}, and {why}; leave out --{name}")


def check_backend(
    attn_backend: str, config: "PretrainedConfig", dtype: "torch.dtype", device_type: str
) -> None:
    """Refuse an attention backend that cannot run the model on this device.

    Args:
        attn_backend: as for `patch_model`.
        config: of the text model, as transformers loads it.
        dtype, device_type: of the weights.

    Raises:
        InputError: an unknown backend, an unsupported architecture, or `BackendUnavailable`.
    """
    from unsloth_pack.attention import AttentionOptions, choose_backend
    from unsloth_pack.attention.backends import requested_backend
    from unsloth_pack.attention.options import AttentionNeed
    from unsloth_pack.models import arch_spec_for

    spec = arch_spec_for(config.model_type)
    attention = AttentionOptions(scale=1.0, softcap=getattr(config, spec.softcap) if spec.softcap else None)
    backend, source = requested_backend(attn_backend)
    for head_dim, v_head_dim in spec.head_sizes(config):
        choose_backend(backend, AttentionNeed(device_type, dtype, head_dim, attention, v_head_dim), source)
