"""Two stores, what is done to them, and the model that says what must be true of them afterwards.

Every operation is done by the library, on a store object that lives on or, if it is to be killed, by one that dies with
it; then the model is told what was asked for, and what is stored is compared with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.backends.memory import named
from ckptstore.backends.owners import this_process
from ckptstore.backends.protocol import PruneBackend
from ckptstore.errors import CkptStoreError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key
from ckptstore.format.records import CollectionMarker, Lease, Pin
from ckptstore.store import Store
from tests.machine.model import Holding, Model
from tests.machine.states import live
from tests.support.faulty import FaultyBackend
from tests.support.invariants import broken

NAMES = ("near", "far")
OPERATIONS = ("get", "readback", "stat", "list", "create", "replace", "delete")


def tried(work: Callable[[], Any]) -> tuple[Any, CkptStoreError | None]:
    """What work returns, or the error that it ends with."""
    try:
        return work(), None
    except CkptStoreError as error:
        return None, error


class Killed(BaseException):
    """The process that does an operation dies here."""


@dataclass(frozen=True, slots=True)
class Kill:
    """When an operation dies: at its ``nth`` call of a backend, before that or (``late``) when it took effect."""

    nth: int
    late: bool


class World:
    """Two stores in ``folder``, or in memory if that is None."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.model = Model()
        self.held = {name: Holding() for name in NAMES}
        run = secrets.token_hex(8)
        self.urls = {name: f"memory:{name}-{run}" if folder is None else str(folder / name) for name in NAMES}
        self.stores = {name: ckptstore.open(url, create=True) for name, url in self.urls.items()}
        self.raw: dict[str, PruneBackend] = {name: store.backend for name, store in self.stores.items()}
        self._seen: dict[str, set[str]] = {name: set() for name in NAMES}
        self._turn = 0

    def reopen(self, name: str) -> None:
        """The process ends, and another one begins that has verified nothing yet."""
        self.stores[name] = ckptstore.open(self.urls[name])

    # -- looking ------------------------------------------------------------------------------------------------------

    def restore(self, name: str, root: Digest, shard: int, *, atomic: bool) -> str:
        """Restore a shard: to the very bits, or not at all."""
        count = len(self.model.truths[root].shards)
        fresh = live(None, None if count == 1 else shard)
        needed = self.model.closure(root, {shard})
        bad = self.held[name].damage.keys() & needed
        _, failure = tried(lambda: self.stores[name].restore(root, fresh.state, shard=shard, atomic=atomic))
        if failure is not None:
            assert bad, failure
            return failure.code
        assert not bad, "damage was handed out, or read around"
        assert fresh.content() == self.model.truths[root].shards[shard]
        return "restored"

    def verify(self, name: str, root: Digest, *, note: bool = False) -> int:
        """Find exactly what is damaged; returns how many keys that are. ``note``: else leave a receipt."""
        held = self.held[name]
        shards = None if root in held.whole else held.partial[root]
        report = self.stores[name].verify(root, None if shards is None else sorted(shards))
        expected = self.model.faults(held, self.keys(name), root, shards)
        found: dict[str, set[str]] = {}
        for finding in report.findings:
            found.setdefault(finding.key, set()).add(finding.kind.value)
        assert found.keys() == expected.keys(), (found, expected)
        for key, kind in expected.items():
            assert kind in found[key], (key, kind, found[key])
        assert (report.exit_code == 0) == (not expected)
        if note and report.ok and shards is None:
            self.stores[name].add_receipt(report.receipt(self.urls[name]))
        return len(expected)

    def diff(self, left: tuple[str, Digest], right: tuple[str, Digest]) -> str:
        """Say exactly which tensors differ."""
        sides = [self.model.entries(root) for _, root in (left, right)]
        expected = {key for key in sides[0].keys() | sides[1].keys() if sides[0].get(key) != sides[1].get(key)}
        bad = [self.held[name].damage.keys() & self.model.closure(root) for name, root in (left, right)]
        found, failure = tried(lambda: self.stores[left[0]].diff(left[1], right[1], self.stores[right[0]]))
        if failure is not None:
            assert any(bad), failure
            return failure.code
        told = {(*change.role, change.path) for change in found.tensors}
        assert told <= expected
        if not any(bad):
            assert not found.findings
        if not found.findings:
            assert told == expected
        assert found.same_state == (
            self.model.checkpoint(left[1]).state_root == self.model.checkpoint(right[1]).state_root
        )
        return "compared"

    # -- what must be true always -------------------------------------------------------------------------------------

    def check(self, *, everything: bool = False) -> None:
        """Compare the stores with the model: names and keys each time, bytes of some checkpoint in turn or of all."""
        for name in NAMES:
            held, store = self.held[name], self.stores[name]
            self.settle(name)
            assert store.refs.names() == sorted(held.refs)
            for ref, roots in held.refs.items():
                log = [record.root for record in store.refs.log(ref)][::-1]
                named_once = [root for at, root in enumerate(log) if at == 0 or root != log[at - 1]]
                assert named_once == roots
                assert not store.refs.findings(ref)[0]
            assert self.pins(name) == held.pins
            there = self.keys(name)
            for root in held.whole:
                assert self.model.closure(root) - there <= held.damage.keys(), "something of a whole checkpoint is gone"
            for root, shards in held.partial.items():
                assert self.model.closure(root, shards) - there <= held.damage.keys()
            there_now = self.roots(name)
            self._turn += 1
            if there_now and not everything:
                there_now = [there_now[self._turn % len(there_now)]]
            for one in there_now:
                self.verify(name, one)
                present = range(len(self.model.truths[one].shards)) if one in held.whole else sorted(held.partial[one])
                for shard in present:
                    self.restore(name, one, shard, atomic=everything)
            if everything:
                self._read_everything(name)

    def roots(self, name: str) -> list[Digest]:
        """Roots that a store has, whole or in part, in an order that is the same each time."""
        held = self.held[name]
        return sorted(held.whole | held.partial.keys(), key=lambda root: (self.model.truths[root].step, root.raw))

    def whole(self, name: str) -> list[Digest]:
        """Those that it has whole."""
        return [root for root in self.roots(name) if root in self.held[name].whole]

    def close(self) -> None:
        """Forget what was in memory."""
        if self.folder is None:
            for url in self.urls.values():
                backend = named(url.removeprefix("memory:"), create=False)
                for stat in backend.list(""):
                    backend.delete(stat.key)

    # -- inside -------------------------------------------------------------------------------------------------------

    def do(
        self,
        work: Callable[..., Any],
        names: list[str],
        kill: Kill | None,
        *,
        may_fail: bool = True,
        deleting: bool = False,
    ) -> tuple[Any, str]:
        """What ``work`` returns, None if it failed or died; and in a word what became of it. Only what is damaged may
        make it fail, if that ``may_fail``; only what is ``deleting`` lets a key go."""
        before = {name: self.keys(name) for name in names}
        if kill is None:
            return self._came_to(*tried(lambda: work(*(self.stores[name] for name in names))), names, may_fail)
        calls = 0

        def count(_key: str) -> None:
            nonlocal calls
            calls += 1
            if calls // 2 >= kill.nth and (calls > 2 * kill.nth or not kill.late):
                raise Killed

        dying = [FaultyBackend(self.raw[name]) for name in names]
        for backend in dying:
            for operation in OPERATIONS:
                backend.before(operation, count)
                backend.after(operation, count)
        try:
            return self._came_to(*tried(lambda: work(*map(Store, dying))), names, may_fail)
        except Killed:
            for name in names:
                assert deleting or before[name] <= self.keys(name) | self._keys_of_leases(before[name])
                self._bury(name)
                self.reopen(name)
            return None, "killed"

    def _came_to(self, done: Any, failure: CkptStoreError | None, names: list[str], may_fail: bool) -> tuple[Any, str]:
        if failure is None:
            return done, "done"
        assert may_fail, failure
        assert any(self.held[name].damage for name in names), failure
        return None, failure.code

    def _bury(self, name: str) -> None:
        """Whoever died in this process was another one: what it left says so."""
        raw = self.raw[name]
        here = this_process()
        gone = type(here)(here.boot, here.namespace, here.pid, here.started + 1)
        for stat in list(raw.list("leases/")):
            held = Lease.parse(raw.get(stat.key))
            if held.process == str(here):
                raw.delete(stat.key)
                raw.create(stat.key, replace(held, process=str(gone)).encode())
        for stat in list(raw.list("gc/")):
            marker = CollectionMarker.parse(raw.get(stat.key))
            raw.delete(stat.key)
            raw.create(stat.key, replace(marker, process=str(gone)).encode())

    def let_go(self, name: str, keys: set[str]) -> None:
        """These keys were deleted on purpose."""
        self._seen[name] -= keys
        for key in keys & self.held[name].damage.keys():
            del self.held[name].damage[key]

    def digests(self, name: str) -> set[Digest | None]:
        """Digests of the objects and documents that are there."""
        return {digest_of_key(key) for key in self.keys(name)} - {None}

    def named(self, held: Holding, ref: str, root: Digest | None) -> None:
        roots = held.refs.setdefault(ref, [])
        if not roots or roots[-1] != root:
            roots.append(root)

    def moved(self, name: str, ref: str) -> Digest | None:
        """The root that a ref names now, if it is another than the model says."""
        actual = self.stores[name].head(ref)
        head = self.held[name].head(ref)
        if ref not in self.held[name].refs and ref in self.stores[name].refs.names() and actual is None:
            self.held[name].refs[ref] = [None]  # a fence before the first generation
        return actual if actual != head else None

    def settle(self, name: str) -> None:
        """Learn what was stored, see what was healed; nothing else may have changed."""
        held, raw = self.held[name], self.raw[name]
        there = {key for key in self.keys(name) if digest_of_key(key) is not None}
        assert self._seen[name] - there <= held.damage.keys(), "something is gone"
        for key in there - self._seen[name]:
            assert self.model.learn(key, raw.get(key)), f"{key} is visible and has other bytes"
        self._seen[name] |= there
        for key, (_, left) in list(held.damage.items()):
            now = raw.get(key) if key in there else None
            if now == self.model.good[key]:
                del held.damage[key]
            else:
                assert now == left, f"{key} was damaged and is now otherwise"

    def _read_everything(self, name: str) -> None:
        held, raw = self.held[name], self.raw[name]
        for key in self.keys(name):
            if digest_of_key(key) is not None and key not in held.damage:
                assert raw.get(key) == self.model.good[key]
        if self.folder is not None and not held.damage:
            assert broken(self.folder / name) == []

    def keys(self, name: str) -> set[str]:
        return {stat.key for stat in self.raw[name].list("")}

    @staticmethod
    def _keys_of_leases(keys: set[str]) -> set[str]:
        return {key for key in keys if key.startswith("leases/")}

    def pins(self, name: str) -> dict[str, tuple[Digest, tuple[int, ...] | None]]:
        found = {}
        for stat in self.raw[name].list("pins/"):
            _, root, nonce = stat.key.split("/")
            found[nonce] = (Digest.parse(root), Pin.parse(self.raw[name].get(stat.key)).shards)
        return found
