"""What can be refused about the options of a run before its model is loaded."""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from unsloth_pack.checkpoints.names import MODEL_CONFIG
from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.config.options import ImageOptions, TrainingOptions
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import (
    Check,
    InputError,
    about,
    at_once,
    first_line,
    mistakes_of,
    require_whole,
    written,
)
from unsloth_pack.run.folder import check_folders
from unsloth_pack.run.from_adapter import saved_config
from unsloth_pack.run.hub import check_hub, check_repository
from unsloth_pack.run.library_names import names_in
from unsloth_pack.run.machine import device_type
from unsloth_pack.run.optimizer import check_masters, check_rounding, check_settings, check_updates
from unsloth_pack.run.paths import check_paths
from unsloth_pack.run.resolve import (
    check_data,
    check_given,
    evaluation_sets,
    name_of,
    training_sets,
    with_optimizer,
)
from unsloth_pack.run.sharding import check_sharding, check_sharding_here
from unsloth_pack.run.trained import check_names_of_modules, check_tuning

# Refuse options of images, and of the trained parts of a model of vision and language.

_RATES = {"vit_lr": "freeze_vit", "aligner_lr": "freeze_aligner"}
_OF_THE_TEXT = ("target_modules", "layers_to_transform", "trainable_token_indices", "add_tokens")


def check_images_together(options: TrainOptions) -> Iterator[InputError]:
    """Refuse options of images that contradict each other, whatever the model."""
    images, adapter = options.images, options.adapter
    for rate, frozen in _RATES.items():
        if (value := getattr(images, rate)) is not None and getattr(images, frozen):
            yield InputError(
                f"{rate} is {value:g} and {frozen} is true, so that nothing learns at this rate; leave out "
                f"--{rate}, or give --{frozen} false",
                about=(rate, frozen),
            )
    if images.freeze_vit and images.freeze_aligner and images.freeze_llm:
        yield InputError(
            "freeze_vit, freeze_aligner and freeze_llm are true, which leaves nothing to train; set one of "
            "them to false",
            about=("freeze_vit", "freeze_aligner", "freeze_llm"),
        )
    if images.freeze_llm:
        for name in _OF_THE_TEXT:
            if (given := getattr(adapter, name)) is not None:
                yield InputError(
                    f"freeze_llm is true and {name} is {written(given)}, which is of the language model; "
                    "leave out one of them",
                    about=("freeze_llm", name),
                )
    yield from image_mistakes(images)


def image_mistakes(images: ImageOptions) -> Iterator[InputError]:
    """Refuse sizes that are no range, and a folder that is not there."""
    if images.min_pixels is not None and images.min_pixels > (images.max_pixels or images.min_pixels):
        yield InputError(
            f"min_pixels is {images.min_pixels} and max_pixels is {images.max_pixels}; give a range",
            about=("min_pixels", "max_pixels"),
        )
    if images.image_folder is not None and not os.path.isdir(images.image_folder):
        yield InputError(
            f"image_folder is {images.image_folder!r}, which is no folder; correct it", about="image_folder"
        )


def refuse_image_options(images: ImageOptions, why: str) -> None:
    """Refuse options of images where a run has none, all at once.

    Args:
        why: it has none.

    Raises:
        InputError: names the options that differ from their defaults.
    """
    given, defaults = flat(images), flat(ImageOptions())
    names = [name for name, value in given.items() if value != defaults[name]]
    at_once([lambda: [_left_out(name, given[name], why) for name in names]])


def _left_out(name: str, value: Any, why: str) -> InputError:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return InputError(f"{name} is {shown}, and {why}; leave out --{name}", about=name)


def check_run_with_images(options: TrainOptions) -> None:
    """Refuse what runs with images do not do.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    for name in ("fsdp", "deepspeed"):
        if (value := getattr(options.training, name)) is not None:
            raise InputError(
                f"{name} is {value!r} and the rows have images, but a process whose row has none would keep "
                f"the others waiting; leave out --{name}",
                about=name,
            )


_SCHEDULES_BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
_TRACKERS = ("integrations/integration_utils", "INTEGRATION_TO_CALLBACK")
_PACKAGES_OF_TRACKERS = {  # of those that have another name, or none
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "kubeflow": ("transformers",),
    "tensorboard": ("tensorboard", "tensorboardX"),
}


def check_anywhere(options: TrainOptions, given: Mapping[str, Any]) -> None:
    """Refuse what cannot be on any machine, all at once.

    Args:
        given: the values that somebody asked for, by name.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    at_once([partial(check_given, options, given), *_together(options), partial(check_names, options, given)])


def check_file(options: TrainOptions, given: Mapping[str, Any]) -> None:
    """As `check_anywhere`, and refuse modules, a rank and a length that a model in a folder does not have.

    Args:
        given: as for `check_anywhere`.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    name = options.model.model_name
    checks: list[Check] = [partial(check_anywhere, options, given)]
    if name in BUNDLED_MODELS or os.path.isfile(os.path.join(name, MODEL_CONFIG)):
        source = str(BUNDLED_MODELS.get(name, name))
        checks.append(partial(check_names_of_modules, options, source))
        if {"r", "max_seq_length", *flat(options.images)} & given.keys():
            from unsloth_pack.checkpoints.loading import load_config

            checks.append(lambda: _check_fits(load_config(source), options))
    at_once(checks)


def check_sure(options: TrainOptions, wrong: Collection[str]) -> None:
    """Refuse contradictions and unknown names that are sure although other options are wrong, all at once.

    Args:
        options: those that are right.
        wrong: names of the others, and of options that misspelt names may mean.

    Raises:
        InputError: names the options and the remedy.
    """
    given, told = options.given, [*wrong]
    if "lr_scheduler_type" not in given:
        told.append("lr_scheduler_type")  # the demo has another default, and who knows whether it is meant

    def contradictions() -> Iterator[InputError]:
        """Of options that are all given: what lacks an option may lack a misspelt one."""
        try:
            check_anywhere(options, given)
        except InputError as error:
            about = [(each, {name.partition(".")[0] for name in each.about}) for each in mistakes_of(error)]
            yield from (each for each, names in about if len(names) > 1 and names <= given.keys())

    at_once([partial(check_names, options, given, told), contradictions])


def check_first(options: TrainOptions, given: Mapping[str, Any]) -> None:
    """Refuse what can be told without torch, whose import takes seconds, all at once.

    Args:
        given: as for `check_anywhere`.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    own: list[Callable[[TrainOptions], Iterator[InputError] | None]]
    own = [check_sharding_here, check_folders, _check_push, _check_tracker_is_installed, _check_sources]
    checks: list[Check] = [partial(check_given, options, given), *_together(options)]
    checks.append(partial(check_names, options, given, tries=False))
    at_once([*checks, *(partial(check, options) for check in own)])


def check_here(options: TrainOptions, given: Mapping[str, Any]) -> None:
    """Refuse what cannot be on this machine or with this model, all at once, and load no weights or data.

    Args:
        given: as for `check_anywhere`. `check_first` has nothing to refuse.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    own: list[Callable[[TrainOptions], Iterator[InputError] | None]]
    own = [check_sharding_here, _check_loading, _check_loftq, _check_dtype, _check_tracker_is_there]
    at_once(
        [partial(check_names, options, given), *(partial(check, options) for check in [*own, _check_model])]
    )


def _together(options: TrainOptions) -> list[Check]:
    """What contradicts each other, and paths at which nothing lies."""
    checks: list[Callable[[TrainOptions], Iterator[InputError] | None]]
    checks = [_check_weights, _check_held_out, _check_packing, _check_saving, check_tuning]
    checks += [
        _check_repository,
        check_updates,
        check_images_together,
        _check_evaluations,
        check_sharding,
        check_paths,
    ]
    return [partial(check_data, options.data), *(partial(check, options) for check in checks)]


def check_names(
    options: TrainOptions, given: Mapping[str, Any], told: Collection[str] = (), *, tries: bool = True
) -> None:
    """Refuse an optimizer, a schedule or a tracker that is unknown, and settings that it does not take.

    Args:
        given: as for `check_anywhere`. What is not among them is not judged.
        told: options of which a mistake has been told; what goes with one of them cannot be judged.
        tries: whether the schedule is made, for which torch is imported.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    optimizer = with_optimizer(options, "cpu").training  # that of CUDA has the same settings
    checks: dict[tuple[str, ...], Check] = {
        ("lr_scheduler_type", "lr_scheduler_kwargs"): partial(
            _check_schedule, options.training, "learning_rate" not in told, tries
        ),
        ("optim", "optim_args"): partial(check_settings, optimizer),
        ("report_to",): partial(_check_tracker, options.output.report_to),
    }
    wanted = {names for names in checks if {*names} & given.keys() and not {*names} & {*told}}
    at_once(check for names, check in checks.items() if names in wanted)


def _check_weights(options: TrainOptions) -> Iterator[InputError]:
    model, adapter = options.model, options.adapter
    loaded_in = [name for name in ("load_in_4bit", "load_in_8bit", "load_in_fp8") if getattr(model, name)]
    if len(loaded_in) > 1:
        yield InputError(f"{' and '.join(loaded_in)} are set together; choose one", about=loaded_in)
    if adapter.loftq_config is not None and loaded_in:
        yield InputError(
            f"loftq_config starts from 16-bit weights; drop {loaded_in[0]}",
            about=("loftq_config", loaded_in[0]),
        )
    if adapter.use_dora and model.load_in_fp8:
        yield InputError(
            "use_dora needs the exact base weights; drop load_in_fp8", about=("use_dora", "load_in_fp8")
        )


def _check_held_out(options: TrainOptions) -> Iterator[InputError]:
    data = options.data
    if data.eval_fraction is not None and data.eval_dataset is not None:
        yield InputError(
            f"eval_fraction is {data.eval_fraction:g} and eval_dataset is {name_of(data.eval_dataset)}; give "
            "one of them",
            about=("eval_fraction", "eval_dataset"),
        )
    if data.eval_fraction is not None and data.streaming:
        yield InputError(
            f"eval_fraction is {data.eval_fraction:g} and streaming is set, but nobody knows which documents "
            "of a stream are equal; give --eval_dataset",
            about=("eval_fraction", "streaming"),
        )


def _check_packing(options: TrainOptions) -> Iterator[InputError]:
    data = options.data
    if data.eval_packing is not None and not data.evaluates:
        yield InputError(
            f"eval_packing is {written(data.eval_packing)} without data to evaluate; give --eval_dataset or "
            "--eval_fraction",
            about="eval_packing",
        )
    if data.eval_packing and not data.sample_packing:
        yield InputError(
            "eval_packing is set without sample_packing; give --sample_packing too",
            about=("eval_packing", "sample_packing"),
        )
    if data.keep_examples_per_update and not data.sample_packing:
        yield InputError(
            "keep_examples_per_update is set without sample_packing; give --sample_packing too",
            about=("keep_examples_per_update", "sample_packing"),
        )


def _check_saving(options: TrainOptions) -> Iterator[InputError]:
    output = options.output
    if output.save_path is not None and not output.save_model:
        yield InputError(
            f"save_path is {output.save_path!r} but nothing is saved there; give --save_model too",
            about=("save_path", "save_model"),
        )


def _check_evaluations(options: TrainOptions) -> Iterator[InputError]:
    """Refuse what follows evaluations where there are none, and checkpoints at other updates than these."""
    training, output, evaluates = options.training, options.output, options.data.evaluates
    for name in ("eval_steps", "early_stopping_patience", "load_best_model_at_end"):
        if (value := getattr(training, name)) and not evaluates:
            yield InputError(
                f"{name} is {written(value)} without data to evaluate on; give --eval_dataset or "
                "--eval_fraction",
                about=name,
            )
    if training.lr_scheduler_type in _SCHEDULES_BY_EVALUATION and not evaluates:
        yield InputError(
            f"lr_scheduler_type is {training.lr_scheduler_type!r}, which follows the evaluation loss; "
            "give --eval_dataset or --eval_fraction, or use linear",
            about="lr_scheduler_type",
        )
    if training.load_best_model_at_end and output.save_steps and evaluates:
        of_both = ("load_best_model_at_end", "save_steps", "eval_steps")
        if training.eval_steps is None:
            yield InputError(
                "load_best_model_at_end takes the best of the checkpoints, save_steps is "
                f"{output.save_steps} and eval_steps is not given; give --eval_steps, of which save_steps is "
                "a multiple",
                about=of_both,
            )
        elif output.save_steps % training.eval_steps:
            yield InputError(
                "load_best_model_at_end takes the best of the checkpoints, but save_steps "
                f"{output.save_steps} is no multiple of eval_steps {training.eval_steps}; make it one",
                about=of_both,
            )
    if output.save_delay_steps and not (output.save_steps or training.load_best_model_at_end):
        yield InputError(
            f"save_delay_steps is {output.save_delay_steps} and no checkpoints are made; give --save_steps",
            about="save_delay_steps",
        )


def _check_loading(options: TrainOptions) -> None:
    from unsloth_pack.checkpoints.weight_checks import check_loading

    model = options.model
    check_loading(model.max_seq_length, model.load_in_4bit, model.load_in_8bit, model.load_in_fp8)


def _check_loftq(options: TrainOptions) -> None:
    from unsloth_pack.checkpoints.weight_checks import check_loftq

    if options.adapter.loftq_config is not None:
        check_loftq(options.adapter.loftq_config)


def _check_dtype(options: TrainOptions) -> None:
    from unsloth_pack.checkpoints.loading import weight_dtype

    dtype = weight_dtype(options.model.dtype, options.adapter.tuning == "full")
    at_once([partial(check_rounding, options, dtype), partial(check_masters, options, dtype)])


def _check_repository(options: TrainOptions) -> None:
    if options.output.push_to_hub is not None:
        check_repository(options.output.push_to_hub)


def _check_push(options: TrainOptions) -> None:
    if options.output.push_to_hub is not None:
        check_hub(options.output.push_to_hub)


def _check_tracker_is_installed(options: TrainOptions) -> Iterator[InputError]:
    name = options.output.report_to
    packages = _PACKAGES_OF_TRACKERS.get(name, (name,))
    if name in names_in(*_TRACKERS) and not any(map(find_spec, packages)):
        yield _tracker_missing(name)


def _check_tracker_is_there(options: TrainOptions) -> Iterator[InputError]:
    """Refuse a tracker that transformers finds no use for: some are installed, and not configured."""
    name = options.output.report_to
    if name not in ("none", "all"):
        from transformers.integrations import get_available_reporting_integrations

        if name not in get_available_reporting_integrations():
            yield _tracker_missing(name)


def _tracker_missing(name: str) -> InputError:
    return InputError(
        f"report_to is {name!r}, which is not installed; pip install {name}, or use none", about="report_to"
    )


def _check_model(options: TrainOptions) -> None:
    """Refuse a model that is not there, what it has no modules or positions for, and attention that cannot
    run it."""
    from unsloth_pack.checkpoints.loading import load_config, resolve, weight_dtype

    if options.adapter.init_adapter is not None:
        saved_config(options.adapter.init_adapter)  # without which nobody knows the model
    with about("model_name", "init_adapter"):
        base, adapter = resolve(options.model.model_name)
        if adapter is not None:  # which `check_paths` refuses
            return
        whole = load_config(base)
    config = whole.get_text_config()
    model, is_full = options.model, options.adapter.tuning == "full"
    dtype = weight_dtype(model.dtype, is_full)
    checks: list[Check] = [
        partial(_check_fits, whole, options),
        partial(check_names_of_modules, options, base),
        partial(check_backend, model.attn_backend, config, dtype, device_type()),
    ]
    at_once(checks)


def _check_fits(whole: Any, options: TrainOptions) -> None:
    """Refuse rows and a rank that a model has no room for, and options of images where it takes none.

    Args:
        whole: the model's configuration.
    """
    from unsloth_pack.checkpoints.weight_checks import check_positions

    model, adapter, config = options.model, options.adapter, whole.get_text_config()
    checks: list[Check] = [partial(check_positions, model.max_seq_length, model.model_name, config)]
    if adapter.tuning != "full":
        checks.append(partial(require_whole, "r", adapter.r, 1, config.hidden_size))
    if not hasattr(whole, "vision_config"):
        why = f"{model.model_name} takes no images"
        checks.append(partial(refuse_image_options, options.images, why))
    at_once(checks)


def _check_sources(options: TrainOptions) -> None:
    """Refuse data that is not there, or lacks a column that the options map."""
    data = options.data
    checks: list[Check] = [partial(each.check, data.streaming) for each in training_sets(data)]
    at_once([*checks, *(each.check for each in evaluation_sets(data))])


def _check_schedule(training: TrainingOptions, knows_rate: bool, tries: bool) -> Iterator[InputError]:
    """Refuse what transformers refuses, and a floor at which the rate would rise, or be negative.

    Args:
        knows_rate: whether `learning_rate` is what was meant, so that a floor can be held against it.
        tries: whether the schedule is made.
    """
    name, settings = training.lr_scheduler_type, dict(training.lr_scheduler_kwargs or {})
    if name in ("constant", "constant_with_warmup") and settings:
        yield InputError(
            f"lr_scheduler_kwargs is {json.dumps(settings)} and lr_scheduler_type is {name!r}, which takes "
            "none; leave them out, or give another lr_scheduler_type",
            about=("lr_scheduler_kwargs", "lr_scheduler_type"),
        )
        return
    schedules = names_in("trainer_utils", "SchedulerType")
    if name not in schedules:
        yield InputError(
            f"lr_scheduler_type is {name!r}; choose one of {', '.join(schedules)}", about="lr_scheduler_type"
        )
        return
    if tries and (why := _why_not_made(name, settings, training.learning_rate)):
        given = f" and lr_scheduler_kwargs is {json.dumps(settings)}" if settings else ""
        yield InputError(
            f"lr_scheduler_type is {name!r}{given}, which transformers refuses ({why}); correct "
            "lr_scheduler_kwargs, or give another lr_scheduler_type",
            about=("lr_scheduler_type", "lr_scheduler_kwargs"),
        )
        return
    of_rate = f"learning_rate, which is {training.learning_rate:g}"
    floors: dict[str, tuple[float, str]] = {"min_lr_rate": (1, "1"), "min_lr_ratio": (1, "1")}
    floors |= {name: (training.learning_rate, of_rate) for name in ("min_lr", "lr_end") if knows_rate}
    for name, (most, says) in floors.items():
        value = settings.get(name)
        if isinstance(value, int | float) and not 0 <= value <= most:
            yield InputError(
                f"lr_scheduler_kwargs has {name} {json.dumps(value)}; give a number from 0 to {says}",
                about=(f"lr_scheduler_kwargs.{name}", "learning_rate"),
            )


def _why_not_made(schedule: str, settings: dict[str, Any], learning_rate: float) -> str | None:
    """Why transformers refuses to make a schedule with these settings, or None."""
    import torch
    from transformers import get_scheduler

    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
        get_scheduler(schedule, optimizer, 0, 1, scheduler_specific_kwargs=settings)
    except (ValueError, TypeError) as error:
        return first_line(error)
    return None


def _check_tracker(report_to: str) -> Iterator[InputError]:
    known = ("none", "all", *names_in(*_TRACKERS))
    if report_to not in known:
        yield InputError(f"report_to is {report_to!r}; choose one of {', '.join(known)}", about="report_to")


def check_backend(attn_backend: str, config: Any, dtype: Any, device_type: str) -> None:
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

    with about("model_name", "init_adapter"):
        spec = arch_spec_for(config.model_type)
    attention = AttentionOptions(scale=1.0, softcap=getattr(config, spec.softcap) if spec.softcap else None)
    backend, source = requested_backend(attn_backend)
    for head_dim, v_head_dim in spec.head_sizes(config):
        choose_backend(backend, AttentionNeed(device_type, dtype, head_dim, attention, v_head_dim), source)
