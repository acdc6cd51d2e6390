"""All workers of a small run as threads of one process: real sessions, hosts, stores and orders, and no launching."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore import Digest, ShardReceipt, Store
from tests.trainer.small import small_profile
from trainer.compute.result import UpdateResult
from trainer.compute.transport import LocalGroup, local_groups
from trainer.lifecycle.commits import push_shards
from trainer.preparation import prepare
from trainer.preparation.prepare import Prepared
from trainer.workers import events, fingerprints
from trainer.workers.events import Emitter, Event
from trainer.workers.fingerprints import Fingerprint
from trainer.workers.hosts import STORE, Host
from trainer.workers.orders import Arm, Order, Restore, Save, Start, Train
from trainer.workers.reports import update_result
from trainer.workers.session import Session

REF = "small"
InThreads = Callable[[Sequence[LocalGroup], Callable[[LocalGroup], Any]], list[Any]]


def prepare_small(folder: Path, compute: str = "float32") -> Prepared:
    """The small run frozen under ``folder``, by default in a compute dtype that every CPU has."""
    return prepare.prepare(small_profile(), folder, compute=compute)


def store_preparation(prepared: Prepared, store: Store) -> Digest:
    """Put plan and inputs into ``store``; returns the prepared identity."""
    plan, inputs = store.put_tree(prepared.plan_dir), store.put_tree(prepared.inputs_dir)
    return store.put_preparation(plan, inputs, plan)


class Pair:
    """A session for each shard of the plan, or of other cuts, on a host of its own below ``area``.

    Args:
        area: a new folder.
        prepared: the small run.
        identity: its identity in the operator's store.
        in_threads: runs something for each member of a group in a thread of its own.
        cuts: where the shards begin; None: as planned.
    """

    def __init__(
        self,
        area: Path,
        prepared: Prepared,
        identity: Digest,
        in_threads: InThreads,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self._in_threads = in_threads
        self._groups = local_groups(len(prepared.plan.cuts if cuts is None else cuts) + 1)
        self.hosts: list[Host] = []
        self.sessions: list[Session] = []
        self._paths: list[Path] = []
        for group in self._groups:
            host = Host(area, f"host-{group.rank}")
            shutil.copytree(prepared.plan_dir, host.directory / "plan")
            shutil.copytree(prepared.inputs_dir, host.directory / "inputs")
            ckptstore.open(host.store, create=True)
            path = host.directory / "events.jsonl"
            self.hosts.append(host)
            self._paths.append(path)
            session = Session(host.directory, identity, Emitter(path), lambda timeout, own=group: own, cuts=cuts)
            self.sessions.append(session)

    def started(self) -> Pair:
        """From the starting weights."""
        self.each(Start())
        return self

    def restored(self, operator: Store, root: Digest, *, drift: bool = False) -> Pair:
        """From a checkpoint, of which each host fetches its shard."""
        for index, host in enumerate(self.hosts):
            ckptstore.pull(operator, ckptstore.open(host.store), root, shards=[index], files=False)
        self.each(Restore(root, STORE, drift))
        self.each(Arm())
        return self

    def each(self, order: Order) -> list[Event]:
        """Carry out an order that needs no other worker, one session after the other: they share their generators."""
        for session in self.sessions:
            session.carry_out(order)
        return [self.said(shard)[-1] for shard in range(len(self.sessions))]

    def train(self, first: int, last: int) -> None:
        """Make updates together."""
        self._in_threads(self._groups, lambda group: self.sessions[group.rank].carry_out(Train(first, last)))

    def said(self, shard: int) -> list[Event]:
        """All events of a session."""
        return list(events.read(self._paths[shard]))

    def results(self) -> dict[int, UpdateResult]:
        """Results of the updates made, by update."""
        return {event["update"]: update_result(event) for event in self.said(0) if event.name == "update"}

    def fingerprint(self, update: int) -> Fingerprint:
        """Of an update that was made."""
        said = [event for shard in range(len(self.sessions)) for event in self.said(shard) if event.name == "update"]
        told = [fingerprints.state_of(event) for event in said if event["update"] == update]
        return fingerprints.make(self.results()[update], told)

    def save(self, attempt: object, step: int, files: Digest | None = None) -> list[ShardReceipt]:
        """All shards to their hosts' stores."""
        said = self.each(Save(str(attempt), step, STORE, files))
        return [ShardReceipt.parse(event["receipt"].encode()) for event in said]

    def commit(self, operator: Store, step: int, files: Digest | None = None, *, ref: str = REF) -> Digest:
        """All shards to their hosts' stores, from there to ``operator``, and there a checkpoint."""
        attempt = operator.begin(ref)
        receipts = self.save(attempt, step, files)
        push_shards(self.hosts, receipts, operator, "operator")
        return operator.commit(attempt, receipts)
