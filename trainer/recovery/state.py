"""Where a run stands: a pure fold over the entries of its journal, and the one thing to do next. No torch, no clock.

The journal is the only memory. A controller that is started again folds it, learns what is done, and does what is next;
what an earlier one had begun and not written down is done again, so every action leads to the same place twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from ckptstore import Digest
from trainer.recovery.entries import (
    Assigned,
    Begun,
    Chosen,
    Cleared,
    Committed,
    Entry,
    Finished,
    Launched,
    Lost,
    Opened,
    Ready,
    Recovered,
    Replicated,
    Snapped,
    Staged,
    Updated,
)

PATIENCE = 3
"""Losses in a row without one new update after which nothing is tried any more: hosts come and go, but what fails on
each of them is the run itself."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that entries tell.

    ``members`` are the hosts by shard (None: the shard has none), ``made`` how many hosts there ever were, ``lost``
    those given up, ``staged`` the shards whose hosts are ready to start, ``chosen`` what is restored next, or what the
    present group began with. ``head`` and ``head_step`` are the checkpoint that the next one follows, ``pending`` the
    one that is under way. ``step`` counts the updates of the present group and is None without a group that is ready;
    ``reached`` is the last update that was ever made, ``results`` are those of the updates since the last commit, which
    may be made again. ``futile`` counts the losses since a new update was made, ``replicas`` are the last ones that
    hosts hold for each other.
    """

    begun: Begun | None = None
    spares: int = 0
    members: tuple[str | None, ...] = ()
    made: int = 0
    lost: tuple[str, ...] = ()
    staged: frozenset[int] = frozenset()
    chosen: Chosen | None = None
    head: Digest | None = None
    head_step: int = 0
    pending: Snapped | None = None
    replicas: Replicated | None = None
    generation: int = 0
    step: int | None = None
    committed: tuple[Committed, ...] = ()
    reached: int = 0
    results: Mapping[int, Updated] = field(default_factory=dict)
    futile: int = 0
    recovered: tuple[Recovered, ...] = ()
    finished: Finished | None = None
    cleared: bool = False

    @property
    def spares_left(self) -> int:
        """Hosts that may still be made beside the first ones."""
        shards = len(self.members)
        return self.spares - max(0, self.made - shards)


# -- what is done next ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Freeze the plan, its inputs and its sources."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Make a host and give it ``shard``."""

    shard: int
    host: str


@dataclass(frozen=True, slots=True)
class Choose:
    """Find the newest checkpoint that is whole."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Bring every host what it lacks, and check what it has."""

    chosen: Chosen


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a group, let it meet, and bring it to where it begins."""

    generation: int
    chosen: Chosen


@dataclass(frozen=True, slots=True)
class Train:
    """Make the updates from ``first`` to ``last``."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit the state after ``step`` updates."""

    step: int


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the commit that is under way: there is one at a time."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The last checkpoint is committed: let the group leave, if there is one."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove the hosts."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing is left to do."""


@dataclass(frozen=True, slots=True)
class NoSpare:
    """A shard has no host and there is no spare one: training cannot go on with this number of workers."""

    shard: int


@dataclass(frozen=True, slots=True)
class Futile:
    """The same updates failed as often as is tried."""

    losses: int


Action = Prepare | Assign | Choose | Stage | Launch | Train | Commit | Await | Finish | Clear | Stop | NoSpare | Futile


def decide(state: State) -> Action:
    """The one thing to do next."""
    begun = state.begun
    if begun is None:
        return Prepare()
    if state.finished is not None:
        return Stop() if state.cleared else Clear()
    if state.step is None:
        return _begin(state)
    if state.step in begun.commits and state.head_step < state.step:
        if state.pending is None:
            return Commit(state.step)
        if state.pending.step < state.step or state.step == begun.last:
            return Await()
    if state.step == begun.last:
        return Finish()
    return Train(state.step + 1, min(step for step in begun.commits if step > state.step))


def _replace(state: State) -> Action:
    """A shard has no host: a spare takes it over. Who wants to go on with fewer workers decides it here."""
    shard = state.members.index(None)
    if state.made >= len(state.members) and state.spares_left <= 0:
        return NoSpare(shard)
    return Assign(shard, f"host-{state.made}")


def _begin(state: State) -> Action:
    """There is no group: find out from where it begins, bring every host what it needs, start it."""
    assert state.begun is not None
    if state.chosen is None:
        return Choose()
    if state.chosen.step == state.begun.last:
        return Finish()
    if state.futile >= PATIENCE:
        return Futile(state.futile)
    if None in state.members:
        return _replace(state)
    if len(state.staged) < len(state.members):
        return Stage(state.chosen)
    return Launch(state.generation + 1, state.chosen)


def receipts(state: State, root: Digest) -> tuple[str, ...]:
    """Receipts of the shards of a checkpoint, by shard; none if its commit was never written down."""
    return next((one.receipts for one in reversed(state.committed) if one.root == root), ())


def replica(state: State, shard: int) -> tuple[str, str] | None:
    """Where the shard of the checkpoint that is chosen can be had from a peer: that host, and the shard's receipt."""
    held = state.replicas
    if held is None or state.chosen is None or held.root != state.chosen.root:
        return None
    host, found = held.holders[shard], receipts(state, held.root)
    return (host, found[shard]) if found and host in state.members and host != state.members[shard] else None


# -- what entries tell ----------------------------------------------------------------------------------------------


def fold(entries: Iterable[Entry]) -> State:
    """The state after all entries of a journal."""
    return reduce(apply, entries, State())


def apply(state: State, entry: Entry) -> State:
    """The state after one more entry."""
    match entry:
        case Begun():
            return replace(state, begun=entry, members=(None,) * entry.shards)
        case Opened():  # the group was its controller's; hosts may have been tried in vain by another cause
            return replace(_without_group(state), spares=entry.spares, futile=0)
        case Assigned():
            members = (*state.members[: entry.shard], entry.host, *state.members[entry.shard + 1 :])
            return replace(state, members=members, made=state.made + 1, staged=state.staged - {entry.shard})
        case Chosen():
            return replace(state, chosen=entry, head=entry.root, head_step=entry.step, staged=frozenset())
        case Staged():
            return replace(state, staged=state.staged | {entry.shard})
        case Launched():
            return replace(state, generation=entry.generation)
        case Ready():
            return replace(state, step=entry.step)
        case Updated():
            futile = 0 if entry.update > state.reached else state.futile
            reached, results = max(state.reached, entry.update), {**state.results, entry.update: entry}
            return replace(state, step=entry.update, reached=reached, results=results, futile=futile)
        case Snapped():
            return replace(state, pending=entry)
        case Committed():
            committed, head = (*state.committed, entry), entry.root
            results = {number: one for number, one in state.results.items() if number > entry.step}
            return replace(state, committed=committed, head=head, head_step=entry.step, pending=None, results=results)
        case Replicated():
            return replace(state, replicas=entry)
        case Lost():
            members = tuple(None if host in entry.hosts else host for host in state.members)
            lost = (*state.lost, *entry.hosts)
            return replace(_without_group(state), members=members, lost=lost, futile=state.futile + 1)
        case Recovered():
            return replace(state, recovered=(*state.recovered, entry))
        case Finished():
            return replace(state, finished=entry)
        case Cleared():
            return replace(state, cleared=True)


def _without_group(state: State) -> State:
    return replace(state, step=None, chosen=None, pending=None, staged=frozenset())
