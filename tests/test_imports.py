"""What importing does, each seen in a process of its own."""

import json
import subprocess
import sys


def test_importing_does_nothing():
    code = """
import json, os, sys, io
import torch
before, modules = dict(os.environ), set(sys.modules)
sys.stdout = sys.stderr = said = io.StringIO()
import unsloth_pack
sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
new = {name.split(".")[0] for name in set(sys.modules) - modules}
print(json.dumps({"new": sorted(new), "environment": before == dict(os.environ), "said": said.getvalue(),
                  "cuda": torch.cuda.is_initialized()}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    seen = json.loads(done.stdout)
    assert seen == {"new": ["unsloth_pack"], "environment": True, "said": "", "cuda": False}
