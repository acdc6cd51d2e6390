"""Content-addressed objects and documents over a backend: hashed when written, hashed before they are handed out."""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

from ckptstore.backends.protocol import Buffer, ReadBackend, ReadbackMethod, RepairBackend, WriteBackend
from ckptstore.errors import BackendError, CorruptError, MalformedError, NotFoundError, ReadOnlyError
from ckptstore.findings import Finding, Kind, Place, Report, raise_finding
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key, object_key

T = TypeVar("T")


class Objects:
    """Objects and documents of one store, with this process's set of keys that it wrote or verified.

    An existing name is no proof of content: a key counts as already there only if it is in that set, or after its
    stored bytes were read and hashed now.

    Args:
        backend: where they lie.
        medium: read from the medium as far as the backend can (readback), not from caches.
    """

    def __init__(self, backend: ReadBackend, *, medium: bool = False) -> None:
        self.backend = backend
        self.medium = medium
        self._methods: set[ReadbackMethod] = set()
        self._verified: set[str] = set()
        self._lock = Lock()

    @property
    def method(self) -> ReadbackMethod:
        """The weakest way in which bytes were read so far."""
        order = list(ReadbackMethod)
        return max(self._methods, key=order.index, default=ReadbackMethod.CACHED)

    def read(self, digest: Digest, length: int, place: Place, report: Report = raise_finding) -> bytes | None:
        """The object with this digest and length, verified; None after a reported finding."""
        return self._checked(object_key(digest), digest, length, place, report)

    def document(self, digest: Digest, place: Place, report: Report = raise_finding) -> bytes | None:
        """The document with this digest, verified, at most 4 MiB; None after a reported finding."""
        return self._checked(document_key(digest), digest, None, place, report)

    def put_object(self, data: Buffer) -> Digest:
        """Make sure that an object with these bytes is stored whole and durable; returns its digest."""
        digest = Digest.of(data)
        self._put(object_key(digest), digest, data)
        return digest

    def put_document(self, data: bytes) -> Digest:
        """Make sure that this document is stored whole and durable; returns its digest."""
        digest = Digest.of(data)
        self._put(document_key(digest), digest, data)
        return digest

    def put(self, key: str, digest: Digest, data: Buffer) -> bool:
        """Store verified bytes under ``key``. Returns False if good bytes were there already."""
        if Digest.of(data) != digest:
            raise CorruptError(f"key {key}", f"bytes to be stored are not those of {digest}")
        return self._put(key, digest, data)

    def is_verified(self, key: str) -> bool:
        """Whether this process wrote or verified ``key`` and nothing found it bad since."""
        with self._lock:
            return key in self._verified

    def _put(self, key: str, digest: Digest, data: Buffer) -> bool:
        length = memoryview(data).nbytes
        if self.is_verified(key):
            stat = self.backend.stat(key)
            if stat is not None and stat.size == length:
                return False
        backend = writable(self.backend)
        if backend.create(key, data):
            self._remember(key)
            return True
        found: list[Finding] = []
        stored = self._checked(key, digest, length, Place(), found.append)
        if stored is not None:
            return False
        (finding,) = found
        if finding.kind is Kind.MISSING:  # deleted in between: as if it had been absent
            return self._put(key, digest, data)
        if finding.kind is Kind.UNREADABLE:  # whether the bytes are wrong is not known
            raise finding.error("check the device; if it is damaged for good, move the file out of the store")
        repairing(self.backend).replace(key, data)
        self._remember(key)
        return True

    def _remember(self, key: str) -> None:
        with self._lock:
            self._verified.add(key)

    def _checked(self, key: str, digest: Digest, length: int | None, place: Place, report: Report) -> bytes | None:
        """Read ``key`` whole and hash it. ``length`` None: any length up to the limit of a document."""
        limit = DOCUMENT_LIMIT if length is None else length
        method = ReadbackMethod.CACHED
        try:
            if self.medium:
                data, method = self.backend.readback(key, limit + 1)
            else:
                data = self.backend.get(key, 0, limit + 1)
        except NotFoundError:
            finding = Finding(Kind.MISSING, place, key, "not in the store", str(digest), "nothing")
        except CorruptError as error:
            finding = Finding(Kind.CORRUPT, place, key, str(error), str(digest), "unreadable")
        except BackendError as error:
            finding = Finding(Kind.UNREADABLE, place, key, error.why, str(digest), "unreadable")
        else:
            if length is not None and len(data) != length:
                actual = f"{len(data)} bytes" if len(data) < length else f"more than {length} bytes"
                finding = Finding(Kind.TRUNCATED, place, key, "wrong length", f"{length} bytes", actual)
            elif (hashed := Digest.of(data)) != digest:
                finding = Finding(Kind.CORRUPT, place, key, "wrong bytes", str(digest), str(hashed))
            else:
                with self._lock:
                    self._verified.add(key)
                    self._methods.add(method)
                return data
        with self._lock:
            self._verified.discard(key)
        report(finding)
        return None


def writable(backend: ReadBackend) -> WriteBackend:
    """``backend`` as one that can be written, else ReadOnlyError."""
    if not hasattr(backend, "create"):
        raise ReadOnlyError(f"store {backend.url}", "its backend only reads")
    return backend  # type: ignore[return-value]


def repairing(backend: ReadBackend) -> RepairBackend:
    """``backend`` as one that can replace bad bytes, else ReadOnlyError."""
    if not hasattr(backend, "replace"):
        raise ReadOnlyError(f"store {backend.url}", "its backend cannot replace a damaged object")
    return backend  # type: ignore[return-value]


def malformed(place: Place, key: str, error: MalformedError) -> Finding:
    """A finding for verified bytes that are no document of the format."""
    return Finding(Kind.MALFORMED, place, key, str(error))
