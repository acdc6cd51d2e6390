"""Which bytes of an object a ranged read means."""

from __future__ import annotations

from ckptstore.errors import UsageError


def window(size: int, offset: int = 0, length: int | None = None) -> tuple[int, int]:
    """The range ``[start, stop)`` in bytes that ``offset`` and ``length`` (None: to the end) select of ``size`` bytes.

    Always ``0 <= start <= stop <= size``: a range that begins behind the end is empty.

    Raises:
        UsageError: a negative offset or length.
    """
    if offset < 0 or (length is not None and length < 0):
        raise UsageError(f"range at {offset} of {length} bytes", "negative", "offset and length count from the start")
    start = min(offset, size)
    return start, size if length is None else min(start + length, size)
