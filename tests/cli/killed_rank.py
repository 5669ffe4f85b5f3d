"""The command line, whose second process is killed in the fourth update."""

import os
import signal
import sys

from unsloth_pack.cli import main
from unsloth_pack.training.trainer import RunTrainer

step = RunTrainer.training_step


def killed_in_the_fourth(self, *arguments):
    if self.args.process_index == 1 and self.state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments)


RunTrainer.training_step = killed_in_the_fourth
sys.exit(main())
