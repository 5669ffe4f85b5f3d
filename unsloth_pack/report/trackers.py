"""Gives trackers what transformers' callbacks leave out: a run's options, its figures and its files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.integrations import TensorBoardCallback

Options = Mapping[str, object]
Figures = Mapping[str, float]
Paths = Sequence[Path]
Add = Callable[[Figures, Paths, Paths], None]  # figures, files and pictures


def begin_trackers(trainer: Trainer, options: Options) -> list[Add]:
    """Add the options to the trackers of a trainer, whose own callbacks have begun a run in each.

    Returns what adds results to those runs, even if the callbacks have ended them.
    """
    return [_BEGIN[name](trainer, options) for name in trainer.args.report_to or () if name in _BEGIN]


def _begin_wandb(trainer: Trainer, options: Options) -> Add:
    import wandb

    run: Any = wandb.run
    run.config.update({"options": options}, allow_val_change=True)

    def add(figures: Figures, files: Paths, pictures: Paths) -> None:
        run.summary.update(dict(figures))
        _log(wandb, run.id, {}, files, pictures)

    return add


def _begin_trackio(trainer: Trainer, options: Options) -> Add:
    import trackio

    begun = trackio.context_vars.current_run.get()
    trackio.config.update({"options": options}, allow_val_change=True)

    def add(figures: Figures, files: Paths, pictures: Paths) -> None:
        trackio.init(begun.project, begun.name, resume="must", embed=False)
        _log(trackio, begun.name, figures, files, pictures)
        trackio.finish()

    return add


def _log(api: Any, name: str, figures: Figures, files: Paths, pictures: Paths) -> None:
    """Log by the functions of wandb, which trackio has too."""
    api.log({**figures, **{path.stem: api.Image(str(path)) for path in pictures}})
    artifact = api.Artifact(f"run-{name}", type="report")
    for path in files:
        artifact.add_file(str(path))
    api.log_artifact(artifact)


def _begin_mlflow(trainer: Trainer, options: Options) -> Add:
    import mlflow

    active: Any = mlflow.active_run()
    run = active.info.run_id
    mlflow.log_dict(dict(options), "options.json", run)

    def add(figures: Figures, files: Paths, pictures: Paths) -> None:
        mlflow.log_metrics(dict(figures), run_id=run)
        for path in (*files, *pictures):
            mlflow.log_artifact(str(path), run_id=run)

    return add


def _begin_tensorboard(trainer: Trainer, options: Options) -> Add:
    from torch.utils.tensorboard import SummaryWriter

    callbacks = trainer.callback_handler.callbacks
    folder = next(each.logging_dir for each in callbacks if isinstance(each, TensorBoardCallback))

    def add(figures: Figures, files: Paths, pictures: Paths) -> None:
        from matplotlib.image import imread

        with SummaryWriter(folder) as writer:
            writer.add_text("options", "".join(f"    {name}: {value}\n" for name, value in options.items()))
            writer.add_text("files", "".join(f"    {path}\n" for path in files))  # it holds none
            for name, value in figures.items():
                writer.add_scalar(name, value)
            for path in pictures:
                writer.add_image(path.stem, imread(path)[..., :3], dataformats="HWC")

    return add


_BEGIN = {
    "wandb": _begin_wandb,
    "trackio": _begin_trackio,
    "mlflow": _begin_mlflow,
    "tensorboard": _begin_tensorboard,
}
