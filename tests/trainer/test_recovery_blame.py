"""Whose loss it was: the host that is replaced is the one that was lost, whatever the order of the signs."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from ckptstore.errors import BackendError, CorruptError, NoSpaceError
from trainer.errors import NotFiniteError, PeerLostError, ProtocolError
from trainer.recovery.blame import blame, connection
from trainer.workers.events import make
from trainer.workers.exits import PEER_LOST
from trainer.workers.group import Ended, Said, Seen, Silent


def error(shard: int, kind: type[Exception], **fields: Any) -> Said:
    code = getattr(kind, "exit_code", 70)
    return Said(shard, 0.0, make("error", {"type": kind.__name__, "message": "why", "code": code, **fields}))


def test_the_worker_that_was_killed_is_blamed_and_not_the_one_that_says_so() -> None:
    told = [error(0, PeerLostError, code=PEER_LOST), Ended(0, 0.0, PEER_LOST), Ended(1, 0.0, -9)]
    for signs in permutations(told):
        found = blame(signs)
        assert found is not None
        assert (found.shards, found.sign, found.fatal) == ((1,), "process gone", False)
        assert "SIGKILL" in found.why


@pytest.mark.parametrize("signs", [[], [error(0, PeerLostError)], [Ended(1, 0.0, PEER_LOST), Ended(0, 0.0, 0)]])
def test_workers_that_only_lost_each_other_are_not_blamed_at_once_nor_in_the_end(signs: list[Seen]) -> None:
    assert blame(signs) is None
    assert connection(signs).shards == ()


def test_a_silent_worker_is_blamed() -> None:
    found = blame([error(0, PeerLostError), Silent(1, 0.0, 3)])
    assert found is not None
    assert found.shards == (1,)


@pytest.mark.parametrize("kind", [CorruptError, NoSpaceError, BackendError, RuntimeError, MemoryError])
def test_an_error_of_a_machine_is_a_reason_for_another_one(kind: type[Exception]) -> None:
    found = blame([error(1, kind), Ended(1, 0.0, 1)])
    assert found is not None
    assert (found.shards, found.fatal) == ((1,), False)


@pytest.mark.parametrize("kind", [NotFiniteError, ProtocolError])
def test_an_error_that_any_machine_would_make_is_no_reason_to_use_one_up(kind: type[Exception]) -> None:
    found = blame([error(1, kind), Ended(1, 0.0, 5)])
    assert found is not None
    assert found.fatal
