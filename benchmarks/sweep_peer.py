"""One peer of `sweep.py`, in a process that trains point after point: a job a line in, an answer a line out.

    python benchmarks/sweep_peer.py PEER     of ours, unsloth, trl, trl+liger; builder makes the models

Every peer trains through TRL's own `SFTTrainer` with the same options. It loads the model for each point, so
that no point inherits what another one switched on, and frees it before it answers.
"""

import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from shapes import EVERY_SHAPE, build, device_name

SEED = 3407
SPARE_ROWS = 1.5  # how much more text a run gets than it trains, so that no epoch ends within it
FULL = 0.97  # of a row: packing leaves a part of a row at the end of each thousand documents
FAILED_LETTERS = 300
STACK = ("datasets.Dataset", "peft.LoraConfig", "transformers.AutoModelForCausalLM", "trl.SFTTrainer")


def main() -> int:
    peer = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print is not an answer

    def answer(found: Mapping[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    import_stack(peer)
    import torch

    on_gpu = torch.cuda.is_available()
    answer({"ready": peer, "device": device_name(), "cuda": torch.version.cuda})
    for line in sys.stdin:
        job = json.loads(line)
        found = attempt(peer, job)
        gc.collect()
        if on_gpu:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                found["left_GiB"] = round(torch.cuda.memory_allocated() / 2**30, 2)
            except RuntimeError:  # an illegal access poisons the device for the whole process
                answer(found)
                return 1
        answer(found)
    return 0


def import_stack(peer: str) -> None:
    """Import what a peer needs, so that no point waits for it. Unsloth comes before what it changes."""
    own = {"ours": ["unsloth_pack.FastLanguageModel"], "unsloth": ["unsloth.FastLanguageModel"]}
    for path in (*own.get(peer, []), *STACK):
        module, _, name = path.rpartition(".")
        getattr(import_module(module), name)


def attempt(peer: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a job, or `failed` and why. No traceback lives on: it would hold the model."""
    try:
        if peer == "builder":
            texts = json.loads(Path(job["texts"]).read_text(encoding="utf-8"))
            return {"model": build(job["shape"], Path(job["work"]), texts)}
        return train(peer, job)
    except (Exception, SystemExit) as error:
        kind = "out of memory" if type(error).__name__ == "OutOfMemoryError" else type(error).__name__
        return {"failed": f"{kind}: {' '.join(str(error).split())[:FAILED_LETTERS]}"}


def train(peer: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one point.

    Only full rows are trained. Times are of the steps after the warm-up. Tokens are counted where the trainer
    hands them to the model. `train_s` is of all steps, with what the first ones compile and capture. The peak
    leaves out what the process still held of earlier points.
    """
    import torch
    from transformers import TrainerCallback
    from trl import SFTTrainer

    on_gpu = torch.cuda.is_available()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    began = time.perf_counter()
    model, tokenizer, lora = load(peer, point)
    load_s = time.perf_counter() - began
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=documents(point, tokenizer),
        args=sft_config(peer, point),
        peft_config=lora,
        callbacks=[Clock()],
    )
    trainer.train_dataset = full_rows(trainer.train_dataset, point)
    counted: list[int] = []
    training_step = trainer.training_step

    def count_and_train(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        mask = inputs.get("attention_mask")
        counted.append(inputs["input_ids"].numel() if mask is None else int(mask.sum()))
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = count_and_train
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    training_began = time.perf_counter()
    trainer.train()
    train_s = time.perf_counter() - training_began
    steps = [end - start for start, end in itertools.pairwise(ends)][point["warm"] - 1 :]
    step, tokens = statistics.median(steps), statistics.mean(counted[point["warm"] :])
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    return {
        "step_ms": round(step * 1e3, 1),
        "p90_ms": round(sorted(steps)[int(len(steps) * 0.9)] * 1e3, 1),
        "tok_s": round(tokens / step),
        "tokens_update": round(tokens),
        "peak_GiB": round(peak / 2**30, 2),
        "load_s": round(load_s, 1),
        "train_s": round(train_s, 2),
        "loss": [round(float(log["loss"]), 4) for log in trainer.state.log_history if "loss" in log],
    }


def load(peer: str, point: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The model, its tokenizer, and the LoRA config where the trainer is to apply it."""
    import torch

    on_gpu, folder, in_4bit = torch.cuda.is_available(), point["model"], point["base"] == "4-bit"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    targets = list(EVERY_SHAPE[point["shape"]].projections)
    lora = {"r": point["rank"], "lora_alpha": point["rank"], "lora_dropout": point["dropout"]}
    if peer in ("ours", "unsloth"):
        if peer == "unsloth":
            from unsloth import FastLanguageModel
        else:
            from unsloth_pack import FastLanguageModel
        model, tokenizer = FastLanguageModel.from_pretrained(
            folder, max_seq_length=point["row_tokens"], dtype=dtype, load_in_4bit=in_4bit
        )
        model = FastLanguageModel.get_peft_model(
            model,
            **lora,
            target_modules=targets,
            bias="none",
            use_gradient_checkpointing="unsloth" if point["checkpointing"] else False,
            random_state=SEED,
        )
        return model, tokenizer, None

    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="flash_attention_2" if on_gpu else "sdpa",
        device_map={"": 0} if on_gpu else None,
        quantization_config=nf4 if in_4bit else None,
    )
    config = LoraConfig(**lora, target_modules=targets, task_type="CAUSAL_LM")
    return model, AutoTokenizer.from_pretrained(folder), config


def documents(point: Mapping[str, Any], tokenizer: Any) -> Any:
    """Texts for all steps of a run, repeated where there are too few."""
    from datasets import Dataset

    texts = json.loads(Path(point["texts"]).read_text(encoding="utf-8"))
    lengths = [min(len(ids), point["row_tokens"]) for ids in tokenizer(texts)["input_ids"]]
    steps = point["warm"] + point["timed"]
    wanted = SPARE_ROWS * steps * point["rows"] * point["row_tokens"]
    chosen, tokens = [], 0
    for text, length in itertools.cycle(zip(texts, lengths, strict=True)):
        chosen.append(text)
        tokens += length
        if tokens >= wanted:
            return Dataset.from_dict({"text": chosen})


def full_rows(rows: Any, point: Mapping[str, Any]) -> Any:
    """The full ones of these rows, so that the median step is of one length, the same for all peers.

    Raises:
        ValueError: fewer are left than are trained.
    """
    full = rows.filter(lambda row: len(row["input_ids"]) >= FULL * point["row_tokens"])
    wanted = (point["warm"] + point["timed"]) * point["rows"]
    if len(full) < wanted:
        raise ValueError(f"{len(full)} of {len(rows)} packed rows are full, {wanted} are to be trained")
    return full


def sft_config(peer: str, point: Mapping[str, Any]) -> Any:
    """TRL's options; those whose defaults differ between the peers are fixed."""
    import torch
    from trl import SFTConfig

    on_gpu = torch.cuda.is_available()
    return SFTConfig(
        output_dir="out",
        per_device_train_batch_size=point["rows"],
        gradient_accumulation_steps=1,
        max_steps=point["warm"] + point["timed"],
        warmup_steps=5,
        learning_rate=2e-4,
        logging_steps=5,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        weight_decay=0.01,
        lr_scheduler_type="linear",
        seed=SEED,
        report_to="none",
        disable_tqdm=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        max_length=point["row_tokens"],
        packing=True,
        dataset_num_proc=1,  # each worker packs its share alone, and Unsloth starts one for each core
        dataset_text_field="text",
        save_strategy="no",
        gradient_checkpointing=point["checkpointing"] and peer.startswith("trl"),
        use_liger_kernel=peer == "trl+liger",
    )


if __name__ == "__main__":
    sys.exit(main())
