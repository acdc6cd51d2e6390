"""All keys of a store, also of one in which something lies that no listing can get past."""

from __future__ import annotations

from collections.abc import Iterator

from ckptstore.backends.protocol import ReadBackend, Stat
from ckptstore.errors import CorruptError
from ckptstore.findings import Finding, Kind, Place, Report
from ckptstore.format.keys import PREFIXES, STORE_KEY


def listed(backend: ReadBackend, report: Report, prefix: str = "") -> Iterator[Stat]:
    """Every key below ``prefix``; what is in the way is reported, and the folders beside it are listed.

    Raises:
        BackendError: the storage failed.
    """
    try:
        yield from list(backend.list(prefix))
    except CorruptError as error:
        if prefix == "":
            stat = asked_for(backend, STORE_KEY, report)
            yield from () if stat is None else (stat,)
            for name in PREFIXES:
                yield from listed(backend, report, f"{name}/")
        elif prefix in ("objects/", "documents/"):
            for number in range(256):
                yield from listed(backend, report, f"{prefix}{number:02x}/")
        else:
            message = f"{error.what}: {error.why}; other keys of this folder are looked for by their names alone"
            report(Finding(Kind.CORRUPT, Place(part=f"keys below {prefix}"), prefix, message))


def asked_for(backend: ReadBackend, key: str, report: Report) -> Stat | None:
    """A key that is asked for by its name; None if it is not there, or no file, which is reported."""
    try:
        return backend.stat(key)
    except CorruptError as error:
        report(Finding(Kind.CORRUPT, Place(part="key"), key, error.why))
        return None
