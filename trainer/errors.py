"""What can go wrong in the trainer, on top of the library's own errors."""

from __future__ import annotations

import errno
import os

from ckptstore.errors import BackendError, CkptStoreError, ConflictError, NoSpaceError, RefusedError


class ProtocolError(ConflictError):
    """Two workers disagree about what happens now: another generation, update, microbatch, shape, dtype or value."""

    code = "protocol"


class PeerLostError(CkptStoreError):
    """A peer did not answer: its process ended, its connection broke, or the timeout of the group passed."""

    code = "peer-lost"


class CursorError(RefusedError):
    """The optimizer's counters do not stand where the update to be made needs them."""

    code = "cursor"


class NotFiniteError(RefusedError):
    """A loss, gradient or logit is infinite or NaN; the update was not made."""

    code = "not-finite"


class NumericsError(RefusedError):
    """This process cannot give the arithmetic that was asked for."""

    code = "numerics"


def of_system(error: OSError, what: str) -> BackendError:
    """What the operating system refused, as one of our errors: the file, if one is known, or ``what``, and why."""
    kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else BackendError
    path = "" if error.filename is None else os.fsdecode(error.filename)
    return kind(path or what, error.strerror or type(error).__name__)
