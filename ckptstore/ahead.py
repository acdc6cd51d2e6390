"""Documents fetched ahead: over a network each takes its time, and the next ones are known before they are needed.

At most a few for each thread are on their way or waiting, so that memory is bounded. What is wrong with one is kept
with it, and reported when its turn comes: findings and their order are those of reading one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

from ckptstore.findings import Finding, Place, Report
from ckptstore.format.digest import Digest
from ckptstore.objects import Objects
from ckptstore.threads import in_threads


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A document, or what was found in its place."""

    digest: Digest
    data: bytes | None
    findings: list[Finding] = field(default_factory=list)


class Ahead:
    """Reads documents of ``objects``; those that were announced are fetched in threads before they are asked for.

    Where no network is in between, it reads one after the other.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._coming: Iterator[_Fetched] = iter(())
        self._next: _Fetched | None = None

    @contextmanager
    def announced(
        self, parents: Iterable[Digest], children: Callable[[Digest, bytes], Iterable[Digest]] | None = None
    ) -> Iterator[None]:
        """Inside, documents will be asked for in this order: each of ``parents``, and after it what ``children`` says
        of its digest and bytes. One that is named again is fetched again only when it is asked for again."""
        if not self._objects.backend.traits.network:
            yield
            return
        with closing(self._fetched(parents, children)) as self._coming:
            try:
                yield
            finally:
                self._coming, self._next = iter(()), None

    def document(self, digest: Digest, place: Place, report: Report) -> bytes | None:
        """The document with this digest, verified; None after a reported finding."""
        if self._next is None:
            self._next = next(self._coming, None)
        fetched = self._next
        if fetched is None or fetched.digest != digest:
            return self._objects.document(digest, place, report)
        self._next = None
        for finding in fetched.findings:
            report(replace(finding, place=place))
        return fetched.data

    def _fetched(
        self, parents: Iterable[Digest], children: Callable[[Digest, bytes], Iterable[Digest]] | None
    ) -> Generator[_Fetched, None, None]:
        threads = self._objects.threads
        seen: set[Digest] = set()

        def new(digests: Iterable[Digest]) -> Iterator[Digest]:
            for digest in digests:
                if digest not in seen:
                    seen.add(digest)
                    yield digest

        def families() -> Generator[_Fetched | Digest, None, None]:
            assert children is not None
            for document in in_threads(self._fetch, new(parents), min(2, threads)):
                yield document
                if document.data is not None:
                    yield from new(children(document.digest, document.data))

        if children is None:
            yield from in_threads(self._fetch, new(parents), threads)
        else:
            with closing(families()) as wanted:
                yield from in_threads(self._fetch, wanted, max(1, threads - 2))

    def _fetch(self, item: _Fetched | Digest) -> _Fetched:
        if isinstance(item, _Fetched):
            return item
        found: list[Finding] = []
        data = self._objects.document(item, Place(), found.append)
        return _Fetched(item, data, found)
