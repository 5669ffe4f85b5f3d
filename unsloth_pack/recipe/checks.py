"""What can be refused about a training run before its model is loaded. Nothing here writes to the disk."""

import math
import os
import reprlib
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.errors import InputError
from unsloth_pack.files.saved_names import ADAPTER, CARD, TOKENIZER, VOCABULARY, holds_model
from unsloth_pack.files.whole_folders import holds
from unsloth_pack.recipe.machine import count_processes, is_main_process
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.sharding import check_sharding
from unsloth_pack.report.metrics import FILE_NAME

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from unsloth_pack.data.ledger import TokenLedger

_SCHEDULES_BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
_LONGEST_NAME = 255  # bytes, on every file system in use
_SUFFIXES_OF_A_RUN = ("json", "jsonl", "safetensors", "png", "md", "jinja", "txt", "model", "tmp")
_RUN_FILES = (FILE_NAME, *sorted(ADAPTER))
_PLOTS_AND_CARD = ("lengths.png", "loss.png", CARD)
_PICTURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".jpg": b"\xff\xd8"}  # how they begin


def check_options(options: TrainOptions) -> None:
    """Refuse options that contradict each other, and folders that cannot be written to.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    model, adapter, data, output = options.model, options.adapter, options.data, options.output
    loaded_in = [name for name in ("load_in_4bit", "load_in_8bit", "load_in_fp8") if getattr(model, name)]
    if len(loaded_in) > 1:
        raise InputError(f"{' and '.join(loaded_in)} are set together; choose one")
    if adapter.loftq_config is not None and loaded_in:
        raise InputError(f"loftq_config starts from 16-bit weights; drop {loaded_in[0]}")
    if adapter.use_dora and model.load_in_fp8:
        raise InputError("use_dora needs the exact base weights; drop load_in_fp8")
    if data.eval_packing is not None and data.eval_dataset is None:
        raise InputError(f"eval_packing is {data.eval_packing} without data to evaluate; give --eval_dataset")
    if data.eval_packing and not data.sample_packing:
        raise InputError("eval_packing is set without sample_packing; give --sample_packing too")
    if data.keep_examples_per_update and not data.sample_packing:
        raise InputError("keep_examples_per_update is set without sample_packing; give --sample_packing too")
    if output.save_path is not None and not output.save_model:
        raise InputError(
            f"save_path is {output.save_path!r} but nothing is saved there; give --save_model too"
        )
    check_sharding(options)
    check_folders(options)


def check_folders(options: TrainOptions) -> None:
    """Refuse folders that cannot be written to, or hold files that the run would replace.

    Raises:
        InputError: names the option, the folder and what it holds.
    """
    output, folder = options.output, options.folder
    if not str(output.output_dir).strip():
        raise InputError(f"output_dir is {output.output_dir!r}; give a folder")
    check_writable("output_dir", folder)
    _check_apart(options, folder)
    may_replace = output.overwrite_output_dir or output.resume
    if not may_replace and is_main_process() and (found := run_files(folder)):
        raise InputError(
            f"output_dir {str(folder)!r} holds a run already ({found[0].name}); "
            "give --resume, --overwrite_output_dir, or another folder"
        )
    if not may_replace and is_main_process() and (name := _in_the_way(folder)):
        raise InputError(
            f"output_dir {str(folder)!r} holds {name}, and the run writes a file of that name; give another "
            "folder, or --overwrite_output_dir to replace it"
        )
    if output.resume:
        _check_resumable(folder)
    if output.save_path is not None:
        target = Path(output.save_path)
        _check_save_path(target, folder, may_replace and _is_of_the_run(target, folder))


def _in_the_way(folder: Path) -> str | None:
    """A file in `folder` of a name that a run writes there."""
    names = sorted({*_PLOTS_AND_CARD, *TOKENIZER, *VOCABULARY})
    return next((name for name in names if os.path.lexists(folder / name)), None)


def _is_of_the_run(target: Path, folder: Path) -> bool:
    """Whether `target` is where the run in `folder` saves its merged model."""
    from unsloth_pack.report.metrics import read_config, read_cwd

    saved = [folder / "merged"]
    with suppress(InputError):  # there is no run
        run, cwd = read_config(folder), read_cwd(folder) or Path()
        was_started_here = (cwd / str(run.get("output_dir"))).resolve() == folder.resolve()
        if run.get("save_path") and was_started_here:  # else it is a copy, and that model is the original's
            saved.append(cwd / run["save_path"])
    return target.resolve() in [path.resolve() for path in saved]


def _check_save_path(target: Path, folder: Path, may_replace: bool) -> None:
    if target.resolve() == folder.resolve():
        raise InputError(
            f"save_path {str(target)!r} is output_dir, which gets the adapter; give another folder"
        )
    if _is_taken(target, folder):
        raise InputError(
            f"save_path {str(target)!r} is where the run itself writes in output_dir; give another folder"
        )
    if target.is_symlink() and target.parent.resolve() == folder.resolve():
        raise InputError(
            f"save_path {str(target)!r} is a link; remove it, or give the folder that it points to"
        )
    check_new_folder("save_path", target, may_replace)


def _is_taken(target: Path, folder: Path) -> bool:
    """Whether `target` is one of the files or folders that a run saves in its `folder`, or lies in one."""
    if not target.resolve().is_relative_to(folder.resolve()):
        return False
    name = target.resolve().relative_to(folder.resolve()).parts[0]
    return name.startswith((".", "checkpoint-")) or Path(name).suffix[1:] in _SUFFIXES_OF_A_RUN


def _check_apart(options: TrainOptions, folder: Path) -> None:
    """Refuse a folder in which the run's files would be mistaken for a model's or for data."""
    if holds_model(folder):  # no adapter is saved there, at the end
        raise InputError(f"output_dir {str(folder)!r} holds a model; give another folder")
    for name in ("dataset", "eval_dataset"):
        data = getattr(options.data, name)
        if data and os.path.isdir(data) and folder.resolve().is_relative_to(Path(data).resolve()):
            raise InputError(
                f"output_dir {str(folder)!r} is in {name} {data!r}, where every file is read as data; "
                "give another folder"
            )


def _check_resumable(folder: Path) -> None:
    from unsloth_pack.report.metrics import has_ended, read_losses, read_processes
    from unsloth_pack.training.checkpoints import last_checkpoint, state_of

    checkpoint = last_checkpoint(folder)
    if checkpoint is None:  # a run that was killed before its first checkpoint starts over
        if (folder / "adapter_config.json").exists():
            raise InputError(
                f"--resume: the run in {str(folder)!r} has saved its adapter and left no checkpoint; "
                "start a new run in another folder"
            )
        if broken := _checkpoints(folder):
            raise InputError(
                f"--resume: {broken[-1].name} in {str(folder)!r} is not whole, and there is no other "
                "checkpoint; start anew with --overwrite_output_dir"
            )
        return
    state = state_of(checkpoint)
    assert state is not None
    losses = read_losses(folder)
    for entry in state["log_history"]:
        loss, was = entry.get("loss", math.nan), losses.get(entry["step"])
        if was is not None and math.isfinite(loss) and loss != was:
            raise InputError(
                f"--resume: {checkpoint.name} in {str(folder)!r} is of another run: its loss of update "
                f"{entry['step']} is {loss:.6g}, and {FILE_NAME} has {was:.6g}; remove that checkpoint"
            )
    if state["global_step"] >= state["max_steps"] and has_ended(folder):
        raise InputError(
            f"--resume: the run in {str(folder)!r} is complete after {state['global_step']} updates; "
            "merge its adapter with `unsloth-pack merge`, or start a new run in another folder"
        )
    before, now = read_processes(folder), count_processes()
    if before not in (None, now):
        raise InputError(
            f"--resume: the run in {str(folder)!r} had {before} processes and this one has {now}, whose "
            f"updates would see other rows; continue with {before}, or start a new run"
        )


def check_same_data(options: TrainOptions, use: str, ledger: "TokenLedger", fingerprint: str | None) -> None:
    """Refuse to resume with other data than the run began with.

    Args:
        use: "train" or "eval".
        ledger, fingerprint: of that data as it is now.

    Raises:
        InputError: its rows or tokens have changed, or how they are tokenised or packed.
    """
    from unsloth_pack.report.metrics import read_data

    before = read_data(options.folder, use) if options.output.resume else None
    if before is None:
        return
    was, now = dict(before["ledger"]), asdict(ledger)
    was["fingerprint"], now["fingerprint"] = before.get("fingerprint"), fingerprint
    if was != now:
        name = next(name for name in now if now[name] != was.get(name))
        data = options.data.dataset if use == "train" else options.data.eval_dataset
        raise InputError(
            f"--resume: {data} is not what the run began with ({name} was {was.get(name)}, is "
            f"{now[name]}); give the same data and tokenizer, or start anew"
        )


def check_new_folder(name: str, target: Path, may_replace: bool = False) -> None:
    """Refuse a folder that cannot be written to, or holds anything."""
    check_writable(name, target)
    if not may_replace and target.is_dir() and (held := holds(target)):
        raise InputError(f"{name} {str(target)!r} is not empty; give a new folder (it holds {held[0]})")


def check_picture(name: str, path: Path) -> None:
    """Refuse a file to draw into that cannot be written, or that holds something else than a picture."""
    check_writable(name, path.parent)
    if path.is_dir():
        raise InputError(f"{name} is {str(path)!r}, which is a folder; give a file")
    if path.suffix not in ("", *_PICTURES):
        raise InputError(f"{name} is {str(path)!r}; give a name that ends in one of {', '.join(_PICTURES)}")
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(8)
        if start and not start.startswith(tuple(_PICTURES.values())):
            raise InputError(f"{name} is {str(path)!r}, which is there and no picture; give another file")


def check_writable(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it."""
    too_long = any(len(os.fsencode(part)) > _LONGEST_NAME for part in folder.parts)
    if too_long or any(letter < " " or letter == "\x7f" for letter in str(folder)):
        raise InputError(f"{name} is {reprlib.repr(str(folder))}, which cannot name a folder; give another")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise InputError(f"{name} is {str(folder)!r} but {str(existing)!r} is a file; give another folder")
    try:
        with tempfile.TemporaryFile(dir=existing):  # it has no name, so nobody sees it
            pass
    except OSError as error:
        raise InputError(
            f"{name} is {str(folder)!r} but {str(existing)!r} cannot be written to ({error.strerror}); "
            "give another folder"
        ) from None


def run_files(folder: Path) -> list[Path]:
    """The files and folders that a run has left in `folder`."""
    files = [folder / name for name in _RUN_FILES if os.path.lexists(folder / name)]
    return files + _checkpoints(folder)


def _checkpoints(folder: Path) -> list[Path]:
    """Whole or not, and links; a folder of another name, such as checkpoint-best, is somebody's own."""
    found = sorted(folder.glob("checkpoint-*"))
    return [path for path in found if path.is_symlink() or path.name.removeprefix("checkpoint-").isdigit()]


def check_trainer(options: TrainOptions) -> None:
    """Refuse an optimizer, a schedule or a tracker that is unknown or not installed.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    from transformers.training_args import OptimizerNames

    from unsloth_pack.api import check_loading, check_loftq

    model, optim = options.model, options.training.optim
    check_loading(model.max_seq_length, model.load_in_4bit, model.load_in_8bit, model.load_in_fp8)
    if options.adapter.loftq_config is not None:
        check_loftq(options.adapter.loftq_config)
    optimizers = [name.value for name in OptimizerNames]
    if optim not in optimizers:
        raise InputError(f"optim is {optim!r}; choose one of {', '.join(optimizers)}")
    _check_schedule(options.training.lr_scheduler_type, evaluates=options.data.eval_dataset is not None)
    _check_tracker(options.output.report_to)


def _check_schedule(name: str, evaluates: bool) -> None:
    import torch
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType

    schedules = [name.value for name in SchedulerType]
    if name not in schedules:
        raise InputError(f"lr_scheduler_type is {name!r}; choose one of {', '.join(schedules)}")
    if name in _SCHEDULES_BY_EVALUATION and not evaluates:
        raise InputError(
            f"lr_scheduler_type is {name!r}, which follows the evaluation loss; "
            "give --eval_dataset, or use linear"
        )
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"lr_scheduler_type is {name!r}, which needs settings that have no option ({error}); use linear"
        ) from None


def check_optimizer(arguments: "TrainingArguments") -> None:
    """Refuse an optimizer that cannot be made here.

    Raises:
        InputError: it is not installed, or needs CUDA or arguments of its own.
    """
    import torch
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    name = OptimizerNames(arguments.optim).value
    try:
        kind, _ = Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError) as error:
        raise InputError(f"optim is {name!r}, which cannot be made ({error}); use adamw_torch") from None
    if kind.__module__.startswith("bitsandbytes") and not torch.cuda.is_available():
        raise InputError(f"optim is {name!r}, which needs CUDA, and there is none here; use adamw_torch")


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
