"""Two small models of our own, the second with images, and data for a fine-tune on two CPU cores."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
VISION_MODEL_DIR = Path(__file__).parent / "vision_model"
BUNDLED_MODELS = {"demo": MODEL_DIR, "vision-demo": VISION_MODEL_DIR}  # by the names that load them
DATA_DIR = Path(__file__).parent / "data"
TRAIN_FILE = DATA_DIR / "train.jsonl"
HELDOUT_FILE = DATA_DIR / "heldout.jsonl"
BASE_HELDOUT_FILE = DATA_DIR / "base_heldout.jsonl"

# The command line's defaults for the demos
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
VISION_DEMO_DEFAULTS = DEMO_DEFAULTS | {
    "max_seq_length": 1024,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 1,
    "train_on_responses_only": True,
}
DEFAULTS = {"demo": DEMO_DEFAULTS, "vision-demo": VISION_DEMO_DEFAULTS}

Row = dict[str, str]  # `instruction`, `input` and `output`, alpaca's columns


def user_text(row: Row) -> str:
    """Join the instruction and the input."""
    return f"{row['instruction']}\n{row['input']}" if row["input"] else row["instruction"]


def messages(row: Row) -> list[dict[str, str]]:
    return [{"role": "user", "content": user_text(row)}, {"role": "assistant", "content": row["output"]}]
