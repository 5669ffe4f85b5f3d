"""One update of TRL's unchanged `SFTTrainer` over a whole data set, by one process or several.

python one_update.py MODEL_FOLDER OUTPUT_FOLDER ROWS_A_BATCH ACCUMULATION
"""

import sys

import torch
from datasets import Dataset
from safetensors.torch import save_file
from trl import SFTConfig, SFTTrainer

from unsloth_pack import FastLanguageModel

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = [60, 3, 41, 17, 25, 38, 64, 9, 30, 33, 11, 52, 64, 5, 58, 21, 27, 36]
TEXTS = [
    (LETTERS[place:] + LETTERS)[: size % 26] + LETTERS * (size // 26) for place, size in enumerate(SIZES)
]
LENGTH = 66


def adapted(folder):
    options = {"max_seq_length": 128, "dtype": torch.float32}
    model, tokenizer = FastLanguageModel.from_pretrained(folder, **options)
    model = FastLanguageModel.get_peft_model(model, r=4)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return model, tokenizer


def train(folder, output, rows_a_batch, accumulation):
    """Returns the update of every trained weight: by SGD at a learning rate of 1, minus its gradient."""
    model, tokenizer = adapted(folder)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    config = SFTConfig(
        output_dir=str(output), packing=True, padding_free=True, max_length=LENGTH, max_steps=1, optim="sgd",
        learning_rate=1.0, max_grad_norm=0.0, per_device_train_batch_size=rows_a_batch, report_to="none",
        gradient_accumulation_steps=accumulation, save_strategy="no", gradient_checkpointing=False,
        bf16=False, use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer).train()
    return {name: (p - before[name]).cpu() for name, p in model.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    folder, output, rows_a_batch, accumulation = sys.argv[1:]
    update = train(folder, output, int(rows_a_batch), int(accumulation))
    if torch.distributed.get_rank() == 0:
        save_file(update, f"{output}/update.safetensors")
    torch.distributed.destroy_process_group()
