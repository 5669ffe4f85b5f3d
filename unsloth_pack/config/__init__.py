"""Options of a run: their types, flags, config files, and names in other trainers. Knows no run.

`load(argv)` gives the options that a command line and its config file ask for, or raises all their mistakes.
"""

from unsloth_pack.config.load import load, read_record, telling_places
from unsloth_pack.config.options import OPTIONS, SECTIONS, TrainOptions, changed, flat
from unsloth_pack.config.parser import Parser, train_parser
from unsloth_pack.config.schema import json_schema
