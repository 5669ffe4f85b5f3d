"""What ends a run early, said in one line, with the way to go on."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unsloth_pack.errors import RunStopped


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Within, what stops the training in `folder` is raised with what is left there and how to go on.

    Raises:
        RunStopped: the disk is full, or the training itself stopped.
        KeyboardInterrupt: a second Ctrl-C; with a message.
    """
    try:
        yield
    except (RunStopped, OSError) as error:
        raise RunStopped(f"{error}; {way_on(folder)}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {way_on(folder)}") from None


def way_on(folder: Path) -> str:
    """How to go on with the run in `folder`, and from where."""
    from unsloth_pack.whole_checkpoints import last_checkpoint

    checkpoint = last_checkpoint(folder)
    kept = f"{checkpoint.name} is whole, go on" if checkpoint else "there is no checkpoint yet, start over"
    return f"{kept} with: unsloth-pack --resume --output_dir {shlex.quote(str(folder))}"
