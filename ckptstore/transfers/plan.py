"""What a push or pull would do, in keys, bytes and requests, found out without changing anything.

Whatever only looks is really done, with the calls that the transfer makes, and measured. What the transfer would do
with the keys of the closure follows from the same steps. What it writes besides them (lease, pin, retirements, receipt,
ref) is written, by the code that would write it, to memory, and counted there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from ckptstore.backends import open_backend
from ckptstore.backends.capabilities import Capabilities
from ckptstore.backends.counting import CountingBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.protocol import PruneBackend, ReadBackend, ReadbackMethod
from ckptstore.backends.traffic import Traffic
from ckptstore.closure import read_closure
from ckptstore.endpoints import require_exclusive
from ckptstore.errors import NotFoundError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY
from ckptstore.format.records import Receipt, RefRecord
from ckptstore.format.records import Store as StoreHeader
from ckptstore.leases import check_lease, lease
from ckptstore.refs import Refs
from ckptstore.store import Store
from ckptstore.transfers.exchange import check, head_to_move, sorted_shards
from ckptstore.transfers.sending import Outcome, Source
from ckptstore.transfers.steps import Step, Steps, Way
from ckptstore.transfers.survey import Scope, read_history, survey
from ckptstore.transfers.transfer import make_receipt, put_pin, put_receipt, put_retirements

_NONE = Traffic(MappingProxyType({}))
_HEADER = StoreHeader("0" * 32)  # as long as any other

# Requests of one call of a backend, by its operation. Where there is no conditional creation, one more asks first.
_REQUESTS = {
    "create": ("PutObject",),
    "stat": ("HeadObject",),
    "list": ("ListObjectsV2",),
    "delete": ("HeadObject", "DeleteObject"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a transfer would do if nothing fails and nobody else writes meanwhile.

    ``sent``, ``present`` and ``accepted`` are as in :class:`~ckptstore.Transfer`, sizes in bytes. ``source`` and
    ``target``: requests by operation and bytes at each of both that is behind an endpoint. The figures are exact,
    except that nobody knows yet how long the version ids will be that an endpoint that keeps versions gives to what is
    sent, and that a receipt has room for.
    """

    operation: str
    root: Digest
    sent_keys: int
    sent_bytes: int
    present_keys: int
    present_bytes: int
    accepted_keys: int
    accepted_bytes: int
    source: Traffic
    target: Traffic
    notes: tuple[str, ...] = ()

    @property
    def traffic(self) -> Traffic:
        """Both sides together."""
        return _sum([self.source, self.target])


def plan_push(
    source: Store,
    target: Store | str,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    ref: str | None = None,
    max_age: int = 0,
) -> Plan:
    """What :func:`ckptstore.push` would do with these arguments.

    ``target`` may be the URL of a store that is not there yet; what making it takes is not in the plan.

    Raises:
        CkptStoreError: what the push would raise before it sends anything.
    """
    return _plan(source, target, root, Scope("push", sorted_shards(shards), max_age=max_age), ref)


def plan_pull(
    source: Store,
    target: Store | str,
    root: Digest,
    *,
    shards: Collection[int] | None = None,
    ref: str | None = None,
    files: bool = True,
    max_age: int = 0,
) -> Plan:
    """What :func:`ckptstore.pull` would do with these arguments; the rest is as with :func:`plan_push`."""
    return _plan(source, target, root, Scope("pull", sorted_shards(shards), files, max_age), ref)


def _plan(source: Store, target: Store | str, root: Digest, scope: Scope, ref: str | None) -> Plan:
    check(scope, ref)
    documents = Source(source.backend)
    made = isinstance(target, Store)
    store = target if isinstance(target, Store) else Store(_unmade(target))
    before = _traffic(source.backend), _traffic(store.backend)
    with _as_it_was(store.backend):
        head, moves = _head(documents, store, root, ref, made=made)
        closure = read_closure(documents, root, scope.shards, files=scope.files)
        found = survey(documents, store.backend, closure, read_history(documents, closure), scope)
        if moves and made:
            require_exclusive(store.backend, f"ref {ref}")  # asked once more just before the move
        asks_first = _asks_before_creating(store.backend)
        looked = _traffic(source.backend).since(before[0]), _traffic(store.backend).since(before[1])
    there = _there(store.backend, found.steps)
    outcomes = [_expected(step, there) for step in found.steps.closure()]
    method = "none" if all(outcome.read is None for outcome in outcomes) else ReadbackMethod.SERVER.value
    identity = found.store if made else _HEADER.id
    receipt, notes = make_receipt(root, scope, closure, outcomes, method, store.backend, identity)
    moved = (ref, head) if ref is not None and moves else None
    written = _counted(_rehearsed(scope, root, found.steps, receipt, moved), asks_first)
    everything = [*outcomes, *(_expected(step, there) for step in found.steps.history)]
    at_source = [looked[0], _fetched(documents, everything)]
    if scope.operation == "push":
        at_source.append(_counted(_rehearsed_receipt(receipt), _asks_before_creating(source.backend)))
    at_target = [looked[1], _delivered(everything, found.steps, asks_first), written]
    if not made:
        at_target.append(Traffic({}, 0, len(_HEADER.encode())))  # which was asked for and is not there yet
    sent = [outcome.step.size for outcome in outcomes if outcome.stored]
    accepted = [outcome.step.size for outcome in outcomes if outcome.read is None]
    return Plan(
        operation=scope.operation,
        root=root,
        sent_keys=len(sent),
        sent_bytes=sum(sent),
        present_keys=len(outcomes) - len(sent) - len(accepted),
        present_bytes=sum(outcome.step.size for outcome in outcomes) - sum(sent) - sum(accepted),
        accepted_keys=len(accepted),
        accepted_bytes=sum(accepted),
        source=_sum(at_source) if _is_metered(source.backend) else _NONE,
        target=_sum(at_target) if _is_metered(store.backend) else _NONE,
        notes=(*found.notes, *notes),
    )


# -- looking -----------------------------------------------------------------------------------------------------------


def _unmade(url: str) -> PruneBackend:
    """Where a store would be made; a directory that is not there is as empty as memory."""
    try:
        return open_backend(url)
    except NotFoundError:
        return MemoryBackend()


def _head(
    documents: Source, store: Store, root: Digest, ref: str | None, *, made: bool
) -> tuple[RefRecord | None, bool]:
    """The head of the ref, and whether it will be moved. What an endpoint honours is known once a store is made."""
    if ref is None:
        return None, False
    return head_to_move(documents, store, root, ref) if made else (store.refs.head(ref), True)


@contextmanager
def _as_it_was(backend: ReadBackend) -> Iterator[None]:
    """What is learned of an endpoint in the block is forgotten, so that a transfer after the plan learns it again."""
    known = getattr(backend, "capabilities", None)
    try:
        yield
    finally:
        if hasattr(backend, "capabilities"):
            backend.capabilities = known


def _asks_before_creating(backend: ReadBackend) -> bool:
    """Whether each creation at this endpoint takes a question first."""
    known: Capabilities | None = getattr(backend, "capabilities", None)
    return known is not None and not known.conditional_create


def _there(backend: ReadBackend, steps: Steps) -> frozenset[str]:
    """Which keys are there, for certain: a hint of few requests says of some only that they may be."""
    maybe = {step.key for step in (*steps.closure(), *steps.history) if step.way is Way.READ}
    if not backend.traits.network or not maybe:
        return frozenset(maybe)
    return frozenset(stat.key for folder in ("objects/", "documents/") for stat in backend.list(folder))


def _expected(step: Step, there: Set[str]) -> Outcome:
    if step.way is Way.ACCEPT:
        return Outcome(step, None)
    return Outcome(step, step.size, stored=step.key not in there)


# -- counting ----------------------------------------------------------------------------------------------------------


def _is_metered(backend: ReadBackend) -> bool:
    return hasattr(backend, "traffic")


def _traffic(backend: ReadBackend) -> Traffic:
    found: Traffic = getattr(backend, "traffic", _NONE)
    return found


def _sum(parts: Iterable[Traffic]) -> Traffic:
    requests: Counter[str] = Counter()
    sent = received = 0
    for part in parts:
        requests.update(part.requests)
        sent += part.sent_bytes
        received += part.received_bytes
    return Traffic(MappingProxyType(dict(sorted(requests.items()))), sent, received)


def _fetched(source: Source, outcomes: Iterable[Outcome]) -> Traffic:
    """What is read at the source of what is sent, but for documents that were kept since they were read before."""
    sizes = [outcome.step.size for outcome in outcomes if outcome.stored and not source.holds(outcome.step)]
    return Traffic({"GetObject": len(sizes)} if sizes else {}, 0, sum(sizes))


def _delivered(outcomes: Iterable[Outcome], steps: Steps, asks_first: bool) -> Traffic:
    """What creating and reading keys takes at the target."""
    requests: Counter[str] = Counter()
    sent = received = 0
    for outcome in outcomes:
        if outcome.stored:
            requests.update(("HeadObject", "PutObject") if asks_first else ("PutObject",))
            requests["HeadObject"] += len(steps.whole.get(outcome.step.key, ()))
            sent += outcome.step.size
            if outcome.step.way is Way.READ:
                requests["GetObject"] += 1  # in vain: it only may have been there
        if outcome.read is not None:
            requests["GetObject"] += 1
            received += outcome.read
    return Traffic(+requests, sent, received)


def _rehearsed(
    scope: Scope, root: Digest, steps: Steps, receipt: Receipt, moved: tuple[str, RefRecord | None] | None
) -> CountingBackend:
    """What a transfer writes besides the closure and the history, written to memory."""
    memory = MemoryBackend()
    memory.create(STORE_KEY, _HEADER.encode())
    counting = CountingBackend(memory)
    with lease(counting):
        if scope.shards is not None:
            put_pin(counting, root, scope)
        put_retirements(counting, steps.retire)
        put_receipt(counting, receipt)
        if moved is not None:
            Refs(counting).move(moved[0], root, moved[1])
        elif scope.shards is not None:
            check_lease(counting)
    return counting


def _rehearsed_receipt(receipt: Receipt) -> CountingBackend:
    counting = CountingBackend(MemoryBackend())
    put_receipt(counting, receipt)
    return counting


def _counted(rehearsed: CountingBackend, asks_first: bool) -> Traffic:
    """The requests for the calls that were rehearsed; all that they wrote was new."""
    requests: Counter[str] = Counter()
    for operation, names in _REQUESTS.items():
        for name in names:
            requests[name] += rehearsed.total(operation).calls
    if asks_first:
        requests["HeadObject"] += rehearsed.total("create").calls
    return Traffic({name: count for name, count in requests.items() if count}, rehearsed.total("create").bytes)
