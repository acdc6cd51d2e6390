"""What an evidence archive says of itself: members with size and digests, and what it names by reference. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from ckptstore.errors import CorruptError, MalformedError
from ckptstore.evidence import ustar
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest, derive
from ckptstore.format.fields import FORMAT, Fields, close_document, open_document
from ckptstore.format.tree import path_below_another

NAME = "MANIFEST.json"
KIND = "evidence"
LIMIT = 16 * 2**20

_SEAL_CONTEXT = f"ckptstore {FORMAT} evidence seal"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def path_problem(path: str) -> str | None:
    """Why ``path`` cannot name a member, or None if it can.

    Paths are relative, ``/`` between components, none of them empty, ``.`` or ``..``; valid Unicode without NUL; and
    short enough for ustar.
    """
    try:
        parts = ustar.split(path)
    except UnicodeEncodeError:
        return "not valid Unicode"
    if path == NAME:
        return "the name of the archive's own manifest"
    if "\0" in path:
        return "holds a NUL"
    if path.startswith("/"):
        return "absolute"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f"has the component {part!r}"
    if parts is None:
        return "longer than ustar allows (100 bytes, or 155 more before a '/')"
    return None


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive: path, size in bytes, SHA-256 as 64 hex digits, and BLAKE3."""

    path: str
    size: int
    sha256: str
    blake3: Digest

    def __post_init__(self) -> None:
        problem = path_problem(self.path)
        if problem:
            raise MalformedError(f"member {self.path!a:.120}", problem)
        if not 0 <= self.size <= ustar.MAX_SIZE:
            raise MalformedError(f"member {self.path!a}", f"{self.size} bytes are more than ustar can say")
        if not _SHA256.fullmatch(self.sha256):
            raise MalformedError(f"member {self.path!a}", "its sha256 is not 64 lowercase hex digits")

    def to_json(self) -> Json:
        """As it stands in the manifest."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256, "blake3": str(self.blake3)}

    @staticmethod
    def from_json(value: Json) -> Member:
        """Read what :meth:`to_json` writes. MalformedError for anything else."""
        fields = Fields(value, "evidence member")
        member = Member(fields.text("path"), fields.count("size"), fields.text("sha256"), fields.digest("blake3"))
        fields.end()
        return member


@dataclass(frozen=True, slots=True)
class Reference:
    """Something large that the evidence speaks of and does not hold: key in the store, size in bytes, digest."""

    key: str
    size: int
    digest: Digest

    def __post_init__(self) -> None:
        if not self.key or self.size < 0:
            raise MalformedError(f"reference {self.key!a:.120}", "needs a key and a size of at least 0")
        canonical.encode(self.key)

    def to_json(self) -> Json:
        """As it stands in the manifest."""
        return {"key": self.key, "size": self.size, "digest": str(self.digest)}

    @staticmethod
    def from_json(value: Json) -> Reference:
        """Read what :meth:`to_json` writes. MalformedError for anything else."""
        fields = Fields(value, "evidence reference")
        reference = Reference(fields.text("key"), fields.count("size"), fields.digest("digest"))
        fields.end()
        return reference


@dataclass(frozen=True, slots=True)
class Manifest:
    """Members sorted by the UTF-8 bytes of their paths and references sorted by key, each once.

    Its **seal** is a digest over both. Contents check themselves against a member's digests; the seal does that for
    what has no content in the archive.
    """

    members: tuple[Member, ...]
    references: tuple[Reference, ...] = ()

    def __post_init__(self) -> None:
        paths = [member.path for member in self.members]
        _check_order(paths, "member")
        _check_order([reference.key for reference in self.references], "reference")
        below = path_below_another([NAME, *paths])
        if below is not None:
            raise MalformedError(f"member {below[1]!a}", f"{below[0]!a} is a file and cannot be its folder")

    @property
    def seal(self) -> Digest:
        """BLAKE3 in derive_key mode over the canonical list of members and references."""
        return Digest(derive(_SEAL_CONTEXT, canonical.encode(self._body())))

    def encode(self) -> bytes:
        """Canonical bytes. MalformedError if they are more than the limit of 16 MiB."""
        return close_document(KIND, {**self._body(), "seal": str(self.seal)}, LIMIT)

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """The manifest of canonical bytes.

        Raises:
            MalformedError: not a canonical manifest.
            UnsupportedVersionError: of a format version that this release does not know.
            CorruptError: its seal is that of another list.
        """
        fields = open_document(data, KIND, LIMIT)
        manifest = Manifest(fields.items("members", Member.from_json), fields.items("references", Reference.from_json))
        seal = fields.digest("seal")
        fields.end()
        if seal != manifest.seal:
            raise CorruptError(NAME, f"its list is not the one that was sealed: {manifest.seal}, expected {seal}")
        return manifest

    def _body(self) -> dict[str, Json]:
        return {
            "members": [member.to_json() for member in self.members],
            "references": [reference.to_json() for reference in self.references],
        }


def _check_order(names: list[str], what: str) -> None:
    for name, after in pairwise(names):
        if name.encode() >= after.encode():
            why = "listed twice" if name == after else f"out of order after {name!a:.120}"
            raise MalformedError(f"{what} {after!a:.120}", why)
