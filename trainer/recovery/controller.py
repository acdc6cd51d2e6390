"""The controller of a run that recovers by itself: does what the state says is next, and writes down what is done.

Nothing here imports torch. What is decided, and what an entry means, is in :mod:`trainer.recovery.state`; here are only
the deeds: hosts, groups, stores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime

import ckptstore
from ckptstore import Store
from ckptstore.errors import CkptStoreError, RefusedError
from trainer.lifecycle import admission
from trainer.lifecycle.access import Access, near
from trainer.lifecycle.expect import require
from trainer.lifecycle.freezing import free_ref, freeze
from trainer.lifecycle.journal import Journal
from trainer.preparation import staged
from trainer.preparation.plan import Plan
from trainer.preparation.prepare import choose_compute, read_plan
from trainer.recovery import entries
from trainer.recovery import state as states
from trainer.recovery.agreement import Agreement
from trainer.recovery.blame import Blame, RunFailedError, blame, connection
from trainer.recovery.committing import Commits
from trainer.recovery.custody import Custody
from trainer.recovery.entries import Begun, Chosen, Entry
from trainer.recovery.equipping import HostLostError, Peer, Source, equip
from trainer.recovery.journal import RunJournal
from trainer.recovery.settings import RunSettings, require_same
from trainer.recovery.state import State
from trainer.recovery.times import Recoveries
from trainer.workers.group import GroupLostError, LaunchedGroup, Said
from trainer.workers.hosts import STORE, Host, clear
from trainer.workers.launch import Launch
from trainer.workers.orders import Arm, Restore, Start, Train
from trainer.workers.reports import update_result
from trainer.workers.traces import keep_traces

REF = "run"
PREPARED = "prepared"

_SHOWN = 8  # updates between two lines where progress is not shown in place
_LAST_WORDS = 2.0  # seconds beyond the heartbeats that may be missed, for signs that say more than a lost connection


class NoSpareError(RefusedError):
    """A shard has lost its host and no spare one is left. All that was committed is kept, and the run can go on."""

    code = "no-spare"


class FutileError(RefusedError):
    """The run was lost again and again without one new update."""

    code = "futile"


class Controller:
    """One controller's time in charge of a run; all that it makes lies below ``settings.out``.

    Args:
        settings: what the caller wants.
        custody: charge of the folder.
        access: how the operator's store is reached.
        memory: the run's journal.
        people: what is said to people and kept as events.
    """

    def __init__(
        self, settings: RunSettings, custody: Custody, access: Access, memory: RunJournal, people: Journal
    ) -> None:
        self.settings, self.custody, self.access, self.memory, self.people = settings, custody, access, memory, people
        self.state = states.fold(memory.entries)
        self.operator: Store = ckptstore.open(access.url, create=True)
        self._group: LaunchedGroup | None = None
        self._recoveries = Recoveries()

    def run(self) -> State:
        """Go on until the last checkpoint is committed and the hosts are gone; returns where the run stands then.

        Raises:
            NoSpareError, FutileError: it cannot go on by itself; everything is kept.
            RunFailedError, NotAsPlannedError: something is wrong that no other host would mend.
            CkptStoreError: the operator's store failed. The same command goes on from what is kept.
        """
        require_same(self.settings, self.state.begun)
        self._open()
        # Processes that its threads start end with the threads, so it is there to the end.
        with ThreadPoolExecutor(2 + (os.cpu_count() or 1), "controller") as self._pool, ExitStack() as stack:
            stack.callback(self._end_group)
            if self.state.begun is not None:
                self._load(self.state.begun)
            while True:
                action = states.decide(self.state)
                if isinstance(action, states.Stop):
                    return self.state
                try:
                    self._carry_out(action)
                except GroupLostError:
                    self._lose(None)
                except (CkptStoreError, OSError) as error:
                    self._lose(self._cause(error))

    # -- what is done -------------------------------------------------------------------------------------------------

    def _carry_out(self, action: states.Action) -> None:
        match action:
            case states.Prepare():
                self._prepare()
            case states.Assign(shard=shard, host=host):
                self._assign(shard, host)
            case states.Choose():
                self._choose()
            case states.Stage(chosen=chosen):
                self._stage(chosen)
            case states.Launch(generation=generation, chosen=chosen):
                self._launch(generation, chosen)
            case states.Train(first=first, last=last):
                self._present.tell(Train(first, last))
            case states.Commit(step=step):
                self._note(self._commits.begin(self._present, step, self.state.head, behind=self.settings.behind))
            case states.Await():
                self._note(self._commits.wait())
            case states.Finish():
                self._finish()
            case states.Clear():
                self._clear()
            case states.NoSpare(shard=shard):
                raise NoSpareError(
                    f"shard {shard}",
                    f"it has lost its host, and none of {self.state.spares} spare hosts is left; committed is step "
                    f"{self.state.head_step}, everything is kept",
                    f"go on with: {self.settings.command(spares=self.state.spares + 1)}",
                )
            case states.Futile(losses=losses):
                why = f"{losses} losses in a row without one new update after {self.state.reached}"
                raise FutileError(
                    "run", why, f"see {near(self.memory.path)}; then go on with: {self.settings.command()}"
                )

    def _prepare(self) -> None:
        """Freeze the run. What a controller left that ended meanwhile is made anew."""
        settings, folder = self.settings, self.settings.out / PREPARED
        if folder.exists():
            clear(PREPARED, folder)
        compute = settings.compute or choose_compute(settings.kernels)
        frozen = freeze(
            settings.profile,
            folder,
            self.operator,
            compute=compute,
            kernels=settings.kernels,
            start=settings.start,
        )
        begun = Begun(
            profile=settings.profile.name,
            compute=compute,
            kernels=settings.kernels,
            operator="" if settings.operator is None else self.operator.url,
            ref=free_ref(self.operator, REF),
            identity=frozen.identity,
            plan=frozen.trees[staged.PLAN],
            inputs=frozen.trees[staged.INPUTS],
            sources=frozen.trees[staged.SOURCES],
            shards=len(frozen.plan.owners),
            commits=settings.commits(frozen.plan),
        )
        text = f"prepared identity {begun.identity.short}; compute {compute}; ref {begun.ref} in {self.operator.url}"
        self._record(begun, text)
        self._load(begun)

    def _load(self, begun: Begun) -> None:
        """What was frozen, as the operator's store has it."""
        self.trees = {staged.PLAN: begun.plan, staged.INPUTS: begun.inputs, staged.SOURCES: begun.sources}
        self.plan: Plan = read_plan(self.settings.out / PREPARED / staged.PLAN)
        (file,) = self.operator.tree(begun.plan).files
        require(f"digest of the plan in {self.settings.out / PREPARED}", file.chunks, (self.plan.digest,))
        self.launch = Launch(self.plan, begun.identity, self.settings.out)
        self._commits = Commits(self._pool, self.operator, begun.ref, begun.last, self.people.say)

    def _assign(self, shard: int, name: str) -> None:
        """A host of that name is made; what there is of it is of a controller that ended before it could say so."""
        host = self._host(name)
        if host.directory.exists():
            host.clear()
        host.directory.mkdir(parents=True)
        ckptstore.open(host.store, create=True)
        self._record(entries.Assigned(shard, name), f"{name} takes shard {shard}")

    def _choose(self) -> None:
        """The newest checkpoint that is whole, by reading it; the ref is moved there if it names another."""
        ref = self._begun.ref
        found = ckptstore.latest(self.operator, ref)
        for one in found.skipped:
            self.people.say(f"passed over: {one}; {one.repair}")
        if found.root is not None and found.root != found.head:
            self.operator.refs.move(ref, found.root, self.operator.refs.head(ref))
        step = 0 if found.checkpoint is None else found.checkpoint.step
        self._record(Chosen(found.root, step, tuple(map(str, found.skipped))))

    def _stage(self, chosen: Chosen) -> None:
        members = self._members()
        held = {shard: states.replica(self.state, shard) for shard in range(len(members))}
        peers = {shard: Peer(self._host(found[0]), found[1]) for shard, found in held.items() if found is not None}
        name = f"pull-{sum(isinstance(entry, Chosen) for entry in self.memory.entries)}"
        source = Source(self.operator, self.trees, self.access)
        done = equip(source, members, chosen.root, peers, name, pool=self._pool, say=self.people.say)
        for one in done:
            text = f"{one.host} has shard {one.shard}: files {one.copied_bytes:,} bytes copied, {one.checked_bytes:,} "
            text += f"checked; objects {one.peer_bytes:,} bytes from a peer, {one.operator_bytes:,} from the operator, "
            self._record(one, text + f"{one.verified_bytes:,} verified")
        self._recoveries.staged(done)

    def _launch(self, generation: int, chosen: Chosen) -> None:
        members = self._members()
        purpose = "from the start" if chosen.root is None else f"from step {chosen.step}"
        self._agreement = Agreement(len(members))
        group = LaunchedGroup(self.launch, generation, purpose, members, listen=self._listen)
        self._group = group
        names = tuple(host.name for host in members)
        pids = tuple(process.pid for process in group.processes)
        self._record(entries.Launched(generation, names, pids), f"group {generation} ({purpose}) on {', '.join(names)}")
        joined = group.join()
        admission.check_ownership(self.plan, joined)
        stored = None if chosen.root is None else self.operator.checkpoint(chosen.root)
        admission.check_bindings(joined, stored)
        if chosen.root is None:
            group.tell(Start())
        else:
            group.tell(Restore(chosen.root, STORE))
            group.tell(Arm())
        self._record(entries.Ready(generation, chosen.step))
        if chosen.root is not None:  # a host that is new has no replica for its peer yet, nor the peer one of its own
            self._commits.copy(chosen.root, members, states.receipts(self.state, chosen.root))
        self._recoveries.restored()
        self._note(self._recoveries.reached(chosen.step, chosen.step))

    def _finish(self) -> None:
        """Everything is committed: a group that is lost while it leaves has nothing left that anybody needs."""
        group, self._group = self._group, None
        if group is not None:
            try:
                group.close()
            except GroupLostError as error:
                group.abort()
                self.people.say(f"the group was lost when it left: {error}")
        last = self.state.committed[-1] if self.state.committed else None
        root = self.state.head
        assert root is not None
        state_root = last.state_root if last and last.root == root else self.operator.checkpoint(root).state_root
        self._record(entries.Finished(root, state_root))

    def _clear(self) -> None:
        """Keep what workers wrote, then remove the hosts."""
        out = self.settings.out
        hosts = []
        for number in range(self.state.made):
            host = self._host(f"host-{number}")
            if host.name in self.state.lost:
                host.directory = out / "lost" / host.name
            if host.directory.exists():
                hosts.append(host)
        keep_traces(hosts, out / "events")
        cleared = [host.clear() for host in hosts]
        cleared += [clear(name, out / name) for name in ("hosts", "lost") if (out / name).exists()]
        require("folders that are left", [], [one.path for one in cleared if not one.gone])
        size = sum(one.bytes for one in cleared)
        self._record(entries.Cleared(len(hosts), size), f"{len(hosts)} hosts removed ({size:,} bytes)")

    # -- losses -------------------------------------------------------------------------------------------------------

    def _blame(self, group: LaunchedGroup) -> Blame:
        """What the signs of a group say, once they say enough or nothing more comes."""
        timeouts = self.plan.timeouts
        deadline = time.monotonic() + timeouts.heartbeat * timeouts.heartbeats_missed + _LAST_WORDS
        while (found := blame(group.signs)) is None and time.monotonic() < deadline:
            if group.poll(0.1) is None and all(process.poll() is not None for process in group.processes):
                break  # nobody is left who could say more
        return found or connection(group.signs)

    def _cause(self, error: CkptStoreError | OSError) -> Blame:
        """The loss that an error of the controller's own comes from: that of a host which it tried to use. Otherwise it
        is raised again."""
        if isinstance(error, HostLostError):
            return error.blame
        for shard, host in enumerate(self._members()):
            if not host.directory.is_dir():
                return Blame((shard,), "host gone", f"{host.directory} is not there: {error}")
        raise error

    def _lose(self, found: Blame | None) -> None:
        """End what is left, put the folders of lost hosts out of the way, and write the loss down.

        ``found`` says whose loss it is, where the signs of the group need not be asked.
        """
        detect = abort = 0
        group, self._group = self._group, None  # from here on nothing that it says is news
        if found is None:
            assert group is not None
            found = self._blame(group)
        if group is not None:
            noticed = group.signs[0].at if group.signs else time.monotonic()
            heard = max((group.heard.get(shard, noticed) for shard in found.shards), default=noticed)
            group.abort()  # after which nothing of it comes any more, except for a commit whose shards are all saved
            detect = round(1000 * max(0.0, noticed - heard))
            self._note(self._commits.settle())
            abort = round(1000 * (time.monotonic() - noticed))
        hosts = tuple(name for shard in found.shards if (name := self.state.members[shard]) is not None)
        what = f"shard {', '.join(map(str, found.shards))} on {', '.join(hosts)}" if hosts else found.sign
        if found.fatal:
            raise RunFailedError(what, found.why, f"no host would fare better; go on with: {self.settings.command()}")
        for name in hosts:
            host = self._host(name)
            if host.directory.exists():
                host.take_away()
        self._record(
            entries.Lost(self.state.generation, found.shards, hosts, found.sign, found.why, detect, abort),
            f"LOST {what} ({found.sign}: {found.why}); noticed {detect} ms after its last sign of life, the rest ended "
            f"{abort} ms later",
        )
        self._recoveries.lost(what, self.state.reached, detect, abort)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Take over, and say from whom and when, if there was somebody."""
        detect = abort = 0
        if self.memory.entries:
            abort = self.custody.waited_ms
            detect = max(0, _milliseconds_since(self.memory.last_time) - abort)
        resumed = self.state.begun is not None and self.state.finished is None
        if resumed:
            self._recoveries.lost("controller", self.state.reached, detect, abort)
        text = f"going on after update {self.state.reached}; the last controller was heard of {detect} ms ago"
        if self.state.finished is not None:
            text = "the run in this folder is finished; name another one with --out to train anew"
        opened = entries.Opened(os.getpid(), self.settings.spares, detect, abort)
        self._record(opened, text if resumed or self.state.finished is not None else "")

    def _listen(self, group: LaunchedGroup, said: Said) -> None:
        """Write an update down once all workers have made it, the same, and the same as whenever it was made before."""
        self._commits.heard(group, said)
        if group is self._group:
            self._note(self._commits.news())
        if said.event.name != "update":
            return
        result = update_result(said.event)
        made = self._agreement.hear(said.shard, result, self.state.results)
        if made is None:
            return
        self._record(made)
        text = f"group {group.generation}: update {made.update}, loss {result.loss:.5f}, norm {result.norm:.5f}"
        self.people.progress(text, keep=made.update % _SHOWN == 0)
        assert self.state.chosen is not None
        self._note(self._recoveries.reached(made.update, self.state.chosen.step))

    def _note(self, news: Sequence[Entry]) -> None:
        """Write down what came of commits and recoveries."""
        for one in news:
            text = ""
            if isinstance(one, entries.Committed):
                before = next((past.root for past in self.state.committed if past.step == one.step), one.root)
                require(f"root of step {one.step}, committed again", before, one.root)
                text = f"step {one.step} committed as {one.root.short}: {one.sent_bytes:,} bytes moved, "
                text += (
                    f"{one.verified_bytes:,} read back; training stood still for {one.stall_ms} ms of {one.whole_ms}"
                )
            self._record(one, text)

    def _record(self, entry: Entry, text: str = "") -> None:
        self.memory.append(entry)
        self.state = states.apply(self.state, entry)
        if text:
            self.people.say(text)

    def _host(self, name: str) -> Host:
        return Host(self.settings.out, name, existing=True, inherited=self.custody.inherited)

    def _members(self) -> list[Host]:
        return [self._host(name) for name in self.state.members if name is not None]

    @property
    def _begun(self) -> Begun:
        assert self.state.begun is not None
        return self.state.begun

    @property
    def _present(self) -> LaunchedGroup:
        assert self._group is not None
        return self._group


def _milliseconds_since(time_text: str) -> int:
    """Milliseconds since a time in UTC, by this machine's clock; 0 if that was set back meanwhile."""
    passed = datetime.now(UTC) - datetime.fromisoformat(time_text)
    return max(0, round(1000 * passed.total_seconds()))
