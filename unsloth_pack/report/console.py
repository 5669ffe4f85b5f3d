"""Where a command prints."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console


class LastingConsole(Console):
    """A console that outlives its reader: if the pipe closes (`| head`), the command goes on to its end."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # points stdout at nothing, and raises SystemExit

    def show_json(self, value: Any) -> None:
        self.out(json.dumps(value, indent=1), highlight=False)


class _Pipe:
    """An output whose every error is that of a pipe without a reader, as rich knows it."""

    def __init__(self, file: TextIO):
        self._file = file
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        return self._tried(lambda: self._file.write(text))

    def flush(self) -> None:
        self._tried(self._file.flush)

    def _tried(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except OSError as error:
            self.error = error
            raise BrokenPipeError from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class RunConsole(LastingConsole):
    """The console of a run, which goes on unseen if its output ends: its reader (`| tee`), its terminal, its
    disk."""

    def __init__(self, **options: Any):
        self._pipe = _Pipe(sys.stdout)
        super().__init__(file=cast(TextIO, self._pipe), **options)

    def on_broken_pipe(self) -> None:
        """Print nothing more, and say so on stderr."""
        super().on_broken_pipe()
        error = self._pipe.error
        is_read = error is not None and not isinstance(error, BrokenPipeError)
        why = f"the output cannot be written ({error})" if is_read else "nobody reads the output any more"
        with suppress(OSError):  # stderr may be the same pipe
            print(f"unsloth-pack: {why}; the run goes on", file=sys.stderr)
