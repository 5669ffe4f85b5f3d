"""Rows with images: updates a second of this package, plain TRL and Unsloth on the same documents.

    python benchmarks/vision.py [--case 2b-448,8b-448] [--peers ours,trl,unsloth] [--tower lora] [--json PATH]
    python benchmarks/vision.py --case tiny --peers ours,trl         on a CPU

An update of every peer holds the same documents: those that fill one packed row of ours. The peers, which
cannot pack images, pad them to the longest. Texts are log-normal in length and images are noise. All train
through TRL's SFTTrainer with LoRA of rank 16 on the language model; `--tower lora` adapts the tower, too. The
aligner is frozen, so that all train the same.

`--images ready` (default) hands all peers the same pixels, made beforehand: losses have to agree, but for the
order in which documents come. `--images jpeg` begins with files, and each peer decodes them by its own
collator in `--workers` processes. Tokens are real tokens, padding not counted. Seconds and tokens a second
are medians of the updates after the warm-up. `mean` is all of their tokens by all of their time, in which
ours still captures forms of rows; `wait` is the share of it that the trainer waited for its loader.
"""

import argparse
import importlib.util
import io
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from peer_runs import parser_of, run_peers
from vision_shapes import SHAPES, Document, build, updates

PEERS = ("ours", "trl", "unsloth")
PROJECTIONS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
OF_TEXT = rf".*language_model.*\.({PROJECTIONS})"
OF_TOWER = r".*visual\.blocks.*\.(qkv|proj|linear_fc1|linear_fc2|gate_proj|up_proj|down_proj)"


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        shape: of the model, by its name in `vision_shapes`.
        sides: of the images, by the name of their kind there.
        row_tokens: of a packed row at most.
        steps: updates of a run.
        warm: of them, the first that do not count.
    """

    shape: str
    sides: str
    row_tokens: int = 8192
    steps: int = 32
    warm: int = 12


CASES = {
    f"{short}-{sides}": Case(shape, sides)
    for short, shape in (("2b", "qwen3-vl-2b"), ("8b", "qwen3-vl-8b"), ("2.5-3b", "qwen2.5-vl-3b"))
    for sides in ("448", "1024", "mixed")
} | {"tiny": Case("tiny", "448", row_tokens=1024, steps=6, warm=2)}


def main() -> int:
    parser = parser_of(__doc__, CASES, "2b-448,8b-448", PEERS)
    add = parser.add_argument
    add("--tower", choices=("frozen", "lora"), default="frozen", help="what of the tower trains")
    add("--images", choices=("ready", "jpeg"), default="ready", help="pixels or files (default: ready)")
    add("--workers", type=int, default=8, help="processes of the loader (default: 8)")
    return run_peers(__file__, parser, CASES, PEERS, child, line_of)


def line_of(run: dict[str, Any]) -> str:
    return (
        f"{run['ms']:.1f} ms an update, {run['tokens_s']:,.0f} tokens/s (mean {run['mean_tokens_s']:,.0f}), "
        f"{run['images_s']:,.1f} images/s, "
        f"{run['peak_GiB']:.2f} GiB, wait {run['wait']:.1%}, {run['tokens']:,.0f} of {run['places']:,.0f} "
        f"places hold a token, loss {run['losses'][-1]:.4f}"
    )


# In a process of its own


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    folder = build(CASES[name].shape, args.work)
    return {} if what == "build" else train(what, CASES[name], folder, args)


@dataclass(frozen=True, eq=False)
class ReadyBatches:
    """Batches with pixels made beforehand, from the numbers of updates.

    Args:
        packs: one row of all documents, else each padded to the longest.
        tokenizer: of single bytes.
    """

    documents: Sequence[Sequence[Document]]
    shape: str
    tokenizer: Any
    packs: bool

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        import torch

        (example,) = examples
        patch = SHAPES[self.shape].patch
        documents = self.documents[example["update"]]
        grids = [grid for document in documents for grid in document.grids(patch)]
        encoded = [self._encoded(document, patch) for document in documents]
        labels = [np.where(self._is_of_images(ids), -100, ids) for ids in encoded]
        for one in labels:
            one[0] = -100
        batch: dict[str, Any] = {}
        if grids:
            batch["image_grid_thw"] = torch.tensor(grids)
            n_patches = sum(rows * columns for _, rows, columns in grids)
            batch["pixel_values"] = _pixels(3 * 2 * patch * patch)[example["update"] :][:n_patches]
        if self.packs:
            batch["input_ids"] = torch.from_numpy(np.concatenate(encoded))[None]
            batch["labels"] = torch.from_numpy(np.concatenate(labels))[None]
            lengths = [len(ids) for ids in encoded]
            of_tokens = np.array(grids).reshape(-1, 3) // [1, 2, 2]
            positions = self._positions(batch["input_ids"][0].numpy(), lengths, of_tokens)
            return batch | {"packed_seq_lengths": lengths, "position_ids": positions}
        pad = self.tokenizer.pad_token_id
        batch["input_ids"] = _padded(encoded, pad)
        batch["labels"] = _padded(labels, -100)
        batch["attention_mask"] = _padded([np.ones_like(ids) for ids in encoded], 0)
        image = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return batch | {"mm_token_type_ids": (batch["input_ids"] == image).long()}

    def _positions(self, ids: np.ndarray, lengths: list[int], of_tokens: np.ndarray) -> Any:
        """`[4, 1, T]`, as `VisionDataCollator` makes them."""
        import torch

        from unsloth_pack.row.images import RowImages
        from unsloth_pack.row.packed_row import PackedRow

        row = PackedRow.of_lengths(tuple(lengths), torch.device("cpu"))
        is_placeholder = ids == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        axes = RowImages.of(is_placeholder, of_tokens.prod(axis=1), row).axes(row, of_tokens)
        return torch.from_numpy(np.stack([row.positions, *axes]))[:, None]

    def _encoded(self, document: Document, patch: int) -> np.ndarray:
        """`[L]` int64."""
        grids = document.grids(patch)
        text = self.tokenizer.apply_chat_template(document.messages([None] * len(grids)), tokenize=False)
        for _, rows, columns in grids:
            text = text.replace("<|image_pad|>", "<|image|>" * (rows * columns // 4), 1)
        text = text.replace("<|image|>", "<|image_pad|>")
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _is_of_images(self, ids: np.ndarray) -> np.ndarray:
        names = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
        return np.isin(ids, self.tokenizer.convert_tokens_to_ids(names))


@cache
def _pixels(numbers: int) -> Any:
    """`[40,000, numbers]` bfloat16: noise, of which every batch takes a part."""
    import torch

    return torch.randn(40_000, numbers, generator=torch.Generator().manual_seed(0)).bfloat16()


def _padded(rows: Sequence[np.ndarray], value: int) -> Any:
    import torch

    return torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(row) for row in rows], batch_first=True, padding_value=value
    )


@dataclass(frozen=True, eq=False)
class DecodedBatches:
    """Batches from image files, by a peer's own collator."""

    files: Sequence[Sequence[tuple[Document, list[bytes]]]]
    collate: Any
    peer: str

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        (example,) = examples
        return self.collate([self._row(*each) for each in self.files[example["update"]]])

    def _row(self, document: Document, files: list[bytes]) -> dict[str, Any]:
        """In the form that the collator takes: ours takes bytes, TRL's a column of images."""
        from PIL import Image

        if self.peer == "ours":
            return {"messages": document.messages(files)}
        images = [Image.open(io.BytesIO(file)) for file in files]
        if self.peer == "unsloth":
            return {"messages": document.messages(images)}
        return {"messages": document.messages([None] * len(images)), "images": images}


def train(peer: str, case: Case, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    if peer == "unsloth":  # before TRL is imported
        from unsloth import FastVisionModel
    elif peer == "ours":
        from unsloth_pack import FastVisionModel
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lora: dict[str, Any] = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0}
    more: dict[str, Any] = {}
    if peer == "trl":
        model, more["peft_config"] = plain_model(folder, dtype, lora, args.tower)
    else:
        options: dict[str, Any] = {"load_in_4bit": False}
        options |= {"dtype": dtype} if peer == "ours" else {}
        model, _ = FastVisionModel.from_pretrained(folder, max_seq_length=case.row_tokens, **options)
        no_checkpoints = {"use_gradient_checkpointing": False, "finetune_language_layers": True}
        aligner = {"finetune_aligner": False} if peer == "ours" else {}
        with_tower = args.tower == "lora"
        model = FastVisionModel.get_peft_model(
            model, finetune_vision_layers=with_tower, **lora, **no_checkpoints, **aligner
        )
        if peer == "unsloth":
            FastVisionModel.for_training(model)
    documents = updates(case.sides, case.row_tokens, SHAPES[case.shape].patch, case.steps)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if args.images == "ready":
        collate: Any = ReadyBatches(documents, case.shape, tokenizer, packs=peer == "ours")
    else:
        files = [[(document, document.jpegs()) for document in row] for row in documents]
        collate = DecodedBatches(files, own_collator(peer, model, folder), peer)
    config = SFTConfig(
        output_dir=str(Path(args.work) / f"vision-{peer}"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=case.steps,
        learning_rate=2e-4,
        logging_steps=1,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        seed=3407,
        max_length=None,
        remove_unused_columns=False,
        dataset_text_field="",
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_num_workers=args.workers,
        dataloader_pin_memory=on_gpu,
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"update": range(case.steps)}),
        processing_class=tokenizer,
        data_collator=collate,
        callbacks=[Clock()],
        **more,
    )
    batches: list[tuple[int, int, int]] = []
    waits: list[float] = []
    step, fetch = trainer.training_step, trainer.get_batch_samples

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask, ids, grids = (inputs.get(n) for n in ("attention_mask", "input_ids", "image_grid_thw"))
        tokens = ids.numel() if mask is None else int(mask.sum())
        batches.append((tokens, ids.numel(), 0 if grids is None else len(grids)))
        return step(model, inputs, *args, **kwargs)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        fetched = fetch(*args, **kwargs)
        waits.append(time.perf_counter() - began)
        return fetched

    trainer.training_step, trainer.get_batch_samples = counted, timed
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = [after - before for before, after in pairwise(ends)][case.warm - 1 :]
    warm = batches[case.warm :]
    return {
        "ms": 1000 * statistics.median(seconds),
        "tokens_s": statistics.median(tokens / s for (tokens, _, _), s in zip(warm, seconds, strict=True)),
        "mean_tokens_s": sum(tokens for tokens, _, _ in warm) / sum(seconds),
        "images_s": sum(images for _, _, images in warm) / sum(seconds),
        "tokens": statistics.mean(tokens for tokens, _, _ in batches),
        "places": statistics.mean(places for _, places, _ in batches),
        "wait": sum(waits[case.warm : case.steps]) / sum(seconds),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def plain_model(folder: str, dtype: Any, lora: dict[str, Any], tower: str) -> tuple[Any, Any]:
    """transformers' own model, and PEFT's configuration of the same adapter."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText

    on_gpu = torch.cuda.is_available()
    has_flash = on_gpu and importlib.util.find_spec("flash_attn") is not None
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="flash_attention_2" if has_flash else "sdpa"
    )
    targets = f"({OF_TEXT})|({OF_TOWER})" if tower == "lora" else OF_TEXT
    config = LoraConfig(**lora, target_modules=targets, task_type="CAUSAL_LM")
    return model.to("cuda" if on_gpu else "cpu"), config


def own_collator(peer: str, model: Any, folder: str) -> Any:
    """What the peer's users make batches of conversations with."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    from unsloth_pack.images.processor import VisionProcessor
    from unsloth_pack.images.tokens import IMAGE_TOKENS

    tokenizer, images = (
        AutoTokenizer.from_pretrained(folder),
        Qwen2VLImageProcessorPil.from_pretrained(folder),
    )
    tokens = IMAGE_TOKENS[model.config.model_type]
    processor = VisionProcessor(images, tokenizer, tokenizer.chat_template, tokens)
    if peer == "ours":
        from unsloth_pack import VisionDataCollator

        return VisionDataCollator(model, processor)
    if peer == "unsloth":
        from unsloth.trainer import UnslothVisionDataCollator

        return UnslothVisionDataCollator(model, processor, resize="max")
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    return DataCollatorForVisionLanguageModeling(processor)


if __name__ == "__main__":
    sys.exit(main())
