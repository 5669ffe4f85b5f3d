"""Several runs of the command line in each of two processes, the second of which has other files.

refused_ranks.py '[["--model_name=M", ...], ...]' '[["--model_name=OTHER", ...], ...]'
"""

import json
import os
import sys

from unsloth_pack.cli import main

for flags in json.loads(sys.argv[1 + int(os.environ["RANK"])]):
    assert main(flags) == 2
