"""The options of `train`, as they stand in its help, in config files and in a run's metrics file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unsloth_pack.errors import LAST_SEED
from unsloth_pack.recipe.flags import choice, option, switch
from unsloth_pack.recipe.kinds import json_object, path, real, switch_or, text, whole

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_HELP = "number format of the weights"
DTYPE_UNSET = "bfloat16 if the GPU has it, else float16; float32 on a CPU"
SAVE_METHODS = ("merged_16bit", "lora")
RECOMPUTING = ("offload", "unsloth", "auto")  # words of --use_gradient_checkpointing beside true and false
DATA_HELP = (
    "demo (bundled), a json, jsonl, csv, parquet or txt file, a folder, or a name on the Hugging Face hub"
)


@dataclass(frozen=True)
class ModelOptions:
    """The model that trains, and how its frozen weights are held."""

    model_name: str = option(
        "demo", path, "demo (bundled), a folder, or a name on the Hugging Face hub", "MODEL"
    )
    max_seq_length: int = option(2048, whole(1), "longest document, or longest packed row", "TOKENS")
    dtype: str | None = choice(None, DTYPES, DTYPE_HELP, unset=DTYPE_UNSET)
    load_in_4bit: bool = switch(False, "hold the frozen weights in 4 bits (NF4, by bitsandbytes)")
    load_in_8bit: bool = switch(False, "hold the frozen weights in 8 bits (int8, by bitsandbytes)")
    load_in_fp8: bool = switch(False, "hold the frozen weights in fp8, on GPUs that compute in it")
    attn_backend: str = option(
        "auto",
        text,
        "what computes attention: auto, flash, xformers, triton or sdpa; `unsloth-pack doctor` shows which "
        "can run",
        "BACKEND",
    )


@dataclass(frozen=True)
class AdapterOptions:
    """The LoRA adapter: the small matrices that train beside the frozen weights."""

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
        json_object,
        "start the adapter with LoftQ: the arguments of PEFT's LoftQConfig",
        "JSON",
        unset="no LoftQ",
    )


@dataclass(frozen=True)
class DataOptions:
    """The documents that the model learns from, and how they become rows."""

    dataset: str = option("demo", path, f"{DATA_HELP}; a folder may hold what `pack` wrote", "DATA")
    eval_dataset: str | None = option(
        None, path, "data to evaluate on, ten times during the run; takes what --dataset takes", "DATA"
    )
    streaming: bool = switch(
        False,
        "read, tokenise and pack the data while training, never as a whole; needs max_steps. Files may be "
        "compressed (gz, zst, xz, bz2), and a pattern such as 'data/*.jsonl.gz' names several",
    )
    sample_packing: bool = switch(
        False, "put several documents into a row; no document sees another", alias="packing"
    )
    keep_examples_per_update: bool = switch(
        False,
        "accumulate over fewer packed rows, so that an update sees as many documents as without packing",
    )
    padding_free: bool = switch(False, "join the documents of a batch into one row instead of padding them")
    eval_packing: bool | None = switch(None, "pack the evaluation data", unset="as the training data")
    max_token_loss: float = option(
        0.01,
        real(0),
        "refuse to train if truncation and dropping discard a greater share of the tokens",
        "SHARE",
    )
    num_proc: int | None = option(
        None,
        whole(1),
        "processes that read and tokenise the data",
        "PROCESSES",
        unset="one for each core; with streaming, one beside each process that trains",
    )
    train_on_responses_only: bool = switch(
        False, "in conversations, train on what the assistant says only, not on what the user says"
    )


@dataclass(frozen=True)
class TrainingOptions:
    """How the adapter is trained, and for how long."""

    per_device_train_batch_size: int | None = option(
        None, whole(1), "rows of a step on each device", "ROWS", unset="1 with packing, else 2"
    )
    per_device_eval_batch_size: int | None = option(
        None, whole(1), "rows of an evaluation step on each device", "ROWS", unset="as for training"
    )
    gradient_accumulation_steps: int = option(
        4, whole(1), "steps, each a forward and a backward pass, before the weights are updated", "STEPS"
    )
    warmup_steps: int = option(
        5, whole(0), "updates at the start in which the learning rate rises from 0", "UPDATES"
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
        text,
        "optimizer, by its name in transformers",
        "NAME",
        unset="adamw_torch; on CUDA its fused form",
    )
    weight_decay: float = option(0.01, real(0), "weight decay of the trained weights", "RATE")
    lr_scheduler_type: str = option(
        "linear",
        text,
        "course of the learning rate, by its name in transformers: linear, cosine, ...",
        "NAME",
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
        path,
        "divide the weights among torchrun's processes with FSDP2: full (also --fsdp alone), keep (weights "
        "stay gathered between forward and backward), or a json or yaml file of fsdp_config",
        "PRESET",
        unset="every process holds all weights",
        bare="full",
    )
    deepspeed: str | None = option(
        None,
        path,
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
    report_to: str = option("none", text, "none, all, or a tracker: tensorboard, wandb, ...", "TRACKER")
    save_model: bool = switch(False, "at the end, also save the model with the adapter merged into it")
    save_method: str = choice(
        "merged_16bit", SAVE_METHODS, "what save_model saves: lora is the adapter alone"
    )
    save_path: str | None = option(
        None, path, "new folder for save_model", "FOLDER", unset="merged, in output_dir"
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
    data: DataOptions = DataOptions()
    training: TrainingOptions = TrainingOptions()
    output: OutputOptions = OutputOptions()

    @property
    def is_demo(self) -> bool:
        """Whether the bundled model trains on the bundled data."""
        return self.model.model_name == self.data.dataset == "demo"

    @property
    def folder(self) -> Path:
        """`output_dir`, as `resolve` has filled it in."""
        return Path(str(self.output.output_dir))
