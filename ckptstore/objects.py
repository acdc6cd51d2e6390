"""Content-addressed objects and documents over a backend: hashed when written, hashed before they are handed out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TypeVar

from ckptstore.backends import deadline
from ckptstore.backends.protocol import Buffer, ReadBackend, ReadbackMethod, RepairBackend, WriteBackend
from ckptstore.errors import BackendError, CorruptError, MalformedError, NotFoundError, ReadOnlyError
from ckptstore.findings import Finding, Kind, Place, Report, raise_finding
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key, object_key

T = TypeVar("T")

_STALE_SECONDS = (0.1, 0.4, 1.5, 3.0)
_READS_OVER_NETWORK = 3  # wrong bytes that differ from one reading to the next were changed on the way


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
        self._methods: dict[str, ReadbackMethod] = {}  # in which each key was last read
        self._verified: dict[str, float] = {}  # and when it was last there with the right size
        self._read_back: dict[str, float] = {}  # when its bytes were last read back in full
        self._recent: set[str] = set()
        self._expected: set[str] = set()
        self._listed: dict[str, int] | None = {}
        self._listing = Lock()
        self._lock = Lock()

    @property
    def method(self) -> ReadbackMethod:
        """The weakest way in which bytes were read so far."""
        return self.weakest(self._methods)

    def weakest(self, keys: Iterable[str]) -> ReadbackMethod:
        """The weakest way in which any of ``keys`` was last read and found good."""
        with self._lock:
            methods = {self._methods[key] for key in keys if key in self._methods}
        return max(methods, key=list(ReadbackMethod).index, default=ReadbackMethod.CACHED)

    @property
    def threads(self) -> int:
        """Calls at a time that are worth making."""
        return self.backend.traits.threads

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

    def seen_since(self, key: str, moment: float) -> bool:
        """Whether ``key`` was there with the right size at ``moment`` (of :func:`time.monotonic`) or later."""
        with self._lock:
            return self._verified.get(key, -1.0) >= moment

    def read_back_at(self, key: str) -> float | None:
        """When the stored bytes of ``key`` were last read back in full and found good, if nothing was written there or
        found bad since (of :func:`time.monotonic`)."""
        with self._lock:
            return self._read_back.get(key)

    def keys_read_back(self) -> set[str]:
        """The keys of which :meth:`read_back_at` knows a moment."""
        with self._lock:
            return set(self._read_back)

    def note_read_back(self, key: str) -> None:
        """The stored bytes of ``key`` were read back in full just now, and are good."""
        with self._lock:
            self._read_back[key] = time.monotonic()

    def forget(self, key: str | None = None) -> None:
        """What this process knew of ``key`` (None: of every key) is in doubt: its bytes are read before they count."""
        with self._lock:
            for known in (self._verified, self._read_back):
                if key is None:
                    known.clear()
                else:
                    known.pop(key, None)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, objects that were put or verified since the last time need not be asked for one by one: when the
        first of them is met again, the sizes of those that a backend can list in few round trips are found out. For the
        time of one lease."""
        with self._lock:
            self._expected, self._recent = self._recent, set()
        self._listed = None
        try:
            yield
        finally:
            self._listed = {}

    def _put(self, key: str, digest: Digest, data: Buffer) -> bool:
        length = memoryview(data).nbytes
        if self.is_verified(key) and self._size(key) == length:
            self._saw(key)
            return False
        backend = writable(self.backend)
        try:
            created = backend.create(key, data)
        except CorruptError:  # no regular file lies there, which is put aside as wrong bytes are
            created = False
        if created:
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

    def _size(self, key: str) -> int | None:
        size = self._sizes().get(key) if key.startswith("objects/") else None
        if size is None:
            with suppress(CorruptError):  # no regular file lies there
                stat = self.backend.stat(key)
                size = None if stat is None else stat.size
        return size

    def _sizes(self) -> dict[str, int]:
        with self._listing:
            if self._listed is None:
                sizes = getattr(self.backend, "sizes", None)
                keys = [key for key in self._expected if key.startswith("objects/") and self.is_verified(key)]
                self._listed = sizes(keys) if sizes is not None and len(keys) > 1 else {}
            return self._listed

    def _saw(self, key: str) -> None:
        with self._lock:
            self._verified[key] = time.monotonic()
            self._recent.add(key)

    def _remember(self, key: str) -> None:
        """It was written now, so that what was read back before counts no more."""
        with self._lock:
            self._read_back.pop(key, None)
        self._saw(key)

    def _checked(self, key: str, digest: Digest, length: int | None, place: Place, report: Report) -> bytes | None:
        """Read ``key`` whole and hash it. ``length`` None: any length up to the limit of a document.

        Bytes that came over a network are called wrong only if they are wrong each time, and what this process knows to
        be there is called missing only after a while: a copy that lags behind may have answered.
        """
        network = self.backend.traits.network
        times = _READS_OVER_NETWORK if network else 1
        pauses = iter(_STALE_SECONDS if network and self.is_verified(key) else ())
        read = self._read(key, digest, length, place)
        while not isinstance(read, bytes):
            if read.kind is Kind.MISSING and (pause := next(pauses, None)) is not None:
                deadline.check(f"reading {key} again")
                time.sleep(pause)
            elif read.kind in (Kind.TRUNCATED, Kind.CORRUPT) and times > 1:
                times -= 1
            else:
                self.forget(key)
                report(read)
                return None
            read = self._read(key, digest, length, place)
        return read

    def _read(self, key: str, digest: Digest, length: int | None, place: Place) -> bytes | Finding:
        limit = DOCUMENT_LIMIT if length is None else length
        method = ReadbackMethod.CACHED
        try:
            if self.medium or self.backend.traits.network:
                data, method = self.backend.readback(key, limit + 1)
            else:
                data = self.backend.get(key, 0, limit + 1)
        except NotFoundError:
            return Finding(Kind.MISSING, place, key, "not in the store", str(digest), "nothing")
        except CorruptError as error:
            return Finding(Kind.CORRUPT, place, key, str(error), str(digest), "unreadable")
        except BackendError as error:
            return Finding(Kind.UNREADABLE, place, key, error.why, str(digest), "unreadable")
        if length is not None and len(data) != length:
            actual = f"{len(data)} bytes" if len(data) < length else f"more than {length} bytes"
            return Finding(Kind.TRUNCATED, place, key, "wrong length", f"{length} bytes", actual)
        hashed = Digest.of(data)
        if hashed != digest:
            return Finding(Kind.CORRUPT, place, key, "wrong bytes", str(digest), str(hashed))
        self._saw(key)
        if method.reaches_medium:
            self.note_read_back(key)
        with self._lock:
            self._methods[key] = method
        return data


def undamaged(backend: ReadBackend, read: Callable[[], T]) -> T:
    """What ``read`` returns. Over a network, what is damaged is read again before it is called so."""
    for _ in range(_READS_OVER_NETWORK - 1 if backend.traits.network else 0):
        with suppress(CorruptError, MalformedError):
            return read()
    return read()


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
