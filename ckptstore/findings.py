"""Findings: what is wrong with stored bytes, and exactly where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    CorruptError,
    MalformedError,
    NotFoundError,
    RefusedError,
)
from ckptstore.format.digest import Digest
from ckptstore.format.page import Role, show_role


class Kind(Enum):
    """What is wrong; the worst kind of a report decides its exit code."""

    CORRUPT = "corrupt"  # the bytes are not those of the digest
    TRUNCATED = "truncated"  # fewer or more bytes than promised
    MISSING = "missing"  # no such key
    MALFORMED = "malformed"  # the right bytes, but no document of this format
    INCONSISTENT = "inconsistent"  # documents that contradict each other or a root that does not follow
    PROGRESS = "progress"  # cursors and counters disagree
    UNREADABLE = "unreadable"  # the storage below failed to give the bytes
    ANCESTOR = "ancestor"  # an ancestor is neither present nor retired

    @classmethod
    def of(cls, error: CkptStoreError) -> Kind:
        """The kind of what stopped a read."""
        if isinstance(error, NotFoundError):
            return cls.MISSING
        if isinstance(error, MalformedError):
            return cls.MALFORMED
        return cls.UNREADABLE if isinstance(error, BackendError) else cls.CORRUPT


_ERRORS: dict[Kind, type[CkptStoreError]] = {
    Kind.CORRUPT: CorruptError,
    Kind.TRUNCATED: CorruptError,
    Kind.MISSING: NotFoundError,
    Kind.MALFORMED: MalformedError,
    Kind.INCONSISTENT: CorruptError,
    Kind.PROGRESS: RefusedError,
    Kind.UNREADABLE: BackendError,
    Kind.ANCESTOR: NotFoundError,
}

REPAIRABLE = (Kind.CORRUPT, Kind.TRUNCATED, Kind.MISSING)
"""Kinds of what another copy may have whole; the others are wrong in each copy, or only out of reach."""

_WORST_FIRST = (
    Kind.CORRUPT,
    Kind.TRUNCATED,
    Kind.INCONSISTENT,
    Kind.MALFORMED,
    Kind.PROGRESS,
    Kind.UNREADABLE,
    Kind.MISSING,
    Kind.ANCESTOR,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where: checkpoint, shard, tensor (role and path), chunk, or a file of a tree; what does not apply is None."""

    checkpoint: Digest | None = None
    shard: int | None = None
    role: Role | None = None
    path: str | None = None
    chunk: int | None = None
    part: str = ""

    def at(self, **changes: object) -> Place:
        """This place with some parts replaced."""
        # Not dataclasses.replace, which takes five times as long: there is a place for each tensor.
        own = {
            "checkpoint": self.checkpoint,
            "shard": self.shard,
            "role": self.role,
            "path": self.path,
            "chunk": self.chunk,
            "part": self.part,
        }
        return Place(**{**own, **changes})  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = []
        if self.checkpoint is not None:
            parts.append(f"checkpoint {self.checkpoint.short}")
        if self.shard is not None:
            parts.append(f"shard {self.shard}")
        if self.part:
            parts.append(self.part)
        if self.role is not None:
            parts.append(show_role(self.role))
        if self.path is not None:
            parts.append(repr(self.path)[:200])
        if self.chunk is not None:
            parts.append(f"chunk {self.chunk}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``key`` is the stored key, ``expected`` and ``actual`` are digests or sizes as text."""

    kind: Kind
    place: Place
    key: str
    message: str
    expected: str = ""
    actual: str = ""

    def __str__(self) -> str:
        detail = f"; expected {self.expected}, actual {self.actual}" if self.expected or self.actual else ""
        key = f" [{self.key}]" if self.key else ""
        return f"{self.kind.value}: {self.place}: {self.message}{detail}{key}"

    def error(self, hint: str = "") -> CkptStoreError:
        """This finding as an error of the fitting class."""
        detail = f"; expected {self.expected}, actual {self.actual}" if self.expected or self.actual else ""
        key = f" [{self.key}]" if self.key else ""
        return _ERRORS[self.kind](f"{self.place}", f"{self.message}{detail}{key}", hint)


Report: TypeAlias = Callable[[Finding], None]
"""Takes a finding: collects it, or raises it."""


def raise_finding(finding: Finding) -> None:
    """A report that raises the first finding."""
    root = finding.place.checkpoint
    name = "ROOT" if root is None else str(root) if root.hex in finding.key else root.short
    hint = f"ckpt verify {name} lists all findings, ckpt repair {name} gets the bytes back from another copy"
    raise finding.error(hint if finding.kind in REPAIRABLE else f"ckpt verify {name} lists all findings")


def exit_code(findings: Sequence[Finding]) -> int:
    """0 without findings, else the exit code of the worst kind."""
    for kind in _WORST_FIRST:
        if any(finding.kind is kind for finding in findings):
            return _ERRORS[kind].exit_code
    return 0
