"""A host's own pull: its shard of checkpoints, from the operator's store into the host's, in a process of the host.

It is the only process of a host that is told how the operator's store is reached. Needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ckptstore
from ckptstore import Digest, Store
from ckptstore.errors import CkptStoreError, ReadOnlyError
from trainer.errors import of_system
from trainer.workers import fence
from trainer.workers.events import Emitter
from trainer.workers.hosts import STORE
from trainer.workers.worker import end_with_launcher


@dataclass(frozen=True, slots=True)
class Options:
    """What to pull.

    ``name`` is that of the file of events on ``host``, ``operator`` the URL of the store, ``area`` the folder of the
    run, of which only ``host`` and what is below ``allow`` may be touched, ``pipe`` the descriptor for events.
    ``try_to_write`` says that the operator's store has to refuse a write.
    """

    name: str
    host: Path
    operator: str
    shard: int
    roots: Sequence[Digest]
    area: Path
    allow: tuple[Path, ...]
    pipe: int
    try_to_write: bool = False


def run(options: Options) -> int:
    """Pull, say in events what came and what was asked for, and return the exit code."""
    end_with_launcher()
    emitter = Emitter(options.host / "events" / f"{options.name}.jsonl", options.pipe)
    try:
        # boto3 may have to call a program for credentials, so first contact comes before the fence.
        operator = ckptstore.open(options.operator)
        fence.install(options.area, (options.host, *options.allow))
        _pull(options, operator, emitter)
        if options.try_to_write:
            _try_to_write(operator, emitter)
        if operator.traffic is not None:
            traffic = operator.traffic
            emitter.emit(
                "requests",
                operations=dict(traffic.requests),
                sent_bytes=traffic.sent_bytes,
                received_bytes=traffic.received_bytes,
            )
    except BrokenPipeError:
        return 1  # nobody waits for it any more
    except (CkptStoreError, OSError) as error:
        known = of_system(error, options.name) if isinstance(error, OSError) else error
        print(f"{type(known).__name__}: {known}", file=sys.stderr, flush=True)
        with suppress(OSError):
            emitter.emit("failed", type=type(known).__name__, what=known.what, why=known.why, hint=known.hint)
        return known.exit_code
    return 0


def _pull(options: Options, operator: Store, emitter: Emitter) -> None:
    store = ckptstore.open(options.host / STORE)
    for root in options.roots:
        done = ckptstore.pull(operator, store, root, shards=[options.shard], files=False)
        emitter.emit(
            "pulled",
            root=str(root),
            shard=options.shard,
            sent_bytes=done.sent_bytes,
            present_keys=done.present_keys,
            readback_bytes=done.receipt.bytes_read,
            method=done.receipt.method,
        )


def _try_to_write(operator: Store, emitter: Emitter) -> None:
    refused = ""
    try:
        with operator.lease():  # the smallest thing that is written, and gone again if it is not refused
            pass
    except ReadOnlyError as error:
        refused = f"{type(error).__name__}: {error.what.partition('/')[0]}"
    emitter.emit("tried_to_write", refused=refused)
