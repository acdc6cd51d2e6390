"""Verified chunk bytes of a shard's tensors, wherever they lie: in their entry, as an object, in a pack."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Lock
from typing import Protocol

from ckptstore.closure import Pack, ShardView
from ckptstore.errors import MalformedError
from ckptstore.findings import Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import object_key
from ckptstore.format.page import TensorEntry

_RECENT_PACKS = 4


class ObjectReader(Protocol):
    """Gives objects by digest and length, verified."""

    def read(self, digest: Digest, length: int, place: Place, /) -> bytes | None:
        """The object; raises if it is bad or missing."""
        ...


class ChunkSource:
    """Chunks of one shard, each hashed before it is handed out; may be called from several threads.

    Packs are read once while their slots are asked for in order.
    """

    def __init__(self, objects: ObjectReader, view: ShardView) -> None:
        self._objects = objects
        self._view = view
        self._packs = {
            role: {digest: pack for pack in packs for digest in pack.slots} for role, packs in view.packs.items()
        }
        self._recent: dict[Digest, Future[bytes]] = {}
        self._lock = Lock()

    def read(self, entry: TensorEntry, number: int) -> bytes:
        """Chunk ``number`` of a tensor; its whole bytes if it stands inline.

        Raises:
            CorruptError, NotFoundError: the bytes are bad or missing; names the place.
        """
        if entry.inline is not None:
            return entry.inline
        place = self._view.place.at(role=entry.role, path=entry.path, chunk=number)
        lengths = entry.lengths()
        digest = entry.chunks[number]
        if number < len(lengths) - 1 or not entry.tail:
            data = self._objects.read(digest, lengths[number], place)
            assert data is not None
            return data
        pack = self._packs[entry.role][digest]
        start = pack.slots[digest].offset
        data = self._pack(pack, place)[start : start + lengths[number]]
        if Digest.of(data) != digest:
            why = f"its bytes in pack {object_key(pack.digest)} are {Digest.of(data)}, expected {digest}"
            raise MalformedError(str(place), why, "the documents contradict each other; run ckpt verify")
        return data

    def read_all(self, entry: TensorEntry) -> Iterator[bytes]:
        """The bytes of a tensor, chunk by chunk."""
        return (self.read(entry, number) for number in range(max(1, len(entry.chunks))))

    def _pack(self, pack: Pack, place: Place) -> bytes:
        """The bytes of a pack. Threads that want the same one wait for the first that reads it."""
        with self._lock:
            coming = self._recent.get(pack.digest)
            mine = coming is None
            if coming is None:
                coming = self._recent[pack.digest] = Future()
                for old in list(self._recent)[:-_RECENT_PACKS]:
                    del self._recent[old]
        if mine:
            try:
                data = self._objects.read(pack.digest, pack.length, place)
                assert data is not None
                coming.set_result(data)
            except BaseException as error:
                with self._lock:  # whoever asks later tries himself, and finds his own place named
                    if self._recent.get(pack.digest) is coming:
                        del self._recent[pack.digest]
                coming.set_exception(error)
        return coming.result()
