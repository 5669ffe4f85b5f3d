"""Options of `train`, a section of flags and of config files each.

A docstring below an option is its help: UNIT: what it is (default: what None stands for).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PrivateAttr, StringConstraints, ValidationError
from pydantic.fields import FieldInfo

from unsloth_pack.config import values as t
from unsloth_pack.demo import BUNDLED_MODELS

Dtype = Literal["bfloat16", "float16", "float32"]
ALIASES = {"packing": "sample_packing"}
Place = tuple[str, int]  # a file and a line


class Section(BaseModel):
    """Options that stand together."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelOptions(Section):
    """The model that trains, and how its frozen weights are held."""

    model_name: t.FilePath = "demo"
    """MODEL: demo or vision-demo (bundled), a folder, or a name on the Hugging Face hub"""
    max_seq_length: t.Count = 2048
    """TOKENS: longest document, or longest packed row"""
    dtype: Dtype | None = None
    """number format of the weights (default: bfloat16 if the GPU has it, else float16; float32 on a CPU)"""
    load_in_4bit: bool = False
    """hold the frozen weights in 4 bits (NF4, by bitsandbytes)"""
    load_in_8bit: bool = False
    """hold the frozen weights in 8 bits (int8, by bitsandbytes)"""
    load_in_fp8: bool = False
    """hold the frozen weights in fp8, on GPUs that compute in it"""
    attn_backend: Literal["auto", "flash", "xformers", "triton", "sdpa"] = "auto"
    """what computes attention; `unsloth-pack doctor` shows which can run"""


class AdapterOptions(Section):
    """What trains: a LoRA adapter, which is small matrices beside the frozen weights, or the model itself."""

    tuning: Literal["lora", "full"] = "lora"
    """what trains: lora is an adapter, full the weights of the model"""
    r: t.Count = 16
    """RANK: rank of the adapter; a higher one trains more weights"""
    lora_alpha: t.Positive = 16.0
    """ALPHA: the adapter's output is multiplied by lora_alpha / r"""
    lora_dropout: t.Share = 0.0
    """SHARE: probability with which an input of the adapter is dropped"""
    bias: Literal["none", "all", "lora_only"] = "none"
    """which bias vectors train, too"""
    random_state: t.Seed = 3407
    """SEED: seed of the adapter's initial weights"""
    use_rslora: bool = False
    """multiply by lora_alpha / sqrt(r) instead (rank-stabilised LoRA)"""
    use_dora: bool = False
    """also train the length of every weight vector, apart from its direction (DoRA)"""
    loftq_config: t.Settings | None = None
    """JSON: start the adapter with LoftQ: the arguments of PEFT's LoftQConfig (default: no LoftQ)"""
    target_modules: t.Modules | None = None
    """NAMES: layers that get an adapter: names with commas between them, all-linear, or a regular expression
    of whole paths; embed_tokens and lm_head are taken too (default: the projections of the architecture)"""
    layers_to_transform: t.Numbers | None = None
    """LAYERS: numbers of the decoder layers that get an adapter, from 0 (default: all)"""
    modules_to_save: t.Names | None = None
    """NAMES: modules that train as a whole beside the adapter, such as lm_head,norm (default: none)"""
    train_modules: t.Patterns | None = None
    """PATTERN: regular expressions over names of modules: with tuning full nothing else trains, with lora
    they train as a whole and get no adapter (default: none)"""
    freeze_modules: t.Patterns | None = None
    """PATTERN: likewise, of modules that do not train and get no adapter (default: none)"""
    trainable_token_indices: t.Numbers | None = None
    """IDS: ids of tokens whose embeddings train, those alone (default: none)"""
    add_tokens: t.FilePath | None = None
    """FILE: file of new tokens, one a line, or json or yaml of token and description; their embeddings begin
    as the mean of all, or of the description's, and train (default: none)"""
    init_adapter: t.FilePath | None = None
    """FOLDER: folder of an adapter that this run begins with, with a new optimizer (default: none)"""
    merge_init_adapter: bool = False
    """merge init_adapter into the base model, and train on top of it"""


class DataOptions(Section):
    """The documents that the model learns from, and how they become rows."""

    dataset: t.DataSets = "demo"
    """DATA: demo or vision-demo (bundled), a json, jsonl, csv, parquet or txt file (text may be compressed:
    gz, zst, xz, bz2), a folder, or a name on the Hugging Face hub; several between commas, or a JSON list of
    objects with path, weight, split, limit and columns. A folder may hold what `pack` wrote"""
    mixture: Literal["concatenate", "interleave_under", "interleave_over"] = "concatenate"
    """how several data sets become one. concatenate: one after the other, each as often as its weight says.
    interleave_under, interleave_over: each document from a data set drawn by the weights, until the first, or
    each, has been used up"""
    columns: t.Columns | None = None
    """THEIRS=OURS,...: what the columns of the data are called here, such as
    question=prompt,answer=completion; a name without a second one (id=) is left out (default: the names that
    the data has)"""
    split: t.Split | None = None
    """NAME: which split of a folder or hub data set is read: train, validation, test, or another name
    (default: train)"""
    sample_limit: t.Count | None = None
    """DOCUMENTS: use the first documents alone, for a smoke run (default: all)"""
    eval_dataset: t.EvalSets | None = None
    """DATA: data to evaluate on, ten times during the run; takes what --dataset takes, of folders and hub
    data sets the split test (default: none)"""
    eval_fraction: t.OpenShare | None = None
    """SHARE: hold out this share of the documents, and evaluate on them; equal documents stay together
    (default: none)"""
    streaming: bool = False
    """read, tokenise and pack the data while training, never as a whole; needs max_steps. A pattern such as
    'data/*.jsonl.gz' names several files"""
    sample_packing: bool = False
    """put several documents into a row; no document sees another"""
    keep_examples_per_update: bool = False
    """accumulate over fewer packed rows, so that an update sees as many documents as without packing"""
    padding_free: bool = False
    """join the documents of a batch into one row instead of padding them"""
    eval_packing: bool | None = None
    """pack the evaluation data (default: as the training data)"""
    max_token_loss: t.NotNegative = 0.01
    """SHARE: refuse to train if truncation and dropping discard a greater share of the tokens"""
    num_proc: t.Count | None = None
    """PROCESSES: processes that read and tokenise the data (default: one for each core; with streaming, one
    beside each process that trains)"""
    train_on_responses_only: bool = False
    """in conversations, train on what the assistant says only, not on what the user says"""

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
    """FOLDER: folder in which the paths of images begin, and out of which none may lead (default: paths have
    to be absolute)"""
    max_pixels: t.Count | None = None
    """PIXELS: make larger images smaller, to so many pixels (default: the model's own)"""
    min_pixels: t.Count | None = None
    """PIXELS: make smaller images larger, to so many pixels (default: the model's own)"""
    skip_broken_images: bool = False
    """leave out rows with an image that cannot be read, and count them, instead of refusing them"""
    shrink_images: bool = False
    """make the images of a document smaller that would be longer than max_seq_length with them"""
    dataloader_num_workers: t.CountFrom0 | None = None
    """PROCESSES: processes (threads of a stream) beside each that trains, which decode images; text needs
    none (default: on a GPU one for each core, at most 8; else 0)"""
    freeze_vit: bool = True
    """do not train the vision tower; false puts an adapter on it"""
    freeze_aligner: bool = False
    """do not train what carries images into the language model; else it trains as a whole"""
    freeze_llm: bool = False
    """do not train the language model, which gets no adapter then"""
    vit_lr: t.Positive | None = None
    """RATE: learning rate of the vision tower (default: learning_rate)"""
    aligner_lr: t.Positive | None = None
    """RATE: learning rate of the aligner (default: learning_rate)"""


class TrainingOptions(Section):
    """How it is trained, and for how long."""

    objective: Literal["sft"] = "sft"
    """what is trained for: sft is the next token of the data"""
    per_device_train_batch_size: t.Count | None = None
    """ROWS: rows of a step on each device (default: 1 with packing, else 2)"""
    per_device_eval_batch_size: t.Count | None = None
    """ROWS: rows of an evaluation step on each device (default: as for training)"""
    gradient_accumulation_steps: t.Count = 4
    """STEPS: steps, each a forward and a backward pass, before the weights are updated"""
    effective_batch_size: t.Count | None = None
    """ROWS: rows of an update over all processes, which decides gradient_accumulation_steps (default: what
    the two options above give)"""
    warmup_steps: t.CountFrom0 = 5
    """UPDATES: updates at the start in which the learning rate rises from 0"""
    warmup_ratio: t.Share | None = None
    """SHARE: likewise, as a share of all updates; in place of warmup_steps (default: as warmup_steps says)"""
    max_steps: t.Count | None = None
    """UPDATES: end after so many updates (default: 400 if num_train_epochs is not given)"""
    num_train_epochs: t.Positive | None = None
    """EPOCHS: end after so many passes over the data, if max_steps is not given (default: as many as
    max_steps takes)"""
    learning_rate: t.Positive = 0.0002
    """RATE: highest learning rate of the run"""
    optim: str | None = None
    """NAME: optimizer, by its name in transformers (default: adamw_torch; on CUDA its fused form)"""
    optim_args: t.Settings | None = None
    """NAME=VALUE,...: settings of that optimizer, such as bf16_stochastic_round=true,beta2=0.95 (default: its
    own defaults)"""
    max_grad_norm: t.NotNegative = 1.0
    """NORM: norm that the gradients of an update are clipped to; 0 clips nothing"""
    optimizer_in_backward: bool = False
    """with tuning full, apply and free each gradient as the backward pass makes it, to save GPU memory"""
    masters_on_host: bool = False
    """with tuning full in bfloat16, hold float32 weights and the optimizer's state in host memory, and update
    there"""
    weight_decay: t.NotNegative = 0.01
    """RATE: weight decay of the trained weights"""
    lr_scheduler_type: str = "linear"
    """NAME: course of the learning rate, by its name in transformers: linear, cosine, ..."""
    lr_scheduler_kwargs: t.Settings | None = None
    """JSON: settings of that course, such as '{"min_lr": 1e-6}' (default: none)"""
    lora_plus_ratio: t.AtLeast1 | None = None
    """RATIO: LoRA+: multiply the learning rate of each adapter's second matrix by this, often 16 (default:
    1)"""
    embedding_learning_rate: t.Positive | None = None
    """RATE: learning rate of what trains of the embeddings and the head (default: learning_rate)"""
    learning_rates: t.Rates | None = None
    """JSON: learning rates by regular expression over names of modules, such as '{"lm_head": 1e-5}'; the
    first that matches counts (default: none)"""
    neftune_noise_alpha: t.Positive | None = None
    """ALPHA: NEFTune: add noise to the embeddings in training, less in longer rows (default: no noise)"""
    eval_steps: t.Count | None = None
    """UPDATES: updates between two evaluations (default: a tenth of all updates)"""
    early_stopping_patience: t.Count | None = None
    """EVALUATIONS: end after so many evaluations in a row that were no better than the best (default: no
    early stopping)"""
    load_best_model_at_end: bool = False
    """save what had the lowest evaluation loss at the end; checkpoints are made as evaluations are"""
    use_gradient_checkpointing: t.Recompute = False
    """save GPU memory: compute layers again in the backward pass. offload (or unsloth) also holds their
    inputs in host memory, auto recomputes as few layers as memory allows"""
    seed: t.Seed = 3407
    """SEED: seed of the data's order and of dropout"""
    no_probe: bool = False
    """skip the check, before the first packed step, that no document sees another"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """stop or go on after an update whose loss or gradient is not finite; it is never applied"""
    fsdp: t.FilePath | None = None
    """PRESET: divide the weights among torchrun's processes with FSDP2: full (also --fsdp alone), keep
    (weights stay gathered between forward and backward), or a json or yaml file of fsdp_config (default:
    every process holds all weights)"""
    deepspeed: t.FilePath | None = None
    """PRESET: divide the weights with DeepSpeed: zero2, zero3, or a json or yaml file of its settings
    (default: no DeepSpeed)"""


class OutputOptions(Section):
    """What the run writes and where, and how to continue an earlier one."""

    output_dir: t.FilePath | None = None
    """FOLDER: folder for the adapter, the metrics and the checkpoints (default:
    outputs/<model>-<dataset>-<time>-<4 random digits>)"""
    resume: bool = False
    """continue the run in output_dir from its last checkpoint, with its options"""
    overwrite_output_dir: bool = False
    """replace the run that output_dir holds, and other files of the names that a run writes"""
    logging_steps: t.Count = 1
    """UPDATES: updates between two lines of the log"""
    save_steps: t.Count | None = None
    """UPDATES: updates between two checkpoints; the last two are kept (default: a checkpoint only if the run
    is stopped)"""
    save_delay_steps: t.CountFrom0 | None = None
    """UPDATES: make no checkpoint within the first so many updates, unless the run ends or is stopped
    (default: 0)"""
    report_to: str = "none"
    """TRACKER: none, all, or a tracker: tensorboard, wandb, ..."""
    save_model: bool = False
    """at the end, also save the model with the adapter merged into it"""
    save_method: Literal["merged_16bit", "lora"] = "merged_16bit"
    """what save_model saves: lora is the adapter alone"""
    save_path: t.FilePath | None = None
    """FOLDER: new folder for save_model (default: merged, in output_dir)"""
    push_to_hub: Annotated[str, StringConstraints(pattern="/")] | None = None
    """OWNER/NAME: repository on the Hugging Face hub that gets the result at the end; needs a token and a
    network (default: nothing is uploaded)"""
    config: t.FilePath | None = None
    """FILE: yaml file of options, a `name: value` line for each; flags on the command line win (default:
    none)"""

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
    types: tuple[Any, ...]
    bare: str | None  # the value of a flag without one

    @property
    def takes_several(self) -> bool:
        """Whether one flag holds several values, so that a second flag would drop the first."""
        return bool({list, dict} & {*self.types})


def _types(annotation: object) -> list[Any]:
    """The plain types and the words of an annotation."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [each for part in get_args(annotation) for each in _types(part)]
    if get_origin(annotation) is Literal:
        return [bool if isinstance(each, bool) else each for each in get_args(annotation)]
    return [get_origin(annotation) or annotation]


def _option(section: str, name: str, field: FieldInfo) -> Option:
    types = _types(field.annotation)
    unit, help, unset = _HELP.findall(" ".join(str(field.description).split()))[0]
    words = ["true", "false"] * (bool in types) + [word for word in types if isinstance(word, str)]
    default = "" if field.default is None else f"{field.default:g}" if float in types else str(field.default)
    shown = unset or (default.lower() if bool in types else default)
    names = [name, *(alias for alias, its_name in ALIASES.items() if its_name == name)]
    bare = "true" if bool in types else "full" if name == "fsdp" else None
    return Option(section, names, unit or "|".join(words), help, field.default, shown, tuple(types), bare)


SECTIONS: dict[str, type[Section]] = {n: type(each) for n, each in TrainOptions()}
_HELP = re.compile(r"^(?:([A-Z/=,.]+): )?(.*?)(?: \(default: (.*)\))?$")
OPTIONS = {n: _option(s, n, f) for s, kind in SECTIONS.items() for n, f in kind.model_fields.items()}


def names_in(text: str) -> list[str]:
    """The options that a text names outside of quotes, in order."""
    words = re.findall(r"(?:(?<=--)|(?<![\w./-]))\w+(?![\w/-]|\.\w)", re.sub(r"'[^']*'", "''", text))
    return [*dict.fromkeys(ALIASES.get(word, word) for word in words if word in OPTIONS or word in ALIASES)]


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
