"""A small run of the experiment in processes of its own, as a hostile hand sees it that strikes at an event."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.workers import events
from trainer.workers.events import Event

ROOT = Path(__file__).resolve().parents[2]
SMALL = Path(__file__).with_name("small.py")


class Attack:
    """A small run in a folder, as its attacker sees it, on hosts whose processes are those of this machine."""

    def __init__(
        self, out: Path, *arguments: str, hosts: str = "process", environment: Mapping[str, str] | None = None
    ) -> None:
        self.out = out
        given = ["--out", str(out), "--compute", "float32", "--hosts", hosts, *arguments]
        self.controller = subprocess.Popen(
            [sys.executable, str(SMALL), "lifecycle", *given],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def when(self, path: str, name: str) -> Event:
        """Wait until a file of events has one of that name."""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and self.controller.poll() is None:
            if (self.out / path).exists():
                for event in events.read(self.out / path):
                    if event.name == name:
                        return event
            time.sleep(0.01)
        raise AssertionError(f"no {name} in {path}: {self.controller.communicate(timeout=1)}")

    def workers(self) -> list[str]:
        """Command lines of the run's agents and workers that there are; a worker may have its agent's."""
        return [text for text in _command_lines() if f" --host {self.out}/" in text]

    def processes(self) -> list[str]:
        """Command lines of all processes that name the run's folder, its S3 server among them."""
        return [text for text in _command_lines() if f"{self.out}/" in text or text.endswith(str(self.out))]

    def end(self) -> tuple[int, str, str]:
        """Exit code, output and error output, once it has ended by itself."""
        out, errors = self.controller.communicate(timeout=300)
        return self.controller.returncode, out, errors


def worker_file(host: int, generation: int, shard: int) -> str:
    return f"hosts/host-{host}/events/generation-{generation}-shard-{shard}.jsonl"


def _command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue
    return found
