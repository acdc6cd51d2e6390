"""Kills of workers, hosts and controllers of a run at given moments, by what its journal says of it. Needs no torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.recovery import entries
from trainer.recovery.entries import Entry

WORKER, HOST, STALL, CONTROLLER = "worker", "host", "stall", "controller"

NO_SPARE = 5  # exit code


@dataclass
class Endured:
    """A run that was disturbed: what was killed, the entries of its journal, the outputs of its controllers."""

    kills: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    code: int = 0

    def of(self, kind: type[Entry]) -> list[Entry]:
        return [entry for entry in self.entries if isinstance(entry, kind)]


Moment = Callable[[list[Entry], float], bool]
"""Whether it is time for the next kill: by the journal so far, and the seconds since the last kill."""


def endure(
    command: Callable[[], Sequence[str]], out: Path, kills: Sequence[tuple[str, int, Moment]], *, cwd: Path
) -> Endured:
    """Run a command, killing what is told when it is time, and starting it again whenever its controller is gone.

    Args:
        command: gives the arguments of each start.
        out: the folder of the run.
        kills: what is killed, of which shard, and when.
        cwd: where the command is run.
    """
    found = Endured()
    left = list(kills)
    journal = _Journal(out / "journal.jsonl")
    while True:
        with (out.parent / f"{out.name}.log").open("a+b") as log:
            began = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(command(), cwd=cwd, stdout=log, stderr=log)
            struck = time.monotonic()
            while process.poll() is None:
                told = journal.read()
                if left and left[0][2](told, time.monotonic() - struck):
                    kind, shard, _ = left[0]
                    if kind == CONTROLLER:
                        process.kill()
                    if kind == CONTROLLER or _strike(kind, shard, told, out):
                        found.kills.append(kind)
                        struck = time.monotonic()
                        del left[0]
                time.sleep(0.01)
            log.seek(began)
            found.outputs.append(log.read().decode(errors="replace"))
        found.code = process.wait()
        if found.code != -signal.SIGKILL:
            found.entries = journal.read()
            return found


def _strike(kind: str, shard: int, told: list[Entry], out: Path) -> bool:
    """Kill the present worker of a shard, alone or with its host's folder, or stop it; False if there is none."""
    groups = [entry for entry in told if isinstance(entry, entries.Launched | entries.Lost | entries.Opened)]
    if not groups or not isinstance(groups[-1], entries.Launched):
        return False
    pid, host = groups[-1].pids[shard], groups[-1].hosts[shard]
    with suppress(ProcessLookupError):
        if kind == WORKER:
            os.kill(pid, signal.SIGKILL)
        elif kind == STALL:
            os.killpg(pid, signal.SIGSTOP)
        else:
            folder = out / "hosts" / host
            with suppress(FileNotFoundError):
                gone = folder.rename(out.parent / f"gone-{host}-{time.monotonic_ns()}")
                os.killpg(pid, signal.SIGKILL)
                shutil.rmtree(gone)
                return True
            os.killpg(pid, signal.SIGKILL)
        return True
    return False


class _Journal:
    """A journal that is being written, read on from where it was read to."""

    def __init__(self, path: Path) -> None:
        self._path, self._entries, self._at = path, list[Entry](), 0

    def read(self) -> list[Entry]:
        """All entries so far. A line that is cut off is written anew by the next controller, so it is left."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            whole, end, _ = file.read().rpartition(b"\n")
            self._at += len(whole) + len(end)
            self._entries += [entries.parse(line)[1] for line in whole.splitlines()]
        return self._entries
