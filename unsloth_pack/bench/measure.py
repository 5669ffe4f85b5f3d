"""Measure a case: a short training run, in a process that shares neither memory nor patches with others."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig, PeftModel, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args
from transformers.utils import is_flash_attn_2_available

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.bench import close_outputs
from unsloth_pack.bench.breakdown import break_down
from unsloth_pack.checkpoints import loading
from unsloth_pack.lora.targets import list_default_names
from unsloth_pack.memory.checkpointing import CheckpointingMode, enable_checkpointing
from unsloth_pack.modules import base_of
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.report.callbacks import peak_memory
from unsloth_pack.report.terminal import document_lengths
from unsloth_pack.training.trainer import RunTrainer, make_trainer
from unsloth_pack.training.trl_setup import sft_config
from unsloth_pack.training.updates import TokenCounter

SEED = 3407
_WARM_UP = {"cuda": 10, "cpu": 1}  # steps, to compile kernels and capture common forms of rows


@dataclass(frozen=True)
class Case:
    """One short training run."""

    model_name: str  # "demo", a folder or a hub name of a model, not of an adapter
    rows: str  # folder of tokenised documents, or of packed rows
    is_packed: bool
    is_patched: bool  # else plain transformers and PEFT
    max_seq_length: int
    rows_per_step: int  # of a micro-batch, which is the whole update
    steps: int  # measured or profiled, after the warm-up
    load_in_4bit: bool = False
    load_in_fp8: bool = False  # of the patched model; the plain one stays in 16 bits
    attn_backend: str = "auto"
    use_gradient_checkpointing: CheckpointingMode = False  # the plain model recomputes unless it is False
    is_profiled: bool = False  # break the step down instead of timing it


@dataclass(frozen=True)
class Figures:
    """The figures of a run. Speeds count no padding."""

    attention: str
    step_graphs: str | None  # the captured graphs of the step, or why there are none; None for a plain model
    startup_seconds: float  # from the start of the process to the first step
    first_step_seconds: float  # with compilation
    step_ms: float  # mean over the steps; the profiler slows the host
    tokens_per_second: float
    documents_per_second: float
    tokens_padded: float  # the padding's share of the computed tokens
    tflops: float  # a device, of model FLOPs
    mfu: float | None  # shares of the chip's peak, 0 to 1; None if it is not known
    hfu: float | None  # of a patched model
    peak_memory_bytes: int
    peak_memory_of: str
    kernel_ms: dict[str, float] | None = None  # of a profiled step, by category
    busy_ms: float | None = None  # of a profiled step, with any activity


def measure_apart(case: Case) -> Figures:
    """Measure in a fresh Python process, which prints nothing; raise what it raises."""
    with (
        TemporaryDirectory(prefix="unsloth-pack-bench-") as folder,
        ProcessPoolExecutor(1, get_context("spawn"), close_outputs) as pool,
    ):
        return pool.submit(measure, case, Path(folder), time.time()).result()


def plain_packing_leaks() -> bool:
    """Return True if transformers' own attention on this machine leaks between packed documents.

    Only FlashAttention's varlen form never does. The other backends read the boundaries from `position_ids`,
    and ignore them with a cache or a mask.
    """
    return not (torch.cuda.is_available() and is_flash_attn_2_available())


def measure(case: Case, folder: Path, started: float) -> Figures:
    """Train for a few steps, with the trainer's output in `folder`; `started` is the time of the request."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if case.is_profiled:
        with profile(activities=activities):  # loads CUPTI, which must come before a capture
            pass
    rows = load_from_disk(case.rows)
    assert isinstance(rows, Dataset)
    model, tokenizer = _patched_model(case) if case.is_patched else _plain_model(case)
    watch = _Watch(_WARM_UP["cuda" if on_gpu else "cpu"], case.steps)
    if case.is_profiled:
        profiler = profile(activities=activities)
        watch.on_first, watch.on_last = profiler.start, profiler.stop
    config = sft_config(
        str(folder / "out"),
        padding_free=case.is_packed,
        dtype=loading.weight_dtype(None),
        per_device_train_batch_size=case.rows_per_step,
        gradient_accumulation_steps=1,
        max_steps=watch.last,
        learning_rate=2e-4,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        seed=SEED,
    )
    trainer = make_trainer(model, tokenizer, config, rows, None, [watch])
    watch.trainer = trainer
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    startup_seconds = time.time() - started
    trainer.train()

    n_bytes, what = peak_memory()
    lengths = document_lengths(rows)
    kernel_ms, busy_ms = (
        break_down(profiler.events(), case.steps, on_gpu) if case.is_profiled else (None, None)
    )
    patch = patch_of(model)
    trained = watch.trained
    use = trainer.counts.chips.utilisation(trained.model_flops, trained.hardware_flops, watch.seconds)
    return Figures(
        attention=patch.report.attn_backend if patch else str(model.config._attn_implementation),
        step_graphs=str(base_of(model).get_decoder().step_graphs) if patch else None,
        startup_seconds=startup_seconds,
        first_step_seconds=watch.first_step_seconds,
        step_ms=1e3 * watch.seconds / case.steps,
        tokens_per_second=trained.tokens / watch.seconds,
        documents_per_second=trained.tokens / float(lengths.mean()) / watch.seconds,
        tokens_padded=1 - trained.tokens / trained.slots,
        tflops=use["tflops"],
        mfu=use.get("mfu"),
        hfu=use.get("hfu"),
        peak_memory_bytes=n_bytes,
        peak_memory_of=what,
        kernel_ms=kernel_ms,
        busy_ms=busy_ms,
    )


def _patched_model(case: Case) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    model, tokenizer = FastLanguageModel.from_pretrained(
        case.model_name,
        case.max_seq_length,
        load_in_4bit=case.load_in_4bit,
        load_in_fp8=case.load_in_fp8,
        attn_backend=case.attn_backend,
        random_state=SEED,
    )
    model = FastLanguageModel.get_peft_model(
        model, use_gradient_checkpointing=case.use_gradient_checkpointing, random_state=SEED
    )
    return model, tokenizer


def _plain_model(case: Case) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Load the same model and adapter with plain transformers and PEFT, and their best attention here."""
    set_seed(SEED)
    source, dtype = loading.find_model(case.model_name)[0], loading.weight_dtype(None)
    model = loading.load_model(
        source,
        dtype=dtype,
        device_map=loading.own_device(),
        quantization_config=loading.quantization(case.load_in_4bit, False, dtype),
        attn_implementation="sdpa" if plain_packing_leaks() else "flash_attention_2",
    )
    config = LoraConfig(r=16, lora_alpha=16, target_modules=list_default_names(model), task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    enable_checkpointing(model, case.use_gradient_checkpointing is not False)
    return model, loading.load_tokenizer(source)


class _Watch(TrainerCallback):
    """Time the first step, then all steps after the warm-up together; only these times wait for the device.

    `on_first` and `on_last` are called when the measured steps begin and end.
    """

    trainer: RunTrainer

    def __init__(self, warm_up: int, steps: int):
        self.warm_up, self.last = warm_up, warm_up + steps
        self.on_first: Callable[[], object] = lambda: None
        self.on_last: Callable[[], object] = lambda: None
        self.first_step_seconds = self.seconds = 0.0
        self.trained = TokenCounter()  # in the measured steps

    def on_step_begin(self, args: Args, state: State, control: Control, **_: object) -> None:
        if state.global_step == 0:
            self._start = _now()

    def on_step_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        step = state.global_step
        if step == 1:
            self.first_step_seconds = _now() - self._start
        if step == self.warm_up:
            self._before = self.trainer.trained
            self.on_first()
            self._start = _now()
        elif step == self.last:
            self.seconds = _now() - self._start
            self.on_last()
            pairs = zip(astuple(self._before), astuple(self.trainer.trained), strict=True)
            self.trained = TokenCounter(*(after - before for before, after in pairs))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
