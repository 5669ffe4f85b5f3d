"""Options of `train`, a section of flags and of config files each. `options.yaml` says what each is."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from unsloth_pack.config import values as t
from unsloth_pack.demo import BUNDLED_MODELS

ALIASES = {"packing": "sample_packing"}
OWN_TEACHERS = ("base", "init_adapter", "stored")  # values of `teacher` that are no paths
Place = tuple[str, int]  # a file and a line


class Section(BaseModel):
    """Options that stand together."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelOptions(Section):
    """The model that trains, and how its frozen weights are held."""

    model_name: t.FilePath = "demo"
    max_seq_length: t.Count = 2048
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    load_in_fp8: bool = False
    attn_backend: Literal["auto", "flash", "xformers", "triton", "sdpa"] = "auto"


class AdapterOptions(Section):
    """What trains: a LoRA adapter, which is small matrices beside the frozen weights, or the model itself."""

    tuning: Literal["lora", "full"] = "lora"
    r: t.Count = 16
    lora_alpha: t.Positive = 16.0
    lora_dropout: t.Share = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    random_state: t.Seed = 3407
    use_rslora: bool = False
    use_dora: bool = False
    loftq_config: t.Settings | None = None
    target_modules: t.Modules | None = None
    layers_to_transform: t.Numbers | None = None
    modules_to_save: t.Names | None = None
    train_modules: t.Patterns | None = None
    freeze_modules: t.Patterns | None = None
    trainable_token_indices: t.Numbers | None = None
    add_tokens: t.FilePath | None = None
    init_adapter: t.FilePath | None = None
    merge_init_adapter: bool = False


class DataOptions(Section):
    """The documents that the model learns from, and how they become rows."""

    dataset: t.DataSets = "demo"
    mixture: Literal["concatenate", "interleave_under", "interleave_over"] = "concatenate"
    columns: t.Columns | None = None
    split: t.Split | None = None
    sample_limit: t.Count | None = None
    eval_dataset: t.EvalSets | None = None
    eval_fraction: t.OpenShare | None = None
    streaming: bool = False
    sample_packing: bool = False
    keep_examples_per_update: bool = False
    padding_free: bool = False
    eval_packing: bool | None = None
    max_token_loss: t.NotNegative = 0.01
    num_proc: t.Count | None = None
    train_on_responses_only: bool = False
    task: Literal["classify"] | None = None
    label_column: str | None = None

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.eval_dataset is not None or self.eval_fraction is not None

    @property
    def packs_evaluation(self) -> bool:
        return self.sample_packing if self.eval_packing is None else self.eval_packing


class ImageOptions(Section):
    """For models of vision and language: the images of the rows, and the parts that train."""

    image_folder: t.FilePath | None = None
    max_pixels: t.Count | None = None
    min_pixels: t.Count | None = None
    skip_broken_images: bool = False
    shrink_images: bool = False
    dataloader_num_workers: t.CountFrom0 | None = None
    freeze_vit: bool = True
    freeze_aligner: bool = False
    freeze_llm: bool = False
    vit_lr: t.Positive | None = None
    aligner_lr: t.Positive | None = None


class TrainingOptions(Section):
    """How it is trained, and for how long."""

    objective: Literal["sft", "distill", "dpo", "kto", "orpo", "rollouts"] = "sft"
    per_device_train_batch_size: t.Rows | None = None
    per_device_eval_batch_size: t.Count | None = None
    gradient_accumulation_steps: t.Count = 4
    effective_batch_size: t.Count | None = None
    warmup_steps: t.CountFrom0 = 5
    warmup_ratio: t.Share | None = None
    max_steps: t.Count | None = None
    num_train_epochs: t.Positive | None = None
    learning_rate: t.Positive = 0.0002
    optim: str | None = None
    optim_args: t.Settings | None = None
    max_grad_norm: t.NotNegative = 1.0
    optimizer_in_backward: bool = False
    masters_on_host: bool = False
    weight_decay: t.NotNegative = 0.01
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: t.Settings | None = None
    lora_plus_ratio: t.AtLeast1 | None = None
    embedding_learning_rate: t.Positive | None = None
    learning_rates: t.Rates | None = None
    neftune_noise_alpha: t.Positive | None = None
    eval_steps: t.Count | None = None
    early_stopping_patience: t.Count | None = None
    load_best_model_at_end: bool = False
    use_gradient_checkpointing: t.Recompute = False
    seed: t.Seed = 3407
    no_probe: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"
    fsdp: t.FilePath | None = None
    deepspeed: t.FilePath | None = None

    @property
    def rows_of_step(self) -> int:
        """Rows of a step on each device; 1 until "auto" is resolved."""
        return self.per_device_train_batch_size if isinstance(self.per_device_train_batch_size, int) else 1


class DistillOptions(Section):
    """For the objective distill: the teacher, and what the distance from it counts."""

    teacher: t.FilePath = "base"
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    kl_weight: t.NotNegative = 0.1
    ce_weight: t.NotNegative = 1.0
    temperature: t.Positive = 1.0


class RolloutOptions(Section):
    """For the objective rollouts: what makes targets of them, and how they are generated."""

    rollout_function: t.FilePath | None = None
    max_new_tokens: t.Count = 256
    num_generations: t.Count = 1
    rollout_temperature: t.NotNegative = 1.0
    generation_batch_size: t.Count = 16


class PreferenceOptions(Section):
    """For the objectives dpo, kto and orpo: what the model learns from answers that somebody prefers."""

    beta: t.Positive = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: t.BelowHalf = 0.0
    desirable_weight: t.NotNegative = 1.0
    undesirable_weight: t.NotNegative = 1.0


class OutputOptions(Section):
    """What the run writes and where, and how to continue an earlier one."""

    output_dir: t.FilePath | None = None
    dry_run: bool = False
    resume: bool = False
    overwrite_output_dir: bool = False
    logging_steps: t.Count = 1
    verbose: bool = False
    save_steps: t.Count | None = None
    save_delay_steps: t.CountFrom0 | None = None
    report_to: str = "none"
    save_model: bool = False
    save_method: Literal["merged_16bit", "lora", "lora_vllm"] = "merged_16bit"
    save_path: t.FilePath | None = None
    push_to_hub: t.Repository | None = None
    config: t.FilePath | None = None

    @property
    def folder(self) -> Path:
        """`output_dir`, after `resolve`."""
        return Path(str(self.output_dir))


class TrainOptions(Section):
    """All options of a run. A value is None where the rest of the run decides it."""

    model: ModelOptions = ModelOptions()
    adapter: AdapterOptions = AdapterOptions()
    data: DataOptions = DataOptions()
    images: ImageOptions = ImageOptions()
    training: TrainingOptions = TrainingOptions()
    distill: DistillOptions = DistillOptions()
    rollouts: RolloutOptions = RolloutOptions()
    preferences: PreferenceOptions = PreferenceOptions()
    output: OutputOptions = OutputOptions()
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _places: dict[str, Place | None] = PrivateAttr(default_factory=dict)  # `dataset.1.path` -> file, line

    @property
    def given(self) -> dict[str, Any]:
        """The values of the command line and of config files, by name, whatever has changed since."""
        return self._given

    def place_of(self, name: str) -> Place | None:
        """The file and line that set an option or a part of it, such as `dataset.1.path`, or hold it."""
        while name not in self._places and "." in name:
            name = name.rpartition(".")[0]
        return self._places.get(name)

    @property
    def is_demo(self) -> bool:
        """Whether a bundled model trains on the data that came with it."""
        return self.model.model_name == self.data.dataset and self.model.model_name in BUNDLED_MODELS


class Option(NamedTuple):
    """An option, as flags and documents need it."""

    section: str
    names: list[str]  # its own, and aliases
    unit: str
    help: str
    default: Any
    shown_default: str
    types: list[Any]  # plain types, and the words that a value may be
    bare: str | None  # the value of a flag without one
    takes_several: bool  # one flag holds several values, so that a second flag would drop the first


def _types(annotation: object) -> list[Any]:
    """The plain types and the words of an annotation."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return [bool if isinstance(each, bool) else each for each in parts]
    if kind in (Annotated, Union, UnionType):
        return [each for part in parts[: 1 if kind is Annotated else None] for each in _types(part)]
    return [kind or annotation]


def _option(section: str, name: str, field: FieldInfo) -> Option:
    types, default, text = _types(field.annotation), field.default, _TEXTS[section][name]
    words = ["true", "false"] * (bool in types) + [word for word in types if isinstance(word, str)]
    plain = f"{default:g}" if isinstance(default, float) else str(default)
    shown = text["default"] if default is None else plain.lower() if bool in types else plain
    names = [name, *(alias for alias, its_name in ALIASES.items() if its_name == name)]
    unit, bare = text.get("unit", "|".join(words)), text.get("bare", "true" if bool in types else None)
    several = list in types or dict in types
    return Option(section, names, unit, text["help"], default, shown, types, bare, several)


SECTIONS: dict[str, type[Section]] = {n: type(each) for n, each in TrainOptions()}
_TEXTS = yaml.safe_load(files("unsloth_pack").joinpath("config/options.yaml").read_text(encoding="utf-8"))
OPTIONS = {n: _option(s, n, f) for s, kind in SECTIONS.items() for n, f in kind.model_fields.items()}


def flat(options: Section) -> dict[str, Any]:
    """The value of every option of a section or of all, by name."""
    values: dict[str, Any] = {}
    for name, value in options:
        values |= flat(value) if isinstance(value, Section) else {name: value}
    return values


def nested(values: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Sort values by name into sections."""
    return {s: {n: v for n, v in values.items() if OPTIONS[n].section == s} for s in SECTIONS}


def changed(options: TrainOptions, values: Mapping[str, object]) -> TrainOptions:
    """Copy the options with other values, by name, which are not checked."""
    update = {s: getattr(options, s).model_copy(update=new) for s, new in nested(values).items() if new}
    return options.model_copy(update=update)


def validated(values: Mapping[str, object]) -> tuple[TrainOptions, list[tuple[str, str]]]:
    """Make options of values; where some are wrong, returns the place and the text of each mistake."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        options = TrainOptions.model_validate(nested(given))
    except ValidationError as error:
        return TrainOptions(), [*t.mistakes(error)]
    read = flat(options)
    options._given = {name: read[name] for name in given}
    return options, []
