"""Runs once in the process that `warm` forks all others from, so that everything is imported there."""

import atexit
import gc
import json
import os
import tempfile
from pathlib import Path

import accelerate.state
import pytest  # noqa: F401 (tests import it)
import torch
from model_folder import save_model
from tqdm import tqdm

from unsloth_pack.cli import main
from unsloth_pack.report import html

torch.set_num_threads(1)
tqdm.monitor_interval = 0  # a thread, which may hold a lock as a process is forked
output = os.dup(1)
with tempfile.TemporaryDirectory() as temporary, open(os.devnull, "w") as nowhere:
    os.dup2(nowhere.fileno(), 1)
    folder = Path(temporary)
    save_model(folder / "model")
    (folder / "rows.json").write_text(json.dumps([{"text": "warm"}]))
    paths = {"model_name": "model", "dataset": "rows.json", "output_dir": "out"}
    arguments = [f"--{name}={folder / path}" for name, path in paths.items()]
    assert main([*arguments, "--max_seq_length=64", "--max_steps=1", "--save_steps=1"]) == 0
    os.dup2(output, 1)
os.close(output)
# A process that is forked from this one finds out by itself whether it has peers
accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
accelerate.state.GradientState._reset_state()
# Five figures take longer than a short run
html.render = lambda draw, file_format, **_: {"svg": b"<svg></svg>", "png": b"\x89PNG"}[file_format]
gc.collect()
atexit.register(gc.unfreeze)  # extensions complain of what is left at the exit
gc.freeze()  # trainers collect garbage often: half a second each through all that was imported
