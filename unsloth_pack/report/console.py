"""Where a run prints."""

import sys
from contextlib import suppress

from rich.console import Console


class RunConsole(Console):
    """Outlives its reader: where the pipe closes (`| head`, a `tee` that ends), the run goes on unseen."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, and say so on stderr."""
        try:
            super().on_broken_pipe()  # points stdout at nothing, and would end the process
        except SystemExit:
            with suppress(OSError):  # stderr may be the same pipe
                print("unsloth-pack: nobody reads the output any more; the run goes on", file=sys.stderr)
