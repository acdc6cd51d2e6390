"""Retirements: what they say of a checkpoint whose closure, or whose own document, cannot be read."""

from __future__ import annotations

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import CkptStoreError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import retired_key
from ckptstore.format.records import RECORD_LIMIT, Retired

BY_NAME = "retired by name"
"""Reason of the retirement of what somebody named, though something led to it, because it could not be read."""


def was_retired_by_name(backend: ReadBackend, root: Digest) -> bool:
    """Whether somebody let a checkpoint go by name: then it may also lack its document, where its history ends."""
    try:
        record = Retired.parse(backend.get(retired_key(root), 0, RECORD_LIMIT + 1))
    except CkptStoreError:
        return False
    return record.reason == BY_NAME
