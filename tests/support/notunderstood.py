"""Ways in which a store of three checkpoints can be damaged, or hold what this release does not know."""

from __future__ import annotations

from collections.abc import Callable

from ckptstore import Digest
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.format import canonical
from ckptstore.format.keys import (
    document_key,
    pin_key,
    ref_key,
)
from ckptstore.format.records import Pin, RefRecord
from ckptstore.store import Store

LAST = Policy((KeepLast(1),))


def foreign(key: str, data: bytes = b"x") -> Callable[[Store, list[Digest]], str]:
    def damage(store: Store, roots: list[Digest]) -> str:
        store.backend.create(key, data)
        return key

    return damage


def pinned_badly(store: Store, roots: list[Digest]) -> str:
    key = pin_key(roots[0], "ab" * 16)
    store.backend.create(key, b"{}")
    return key


def pinned_nothing(store: Store, roots: list[Digest]) -> str:
    store.backend.create(pin_key(Digest.of(b"none"), "ab" * 16), Pin(None, "lost").encode())
    return Digest.of(b"none").hex


def damaged_record(generation: int) -> Callable[[Store, list[Digest]], str]:
    def damage(store: Store, roots: list[Digest]) -> str:
        store.backend.replace(ref_key("main", generation), b"{}")
        return ref_key("main", generation)

    return damage


def missing_record(store: Store, roots: list[Digest]) -> str:
    store.backend.delete(ref_key("main", 2))
    return ref_key("main", 2)


def planted_record(store: Store, roots: list[Digest]) -> str:
    record = RefRecord(10**15, Digest.of(b"none"), roots[0], "ab" * 16)
    store.backend.create(ref_key("main", 10**15), record.encode())
    return "main"


def missing_document(number: int) -> Callable[[Store, list[Digest]], str]:
    def damage(store: Store, roots: list[Digest]) -> str:
        store.backend.delete(document_key(roots[number]))
        return str(roots[number])

    return damage


def part(number: int, kind: str, replacement: bytes | None) -> Callable[[Store, list[Digest]], str]:
    """A shard, page, tree or preparation of a checkpoint is gone, or has other bytes."""

    def damage(store: Store, roots: list[Digest]) -> str:
        closure = store.closure(roots[number])
        key = next(key for key in closure.documents if b'"kind":"%s"' % kind.encode() in store.backend.get(key))
        if replacement is None:
            store.backend.delete(key)
        else:
            store.backend.replace(key, replacement)
        return str(roots[number])

    return damage


def stray_document(data: bytes, name: bytes | None = None) -> Callable[[Store, list[Digest]], str]:
    def damage(store: Store, roots: list[Digest]) -> str:
        digest = Digest.of(data if name is None else name)
        store.backend.create(document_key(digest), data)
        return digest.hex

    return damage


UNKNOWN_KIND = canonical.encode({"kind": "delta", "format": 1, "base": "b3:" + "ab" * 32})
FUTURE = canonical.encode({"kind": "shard", "format": 2})

DAMAGE: dict[str, Callable[[Store, list[Digest]], str]] = {
    "unknown prefix": foreign("deltas/ab/cd"),
    "unknown name at the top": foreign("notes.txt"),
    "encoded": foreign(f"encoded/ab/{'ab' * 32}"),
    "object in another folder": foreign(f"objects/cd/{'ab' * 32}"),
    "object of another name": foreign("objects/ab/something"),
    "document of another name": foreign(f"documents/ab/{'ab' * 32}.tmp"),
    "pin of another name": foreign(f"pins/{'ab' * 32}/everything"),
    "ref of another name": foreign("refs/main/HEAD"),
    "retirement of another name": foreign("retired/main"),
    "receipt of another name": foreign("receipts/main/1"),
    "unknown feature": foreign("features/deltas"),
    "unreadable feature": foreign("features/single-writer"),
    "unreadable pin": pinned_badly,
    "pin on nothing": pinned_nothing,
    "damaged head": damaged_record(3),
    "damaged older record": damaged_record(1),
    "missing record": missing_record,
    "planted record": planted_record,
    "head without document": missing_document(2),
    "ancestor without document": missing_document(0),
    "shard of the head": part(2, "shard", None),
    "damaged shard of the head": part(2, "shard", b"{}"),
    "shard of an ancestor": part(0, "shard", None),
    "page": part(1, "page", None),
    "damaged page": part(1, "page", b"{}"),
    "document of an unknown kind": stray_document(UNKNOWN_KIND),
    "document of a later format": stray_document(FUTURE),
    "document that is none": stray_document(b"\x80\x04."),
    "damaged document that nothing names": stray_document(b"{", b"something else"),
}
