"""The options of `train`, as they stand in its help, in config files and in a run's metrics file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import LAST_SEED
from unsloth_pack.recipe.data_options import DataOptions
from unsloth_pack.recipe.flags import choice, option, switch
from unsloth_pack.recipe.image_options import ImageOptions
from unsloth_pack.recipe.kinds import json_object, name_of, path, path_of, real, settings, switch_or, whole
from unsloth_pack.recipe.module_kinds import names, names_of_modules, patterns, rates, whole_numbers

ATTN_BACKENDS = ("auto", "flash", "xformers", "triton", "sdpa")
DTYPES = ("bfloat16", "float16", "float32")
DTYPE_HELP = "number format of the weights"
DTYPE_UNSET = "bfloat16 if the GPU has it, else float16; float32 on a CPU"
SAVE_METHODS = ("merged_16bit", "lora")
RECOMPUTING = ("offload", "unsloth", "auto")  # words of --use_gradient_checkpointing beside true and false


@dataclass(frozen=True)
class ModelOptions:
    """The model that trains, and how its frozen weights are held."""

    model_name: str = option(
        "demo", path, "demo or vision-demo (bundled), a folder, or a name on the Hugging Face hub", "MODEL"
    )
    max_seq_length: int = option(2048, whole(1), "longest document, or longest packed row", "TOKENS")
    dtype: str | None = choice(None, DTYPES, DTYPE_HELP, unset=DTYPE_UNSET)
    load_in_4bit: bool = switch(False, "hold the frozen weights in 4 bits (NF4, by bitsandbytes)")
    load_in_8bit: bool = switch(False, "hold the frozen weights in 8 bits (int8, by bitsandbytes)")
    load_in_fp8: bool = switch(False, "hold the frozen weights in fp8, on GPUs that compute in it")
    attn_backend: str = choice(
        "auto", ATTN_BACKENDS, "what computes attention; `unsloth-pack doctor` shows which can run"
    )


@dataclass(frozen=True)
class AdapterOptions:
    """What trains: a LoRA adapter, which is small matrices beside the frozen weights, or the model itself."""

    tuning: str = choice(
        "lora", ("lora", "full"), "what trains: lora is an adapter, full the weights of the model"
    )
    r: int = option(16, whole(1), "rank of the adapter; a higher one trains more weights", "RANK")
    lora_alpha: float = option(
        16.0, real(above=0), "the adapter's output is multiplied by lora_alpha / r", "ALPHA"
    )
    lora_dropout: float = option(
        0.0, real(0, below=1), "probability with which an input of the adapter is dropped", "SHARE"
    )
    bias: str = choice("none", ("none", "all", "lora_only"), "which bias vectors train, too")
    random_state: int = option(3407, whole(0, LAST_SEED), "seed of the adapter's initial weights", "SEED")
    use_rslora: bool = switch(False, "multiply by lora_alpha / sqrt(r) instead (rank-stabilised LoRA)")
    use_dora: bool = switch(
        False, "also train the length of every weight vector, apart from its direction (DoRA)"
    )
    loftq_config: Mapping[str, Any] | None = option(
        None,
        json_object('{"loftq_bits": 4}'),
        "start the adapter with LoftQ: the arguments of PEFT's LoftQConfig",
        "JSON",
        unset="no LoftQ",
    )
    target_modules: str | Sequence[str] | None = option(
        None,
        names_of_modules,
        "layers that get an adapter: names with commas between them, all-linear, or a regular expression of "
        "whole paths; embed_tokens and lm_head are taken too",
        "NAMES",
        unset="the projections of the architecture",
    )
    layers_to_transform: Sequence[int] | None = option(
        None,
        whole_numbers(0),
        "numbers of the decoder layers that get an adapter, from 0",
        "LAYERS",
        unset="all",
    )
    modules_to_save: Sequence[str] | None = option(
        None, names, "modules that train as a whole beside the adapter, such as lm_head,norm", "NAMES"
    )
    train_modules: Sequence[str] | None = option(
        None,
        patterns,
        "regular expressions over names of modules: with tuning full nothing else trains, with lora they "
        "train as a whole and get no adapter",
        "PATTERN",
    )
    freeze_modules: Sequence[str] | None = option(
        None, patterns, "likewise, of modules that do not train and get no adapter", "PATTERN"
    )
    trainable_token_indices: Sequence[int] | None = option(
        None, whole_numbers(0), "ids of tokens whose embeddings train, those alone", "IDS"
    )
    add_tokens: str | None = option(
        None,
        path,
        "file of new tokens, one a line, or json or yaml of token and description; their embeddings begin as "
        "the mean of all, or of the description's, and train",
        "FILE",
    )
    init_adapter: str | None = option(
        None,
        path_of("the folder of an adapter"),
        "folder of an adapter that this run begins with, with a new optimizer",
        "FOLDER",
    )
    merge_init_adapter: bool = switch(False, "merge init_adapter into the base model, and train on top of it")


@dataclass(frozen=True)
class TrainingOptions:
    """How it is trained, and for how long."""

    objective: str = choice("sft", ("sft",), "what is trained for: sft is the next token of the data")
    per_device_train_batch_size: int | None = option(
        None, whole(1), "rows of a step on each device", "ROWS", unset="1 with packing, else 2"
    )
    per_device_eval_batch_size: int | None = option(
        None, whole(1), "rows of an evaluation step on each device", "ROWS", unset="as for training"
    )
    gradient_accumulation_steps: int = option(
        4, whole(1), "steps, each a forward and a backward pass, before the weights are updated", "STEPS"
    )
    effective_batch_size: int | None = option(
        None,
        whole(1),
        "rows of an update over all processes, which decides gradient_accumulation_steps",
        "ROWS",
        unset="what the two options above give",
    )
    warmup_steps: int = option(
        5, whole(0), "updates at the start in which the learning rate rises from 0", "UPDATES"
    )
    warmup_ratio: float | None = option(
        None,
        real(0, below=1),
        "likewise, as a share of all updates; in place of warmup_steps",
        "SHARE",
        unset="as warmup_steps says",
    )
    max_steps: int | None = option(
        None, whole(1), "end after so many updates", "UPDATES", unset="400 if num_train_epochs is not given"
    )
    num_train_epochs: float | None = option(
        None,
        real(above=0),
        "end after so many passes over the data, if max_steps is not given",
        "EPOCHS",
        unset="as many as max_steps takes",
    )
    learning_rate: float = option(2e-4, real(above=0), "highest learning rate of the run", "RATE")
    optim: str | None = option(
        None,
        name_of("the name of an optimizer, such as adamw_torch"),
        "optimizer, by its name in transformers",
        "NAME",
        unset="adamw_torch; on CUDA its fused form",
    )
    optim_args: Mapping[str, Any] | None = option(
        None,
        settings,
        "settings of that optimizer, such as bf16_stochastic_round=true,beta2=0.95",
        "NAME=VALUE,...",
        unset="its own defaults",
    )
    max_grad_norm: float = option(
        1.0, real(0), "norm that the gradients of an update are clipped to; 0 clips nothing", "NORM"
    )
    optimizer_in_backward: bool = switch(
        False,
        "with tuning full, apply and free each gradient as the backward pass makes it, to save GPU memory",
    )
    masters_on_host: bool = switch(
        False,
        "with tuning full in bfloat16, hold float32 weights and the optimizer's state in host memory, and "
        "update there",
    )
    weight_decay: float = option(0.01, real(0), "weight decay of the trained weights", "RATE")
    lr_scheduler_type: str = option(
        "linear",
        name_of("the name of a course, such as cosine"),
        "course of the learning rate, by its name in transformers: linear, cosine, ...",
        "NAME",
    )
    lr_scheduler_kwargs: Mapping[str, Any] | None = option(
        None,
        json_object('{"min_lr": 1e-6}'),
        """settings of that course, such as '{"min_lr": 1e-6}'""",
        "JSON",
    )
    lora_plus_ratio: float | None = option(
        None,
        real(1),
        "LoRA+: multiply the learning rate of each adapter's second matrix by this, often 16",
        "RATIO",
        unset="1",
    )
    embedding_learning_rate: float | None = option(
        None,
        real(above=0),
        "learning rate of what trains of the embeddings and the head",
        "RATE",
        unset="learning_rate",
    )
    learning_rates: Mapping[str, float] | None = option(
        None,
        rates,
        """learning rates by regular expression over names of modules, such as '{"lm_head": 1e-5}'; the """
        "first that matches counts",
        "JSON",
    )
    neftune_noise_alpha: float | None = option(
        None,
        real(above=0),
        "NEFTune: add noise to the embeddings in training, less in longer rows",
        "ALPHA",
        unset="no noise",
    )
    eval_steps: int | None = option(
        None, whole(1), "updates between two evaluations", "UPDATES", unset="a tenth of all updates"
    )
    early_stopping_patience: int | None = option(
        None,
        whole(1),
        "end after so many evaluations in a row that were no better than the best",
        "EVALUATIONS",
        unset="no early stopping",
    )
    load_best_model_at_end: bool = switch(
        False, "save what had the lowest evaluation loss at the end; checkpoints are made as evaluations are"
    )
    use_gradient_checkpointing: bool | Literal["offload", "unsloth", "auto"] = option(
        False,
        switch_or(*RECOMPUTING),
        "save GPU memory: compute layers again in the backward pass. offload (or unsloth) also holds their "
        "inputs in host memory, auto recomputes as few layers as memory allows",
        "|".join(("true", "false", *RECOMPUTING)),
        bare=True,
    )
    seed: int = option(3407, whole(0, LAST_SEED), "seed of the data's order and of dropout", "SEED")
    no_probe: bool = switch(
        False, "skip the check, before the first packed step, that no document sees another"
    )
    on_nonfinite: str = choice(
        "stop",
        ("stop", "skip"),
        "stop or go on after an update whose loss or gradient is not finite; it is never applied",
    )
    fsdp: str | None = option(
        None,
        path_of("full, keep, or the name of a file of fsdp_config"),
        "divide the weights among torchrun's processes with FSDP2: full (also --fsdp alone), keep (weights "
        "stay gathered between forward and backward), or a json or yaml file of fsdp_config",
        "PRESET",
        unset="every process holds all weights",
        bare="full",
    )
    deepspeed: str | None = option(
        None,
        path_of("zero2, zero3, or the name of a file of DeepSpeed's settings"),
        "divide the weights with DeepSpeed: zero2, zero3, or a json or yaml file of its settings",
        "PRESET",
        unset="no DeepSpeed",
    )


@dataclass(frozen=True)
class OutputOptions:
    """What the run writes and where, and how to continue an earlier one."""

    output_dir: str | None = option(
        None,
        path,
        "folder for the adapter, the metrics and the checkpoints",
        "FOLDER",
        unset="outputs/<model>-<dataset>-<time>-<4 random digits>",
    )
    resume: bool = switch(False, "continue the run in output_dir from its last checkpoint, with its options")
    overwrite_output_dir: bool = switch(
        False, "replace the run that output_dir holds, and other files of the names that a run writes"
    )
    logging_steps: int = option(1, whole(1), "updates between two lines of the log", "UPDATES")
    save_steps: int | None = option(
        None,
        whole(1),
        "updates between two checkpoints; the last two are kept",
        "UPDATES",
        unset="a checkpoint only if the run is stopped",
    )
    save_delay_steps: int | None = option(
        None,
        whole(0),
        "make no checkpoint within the first so many updates, unless the run ends or is stopped",
        "UPDATES",
        unset="0",
    )
    report_to: str = option(
        "none",
        name_of("the name of one tracker, or none, or all"),
        "none, all, or a tracker: tensorboard, wandb, ...",
        "TRACKER",
    )
    save_model: bool = switch(False, "at the end, also save the model with the adapter merged into it")
    save_method: str = choice(
        "merged_16bit", SAVE_METHODS, "what save_model saves: lora is the adapter alone"
    )
    save_path: str | None = option(
        None, path, "new folder for save_model", "FOLDER", unset="merged, in output_dir"
    )
    push_to_hub: str | None = option(
        None,
        name_of("the name of a repository, OWNER/NAME, or leave it out", may_be_secret=False),
        "repository on the Hugging Face hub that gets the result at the end; needs a token and a network",
        "OWNER/NAME",
        unset="nothing is uploaded",
    )
    config: str | None = option(
        None,
        path,
        "yaml file of options, a `name: value` line for each; flags on the command line win",
        "FILE",
    )


@dataclass(frozen=True)
class TrainOptions:
    """What `train` was asked for; a value is None if it was not given and the rest of the run decides."""

    model: ModelOptions = ModelOptions()
    adapter: AdapterOptions = AdapterOptions()
    data: DataOptions = field(default_factory=DataOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    training: TrainingOptions = TrainingOptions()
    output: OutputOptions = OutputOptions()

    @property
    def is_demo(self) -> bool:
        """Whether a bundled model trains on the data that came with it."""
        return self.model.model_name == self.data.dataset and self.model.model_name in BUNDLED_MODELS

    @property
    def folder(self) -> Path:
        """`output_dir`, as `resolve` has filled it in."""
        return Path(str(self.output.output_dir))
