"""The experiment from end to end: train, lose a host in the middle of an update, replace it, end with the same root.

Each method of :class:`Lifecycle` is one phase; :meth:`Lifecycle.run` is their order. Nothing here imports torch: the
controller holds digests, receipts and events, and no process of the run ever holds the whole model.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import ckptstore
from ckptstore import Digest
from ckptstore.errors import CkptStoreError
from trainer.data.template import TEMPLATE
from trainer.hosts.backend import Backend
from trainer.lifecycle import admission, replay, scored
from trainer.lifecycle.access import Access
from trainer.lifecycle.commits import REFERENCE, Committed, commit_by_way_of_hosts, commit_reference
from trainer.lifecycle.drill import lose_host
from trainer.lifecycle.expect import KEPT, NotAsPlannedError, require, unexpected
from trainer.lifecycle.freezing import free_ref, freeze
from trainer.lifecycle.journal import Journal
from trainer.lifecycle.pulling import pull_on_hosts
from trainer.lifecycle.record import GroupRecord, Record, Settings
from trainer.lifecycle.report import plain
from trainer.lifecycle.requests import Ledger
from trainer.lifecycle.staging import Staging, stage
from trainer.preparation import staged
from trainer.preparation.prepare import choose_compute
from trainer.workers.group import LaunchedGroup, Said
from trainer.workers.hosts import STORE, Host, Shut, clear
from trainer.workers.launch import Launch, agent_environment
from trainer.workers.orders import Arm, Evaluate, Flip, Restore, Start, Train
from trainer.workers.traces import keep_traces

REF = "lifecycle"
_SHOWN = 8  # updates between two lines where progress is not shown in place


class Lifecycle:
    """One run; everything that it makes lies below ``settings.out``, which has to be empty or absent."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.settings, self.journal = settings, journal
        self.hosts: dict[str, Host] = {}
        self.members: list[Host] = []
        self.ledger = Ledger()
        self._shuts: list[Shut] = []
        self._generation = self._pulls = 0
        self._sealed: Path | None = None
        self._mode = 0o755

    def run(self, access: Access, backend: Backend) -> Record:
        """All phases up to the evaluation, and the receipts for what was removed.

        Args:
            access: how the operator's store is reached.
            backend: makes the hosts.

        Raises:
            NotAsPlannedError: the run did not do what it has to; everything is kept.
            CkptStoreError: anything else that failed.
        """
        self.access, self.backend, phase = access, backend, self.phase
        with phase("prepare", "freezing plan, inputs and sources"):
            self.prepare()
        plan = self.plan
        early, middle, last = plan.commits
        with phase("stage", "staging two hosts from the operator's store"):
            self.members = [self._new_host(index) for index in range(len(plan.owners))]
            for shard, host in enumerate(self.members):
                self._stage(host, shard)
        with phase("reference", f"training without a loss, to update {middle}"):
            self.train_reference(early, middle)
        with phase("drill", f"losing the host of shard {plan.drill.shard} in update {plan.drill.update}"):
            self.drill(early, middle)
        with phase("replace", "a third host takes the shard over"):
            self.replace(early)
        with phase("recover", f"replaying updates {early + 1} to {middle}, then on to {last}"):
            self.recover(early, middle, last)
        with phase("evaluate", "scoring start, recovered and last weights, by the shards alone"):
            self.evaluate(middle, last)
        with phase("clean up", "removing hosts"):
            self.clean_up()
        self.record.torch_imported = "torch" in sys.modules
        require("torch imported by the controller", False, self.record.torch_imported)
        return self.record

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        """Record when the block begins and ends, how, and what it asked of the operator's store."""
        with self.journal.phase(name, text):
            yield
            self.ledger.close(name, self.operator)

    # -- phases -------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Freeze plan, inputs and sources, and store them as trees: their digest is the prepared identity."""
        settings, journal = self.settings, self.journal
        self.operator = ckptstore.open(self.access.url, create=True)
        compute = settings.compute or choose_compute(settings.kernels)
        folder = settings.out / "prepared"
        frozen = freeze(
            settings.profile,
            folder,
            self.operator,
            compute=compute,
            kernels=settings.kernels,
            mode=settings.mode,
            start=settings.start,
        )
        self.plan, self.trees, identity = frozen.plan, frozen.trees, frozen.identity
        self.ref = free_ref(self.operator, REF)
        kind, requests = self.access.kind, self.ledger.entries
        self.record = Record(self.plan, identity, self.trees, self.ref, self.operator.url, kind, requests)
        self.launch = Launch(self.plan, identity, settings.out)
        self.record.hosts_kind, self.record.hosts_claim = self.backend.kind, self.backend.claim
        journal.note(
            "prepared",
            f"prepared identity {identity.short}; compute {compute}; ref {self.ref} in {self.operator.url}",
            identity=str(identity),
            trees={name: str(digest) for name, digest in self.trees.items()},
            ref=self.ref,
            operator=self.operator.url,
        )

    def train_reference(self, early: int, middle: int) -> None:
        """The original group: commit for everybody in between, then on without a loss, into a store out of reach."""
        record, path = self.record, self.settings.out / REFERENCE
        reference = ckptstore.open(path, create=True)
        with self._group("uninterrupted reference") as group:
            self._join(group, None)
            group.tell(Start())
            group.tell(Train(1, early))
            first = self._keep(commit_by_way_of_hosts(group, self.operator, self.ref, early, None))
            ckptstore.push(self.operator, reference, first.root, ref=self.ref)
            group.tell(Train(early + 1, middle))
            self._keep(commit_reference(group, reference, self.ref, middle, first.root), announce=False)
            record.reference = replay.agreed_results(group)
            self._close(group)
        require("updates of the reference", list(range(1, middle + 1)), sorted(record.reference))
        # From here on no path that anything knows leads to the reference, until both roots are on the terminal.
        self._sealed = self.settings.out / f".sealed-{secrets.token_hex(8)}"
        self._mode = path.stat().st_mode & 0o7777
        path.rename(self._sealed)
        self._sealed.chmod(0)
        self.journal.note("sealed", f"reference of update {middle} is out of reach", step=middle)

    def drill(self, early: int, middle: int) -> None:
        """A fresh group restores the commit and loses a host; its survivor is aborted and nothing new exists."""
        plan, record = self.plan, self.record
        root = record.root(early).root
        self._pull([root])
        with self._group("interrupted by the loss of a host") as group:
            self._join(group, root)
            group.tell(Restore(root, STORE, self.settings.drift))
            group.tell(Arm())
            loss = lose_host(group, plan.drill, early + 1, middle, self.operator, self.ref, root, self.journal.began)
            record.loss = loss
            self._finished(group)
        self.journal.note(
            "host_lost",
            f"{loss.host} lost in update {loss.update} ({loss.mode}); noticed after {loss.detection_ms:.0f} ms "
            f"({loss.detected_by}); survivor aborted after {loss.abort_ms:.0f} ms more; head is still {root.short}",
            detection_ms=loss.detection_ms,
            abort_ms=loss.abort_ms,
            completed=loss.completed,
        )

    def replace(self, early: int) -> None:
        """The failed host's folder goes out of the way; an empty one gets the shard's files and objects, no others."""
        shard = self.plan.drill.shard
        lost = self.members[shard]
        self._shut(lost)
        kept = lost.take_away()
        self.journal.note("taken_away", f"folder of {lost.name} renamed, nothing reads it any more", path=str(kept))
        spare = self._new_host(len(self.hosts), with_store=False)
        self.record.empty_listing = spare.listing()
        require(f"files on {spare.name} before staging", [], self.record.empty_listing)
        if spare.view is not None:
            require(f"files on {spare.name} as its first process saw them", (), spare.view.listing)
        template = f"{staged.INPUTS}/tokenizer/{TEMPLATE}"
        refused = self._stage(spare, shard, forget=(template,))
        if template not in refused.refused:
            raise unexpected(
                "staging without the chat template", f"refused, naming {template}", refused.refused or "accepted"
            )
        self._stage(spare, shard, attempt=2)
        ckptstore.open(spare.store, create=True)
        spare.publish()
        self.members[shard] = spare
        self._pull([self.record.root(early).root], try_to_write=(spare,) if self.access.read_only else ())

    def recover(self, early: int, middle: int, last: int) -> None:
        """A fresh group replays to the reference's root, losses and norms, and goes on from there."""
        plan, record = self.plan, self.record
        root = record.root(early).root
        with self._group("recovered on the third host") as group:
            self._join(group, root)
            group.tell(Restore(root, STORE, self.settings.drift))
            group.tell(Arm())
            if self.settings.sabotage:
                self._sabotage(group, plan.drill.shard)
            group.tell(Train(early + 1, middle))
            record.replay = replay.agreed_results(group)
            recovered = self._keep(commit_by_way_of_hosts(group, self.operator, self.ref, middle, root), announce=False)
            self._compare(middle, recovered)
            group.tell(Train(middle + 1, last))
            record.continued = {n: one for n, one in replay.agreed_results(group).items() if n > middle}
            final = self._keep(commit_by_way_of_hosts(group, self.operator, self.ref, last, recovered.root))
            require(f"parent of the root at {last}", recovered.root, final.parent)
            self._close(group)

    def evaluate(self, middle: int, last: int) -> None:
        """A group of its own scores starting weights and committed roots; both workers must say the same."""
        plan, record = self.plan, self.record
        steps: dict[int, Digest | None] = {0: None}
        steps |= {step: record.root(step).root for step in (middle, last)}
        self._pull([record.root(step).root for step in (middle, last)])
        with self._group("evaluation") as group:
            self._join(group, record.root(last).root)
            for step in plan.evaluation.after:
                root = steps[step]
                group.tell(Start() if root is None else Restore(root, STORE, self.settings.drift))
                events = group.tell(Evaluate(step))
                result, entry = scored.agreed(step, root, events)
                record.results[step] = result
                record.evaluations.append(entry)
                scores = ", ".join(f"{one.name} {one.mean:.5f}" for one in result.sets)
                correct = ", ".join(f"{one.correct}/{len(one.answers)}" for one in result.sets if one.answers)
                self.journal.say(f"after update {step}: loss {scores}; correct {correct}; equal on all workers")
                again = entry["recomputed"]
                text = f"KV cache equals recomputation: {again['logits']} logits of {again['cases']} cases"
                text += f"; {entry['tokens_per_second']:.0f} tokens a second with it"
                self.journal.say(f"{text}, {again['tokens_per_second']:.0f} without")
            self._close(group)

    def clean_up(self) -> None:
        """Remove every host, after its events and error output were copied to where the evidence is made."""
        require("processes that are left", [], [one.pid for one in self.record.endings if not one.gone])
        for host in self.members:
            self._shut(host)
        self.record.shut = [*self._shuts, *self.backend.close()]
        require("hosts that are left", [], [one.host for one in self.record.shut if not one.gone])
        self.collect_events()
        for host in self.hosts.values():
            self.record.cleared.append(host.clear())
        for folder in ("hosts", "lost"):
            self.record.cleared.append(clear(folder, self.settings.out / folder))
        require("folders that are left", [], [one.path for one in self.record.cleared if not one.gone])
        total = sum(one.bytes for one in self.record.cleared)
        self.journal.note(
            "cleaned",
            f"{len(self.record.endings)} processes and {len(self.hosts)} hosts gone ({total:,} bytes)",
            shut=plain(self.record.shut),
        )

    def collect_events(self) -> None:
        """Copy what workers wrote on their hosts to the run's own folder of events."""
        for host in self.hosts.values():
            host.collect()
        keep_traces(self.hosts.values(), self.settings.out / "events")

    def abandon(self) -> None:
        """End what still runs on hosts, at once: of a run that ended well, nothing does."""
        over = {one.host for one in self._shuts}
        for host in self.hosts.values():
            if host.name not in over:
                with suppress(CkptStoreError):  # nothing may hide why the run failed
                    host.lose()
                    host.shut()

    def unseal(self) -> None:
        """Give the reference's store its name back: when both roots are known, or nothing runs any more."""
        if self._sealed is not None:
            self._sealed.chmod(self._mode)
            self._sealed.rename(self.settings.out / REFERENCE)
            self._sealed = None

    # -- steps of phases ----------------------------------------------------------------------------------------------

    def _new_host(self, index: int, *, with_store: bool = True) -> Host:
        host = self.backend.host(self.settings.out, f"host-{index}", self.access.host_allow)
        self.hosts[host.name] = host
        if host.view is not None:
            self.record.views[host.name] = host.view
        if with_store:
            ckptstore.open(host.store, create=True)
        return host

    def _stage(self, host: Host, shard: int, *, attempt: int = 1, forget: tuple[str, ...] = ()) -> Staging:
        done = stage(self.operator, self.trees, host, shard, attempt=attempt, forget=forget)
        self.record.stagings.append(done)
        if done.refused:
            text = f"staging of {host.name} refused: {done.refused}"
        else:
            text = f"{host.name} has shard {shard}'s files: {done.bytes:,} bytes copied, {done.checked_bytes:,} checked"
        self.journal.note(
            "staged", text, host=host.name, shard=shard, attempt=attempt, refused=done.refused, bytes=done.bytes
        )
        if done.refused and not forget:
            raise NotAsPlannedError(f"staging of {host.name}", done.refused, KEPT)
        if not done.refused:
            host.publish()
            host.begin(agent_environment(self.plan, host))
        return done

    def _pull(self, roots: Sequence[Digest], *, try_to_write: Sequence[Host] = ()) -> None:
        """Let each host pull its shard of checkpoints, in processes that alone know how to reach the operator."""
        self._pulls += 1
        members = [(host, shard) for shard, host in enumerate(self.members)]
        name = f"pull-{self._pulls}"
        for done in pull_on_hosts(self.access, members, roots, name, try_to_write=try_to_write):
            self.ledger.fetched(done.operations, done.sent_bytes, done.received_bytes)
            self.record.pulled += done.pulled
            for one in done.pulled:
                text = f"{one.host} has shard {one.shard} of {one.root.short}: {one.received_bytes:,} bytes came"
                text += f", {one.readback_bytes:,} read back"
                fields = {"host": one.host, "shard": one.shard, "root": str(one.root), "bytes": one.received_bytes}
                self.journal.note("pulled", text, **fields)
            if done.refused_write:
                self.record.refused_write = done.refused_write
                who = done.pulled[0].host
                text = f"{who} may not write to the operator's store: {done.refused_write}"
                self.journal.note("write_refused", text, host=who)

    def _shut(self, host: Host) -> None:
        """End all that a host is but for its folder, and keep the receipt."""
        self._shuts.append(host.shut())

    def _group(self, purpose: str) -> LaunchedGroup:
        self._generation += 1
        names = ", ".join(host.name for host in self.members)
        self.journal.note("launched", f"group {self._generation} ({purpose}) on {names}", generation=self._generation)
        return LaunchedGroup(self.launch, self._generation, purpose, self.members, listen=self._listen)

    def _join(self, group: LaunchedGroup, root: Digest | None) -> None:
        """Let the workers meet, and compare what they have and measured before any of them makes an update."""
        joined = group.join()
        self.record.ownership = admission.check_ownership(self.plan, joined, self.launch.owners)
        stored = None if root is None else self.operator.checkpoint(root)
        self.record.binding = admission.check_bindings(joined, None if self.settings.drift else stored)
        self.journal.note("admitted", generation=group.generation, canary=admission.canary(self.record.binding))

    def _keep(self, committed: Committed, *, announce: bool = True) -> Committed:
        self.record.committed.append(committed)
        moved = sum(one.sent_bytes for one in committed.moved)
        text = f"step {committed.step} committed to {committed.store}: {moved:,} bytes moved"
        text += f", {committed.verified_bytes:,} read back"
        root = {"root": str(committed.root)} if announce else {}
        text += f" as {committed.root.short}" if announce else ""
        self.journal.note("committed", text, step=committed.step, store=committed.store, **root)
        return committed

    def _sabotage(self, group: LaunchedGroup, shard: int) -> None:
        places = [event["place"] for event in group.tell(Flip(shard))]
        place = self.record.sabotaged = {"shard": shard, **places[shard]}
        where = f"element {place['element']} of {place['role']} of {place['tensor']}"
        text = f"SABOTAGE: bit {place['bit']} of {where} flipped"
        self.journal.note("sabotaged", text, **place)

    def _compare(self, middle: int, recovered: Committed) -> None:
        """Root, losses and norms of the replay against the reference: bit for bit, or the run has failed."""
        record = self.record
        reference = record.root(middle, REFERENCE)
        self.journal.note("roots", f"reference root at {middle}: {reference.root}", reference=str(reference.root))
        self.journal.note("roots", f"recovered root at {middle}: {recovered.root}", recovered=str(recovered.root))
        self.unseal()
        kept = ckptstore.open(self.settings.out / REFERENCE)
        planned = {number: one for number, one in record.reference.items() if number > record.plan.commits[0]}
        replay.require_equal(middle, (kept, reference.root, planned), (self.operator, recovered.root, record.replay))
        self.journal.say(f"equal: root, and losses and norms of {len(planned)} updates, bit for bit")

    def _close(self, group: LaunchedGroup) -> None:
        closed = group.close()
        self._finished(group, tuple(event["peak_rss"] for event in closed))

    def _finished(self, group: LaunchedGroup, peak_rss: tuple[int, ...] = ()) -> None:
        self.record.endings += group.endings
        updates = [group.updates(shard) for shard in range(len(group.hosts))]
        assert group.joined is not None
        assert group.ended is not None
        self.record.groups.append(
            GroupRecord(
                generation=group.generation,
                purpose=group.purpose,
                hosts=tuple(host.name for host in group.hosts),
                pids=tuple(process.pid for process in group.processes),
                forked=tuple(process.forked for process in group.processes),
                began=self.journal.seconds(group.began),
                joined=self.journal.seconds(group.joined),
                ended=self.journal.seconds(group.ended),
                update_seconds=sum(event["ms"] for event in updates[0].values()) / 1000,
                updates=tuple(sorted(updates[0])),
                sent_bytes=sum(event["sent_bytes"] for one in updates for event in one.values()),
                peak_rss=peak_rss,
            )
        )

    def _listen(self, group: LaunchedGroup, said: Said) -> None:
        """Show how training goes; worker's events stay in their own files."""
        event = said.event
        if event.name == "update" and said.shard == 0:
            number = event["update"]
            text = f"group {group.generation}: update {number}, loss {event['loss']:.5f}, norm {event['norm']:.5f}"
            self.journal.progress(text, keep=number % _SHOWN == 0)
