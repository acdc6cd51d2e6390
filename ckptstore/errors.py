"""The one error tree of the library.

Every error says **what** failed, **why**, and a **hint** at what to do next. Each class carries a stable ``code`` for
machines and the ``exit_code`` that the command line returns for it (docs/design.md lists both).
"""

from __future__ import annotations

from typing import ClassVar


class CkptStoreError(Exception):
    """Base of all errors raised on purpose by this package.

    Args:
        what: what failed, naming the checkpoint, shard, tensor, chunk or key.
        why: the reason, with expected and actual values where there are any.
        hint: the next thing to do or to run.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 7

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        self.what = what
        self.why = why
        self.hint = hint
        super().__init__(what, why, hint)

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text} ({self.hint})" if self.hint else text


class UsageError(CkptStoreError):
    """The caller's arguments make no sense together or name nothing that could exist."""

    code = "usage"
    exit_code = 2


class CorruptError(CkptStoreError):
    """Stored bytes are not the bytes that their name or their document promises."""

    code = "corrupt"
    exit_code = 3


class TornRestoreError(CorruptError):
    """A chunk turned out bad after some live tensors had been overwritten; what was overwritten is in the message."""

    code = "torn-restore"


class NotFoundError(CkptStoreError):
    """A key, ref, checkpoint or file is not there."""

    code = "missing"
    exit_code = 4


class RefusedError(CkptStoreError):
    """The request is understood and will not be done, because doing it would lose or change something."""

    code = "refused"
    exit_code = 5


class MismatchError(RefusedError):
    """Live state and stored state do not fit; the message lists every difference and nothing was changed."""

    code = "mismatch"


class NotArmedError(MismatchError):
    """Live state was overwritten and is not the stored one: no step and no save until a restore succeeds."""


class ConflictError(CkptStoreError):
    """Somebody else moved the ref, or holds what is needed."""

    code = "conflict"
    exit_code = 6


class CommitAbortedError(ConflictError):
    """A sharded commit did not come about; the ref was not moved by this attempt."""

    code = "aborted"


class BackendError(CkptStoreError):
    """The storage below failed (I/O error, permission, connection)."""

    code = "backend"
    exit_code = 7


class ReadOnlyError(BackendError):
    """The storage below does not let us write."""

    code = "read-only"


class NoSpaceError(BackendError):
    """The storage below is full (ENOSPC, EDQUOT)."""

    code = "no-space"
    exit_code = 8


class MalformedError(CkptStoreError):
    """Bytes that should be a document of this format are not one."""

    code = "malformed"
    exit_code = 9


class UnsupportedVersionError(MalformedError):
    """A document or store of a format version, or with a feature, that this release does not know."""

    code = "unsupported-version"
