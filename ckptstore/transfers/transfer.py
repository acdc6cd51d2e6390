"""Push and pull: a closure, or one shard of it, from one store to another, read back whole where it arrived."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from ckptstore.backends.protocol import ReadBackend, WriteBackend
from ckptstore.closure import Closure, read_closure, read_shard
from ckptstore.errors import BackendError, MalformedError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, pin_key, receipt_key, retired_key
from ckptstore.format.records import Pin, Receipt, Retired, closure_digest
from ckptstore.leases import check_lease, lease, now, publish
from ckptstore.meter import OnProgress
from ckptstore.objects import Objects, writable
from ckptstore.readbacks.actors import readback_details
from ckptstore.threads import in_threads
from ckptstore.transfers.ages import versioned
from ckptstore.transfers.sending import Outcome, Sender, Source
from ckptstore.transfers.steps import Past, Step
from ckptstore.transfers.survey import Scope, read_history, survey


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a push or pull did with the keys of a closure, and the receipt of the readback.

    ``sent``: stored by this transfer. ``present``: good bytes lay there already, and were read. ``accepted``: not read
    again, because a readback of the same version was young enough. ``repaired``: those of the sent ones that replaced
    wrong bytes. Sizes are in bytes. ``notes``: where it did not do what its caller may expect.
    """

    root: Digest
    sent_keys: int
    sent_bytes: int
    present_keys: int
    present_bytes: int
    accepted_keys: int
    accepted_bytes: int
    repaired_keys: int
    receipt: Receipt
    notes: tuple[str, ...] = ()


def transfer(
    source: Source,
    target: ReadBackend,
    root: Digest,
    scope: Scope,
    progress: OnProgress | None = None,
    named: Callable[[], object] | None = None,
) -> Transfer:
    """Copy what is missing, children before parents, and read every key of the closure back from ``target``.

    Args:
        source: where the closure is; every byte is verified when it is read, so no unverified byte is sent.
        target: where it goes. A key that is there is no proof: its bytes are read and hashed, and replaced if they
            are wrong.
        root: digest of the checkpoint.
        scope: what of it.
        progress: called with (bytes done, bytes in all).
        named: called when everything is there, to let a ref name it before the lease ends; else it may be collected.

    Raises:
        CorruptError, NotFoundError: the source lacks good bytes; nothing that refers to them was written to ``target``.
        CorruptError: what ``target`` gives back is not what was sent; names the key.
        RefusedError: ``target`` keeps an object and does not hand it out (an archive).
        BackendError: one of them fails; says how much is missing yet. What was stored is used by the next transfer.
    """
    closure = read_closure(source, root, scope.shards, files=scope.files)
    return _carry(source, target, root, closure, read_history(source, closure), scope, progress, named)


def send_shard(source: Source, target: ReadBackend, digest: Digest, index: int, count: int) -> Transfer:
    """Copy one shard that belongs to no checkpoint yet, children before parents, and read it back from ``target``.

    So workers save to a store of their own, and who commits needs only what arrived. Nothing keeps the shard until the
    commit.

    Args:
        source: where the worker saved it.
        target: where the commit will be made.
        digest: the shard document.
        index: the shard's number.
        count: number of shards.

    Returns:
        Its ``root`` is the shard's digest.

    Raises:
        CorruptError, NotFoundError, RefusedError, BackendError: as :func:`transfer`.
    """
    return _carry(source, target, digest, read_shard(source, digest, index, count), (), Scope("push"), None)


def _carry(
    source: Source,
    target: ReadBackend,
    subject: Digest,
    closure: Closure,
    history: Sequence[Past],
    scope: Scope,
    progress: OnProgress | None,
    named: Callable[[], object] | None = None,
) -> Transfer:
    with ExitStack() as held:
        done = _carried(source, target, subject, closure, history, scope, progress, held)
        if named is not None:
            named()
        elif scope.shards is not None:
            check_lease(target)  # else what the pin keeps may be gone
    return done


def _carried(
    source: Source,
    target: ReadBackend,
    subject: Digest,
    closure: Closure,
    history: Sequence[Past],
    scope: Scope,
    progress: OnProgress | None,
    held: ExitStack,
) -> Transfer:
    """The same, with a lease that ``held`` then holds."""
    store = writable(target)
    threads = threads_between(source.backend, target)
    sender = Sender(source, Objects(target, medium=True))
    with _telling_what_is_missing(sender, closure):
        held.enter_context(lease(target))
        found = survey(source, target, closure, history, scope)
        total = sum(step.size for step in found.steps.objects)
        done = 0
        for outcome in in_threads(sender.send, found.steps.objects, threads):
            done += outcome.step.size
            if progress is not None:
                progress(done, total)
        # Whatever says what of a checkpoint is not here on purpose comes before the checkpoint.
        if scope.shards is not None:
            put_pin(store, subject, scope)
        put_retirements(store, found.steps.retire, threads)
        _send_all(_HistorySender(source, Objects(target), found.steps.whole), found.steps.history, threads)
        for level in found.steps.documents:
            _send_all(sender, level, threads)
        receipt, notes = make_receipt(subject, scope, closure, sender.outcomes, sender.method, target, found.store)
        put_receipt(store, receipt)
    sent = [outcome for outcome in sender.outcomes if outcome.stored]
    accepted = [outcome for outcome in sender.outcomes if outcome.read is None]
    present = [outcome for outcome in sender.outcomes if outcome.read is not None and not outcome.stored]
    return Transfer(
        root=subject,
        sent_keys=len(sent),
        sent_bytes=_bytes(sent),
        present_keys=len(present),
        present_bytes=_bytes(present),
        accepted_keys=len(accepted),
        accepted_bytes=_bytes(accepted),
        repaired_keys=sum(outcome.repaired for outcome in sent),
        receipt=receipt,
        notes=(*found.notes, *notes),
    )


def threads_between(source: ReadBackend, target: ReadBackend) -> int | None:
    """How many keys at a time: what the side behind a network is worth, None where there is none."""
    return max((side.traits.threads for side in (source, target) if side.traits.network), default=None)


def _bytes(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.step.size for outcome in outcomes)


class _HistorySender(Sender):
    """Sends documents of ancestors. One that a hint says is whole there is not created before that is certain."""

    def __init__(self, source: Source, target: Objects, whole: Mapping[str, Sequence[Digest]]) -> None:
        super().__init__(source, target)
        self._whole = whole

    def create(self, step: Step) -> bool:
        """See :class:`~ckptstore.transfers.sending.Sender`."""
        store = writable(self.target.backend)
        if any(store.stat(document_key(shard)) is None for shard in self._whole.get(step.key, ())):
            put_retirements(store, [step.digest])
        return super().create(step)


def _send_all(sender: Sender, steps: Sequence[Step], threads: int | None) -> None:
    for _ in in_threads(sender.send, steps, threads):
        pass


@contextmanager
def _telling_what_is_missing(sender: Sender, closure: Closure) -> Iterator[None]:
    """A backend that fails in the block fails with what is missing because of it, and with how to go on."""
    try:
        yield
    except BackendError as error:
        sizes = closure.sizes()
        total = sum(size for _, size in sizes)
        keys, size = len(sizes) - len(sender.outcomes), total - _bytes(sender.outcomes)
        missing = "all keys are there and were read back, but there is no receipt of it"
        if keys:
            missing = (
                f"{keys:,} of {len(sizes):,} keys ({size:,} of {total:,} bytes) are missing there or not read back, "
            )
            missing += "and nothing that refers to them was written"
        hint = error.hint or "run it again: what was stored is read, and not sent again"
        raise type(error)(error.what, f"{error.why}; {missing}", hint) from error


# -- what is written besides the closure -------------------------------------------------------------------------------


def put_pin(store: WriteBackend, root: Digest, scope: Scope) -> None:
    """Say that only some shards of ``root`` are meant to be in a store."""
    assert scope.shards is not None
    pin = Pin(tuple(sorted(set(scope.shards))), f"{scope.operation} of some shards")
    publish(store, pin_key(root, secrets.token_hex(16)), pin.encode())


def put_retirements(store: WriteBackend, roots: Sequence[Digest], threads: int | None = None) -> None:
    """Say of ancestors that their closures may be gone, before their documents come: a crash in between would leave
    checkpoints that seem to have lost theirs."""
    data = Retired("history only: its closure was not transferred").encode()
    for _ in in_threads(lambda root: store.create(retired_key(root), data), roots, threads):
        pass


def put_receipt(store: WriteBackend, receipt: Receipt) -> None:
    """Leave a receipt in a store."""
    data = receipt.encode()
    store.create(receipt_key(receipt.subject, Digest.of(data)), data)


def make_receipt(
    subject: Digest,
    scope: Scope,
    closure: Closure,
    outcomes: Sequence[Outcome],
    method: str,
    target: ReadBackend,
    store: str | None,
) -> tuple[Receipt, tuple[str, ...]]:
    """The receipt about ``subject``, and what it does not say for want of room.

    Args:
        subject: the root, or the shard.
        scope: what was transferred.
        closure: its keys.
        outcomes: what happened to each.
        method: how far down reading them went.
        target: where they were read.
        store: id of that store.
    """
    receipt = Receipt(
        operation=scope.operation,
        subject=subject,
        closure=closure_digest(closure.sizes()),
        documents=len(closure.documents),
        objects=len(closure.objects),
        bytes_read=sum(outcome.read or 0 for outcome in outcomes),
        method=method,
        time=now(),
        where=target.url,
        exceptions=tuple(_exceptions(closure, scope, outcomes)),
        details=readback_details(store, max_age_seconds=scope.max_age),
    )
    versions = _versions_read(target, outcomes)
    if not any(versions):
        return receipt, ()
    full = replace(receipt, details=readback_details(store, max_age_seconds=scope.max_age, versions=versions))
    with suppress(MalformedError):  # over the limit of receipts
        full.encode()
        return full, ()
    return receipt, ("the receipt has no room for the versions: no later transfer can accept these keys by their age",)


def _versions_read(target: ReadBackend, outcomes: Sequence[Outcome]) -> list[str | None]:
    """Version ids in the order of the sorted keys; None for what was not read now, so that no age grows by hearsay."""
    backend = versioned(target)
    read: Mapping[str, str] = {} if backend is None else backend.versions_read()
    by_key = {outcome.step.key: None if outcome.read is None else read.get(outcome.step.key) for outcome in outcomes}
    return [by_key[key] for key in sorted(by_key)]


def _exceptions(closure: Closure, scope: Scope, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What was not transferred, or not read, for the receipt."""
    checkpoint = closure.checkpoint
    if checkpoint is not None and len(closure.shards) < len(checkpoint.shards):
        yield f"only shards {', '.join(map(str, sorted(closure.shards)))}"
    if checkpoint is not None and not closure.trees and (checkpoint.run, checkpoint.files) != (None, None):
        yield "without its files"
    accepted = sum(outcome.read is None for outcome in outcomes)
    if accepted:
        keys = "key" if accepted == 1 else "keys"
        yield f"{accepted} {keys} accepted unread, by readbacks of the same version at most {scope.max_age} s old"
