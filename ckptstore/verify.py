"""Verify: read every byte of a closure again, hash it, recompute every root, and list all that is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ckptstore.backends.protocol import ReadBackend, ReadbackMethod
from ckptstore.closure import Closure, Need, read_closure
from ckptstore.errors import CkptStoreError, NotFoundError
from ckptstore.findings import Finding, Kind, Place, exit_code
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key, retired_key
from ckptstore.format.records import Receipt, closure_digest
from ckptstore.leases import now
from ckptstore.meter import OnProgress
from ckptstore.objects import Objects
from ckptstore.readbacks.actors import readback_details, store_id
from ckptstore.threads import in_threads


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor of the verified checkpoint: present, retired or missing."""

    root: Digest
    step: int | None
    status: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification read and found.

    ``bytes_read`` are the bytes of the closure's distinct keys that were read and hashed; documents of ancestors and
    ref records are history, and counted in ``history_bytes``. ``method`` is the weakest way in which a
    key was read, ``keys`` the keys of the closure's objects, ``store`` the id in the header of the store. ``read`` says
    for each key of the closure, sorted, whether it was read; None: all were.
    """

    root: Digest
    closure: Digest
    step: int | None
    documents: int
    objects: int
    bytes_read: int
    history_bytes: int
    method: ReadbackMethod
    ancestors: tuple[Ancestor, ...]
    keys: tuple[str, ...]
    findings: tuple[Finding, ...]
    store: str | None = None
    read: tuple[bool, ...] | None = None

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.findings

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the worst finding."""
        return exit_code(self.findings)

    def receipt(self, where: str, *, max_age_seconds: int = 0) -> Receipt:
        """The receipt of this verification of the store at ``where``; only one that found nothing wrong deserves one.

        ``max_age_seconds`` is the age of the oldest readback that stands for what was skipped.
        """
        return Receipt(
            operation="verify" if self.method.reaches_medium else "read",
            subject=self.root,
            closure=self.closure,
            documents=self.documents,
            objects=self.objects,
            bytes_read=self.bytes_read,
            method=self.method.value,
            time=now(),
            where=where,
            details=readback_details(self.store, max_age_seconds=max_age_seconds, read=self.read),
        )


def verify(
    backend: ReadBackend,
    root: Digest,
    shards: Collection[int] | None = None,
    progress: OnProgress | None = None,
    refs: Iterable[tuple[list[Finding], int]] = (),
    skip: Collection[str] = (),
    *,
    files: bool = True,
) -> VerifyReport:
    """Verify the closure of ``root``, reading each distinct key once and from the medium where the backend can.

    Args:
        backend: the store.
        root: digest of the checkpoint.
        shards: only these shards, for a partial store.
        progress: called as bytes are read.
        refs: findings and bytes read of ref logs that were checked besides.
        skip: keys of objects that this process has read back already; documents are always read.
        files: whether the trees of files and of the preparation belong to what must be here.
    """
    objects = Objects(backend, medium=True)
    found: list[Finding] = []
    closure = read_closure(objects, root, shards, found.append, files=files)
    wanted = [(key, need) for key, need in closure.objects.items() if key not in skip]
    total = sum(need.length for _, need in wanted)
    read = sum(closure.documents.values())
    done = 0
    for need, findings, size in in_threads(lambda item: check_object(objects, *item), wanted, objects.threads):
        found.extend(findings)
        read += size
        done += need.length
        if progress is not None:
            progress(done, total)
    history = 0
    ancestors, size = _ancestors(backend, closure, found) if shards is None else ((), 0)
    history += size
    for findings, size in refs:
        found.extend(findings)
        history += size
    return VerifyReport(
        root=root,
        closure=closure_digest(closure.sizes()),
        step=closure.checkpoint.step if closure.checkpoint else None,
        documents=len(closure.documents),
        objects=len(wanted),
        keys=tuple(closure.objects),
        bytes_read=read,
        history_bytes=history,
        method=objects.method,
        ancestors=ancestors,
        findings=tuple(found),
        store=store_id(backend),
        read=_read(closure, skip),
    )


def _read(closure: Closure, skip: Collection[str]) -> tuple[bool, ...] | None:
    """For each key, sorted, whether it was read; None if all were."""
    if closure.objects.keys().isdisjoint(skip):
        return None
    return tuple(key not in skip or key in closure.documents for key in sorted((*closure.documents, *closure.objects)))


def check_object(objects: Objects, key: str, need: Need) -> tuple[Need, list[Finding], int]:
    """Read one object back and hash it, and each slot of a pack; findings name every place that uses it."""
    found: list[Finding] = []
    data = objects.read(need.digest, need.length, need.places[0], found.append)
    if data is None:
        spread = [
            Finding(f.kind, place, f.key, f.message, f.expected, f.actual) for f in found for place in need.places
        ]
        kind = found[0].kind
        if kind in (Kind.MISSING, Kind.UNREADABLE):
            why = "its pack is not in the store" if kind is Kind.MISSING else "its pack cannot be read"
            spread += [Finding(kind, place, key, why) for place in need.slots.values()]
        else:
            spread += _bad_slots(_as_far_as_it_is_there(objects.backend, key, need), key, need)
        return need, spread, 0
    return need, list(_bad_slots(data, key, need)), len(data)


def _as_far_as_it_is_there(backend: ReadBackend, key: str, need: Need) -> bytes:
    """The bytes of a damaged pack."""
    try:
        return backend.get(key, 0, need.length)
    except CkptStoreError:
        return b""


def _bad_slots(data: bytes, key: str, need: Need) -> Iterator[Finding]:
    """Which chunks are not at their place in a pack."""
    view = memoryview(data)
    for (offset, length, digest), place in need.slots.items():
        actual = Digest.of(view[offset : offset + length])
        if actual != digest:
            yield Finding(Kind.CORRUPT, place, key, f"wrong bytes at {offset} of its pack", str(digest), str(actual))


def _ancestors(backend: ReadBackend, closure: Closure, found: list[Finding]) -> tuple[tuple[Ancestor, ...], int]:
    """Walk the parents: present if the document and its shards' documents are there, else retired, else missing."""
    ancestors: list[Ancestor] = []
    read = 0
    parent = closure.checkpoint.parent if closure.checkpoint else None
    while parent is not None:
        key = document_key(parent)
        place = Place(checkpoint=closure.root, part=f"ancestor {parent.short}")
        try:
            data = backend.get(key, 0, DOCUMENT_LIMIT + 1)
            read += len(data)
            if Digest.of(data) != parent:
                found.append(Finding(Kind.CORRUPT, place, key, "wrong bytes", str(parent), str(Digest.of(data))))
                break
            checkpoint = Checkpoint.parse(data)
        except NotFoundError:
            found.append(Finding(Kind.ANCESTOR, place, key, "not in the store"))
            ancestors.append(Ancestor(parent, None, "missing"))
            break
        except CkptStoreError as error:
            found.append(Finding(Kind.of(error), place, key, error.why or error.what))
            break
        present = [_is_there(backend, document_key(shard), place, found) for shard in checkpoint.shards]
        if all(present):
            status = "present"
        elif _is_there(backend, retired_key(parent), place, found):
            status = "retired"
        else:
            status = "missing"
            found.append(Finding(Kind.ANCESTOR, place, key, "its closure is gone and it was not retired"))
        ancestors.append(Ancestor(parent, checkpoint.step, status))
        parent = checkpoint.parent
    return tuple(ancestors), read


def _is_there(backend: ReadBackend, key: str, place: Place, found: list[Finding]) -> bool:
    """Whether there is such a key; what lies there without being one is there, and a finding."""
    try:
        return backend.stat(key) is not None
    except CkptStoreError as error:
        found.append(Finding(Kind.of(error), place, key, error.why or error.what))
        return True
