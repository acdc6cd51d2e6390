"""What workers leave behind on their hosts: events and error output, kept when the hosts go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.workers.hosts import Host


def keep_traces(hosts: Iterable[Host], folder: Path) -> None:
    """Copy what processes of ``hosts`` wrote to a folder of each host's name below ``folder``. OSError if it fails."""
    for host in hosts:
        for source in (*host.directory.glob("events/*.jsonl"), *host.directory.glob("logs/*.stderr")):
            target = folder / host.name / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
