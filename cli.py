"""Run the command line from a clone: `python cli.py --sample_packing` is `unsloth-pack --sample_packing`."""

import atexit
import os
import sys

from unsloth_pack.cli import main

if __name__ == "__main__":
    code = main()
    if os.environ.get("RANK", "0") != "0":
        # What follows exit handlers would free Python's objects under gloo's threads, which may abort.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
