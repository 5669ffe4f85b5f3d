"""A small language model of our own, with data that a LoRA fine-tune learns in a minute on two CPU cores."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
DATA_DIR = Path(__file__).parent / "data"
TRAIN_FILE = DATA_DIR / "train.jsonl"
HELDOUT_FILE = DATA_DIR / "heldout.jsonl"
BASE_HELDOUT_FILE = DATA_DIR / "base_heldout.jsonl"

# Values of flags that the command line uses for the demo, unless the user gives others.
DEMO_DEFAULTS = {
    "max_seq_length": 512,
    "r": 16,
    "lora_alpha": 32,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "weight_decay": 0.0,
    "num_train_epochs": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
}
