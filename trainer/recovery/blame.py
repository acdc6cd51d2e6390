"""Whose loss it was: from the signs that a group gave, which hosts have to be replaced, or that no host could help."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.errors import (
    CkptStoreError,
    ConflictError,
    MalformedError,
    RefusedError,
    UsageError,
)
from trainer.errors import PeerLostError
from trainer.workers.exits import PEER_LOST
from trainer.workers.group import Ended, Said, Seen, Silent

_RUN = {kind.exit_code for kind in (UsageError, RefusedError, ConflictError, MalformedError)}
"""Exit codes of errors that are about the run and not about the machine: any host would end with them."""


class RunFailedError(CkptStoreError):
    """A worker ended with an error that another host would end with as well; nothing is tried again."""

    code = "run-failed"
    exit_code = RefusedError.exit_code


@dataclass(frozen=True, slots=True)
class Blame:
    """Shards whose hosts are to be replaced, by which sign that was noticed, and what is known of it.

    No shards: only a connection broke, and the hosts may meet again. ``fatal``: no other host would fare better.
    """

    shards: tuple[int, ...]
    sign: str
    why: str
    fatal: bool = False


def blame(signs: Sequence[Seen]) -> Blame | None:
    """What the signs of a loss, in the order in which they were seen, say; None if more may come that say more.

    A worker that lost its peer says so, and tells nothing about itself; what the other one did tells. Its error event
    comes before the end of its process, so the first sign that is not about a peer decides.
    """
    for sign in signs:
        match sign:
            case Silent(shard=shard, missed=missed):
                return Blame((shard,), "silence", f"{missed} heartbeats in a row did not come")
            case Ended(status=status) if status in (0, PEER_LOST):  # what it left behind, or whom it lost, was not it
                continue
            case Ended(shard=shard, status=status):
                return Blame((shard,), "process gone", _how(status))
            case Said(shard=shard, event=event) if event["type"] != PeerLostError.__name__:
                code = event.fields.get("code")
                why = f"{event['type']}: {event['message']}"
                return Blame((shard,), "error", why, fatal=code in _RUN)
    return None


def connection(signs: Sequence[Seen]) -> Blame:
    """What to say when no sign came that says more than that the workers lost each other."""
    texts = [sign.event["message"] for sign in signs if isinstance(sign, Said)]
    return Blame((), "connection lost", texts[0] if texts else "nothing happened for too long")


def _how(status: int) -> str:
    if status >= 0:
        return f"it ended with exit code {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"
