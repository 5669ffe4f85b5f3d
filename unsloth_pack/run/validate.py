"""Refuse options before anything is loaded or written: all mistakes at once, in two phases.

`validate` takes no time, and imports no torch. `validate_model` looks at the machine and the model.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unsloth_pack.checkpoints.names import MODEL_CONFIG, check_model_there, is_adapter
from unsloth_pack.checkpoints.new_tokens import read_new_tokens
from unsloth_pack.config import TrainOptions
from unsloth_pack.config.options import AdapterOptions, ImageOptions, ModelOptions, TrainingOptions
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError, errors_of, raise_together, require_whole, written
from unsloth_pack.run.contradictions import contradictions
from unsloth_pack.run.folder import check_folders
from unsloth_pack.run.from_adapter import init_adapter_mistakes, saved_config
from unsloth_pack.run.hub import check_hub
from unsloth_pack.run.machine import device_type
from unsloth_pack.run.optimizer import ROUNDING, check_schedule, check_settings
from unsloth_pack.run.resolve import evaluation_sets, paths_of, training_sets
from unsloth_pack.run.sharding import check_sharding, check_sharding_here

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


def validate(options: TrainOptions) -> None:
    """Refuse all that needs no torch, whose import takes seconds."""
    repository = options.output.push_to_hub
    raise_together(
        _mistakes_anywhere(options),
        check_sharding_here(options.training),
        wrong_folders(options),
        errors_of(check_hub, repository) if repository is not None else (),
    )


def wrong_folders(options: TrainOptions) -> Iterator[InputError]:
    """Refuse folders that cannot be written to, or hold files that the run would replace."""
    sources = [*paths_of(options.data.dataset), *paths_of(options.data.eval_dataset)]
    return check_folders(options.output, sources, options.adapter.merge_init_adapter)


def validate_model(options: TrainOptions) -> None:
    """Refuse what cannot be on this machine or with this model, and load no weights or data."""
    from unsloth_pack.checkpoints.loading import check_loading, check_loftq

    model, loftq = options.model, options.adapter.loftq_config
    bits = (model.load_in_4bit, model.load_in_8bit, model.load_in_fp8)
    raise_together(
        errors_of(check_schedule, options.training),
        errors_of(_check_tracker, options.output.report_to),
        errors_of(check_loading, model.max_seq_length, *bits),
        errors_of(check_loftq, loftq) if loftq is not None else (),
        _check_dtype(options.model, options.adapter, options.training),
        _check_model(options),
    )


def validate_file(options: TrainOptions) -> None:
    """Refuse what cannot be on any machine, nor with a model in a folder."""
    name = options.model.model_name
    of_model: Iterator[InputError] = iter(())
    if name in BUNDLED_MODELS or os.path.isfile(os.path.join(name, MODEL_CONFIG)):
        of_model = _check_fits(options, str(BUNDLED_MODELS.get(name, name)))
    raise_together(_mistakes_anywhere(options), of_model)


def _mistakes_anywhere(options: TrainOptions) -> Iterator[InputError]:
    """Contradictions, and paths at which nothing lies. Names on the hub are not looked up."""
    data, name = options.data, options.model.model_name
    yield from contradictions(options)
    yield from check_settings(options.training)
    yield from errors_of(raise_together, init_adapter_mistakes(options.adapter, name, options.given))
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


def _check_tracker(name: str) -> None:
    from transformers.integrations import get_available_reporting_integrations

    known = ("none", "all", *get_available_reporting_integrations())
    if name not in known:
        raise InputError(
            f"report_to is {name!r}, which is unknown or not installed; give one of {', '.join(known)}"
        )


def _check_dtype(
    model: ModelOptions, adapter: AdapterOptions, training: TrainingOptions
) -> Iterator[InputError]:
    """Refuse stochastic rounding and float32 masters where the weights are not in bfloat16."""
    from unsloth_pack.checkpoints.loading import weight_dtype

    is_full = adapter.tuning == "full"
    dtype = str(weight_dtype(model.dtype, is_full)).removeprefix("torch.") if is_full else "float32"
    rounds = str((training.optim_args or {}).get(ROUNDING)).lower() == "true"
    if dtype == "float32" and (rounds or training.masters_on_host):
        name = "masters_on_host" if training.masters_on_host else f"optim_args {ROUNDING}"
        yield InputError(
            f"{name} is set, and what trains is in float32; give --tuning full --dtype bfloat16, or leave "
            "it out"
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
    """Refuse modules, rows and a rank that a model does not have, and options of images it does not take."""
    from unsloth_pack.checkpoints.loading import check_classifies, check_positions, load_config
    from unsloth_pack.checkpoints.mxfp4 import is_in_mxfp4
    from unsloth_pack.run.trained import check_names_of_modules

    model, adapter = options.model, options.adapter
    whole = load_config(source)
    config = whole.get_text_config()
    yield from errors_of(check_positions, model.max_seq_length, model.model_name, config)
    if adapter.tuning != "full":
        yield from errors_of(require_whole, "r", adapter.r, 1, config.hidden_size)
    if options.data.task == "classify":
        yield from errors_of(check_classifies, whole)
    if options.training.deepspeed is not None and is_in_mxfp4(whole):
        said = f"deepspeed is set, and {model.model_name} has experts in MXFP4, which it does not take"
        yield InputError(f"{said}; give --fsdp")
    if not hasattr(whole, "vision_config"):
        defaults = ImageOptions()
        for name, value in options.images:
            if value != getattr(defaults, name):
                wrong = f"{name} is {written(value)}, and {model.model_name} takes no images"
                yield InputError(f"{wrong}; leave out --{name}")
    yield from check_names_of_modules(adapter, source)


def check_backend(
    attn_backend: str, config: "PretrainedConfig", dtype: "torch.dtype", device_type: str
) -> None:
    """Refuse an attention backend that cannot run the text model of a configuration on this device."""
    from unsloth_pack.attention import AttentionOptions, choose_backend
    from unsloth_pack.attention.backends import requested_backend
    from unsloth_pack.attention.options import AttentionNeed
    from unsloth_pack.models import arch_spec_for

    spec = arch_spec_for(config.model_type)
    attention = AttentionOptions(scale=1.0, softcap=getattr(config, spec.softcap) if spec.softcap else None)
    backend, source = requested_backend(attn_backend)
    for head_dim, v_head_dim in spec.head_sizes(config):
        choose_backend(backend, AttentionNeed(device_type, dtype, head_dim, attention, v_head_dim), source)
