"""Leases and markers of processes that live elsewhere, have died, or cannot be told."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from datetime import UTC, datetime

import ckptstore
from ckptstore.backends.owners import Owner, this_process
from ckptstore.collection.exclusion import exclusive
from ckptstore.format.keys import collection_key, lease_key
from ckptstore.format.records import CollectionMarker, Lease
from ckptstore.store import Store

ELSEWHERE = Owner("f" * 16, 7, 4321, 99)
"""A process under another kernel: whether it runs, nobody here can tell."""


def dead() -> Owner:
    """A process of this kernel that has ended."""
    here = this_process()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        return Owner(here.boot, here.namespace, child.pid, 1)


def in_a_container() -> Owner:
    """A process of this kernel in another pid namespace, where numbers say nothing to us."""
    here = this_process()
    return Owner(here.boot, here.namespace + 1, 4321, 99)


def clock(ago: float = 0.0) -> str:
    """What a clock said, or will say, so many seconds ago."""
    return datetime.fromtimestamp(time.time() - ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def plant_lease(store: Store, owner: object, ago: float = 0.0) -> str:
    """The key of a lease that ``owner`` has left in the store."""
    key = lease_key(secrets.token_hex(16))
    store.backend.create(key, Lease("elsewhere", str(owner), clock(ago)).encode())
    return key


def plant_marker(store: Store, owner: object, number: int = 1, ago: float = 0.0) -> str:
    """The key of a marker that a collection of ``owner`` has left in the store."""
    key = collection_key(number)
    store.backend.create(key, CollectionMarker("elsewhere", str(owner), clock(ago), secrets.token_hex(16)).encode())
    return key


def listed(store: Store, prefix: str) -> list[str]:
    """Keys below a prefix."""
    return [stat.key for stat in store.backend.list(prefix)]


def twin(store: Store) -> Store:
    """The same store, opened once more."""
    return ckptstore.open(store.url)


def collect_nothing(store: Store, age: int | None = None) -> tuple[str, ...]:
    """Go in and out; what was taken away."""
    with exclusive(store, break_leases_older_than=age) as guard:
        guard.check()
        return guard.broken
