"""Keys: where each thing lies, the same in a directory and in a bucket (F-01 to F-09)."""

from __future__ import annotations

import re

from ckptstore.errors import UsageError
from ckptstore.format.digest import Digest

STORE_KEY = "ckptstore.json"
REF_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NONCE = re.compile(r"[0-9a-f]{32}")
PREFIXES = ("objects", "encoded", "documents", "refs", "receipts", "pins", "retired", "leases", "gc", "features")

_GENERATION_DIGITS = 16
_HEX_NAME = re.compile(r"[0-9a-f]{4,64}")


def object_key(digest: Digest) -> str:
    """Key of the raw bytes with this digest (a chunk, a pack, a file)."""
    return f"objects/{digest.hex[:2]}/{digest.hex}"


def document_key(digest: Digest) -> str:
    """Key of the document with this digest."""
    return f"documents/{digest.hex[:2]}/{digest.hex}"


def is_ref_name(name: str) -> bool:
    """Whether ``name`` could be that of a ref; whatever else people type is a digest or the beginning of one."""
    return REF_NAME.fullmatch(name) is not None and _HEX_NAME.fullmatch(name) is None


def check_ref_name(name: str) -> str:
    """``name`` if it is a legal ref name, else UsageError."""
    if not is_ref_name(name):
        why = "a ref name is [a-z0-9][a-z0-9._-]{0,63} and not a hex number of 4 digits or more"
        raise UsageError(f"ref {name!r:.80}", why, "hex numbers are read as digests; choose another name")
    return name


def ref_prefix(name: str) -> str:
    """Prefix of all generations of a ref."""
    return f"refs/{check_ref_name(name)}/"


def ref_key(name: str, generation: int) -> str:
    """Key of one generation of a ref: 16 decimal digits, so that names sort like numbers."""
    return f"{ref_prefix(name)}{generation:0{_GENERATION_DIGITS}d}"


def parse_ref_key(key: str) -> tuple[str, int] | None:
    """(name, generation) of a ref key, or None if the key is not one. Generations begin with 1."""
    match = re.fullmatch(rf"refs/({REF_NAME.pattern})/([0-9]{{{_GENERATION_DIGITS}}})", key)
    if match is None or _HEX_NAME.fullmatch(match[1]) or not int(match[2]):
        return None
    return match[1], int(match[2])


def receipt_prefix(subject: Digest) -> str:
    """Prefix of all receipts about one subject."""
    return f"receipts/{subject.hex}/"


def receipt_key(subject: Digest, digest: Digest) -> str:
    """Key of one receipt; named by the plain digest of its bytes."""
    return f"receipts/{subject.hex}/{digest.hex}"


def pin_prefix(root: Digest) -> str:
    """Prefix of all pins on ``root``."""
    return f"pins/{root.hex}/"


def pin_key(root: Digest, nonce: str) -> str:
    """Key of a pin on ``root``."""
    return f"{pin_prefix(root)}{nonce}"


def retired_key(root: Digest) -> str:
    """Key that says that the closure of this ancestor may be gone."""
    return f"retired/{root.hex}"


def feature_key(name: str) -> str:
    """Key that says that the store has this addition to the format."""
    return f"features/{name}"


def lease_key(nonce: str) -> str:
    """Key of a live writer's lease."""
    return f"leases/{nonce}"


def collection_key(number: int) -> str:
    """Key of the marker of a running collection: 16 decimal digits, each number used once as long as one is there."""
    return f"gc/{number:0{_GENERATION_DIGITS}d}"


def parse_collection_key(key: str) -> int | None:
    """The number of a collection's marker, or None if the key is not one."""
    match = re.fullmatch(rf"gc/([0-9]{{{_GENERATION_DIGITS}}})", key)
    return int(match[1]) or None if match else None


def digest_of_key(key: str) -> Digest | None:
    """The digest that names an object or a document, or None if ``key`` is neither or its shard folder does not fit."""
    match = re.fullmatch(r"(?:objects|documents)/([0-9a-f]{2})/([0-9a-f]{64})", key)
    return Digest.parse(match[2]) if match and match[2].startswith(match[1]) else None
