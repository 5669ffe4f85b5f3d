"""What transformers' callbacks leave out of trackers: a run's options, its figures and its files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args
from transformers.integrations import TensorBoardCallback

Options = Mapping[str, object]


@dataclass(frozen=True)
class Results:
    """What a run adds to a tracker at its end."""

    figures: Mapping[str, float]
    files: Sequence[Path]  # the report among them
    pictures: Sequence[Path]  # of a packed row, if any


Add = Callable[[Results], None]

# Each begins once transformers' callback has begun a run. What it returns adds to that run, even if the
# callback has ended it.


def _begin_wandb(trainer: Trainer, options: Options) -> Add:
    import wandb

    run: Any = wandb.run
    run.config.update({"options": options})

    def add(results: Results) -> None:
        run.summary.update(dict(results.figures))
        run.log({path.stem: wandb.Image(str(path)) for path in results.pictures})
        artifact = wandb.Artifact(f"run-{run.id}", type="report")
        for path in results.files:
            artifact.add_file(str(path))
        run.log_artifact(artifact)

    return add


def _begin_mlflow(trainer: Trainer, options: Options) -> Add:
    import mlflow

    active: Any = mlflow.active_run()
    client, run = mlflow.MlflowClient(), active.info.run_id
    client.log_dict(run, dict(options), "options.json")

    def add(results: Results) -> None:
        for name, value in results.figures.items():
            client.log_metric(run, name, value)
        for path in (*results.files, *results.pictures):
            client.log_artifact(run, str(path))

    return add


def _begin_tensorboard(trainer: Trainer, options: Options) -> Add:
    callbacks = trainer.callback_handler.callbacks
    folder = next(each.logging_dir for each in callbacks if isinstance(each, TensorBoardCallback))

    def add(results: Results) -> None:
        from matplotlib.image import imread
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder) as writer:
            writer.add_text("options", "".join(f"    {name}: {value}\n" for name, value in options.items()))
            writer.add_text("files", "".join(f"    {path}\n" for path in results.files))  # it holds none
            for name, value in results.figures.items():
                writer.add_scalar(name, value)
            for path in results.pictures:
                writer.add_image(path.stem, imread(path)[..., :3], dataformats="HWC")

    return add


def _begin_trackio(trainer: Trainer, options: Options) -> Add:
    import trackio

    begun = trackio.context_vars.current_run.get()
    trackio.config.update({"options": options})

    def add(results: Results) -> None:
        run = trackio.init(begun.project, begun.name, resume="must", embed=False)
        trackio.log({**results.figures, **{path.stem: trackio.Image(path) for path in results.pictures}})
        artifact = trackio.Artifact(f"run-{run.name}", type="report")
        for path in results.files:
            artifact.add_file(str(path))
        trackio.log_artifact(artifact)
        trackio.finish()

    return add


_BEGIN = {
    "wandb": _begin_wandb,
    "mlflow": _begin_mlflow,
    "tensorboard": _begin_tensorboard,
    "trackio": _begin_trackio,
}


class Trackers(TrainerCallback):
    """Adds to the trackers of a trainer. It has to come after transformers' own callbacks."""

    def __init__(self, trainer: Trainer, options: Options):
        self._trainer, self._options = trainer, options
        self._add: list[Add] = []

    def on_train_begin(self, args: Args, state: State, control: Control, **_: object) -> None:
        if state.is_world_process_zero:
            begins = [_BEGIN[name] for name in args.report_to or () if name in _BEGIN]
            self._add = [begin(self._trainer, self._options) for begin in begins]

    def __bool__(self) -> bool:
        return bool(self._add)

    def add(self, results: Results) -> None:
        """Add the results of a run to each tracker."""
        for add in self._add:
            add(results)
