"""A live state as a donor: the bytes of its tensors, and of the documents that it would be stored as."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptstore.backends.protocol import Buffer
from ckptstore.format.digest import Digest
from ckptstore.live.capture import Captured, TrainingState
from ckptstore.live.save import write_shard
from ckptstore.live.tensors import chunks


class StateDonor:
    """Gives what a live state has; nothing of it is changed."""

    def __init__(self, state: TrainingState) -> None:
        """Capture ``state`` as a save does.

        Raises:
            RefusedError: something of it cannot be stored exactly.
        """
        self._captured: Captured = state.capture()
        self._documents: dict[tuple[int, int], dict[Digest, bytes]] = {}

    def document(self, digest: Digest, index: int, count: int) -> bytes | None:
        """The document with this digest, if the state, stored as shard ``index`` of ``count``, would have it: a page of
        tensors that are the same, or the shard itself if all is, generators included."""
        if (index, count) not in self._documents:
            sink = _Documents()
            write_shard(self._captured, index, count, sink)
            self._documents[index, count] = sink.kept
        return self._documents[index, count].get(digest)

    def chunks(self, wanted: Collection[Digest]) -> Iterator[tuple[Digest, bytes]]:
        """Those of the wanted chunks that some tensor has, each once, with its bytes; takes one pass over the state."""
        left = set(wanted)
        for source in self._captured.tensors:
            if not left:
                return
            for chunk in chunks(source.tensor):
                digest = Digest.of(chunk)
                if digest not in left:
                    continue
                data = bytes(chunk)
                if Digest.of(data) == digest:  # whatever another thread does to the tensor meanwhile
                    left.discard(digest)
                    yield digest, data


class _Documents:
    """Keeps documents, and of objects only the digest."""

    threads = None

    def __init__(self) -> None:
        self.kept: dict[Digest, bytes] = {}

    def put_object(self, data: Buffer, /) -> Digest:
        """Digest of an object."""
        return Digest.of(data)

    def put_document(self, data: bytes, /) -> Digest:
        """Keep a document; returns its digest."""
        digest = Digest.of(data)
        self.kept[digest] = data
        return digest
