"""Where a command prints."""

import json
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console


class LastingConsole(Console):
    """A console that outlives its reader: if the pipe closes (`| head`), the command goes on to its end."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # points stdout at nothing, and raises SystemExit

    def show_json(self, value: Any) -> None:
        self.out(json.dumps(value, indent=1), highlight=False)


class RunConsole(LastingConsole):
    """The console of a run, which goes on unseen if its reader (`| tee`) ends."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, and say so on stderr."""
        super().on_broken_pipe()
        with suppress(OSError):  # stderr may be the same pipe
            print("unsloth-pack: nobody reads the output any more; the run goes on", file=sys.stderr)
