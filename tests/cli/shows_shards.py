"""The command line, which also prints how each process holds the weights when the training has ended."""

import json
import sys

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unsloth_pack.cli import main
from unsloth_pack.trl import RunTrainer

gather = RunTrainer.trained_weights


def shown(self):
    model = self.model
    layers = model.get_base_model().base_model.layers
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    seen = {
        "held": sum(p.numel() for p in held),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": len(layers),
        "sharded layers": sum(isinstance(layer, FSDPModule) for layer in layers),
    }
    print("SHARDS", json.dumps(seen), flush=True)
    return gather(self)


RunTrainer.trained_weights = shown
sys.exit(main(sys.argv[1:]))
