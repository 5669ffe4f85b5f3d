"""The command line, whose second process gets SIGTERM in the fourth update."""

import os
import signal
import sys

from unsloth_pack.cli import main
from unsloth_pack.training.trainer import RunTrainer

step = RunTrainer.training_step


def terminated_in_the_fourth(self, *arguments):
    if self.args.process_index == 1 and self.state.global_step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, *arguments)


RunTrainer.training_step = terminated_in_the_fourth
sys.exit(main())
