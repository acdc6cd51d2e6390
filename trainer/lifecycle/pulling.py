"""Hosts pull their shards: each in a process of its own, with what it takes to read the operator's store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ckptstore import Digest, errors
from ckptstore.errors import BackendError, CkptStoreError
from trainer.lifecycle.access import Access
from trainer.lifecycle.expect import unexpected
from trainer.workers.events import LINE_LIMIT, Event
from trainer.workers.hosts import Host, Running
from trainer.workers.launch import host_environment, pull_arguments
from trainer.workers.reports import check


class PullEndedError(BackendError):
    """The process that pulled for a host ended without saying why: the host is in no state to be used."""

    code = "pull-ended"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A shard that a host fetched: bytes that came, bytes that were there and were read again, how far down."""

    host: str
    shard: int
    root: Digest
    received_bytes: int
    present_keys: int
    readback_bytes: int
    method: str


@dataclass(frozen=True, slots=True)
class Pull:
    """What the process of one host did: shards that came, requests by operation and bytes of their bodies.

    ``refused_write`` is how the operator's store answered an attempt to write; empty where none was made.
    """

    pulled: tuple[Pulled, ...]
    operations: dict[str, int]
    sent_bytes: int
    received_bytes: int
    refused_write: str


def pull_on_hosts(
    access: Access,
    hosts: Sequence[tuple[Host, int]],
    roots: Sequence[Digest],
    name: str,
    *,
    try_to_write: Sequence[Host] = (),
) -> list[Pull]:
    """Let hosts pull their shards of some checkpoints, all at a time.

    Args:
        access: how the operator's store is reached.
        hosts: each with its staged sources and its store, and the shard that it pulls.
        roots: the checkpoints.
        name: of the processes, new for each call.
        try_to_write: hosts that have to find out that they may not write to the operator's store.

    Raises:
        CkptStoreError: the first failure of a host's process, as it was raised there.
        PullEndedError: a process ended and said nothing.
        NotAsPlannedError: a write was not refused.
    """
    with ExitStack() as stack:
        running = []
        for host, shard in hosts:
            argv = pull_arguments(
                name, host, shard, roots, access.host_url, access.host_allow, try_to_write=host in try_to_write
            )
            # Credentials may be in files whose paths are relative to where this process is.
            process = host.launch(name, argv, host_environment(host, access.host_environment), Path.cwd())
            stack.callback(process.end)
            running.append((process, stack.enter_context(os.fdopen(process.events, "rb")), shard))
        return [_outcome(process, lines, shard) for process, lines, shard in running]


def _outcome(process: Running, lines: BinaryIO, shard: int) -> Pull:
    host = process.host.name
    pulled: list[Pulled] = []
    operations: dict[str, int] = {}
    sent = received = 0
    refused = ""
    for event in _events(lines):
        match event.name:
            case "pulled":
                root, received_bytes = Digest.parse(event["root"]), event["sent_bytes"]
                present, readback = event["present_keys"], event["readback_bytes"]
                pulled.append(Pulled(host, shard, root, received_bytes, present, readback, event["method"]))
            case "requests":
                operations, sent, received = event["operations"], event["sent_bytes"], event["received_bytes"]
            case "tried_to_write":
                refused = event["refused"]
                if not refused:
                    raise unexpected(f"a write of {host} to the operator's store", "refused", "accepted")
            case "failed":
                raise _as_raised(event)
    status = process.end()
    if status != 0:
        why = f"ended with {status}; its last words: {process.last_words()}"
        raise PullEndedError(f"pull on {host}", why, f"error output is in {process.stderr_path}")
    return Pull(tuple(pulled), operations, sent, received, refused)


def _events(lines: BinaryIO) -> list[Event]:
    """What a process has said, once it has closed its end of the pipe."""
    return [check(Event.parse(line)) for line in iter(lambda: lines.readline(LINE_LIMIT + 1), b"")]


def _as_raised(event: Event) -> CkptStoreError:
    kind = getattr(errors, event["type"], CkptStoreError)
    if not (isinstance(kind, type) and issubclass(kind, CkptStoreError)):
        kind = CkptStoreError
    return kind(event["what"], event["why"], event["hint"])
