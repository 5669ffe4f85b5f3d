"""A run of the command line, and the same run resumed from its checkpoint, in each process.

    streaming_rank.py FOLDER OTHER_FOLDER --streaming --output_dir FOLDER ...

The rows that a process trains on in a folder go to seen-RANK.json there.
"""

import json
import shutil
import sys
from pathlib import Path

from accelerate import PartialState

from unsloth_pack.cli import main
from unsloth_pack.training.trainer import RunTrainer

step, seen = RunTrainer.training_step, []


def noting(self, model, inputs, *more):
    seen.append(inputs["input_ids"].flatten().tolist())
    return step(self, model, inputs, *more)


RunTrainer.training_step = noting
whole, cut, *flags = sys.argv[1:]
for folder, arguments in ((whole, flags), (cut, ["--resume", f"--output_dir={cut}"])):
    processes = PartialState()
    if "--resume" in arguments and processes.is_main_process:
        shutil.copytree(whole, cut)
        Path(cut, "adapter_model.safetensors").unlink()
        shutil.rmtree(Path(cut, "checkpoint-9"))
    processes.wait_for_everyone()
    if code := main(arguments):
        sys.exit(code)
    Path(folder, f"seen-{processes.process_index}.json").write_text(json.dumps(seen))
    seen.clear()
