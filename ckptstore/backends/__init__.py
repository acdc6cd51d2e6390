"""Backends: keys to bytes, without meaning (see :mod:`ckptstore.backends.protocol`)."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote_to_bytes, urlsplit

from ckptstore.backends.protocol import PruneBackend
from ckptstore.errors import UsageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SUPPORTED = "supported are a directory's path, file:///path and memory:name"


def open_backend(url: str | os.PathLike[str], *, create: bool = False) -> PruneBackend:
    """The backend that ``url`` names: a directory's path, ``file:///path`` or ``memory:name``.

    A directory, or a name in this process's memory, that is missing is made if ``create`` is true.

    Raises:
        UsageError: ``url`` is of another kind.
        NotFoundError: there is none, and ``create`` is false.
        BackendError: the directory cannot be made.
    """
    text = os.fspath(url)
    if text.startswith("memory:"):
        from ckptstore.backends.memory import named

        return named(text.removeprefix("memory:"), create=create)

    from ckptstore.backends.directory import DirectoryBackend

    path = _path_of(text)
    return DirectoryBackend.create_root(path) if create else DirectoryBackend(path)


def _path_of(text: str) -> str:
    if not text or "\0" in text:
        raise UsageError(f"store {text!r}", "not the name of a store", _SUPPORTED)
    if not _SCHEME.match(text):
        return text
    parts = urlsplit(text)
    if parts.scheme != "file":
        raise UsageError(f"store {parts.scheme}://", "no backend for this kind of URL", _SUPPORTED)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(f"store {text!r}", "a file URL is file:///absolute/path, with ? and # escaped", _SUPPORTED)
    return os.fsdecode(unquote_to_bytes(parts.path))
