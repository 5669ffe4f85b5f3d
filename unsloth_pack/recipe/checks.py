"""What can be refused about the options of a run before its model is loaded."""

import json
from collections.abc import Collection
from functools import partial
from typing import Any

from unsloth_pack.errors import InputError, at_once, first_line
from unsloth_pack.recipe.hub import check_hub
from unsloth_pack.recipe.image_checks import check_images_together
from unsloth_pack.recipe.named_data import name_of
from unsloth_pack.recipe.optimizers import check_settings, check_updates
from unsloth_pack.recipe.options import TrainingOptions, TrainOptions
from unsloth_pack.recipe.run_folder import check_folders
from unsloth_pack.recipe.sharding import check_sharding
from unsloth_pack.recipe.what_trains import check_tuning

_SCHEDULES_BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")


def check_options(options: TrainOptions) -> None:
    """Refuse options that contradict each other, and folders that cannot be written to.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    check_together(options)
    check_sharding(options)
    check_folders(options)


def check_together(options: TrainOptions) -> None:
    """Refuse options that contradict each other on any machine, all at once.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    checks = [_check_weights, _check_held_out, _check_packing, _check_saving, check_tuning]
    checks += [check_updates, check_images_together, _check_evaluations]
    at_once(partial(check, options) for check in checks)


def check_names(options: TrainOptions, given: Collection[str]) -> None:
    """Refuse an optimizer or a schedule that is unknown, and settings that it does not take, all at once.

    Args:
        given: the names of options that somebody gave; only where these are among them, transformers is
            imported.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    checks: list[Any] = []
    if not {"lr_scheduler_type", "lr_scheduler_kwargs"}.isdisjoint(given):
        checks.append(partial(_check_schedule, options.training, evaluates=options.data.evaluates))
    if "optim" in given:
        checks.append(partial(check_settings, options.training))
    at_once(checks)


def _check_weights(options: TrainOptions) -> None:
    model, adapter = options.model, options.adapter
    loaded_in = [name for name in ("load_in_4bit", "load_in_8bit", "load_in_fp8") if getattr(model, name)]
    if len(loaded_in) > 1:
        raise InputError(f"{' and '.join(loaded_in)} are set together; choose one")
    if adapter.loftq_config is not None and loaded_in:
        raise InputError(f"loftq_config starts from 16-bit weights; drop {loaded_in[0]}")
    if adapter.use_dora and model.load_in_fp8:
        raise InputError("use_dora needs the exact base weights; drop load_in_fp8")


def _check_held_out(options: TrainOptions) -> None:
    data = options.data
    if data.eval_fraction is not None and data.eval_dataset is not None:
        raise InputError(
            f"eval_fraction is {data.eval_fraction:g} and eval_dataset is {name_of(data.eval_dataset)}; give "
            "one of them"
        )
    if data.eval_fraction is not None and data.streaming:
        raise InputError(
            f"eval_fraction is {data.eval_fraction:g} and streaming is set, but nobody knows which documents "
            "of a stream are equal; give --eval_dataset"
        )


def _check_packing(options: TrainOptions) -> None:
    data = options.data
    if data.eval_packing is not None and not data.evaluates:
        raise InputError(f"eval_packing is {data.eval_packing} without data to evaluate; give --eval_dataset")
    if data.eval_packing and not data.sample_packing:
        raise InputError("eval_packing is set without sample_packing; give --sample_packing too")
    if data.keep_examples_per_update and not data.sample_packing:
        raise InputError("keep_examples_per_update is set without sample_packing; give --sample_packing too")


def _check_saving(options: TrainOptions) -> None:
    output = options.output
    if output.save_path is not None and not output.save_model:
        raise InputError(
            f"save_path is {output.save_path!r} but nothing is saved there; give --save_model too"
        )


def _check_evaluations(options: TrainOptions) -> None:
    """Refuse what follows evaluations where there are none, and checkpoints at other updates than these."""
    training, output, evaluates = options.training, options.output, options.data.evaluates
    for name in ("eval_steps", "early_stopping_patience", "load_best_model_at_end"):
        if (value := getattr(training, name)) and not evaluates:
            raise InputError(f"{name} is {value} without data to evaluate on; give --eval_dataset")
    if training.load_best_model_at_end and output.save_steps:
        if training.eval_steps is None:
            raise InputError(
                "load_best_model_at_end takes the best of the checkpoints, save_steps is "
                f"{output.save_steps} and eval_steps is not given; give --eval_steps, of which save_steps is "
                "a multiple"
            )
        if output.save_steps % training.eval_steps:
            raise InputError(
                "load_best_model_at_end takes the best of the checkpoints, but save_steps "
                f"{output.save_steps} is no multiple of eval_steps {training.eval_steps}; make it one"
            )
    if output.save_delay_steps and not (output.save_steps or training.load_best_model_at_end):
        raise InputError(
            f"save_delay_steps is {output.save_delay_steps} and no checkpoints are made; give --save_steps"
        )


def check_trainer(options: TrainOptions) -> None:
    """Refuse an optimizer, a schedule or a tracker that is unknown or not installed.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    from unsloth_pack.api import check_loading, check_loftq

    model = options.model
    check_loading(model.max_seq_length, model.load_in_4bit, model.load_in_8bit, model.load_in_fp8)
    if options.output.push_to_hub is not None:
        check_hub(options.output.push_to_hub)
    if options.adapter.loftq_config is not None:
        check_loftq(options.adapter.loftq_config)
    check_settings(options.training)
    _check_schedule(options.training, evaluates=options.data.evaluates)
    _check_tracker(options.output.report_to)


def _check_schedule(training: TrainingOptions, evaluates: bool) -> None:
    import torch
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType

    name, settings = training.lr_scheduler_type, dict(training.lr_scheduler_kwargs or {})
    schedules = [name.value for name in SchedulerType]
    if name not in schedules:
        raise InputError(f"lr_scheduler_type is {name!r}; choose one of {', '.join(schedules)}")
    if name in _SCHEDULES_BY_EVALUATION and not evaluates:
        raise InputError(
            f"lr_scheduler_type is {name!r}, which follows the evaluation loss; "
            "give --eval_dataset, or use linear"
        )
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
        get_scheduler(name, optimizer, 0, 1, scheduler_specific_kwargs=settings)
    except (ValueError, TypeError) as error:
        given = f" and lr_scheduler_kwargs is {json.dumps(settings)}" if settings else ""
        raise InputError(
            f"lr_scheduler_type is {name!r}{given}, which transformers refuses ({first_line(error)}); "
            "correct lr_scheduler_kwargs"
        ) from None


def _check_tracker(report_to: str) -> None:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if report_to in ("none", "all", *get_available_reporting_integrations()):
        return
    if report_to in INTEGRATION_TO_CALLBACK:
        raise InputError(
            f"report_to is {report_to!r}, which is not installed; pip install {report_to}, or use none"
        )
    raise InputError(
        f"report_to is {report_to!r}; choose one of none, all, {', '.join(INTEGRATION_TO_CALLBACK)}"
    )


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
    from unsloth_pack.models import spec_of

    spec = spec_of(config.model_type)
    attention = AttentionOptions(scale=1.0, softcap=getattr(config, spec.softcap) if spec.softcap else None)
    backend, source = requested_backend(attn_backend)
    for head_dim, v_head_dim in spec.head_sizes(config):
        choose_backend(backend, AttentionNeed(device_type, dtype, head_dim, attention, v_head_dim), source)
