"""Where a run has to go as planned: what was expected is compared with what was seen, and both are said."""

from __future__ import annotations

from ckptstore.errors import RefusedError

KEPT = "everything is kept for inspection"


class NotAsPlannedError(RefusedError):
    """Something went otherwise than planned. Everything that the run made is kept."""

    code = "not-as-planned"


def require(what: str, expected: object, seen: object) -> None:
    """Raise NotAsPlannedError unless ``seen`` equals ``expected``."""
    if seen != expected:
        raise unexpected(what, expected, seen)


def unexpected(what: str, expected: object, seen: object, hint: str = KEPT) -> NotAsPlannedError:
    """The error for ``what``, to be raised."""
    return NotAsPlannedError(what, f"expected {expected}, seen {seen}", hint)
