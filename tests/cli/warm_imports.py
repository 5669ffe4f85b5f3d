"""Runs once in the process that `killed_runs` forks all runs from, so that everything is imported there."""

import json
import tempfile
from pathlib import Path

import torch
from model_folder import save_model

from unsloth_pack.cli import main

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    save_model(folder / "model")
    (folder / "rows.json").write_text(json.dumps([{"text": "warm"}]))
    paths = {"model_name": "model", "dataset": "rows.json", "output_dir": "out"}
    arguments = [f"--{name}={folder / path}" for name, path in paths.items()]
    assert main([*arguments, "--max_seq_length=64", "--max_steps=1", "--save_steps=1"]) == 0
