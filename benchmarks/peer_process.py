"""A process that does many jobs, each a JSON line in and out, and is replaced if it hangs or dies."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUOTED = 600  # letters of a dead process's last words
GRACE = 5  # seconds for a process to end when its input closes


class PeerProcess:
    """A child process that reads a job a line and answers each with a line.

    Its first line, which it writes unasked, says that it is ready. Every answer is a JSON object. A process
    that dies or does not answer in time is killed with all that it started, and its answer is
    `{"failed": why}`. The next job starts another process.

    Args:
        command: of the process.
        environment: of the process.
        folder: the process runs here, and writes its other output to `log.txt` here.
        start_seconds: to become ready.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, start_seconds: float
    ) -> None:
        self.command, self.environment, self.folder = list(command), dict(environment), folder
        self.start_seconds = start_seconds
        self.greeting: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        folder.mkdir(parents=True, exist_ok=True)

    def launch(self) -> None:
        """Start a process if there is none, without waiting for it to be ready."""
        if self._process is not None:
            return
        with open(self.folder / "log.txt", "a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
        self.greeting, self._lines = {}, queue.Queue()
        threading.Thread(target=_forward, args=(self._process.stdout, self._lines), daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """Its first line, or `failed` and why."""
        self.launch()
        if not self.greeting:
            greeting = self._answer(self.start_seconds)
            if "failed" in greeting:
                return {"failed": f"did not start: {greeting['failed']}"}
            self.greeting = greeting
        return self.greeting

    def ask(self, job: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a job; the time to become ready does not count."""
        if "failed" in (greeting := self.ready()):
            return greeting
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead process is noticed by its missing answer
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        return self._answer(seconds)

    def stop(self) -> None:
        """End the process: when its input closes, or by force."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self._kill()

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                self._kill()
                return {"failed": f"no answer in {seconds:.0f} s"}
            if line is None:
                code = self._kill()
                return {"failed": f"died with exit code {code}: {self._last_words()}"}
            with contextlib.suppress(ValueError):  # a line of a library that writes to file descriptor 1
                found = json.loads(line)
                if isinstance(found, dict):
                    return found

    def _kill(self) -> int | None:
        process, self._process = self._process, None
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def _last_words(self) -> str:
        log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        return " ".join(log[-QUOTED:].split())


def _forward(stream: Any, lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
