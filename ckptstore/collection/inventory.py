"""All keys of a store by what they are, from one listing.

What is not understood is named, because nothing may be deleted beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptstore.backends.protocol import ReadBackend, Stat
from ckptstore.endpoints import SINGLE_WRITER
from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import PREFIXES, STORE_KEY, digest_of_key, parse_ref_key
from ckptstore.format.records import RECORD_LIMIT, Feature
from ckptstore.objects import undamaged

_RECEIPT = re.compile(r"receipts/([0-9a-f]{64})/[0-9a-f]{64}")
_PIN = re.compile(r"pins/([0-9a-f]{64})/[0-9a-f]{32}")
_RETIRED = re.compile(r"retired/([0-9a-f]{64})")

_UNKNOWN = "not understood by this release, so that nothing may be deleted beside it"


@dataclass(slots=True)
class Inventory:
    """What is in a store.

    Objects and documents are held as the 32 bytes of their digests with their sizes in bytes: there are many of them.

    Args:
        documents, objects: sizes by digest.
        receipts: keys and sizes by subject.
        refs: generations by name of the ref.
        pins: keys by root.
        retired: roots that have a retirement.
        leases: keys of writers.
        keys, size: of everything but leases and markers of collections.
        problems: what is not understood.
    """

    documents: dict[bytes, int] = field(default_factory=dict)
    objects: dict[bytes, int] = field(default_factory=dict)
    receipts: dict[Digest, list[Stat]] = field(default_factory=dict)
    refs: dict[str, set[int]] = field(default_factory=dict)
    pins: dict[Digest, set[str]] = field(default_factory=dict)
    retired: set[Digest] = field(default_factory=set)
    leases: list[str] = field(default_factory=list)
    keys: int = 0
    size: int = 0
    problems: list[str] = field(default_factory=list)

    def has_document(self, digest: Digest) -> bool:
        """Whether such a document was listed."""
        return digest.raw in self.documents


def take_inventory(backend: ReadBackend) -> Inventory:
    """List a store once, and read its features."""
    found = Inventory()
    kinds: dict[str, Callable[[Inventory, Stat], bool]] = {
        "objects": _content,
        "documents": _content,
        "receipts": _receipt,
        "refs": _ref,
        "pins": _pin,
        "retired": _retired,
        "features": lambda _, stat: _feature(backend, stat.key),
        "leases": _lease,
        "gc": lambda _, stat: True,
    }
    try:
        for stat in backend.list(""):
            prefix = stat.key.partition("/")[0]
            if prefix not in ("leases", "gc"):  # they come and go
                found.keys += 1
                found.size += stat.size
            if stat.key != STORE_KEY and not kinds.get(prefix, _nothing)(found, stat):
                known = prefix in PREFIXES and prefix != stat.key
                found.problems.append(f"key {stat.key}: {'' if known else 'of an unknown prefix, '}{_UNKNOWN}")
    except CorruptError as error:  # the listing ends there
        found.problems.append(str(error))
    return found


def add_new_names(backend: ReadBackend, found: Inventory) -> None:
    """List refs and pins once more: what they name may have been stored before the listing, and named after it."""
    for prefix, take in (("refs/", _ref), ("pins/", _pin)):
        for stat in backend.list(prefix):
            take(found, stat)


def _nothing(_: Inventory, __: Stat) -> bool:
    return False


def _content(found: Inventory, stat: Stat) -> bool:
    digest = digest_of_key(stat.key)
    if digest is None:
        return False
    (found.objects if stat.key.startswith("objects/") else found.documents)[digest.raw] = stat.size
    return True


def _receipt(found: Inventory, stat: Stat) -> bool:
    match = _RECEIPT.fullmatch(stat.key)
    if match:
        found.receipts.setdefault(Digest.parse(match[1]), []).append(stat)
    return match is not None


def _ref(found: Inventory, stat: Stat) -> bool:
    parsed = parse_ref_key(stat.key)
    if parsed:
        found.refs.setdefault(parsed[0], set()).add(parsed[1])
    return parsed is not None


def _pin(found: Inventory, stat: Stat) -> bool:
    match = _PIN.fullmatch(stat.key)
    if match:
        found.pins.setdefault(Digest.parse(match[1]), set()).add(stat.key)
    return match is not None


def _retired(found: Inventory, stat: Stat) -> bool:
    match = _RETIRED.fullmatch(stat.key)
    if match:
        found.retired.add(Digest.parse(match[1]))
    return match is not None


def _lease(found: Inventory, stat: Stat) -> bool:
    found.leases.append(stat.key)
    return True


def _feature(backend: ReadBackend, key: str) -> bool:
    """Whether it is known what this feature means to a collection. A single writer means nothing to it."""
    if key != f"features/{SINGLE_WRITER}":
        return False
    try:
        undamaged(backend, lambda: Feature.parse(backend.get(key, 0, RECORD_LIMIT + 1)))
    except (MalformedError, CorruptError, NotFoundError):
        return False
    return True
