"""Presence: whether the objects of a closure are there, before anything relies on them."""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore.closure import Closure
from ckptstore.findings import Finding, Kind, Place, raise_finding
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key
from ckptstore.objects import Objects


def check_presence(objects: Objects, closure: Closure, since: float = 0.0) -> None:
    """Raise the first object that is absent or of another size. What this process saw there since ``since`` (of
    :func:`time.monotonic`) is not asked for; under a lease, that is when it began, since until then a collection may
    have deleted what nothing named.

    Over a network only those are asked for that no listing comes to: the bytes of all are checked when they are read.
    """
    wanted = [(key, need) for key, need in closure.objects.items() if not objects.seen_since(key, since)]
    if objects.backend.traits.network:
        gone = _gone(objects, [key for key, _ in wanted])
        wanted = [(key, need) for key, need in wanted if key in gone]
    for key, need in wanted:
        stat = objects.backend.stat(key)
        if stat is None:
            raise_finding(_missing(need.places[0], key, need.digest))
        elif stat.size != need.length:
            expected, actual = f"{need.length} bytes", f"{stat.size} bytes"
            raise_finding(Finding(Kind.TRUNCATED, need.places[0], key, "wrong length", expected, actual))


def check_still_there(objects: Objects, closure: Closure, began: float) -> None:
    """Raise the first document or object that was not seen since ``began`` (of :func:`time.monotonic`) and is gone."""
    unseen = [key for key, _ in closure.sizes() if not objects.seen_since(key, began)]
    gone = _gone(objects, unseen)
    for key in unseen:
        if key in gone and objects.backend.stat(key) is None:
            digest = digest_of_key(key)
            assert digest is not None
            objects.forget(key)
            need = closure.objects.get(key)
            raise_finding(_missing(need.places[0] if need else Place(part=f"document {digest.short}"), key, digest))


def _gone(objects: Objects, keys: Iterable[str]) -> set[str]:
    """Those of ``keys`` that seem absent, in few round trips."""
    wanted = set(keys)
    return wanted - objects.backend.present(wanted) if wanted else set()


def _missing(place: Place, key: str, digest: Digest) -> Finding:
    return Finding(Kind.MISSING, place, key, "not in the store", str(digest), "nothing")
