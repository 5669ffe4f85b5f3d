"""Several runs of the command line in each process, one after the other: starting takes the longest.

    sharded_runs.py '{"output_dir": ["--fsdp", ...], "another": ["--resume"], ...}'

With --machines=2 the processes of a run pass for two machines. A run that resumes finds the first run there,
without its end. Every run prints how its process holds the weights when the training has ended, and every
process what it ends with.
"""

import atexit
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unsloth_pack.cli import main
from unsloth_pack.layers.peer_weights import PeerLayer
from unsloth_pack.training.trainer import RunTrainer

gather = RunTrainer.trained_weights


def say(line):
    sys.stdout.write(f"{line}\n")  # in one piece: the processes share the pipe
    sys.stdout.flush()


def shown(self):
    model = self.model
    layers = model.get_base_model().base_model.layers
    frozen = [p for p in layers.parameters() if not p.requires_grad]
    held = [p.to_local() if isinstance(p, DTensor) else p for p in frozen]
    seen = {
        "held": sum(p.numel() for p in held),
        "parameters": sum(p.numel() for p in frozen),
        "layers": len(layers),
        "gathered by FSDP2": sum(isinstance(layer, FSDPModule) for layer in layers),
        "read from peers": sum(isinstance(layer, PeerLayer) for layer in layers),
    }
    say(f"SHARDS {json.dumps(seen)}")
    return gather(self)


def copy_without_end(folder, into):
    shutil.copytree(folder, into)
    shutil.rmtree(into / "checkpoint-6")
    (into / "adapter_model.safetensors").unlink()


RunTrainer.trained_weights = shown
atexit.register(lambda: say(f"LEFT {not torch.distributed.is_initialized()}"))  # after what a run registers
runs = json.loads(sys.argv[1])
first, *_ = map(Path, runs)
for folder, flags in runs.items():
    if "--resume" in flags:
        processes = PartialState()
        processes.wait_for_everyone()
        if processes.is_main_process:
            copy_without_end(first, Path(folder))
        processes.wait_for_everyone()
    os.environ["LOCAL_WORLD_SIZE"] = "1" if "--machines=2" in flags else "2"
    flags = [flag for flag in flags if flag != "--machines=2"]
    if code := main([*flags, f"--output_dir={folder}"]):
        sys.exit(code)
    say(f"SAVED {(Path(folder) / 'adapter_model.safetensors').exists()}")
