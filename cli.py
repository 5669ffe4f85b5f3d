"""Run the command line from a clone: `python cli.py --sample_packing` is `unsloth-pack --sample_packing`."""

import sys

from unsloth_pack.cli import main

if __name__ == "__main__":
    sys.exit(main())
