"""Rows with images: updates a second of this package, plain TRL and Unsloth on the same documents.

    python benchmarks/vision.py [--case 2b-448,8b-448] [--peers ours,trl,unsloth] [--tower lora] [--json PATH]
    python benchmarks/vision.py --case tiny,tiny-ov --peers ours,trl         on a CPU

An update of every peer holds the same documents: those that fill one packed row of ours. The peers, which
do not pack images of these models, pad them to the longest. Texts are log-normal in length and images are
noise. All train through TRL's SFTTrainer with LoRA of rank 16 on the language model; `--tower lora` adapts
the tower, too. The aligner is frozen, so that all train the same. Cases of 8B recompute layers in the
backward pass, for every peer in its own way, because a padded batch does not fit otherwise; `--checkpointing`
does so in other cases.

`--images ready` (default) hands all peers the same pixels, made beforehand: losses have to agree, but for the
order in which documents come. `--images jpeg` begins with files, and each peer decodes them by its own
collator in `--workers` processes. Tokens are real tokens, padding not counted. Seconds and tokens a second
are medians of the updates after the warm-up. `mean` is all of their tokens by all of their time, in which
ours still captures forms of rows; `wait` is the share of it that the trainer waited for its loader.

Every run tells on its standard error when the model was loaded, the trainer made and each update done, with
the graphs that torch has compiled by then. A run that takes too long is printed with the last of these lines.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from peer_runs import parser_of, run_peers
from vision_batches import ReadyBatches, decoded_batches
from vision_shapes import build, processor_in, updates

PEERS = ("ours", "trl", "unsloth")
_BEGAN = time.perf_counter()


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        shape: of the model, by its name in `vision_shapes`.
        sides: of the images, by the name of their kind there.
        row_tokens: of a packed row at most.
        steps: updates of a run.
        warm: of them, the first that do not count.
        checkpointing: all peers recompute layers in the backward pass.
    """

    shape: str
    sides: str
    row_tokens: int = 8192
    steps: int = 32
    warm: int = 12
    checkpointing: bool = False


CASES = {
    f"{short}-{sides}": Case(shape, sides, checkpointing=short == "8b")
    for short, shape in (
        ("2b", "qwen3-vl-2b"),
        ("8b", "qwen3-vl-8b"),
        ("2.5-3b", "qwen2.5-vl-3b"),
        ("ov-4b", "onevision-4b"),
    )
    for sides in ("448", "1024", "mixed")
} | {
    short: Case(shape, "tiny", row_tokens=1024, steps=6, warm=2)
    for short, shape in (("tiny", "tiny"), ("tiny-2.5", "tiny-2.5"), ("tiny-ov", "tiny-onevision"))
}


def main() -> int:
    parser = parser_of(__doc__, CASES, "2b-448,8b-448", PEERS)
    add = parser.add_argument
    add("--tower", choices=("frozen", "lora"), default="frozen", help="what of the tower trains")
    add("--images", choices=("ready", "jpeg"), default="ready", help="pixels or files (default: ready)")
    add("--workers", type=int, default=8, help="processes of the loader (default: 8)")
    add("--checkpointing", action="store_true", help="recompute layers in every case")
    return run_peers(__file__, parser, CASES, PEERS, child, line_of)


def line_of(run: dict[str, Any]) -> str:
    how = "with" if run["checkpointing"] else "without"
    return (
        f"{run['ms']:.1f} ms an update, {run['tokens_s']:,.0f} tokens/s (mean {run['mean_tokens_s']:,.0f}), "
        f"{run['images_s']:,.1f} images/s, "
        f"{run['peak_GiB']:.2f} GiB, wait {run['wait']:.1%}, {run['tokens']:,.0f} of {run['places']:,.0f} "
        f"places hold a token, loss {run['losses'][-1]:.4f}\n"
        f"    tower {run['tower']}, images {run['images']}, {run['trained']:,} weights train {how} gradient "
        f"checkpointing ({run['recomputing']} modules)\n"
        f"    loaded in {run['load_s']:.0f} s, trained in {run['train_s']:.0f} s, {run['compiled']} graphs "
        "compiled after the warm-up"
    )


# In a process of its own


def say(what: str) -> None:
    """Tell how far this process has come, and after how many seconds."""
    print(f"{time.perf_counter() - _BEGAN:7.1f} s: {what}", file=sys.stderr, flush=True)


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    if what == "unsloth":  # it has to come before transformers
        import unsloth  # noqa: F401
    folder = build(CASES[name].shape, args.work)
    return {} if what == "build" else train(what, CASES[name], folder, args)


def load(peer: str, case: Case, folder: str, tower: str, checkpointing: bool) -> tuple[Any, Any]:
    """The model, and the configuration of an adapter that it has not got yet, or None."""
    import torch

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lora: dict[str, Any] = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0}
    if peer == "trl":
        return plain_model(folder, dtype, lora, tower)
    options: dict[str, Any] = {"max_seq_length": case.row_tokens, "load_in_4bit": False}
    parts = {"finetune_vision_layers": tower == "lora", "finetune_language_layers": True}
    if peer == "ours":
        from unsloth_pack import FastVisionModel

        model, _ = FastVisionModel.from_pretrained(folder, dtype=dtype, **options)
        parts["finetune_aligner"] = False
        return FastVisionModel.get_peft_model(
            model, use_gradient_checkpointing=checkpointing, **parts, **lora
        ), None
    from unsloth import FastVisionModel as Unsloth

    how = {"use_gradient_checkpointing": "unsloth" if checkpointing else False}
    model, _ = Unsloth.from_pretrained(folder, **options, **how)
    model = Unsloth.get_peft_model(model, **parts, **lora, **how)
    Unsloth.for_training(model)
    return model, None


def plain_model(folder: str, dtype: Any, lora: dict[str, Any], tower: str) -> tuple[Any, Any]:
    """transformers' own model, and PEFT's configuration of the same adapter as ours."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText

    from unsloth_pack.lora.trained_parts import TrainedParts, vision_targets

    on_gpu = torch.cuda.is_available()
    has_flash = on_gpu and importlib.util.find_spec("flash_attn") is not None
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="flash_attention_2" if has_flash else "sdpa"
    )
    targets, _ = vision_targets(model, TrainedParts(vision_layers=tower == "lora", aligner=False))
    config = LoraConfig(**lora, target_modules=targets, task_type="CAUSAL_LM")
    return model.to("cuda" if on_gpu else "cpu"), config


def train(peer: str, case: Case, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from unsloth_pack.images.families import make_image_family

    say("libraries imported")
    on_gpu = torch.cuda.is_available()
    checkpointing = case.checkpointing or args.checkpointing
    model, adapter = load(peer, case, folder, args.tower, checkpointing)
    say("model loaded")
    config, processor = processor_in(folder, case.shape)
    make = make_image_family(config, processor.image_processor)
    rows = updates(case.sides, case.row_tokens, make, case.steps)
    if args.images == "ready":
        collate: Any = ReadyBatches.of(rows, config, processor, packs=peer == "ours")
    else:
        collate = decoded_batches(peer, rows, model, config, processor)
    say("images made")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(Path(args.work) / f"vision-{peer}"),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            max_steps=case.steps,
            learning_rate=2e-4,
            warmup_steps=3,  # as all that follows, said to every peer: Unsloth's defaults are others
            lr_scheduler_type="linear",
            weight_decay=0.01,
            max_grad_norm=1.0,
            logging_steps=1,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            gradient_checkpointing=checkpointing and peer == "trl",
            bf16=on_gpu,
            use_cpu=not on_gpu,
            report_to="none",
            save_strategy="no",
            seed=3407,
            disable_tqdm=True,
            max_length=None,
            remove_unused_columns=False,
            dataset_text_field="",
            dataset_kwargs={"skip_prepare_dataset": True},
            dataloader_num_workers=args.workers,
            dataloader_pin_memory=on_gpu,
        ),
        train_dataset=Dataset.from_dict({"update": range(case.steps)}),
        processing_class=processor.tokenizer,
        data_collator=collate,
        peft_config=adapter,
    )
    say("trainer made")
    watch = Watch(make.described[0])
    watch.follow(trainer)
    loaded = time.perf_counter()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    modules = list(trainer.model.modules())
    return {
        **asdict(case),
        **watch.figures(case.warm),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "trained": sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad),
        "checkpointing": checkpointing,
        "recomputing": sum(bool(getattr(module, "gradient_checkpointing", False)) for module in modules),
        "tower": args.tower,
        "images": args.images,
        "load_s": loaded - _BEGAN,
        "train_s": time.perf_counter() - loaded,
    }


@dataclass
class Watch:
    """What a trainer does.

    Args:
        of_images: the argument of a call with an entry for each image.
        batches: tokens, places and images of each update.
        waits: seconds for each batch.
        ends: when each update was done.
        graphs: how many torch had compiled by then.
    """

    of_images: str
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)

    def follow(self, trainer: Any) -> None:
        """Look at a trainer from now on."""
        from transformers import TrainerCallback

        class Clock(TrainerCallback):
            def on_step_end(_, *args: Any, **kwargs: Any) -> None:
                self._step_done()

        trainer.add_callback(Clock())
        step, fetch = trainer.training_step, trainer.get_batch_samples

        def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
            tokens = ids.numel() if mask is None else int(mask.sum())
            self.batches.append((tokens, ids.numel(), len(inputs.get(self.of_images, ()))))
            return step(model, inputs, *args, **kwargs)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            fetched = fetch(*args, **kwargs)
            self.waits.append(time.perf_counter() - began)
            return fetched

        trainer.training_step, trainer.get_batch_samples = counted, timed

    def _step_done(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        dynamo = sys.modules.get("torch._dynamo.utils")
        self.graphs.append(dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)
        tokens, places, images = self.batches[-1]
        say(
            f"update {len(self.ends)} of {tokens:,} tokens in {places:,} places and {images} images done, "
            f"{self.graphs[-1]} graphs compiled"
        )

    def figures(self, warm: int) -> dict[str, Any]:
        """Of all updates but the first ones."""
        every = [after - before for before, after in pairwise(self.ends)]
        seconds, batches = every[warm - 1 :], self.batches[warm:]
        return {
            "ms": 1000 * statistics.median(seconds),
            "tokens_s": statistics.median(n / s for (n, _, _), s in zip(batches, seconds, strict=True)),
            "mean_tokens_s": sum(tokens for tokens, _, _ in batches) / sum(seconds),
            "images_s": sum(images for _, _, images in batches) / sum(seconds),
            "tokens": statistics.mean(tokens for tokens, _, _ in self.batches),
            "places": statistics.mean(places for _, places, _ in self.batches),
            "wait": sum(self.waits[warm : len(self.ends)]) / sum(seconds),
            "compiled": self.graphs[-1] - self.graphs[warm - 1],
            "seconds": seconds,
        }


if __name__ == "__main__":
    sys.exit(main())
