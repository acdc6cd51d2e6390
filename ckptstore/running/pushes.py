"""Pushes in the background: each checkpoint that was asked for goes to each of its targets and is read back there.

A target has a thread of its own, so that one that is slow or gone holds up no other, and gets its checkpoints in the
order in which they were saved. A push that fails leaves the checkpoint as safe as it was in its own store; what it sent
is used when it is repeated.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from logging import getLogger
from threading import Lock
from typing import TypeAlias

from ckptstore.backends import deadline, normalized
from ckptstore.errors import BackendError, CkptStoreError, UsageError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import is_ref_name
from ckptstore.remotes import open_remote, remotes_of
from ckptstore.running.background import Background
from ckptstore.running.untold import Untold
from ckptstore.store import Store
from ckptstore.transfers.exchange import push
from ckptstore.transfers.transfer import Transfer

WAITING = 2
"""Checkpoints that may wait for a target, besides the one that is under way, before a save waits for it too."""

PushTo: TypeAlias = Store | str | os.PathLike[str] | Iterable[Store | str | os.PathLike[str]]
"""A store, its path or URL, the name of a remote of the store that is saved to, or several of these."""

_REMEMBERED = 64  # pushes that went well and are still listed


class State(Enum):
    """How far a push is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Push:
    """A checkpoint on its way to a target: its root and step, the target as it was given, the ref that names it there
    afterwards, how far it is, and what came of it."""

    root: Digest
    step: int
    target: str
    ref: str
    state: State = State.WAITING
    transfer: Transfer | None = None
    error: CkptStoreError | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to push: what to call it, which store it is, and how to open it."""

    name: str
    url: str
    open: Callable[[], Store]


def targets(store: Store, push_to: PushTo | None) -> list[Target]:
    """What ``push_to`` means for checkpoints of ``store``. Nothing is opened yet.

    Raises:
        UsageError: something in it is no store, no URL and no remote's name, or is ``store`` itself.
    """
    if push_to is None:
        return []
    given = [push_to] if isinstance(push_to, Store | str | os.PathLike) else list(push_to)
    found: dict[str, Target] = {}
    for item in given:
        target = _target(store, item)
        if target.url == store.url:
            raise UsageError(f"push_to {target.name}", "it is the store that is saved to", "name another one")
        found.setdefault(target.url, target)
    return list(found.values())


def _target(store: Store, given: Store | str | os.PathLike[str]) -> Target:
    if isinstance(given, Store):
        return Target(given.url, given.url, lambda: given)
    try:
        name = os.fspath(given)
    except TypeError as error:
        raise UsageError(
            "push_to", str(error), "give what ckptstore.open takes, or a name from ckpt remote list"
        ) from None
    known = remotes_of(store) if is_ref_name(name) else {}
    url = normalized(known.get(name, name))  # of a path: where it leads now, wherever the process goes meanwhile
    return Target(name, url, lambda: open_remote(store, name if name in known else url))


class Pushes:
    """The pushes of a run to ``ref`` of their targets."""

    def __init__(self, store: Store, ref: str) -> None:
        self._store = store
        self._ref = ref
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._all: dict[int, Push] = {}
        self._count = 0
        self._untold = Untold()
        self._threads: dict[str, Background] = {}
        self._stores: dict[str, Store] = {}

    @property
    def all(self) -> tuple[Push, ...]:
        """Every push that is not done, and the last ones that are, oldest first."""
        self._leave_parent()
        with self._lock:
            return tuple(self._all.values())

    def ask(self, root: Digest, step: int, wanted: Iterable[Target]) -> None:
        """Push ``root`` to these targets, after what was asked for before. Returns when no more than :data:`WAITING`
        checkpoints wait for any of them, or the caller's own time is over."""
        self._leave_parent()
        threads = []
        for target in wanted:
            with self._lock:
                number, self._count = self._count, self._count + 1
                self._all[number] = Push(root, step, target.name, self._ref)
                thread = self._threads.setdefault(target.url, Background("ckptstore-push"))
            thread.do(partial(self._push, number, target))
            threads.append(thread)
        for thread in threads:
            thread.wait(WAITING + 1)

    def wait(self) -> bool:
        """Wait until all are through; False if the caller's own time is over before."""
        self._leave_parent()
        return all(thread.wait() for thread in self._threads.values())

    def give_up(self) -> None:
        """End all as soon as possible, and return when they have. What was sent is used when a push is repeated."""
        self._leave_parent()
        for thread in self._threads.values():
            thread.give_up()
        self.wait()

    def failures(self) -> list[BaseException]:
        """What went wrong and was not told yet; it is told now."""
        self._leave_parent()
        return self._untold.take()

    def _push(self, number: int, target: Target) -> None:
        wanted = self._set(number, state=State.RUNNING)
        try:
            deadline.check(f"push to {target.name}")
            store = self._stores.get(target.url)
            if store is None:
                store = self._stores[target.url] = target.open()
            done = push(self._store, store, wanted.root, ref=self._ref)
        except BaseException as error:  # whatever it is, it is told in the thread that trains
            self._failed(number, target, error)
        else:
            self._set(number, state=State.DONE, transfer=done)

    def _failed(self, number: int, target: Target, error: BaseException) -> None:
        wanted = self._all[number]
        state = State.GIVEN_UP if deadline.remaining() == 0.0 else State.FAILED
        what = f"push of checkpoint {wanted.root.short} (step {wanted.step}) to {target.name}"
        words = [wanted.root.hex, target.url, "--ref", self._ref, "--store", self._store.url]
        hint = f"it is safe in {self._store.url}; repeat this push with: ckpt push {shlex.join(words)}"
        if isinstance(error, CkptStoreError):
            kind: type[CkptStoreError] = type(error)
            why = str(error)
        else:
            kind, why = BackendError, f"{type(error).__name__}: {error}"
        failure = kind(what, why, hint)
        failure.__cause__ = error
        getLogger("ckptstore").warning("%s", failure)  # also heard where nobody closes the run
        self._set(number, state=state, error=failure)
        self._untold.add(failure)

    def _set(self, number: int, **changes: object) -> Push:
        with self._lock:
            changed = self._all[number] = replace(self._all[number], **changes)  # type: ignore[arg-type]
            done = [n for n, item in self._all.items() if item.state is State.DONE]
            for old in done[:-_REMEMBERED]:
                del self._all[old]
        return changed

    def _leave_parent(self) -> None:
        """A child made by fork has no part in what its parent pushes."""
        if os.getpid() != self._process:
            self._begin()
