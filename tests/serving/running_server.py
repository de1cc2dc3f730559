"""Start `hydra-ensembles serve` as a process of its own, and stop it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START = "from hydra_ensembles.cli.main import run; run()"
NO_TORCH = "import sys; sys.modules['torch'] = None; " + START
"""As where torch is not installed: importing it raises an ImportError."""


class Server:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def stop(self) -> tuple[int, str]:
        """Send SIGTERM; return the exit code and what was said since."""
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=30)
        return self.process.returncode, said


@contextmanager
def serving(folder: Path, *options: str, start: str = START) -> Iterator[Server]:
    """Serve a folder at a free port until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", start, "serve", str(folder), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        said = []
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            found = re.search(r"Listening at http://(\S+)", line)
            if found:
                yield Server(process, found.group(1))
                return
        raise AssertionError("the service did not start: " + "".join(said))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
