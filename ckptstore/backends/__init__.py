"""Backends: keys to bytes, without meaning (see :mod:`ckptstore.backends.protocol`)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from ckptstore.backends.protocol import PruneBackend
from ckptstore.errors import UsageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SUPPORTED = "supported are a directory's path, file:///path, s3://bucket/prefix and memory:name"


def open_backend(url: str | os.PathLike[str], *, create: bool = False) -> PruneBackend:
    """The backend that ``url`` names: a directory's path, ``file:///path``, ``s3://bucket/prefix`` or ``memory:name``.

    A directory, or a name in this process's memory, that is missing is made if ``create`` is true; a bucket is not, and
    is not asked for anything yet.

    Raises:
        UsageError: ``url`` is of another kind, or what it needs is not installed.
        NotFoundError: there is none, and ``create`` is false.
        BackendError: the directory cannot be made.
    """
    text = os.fspath(url)
    if text.startswith("memory:"):
        from ckptstore.backends.memory import named

        _require_text(text)
        return named(text.removeprefix("memory:"), create=create)

    if text.startswith("s3://"):
        return _bucket(text)

    from ckptstore.backends.directory import DirectoryBackend

    path = _path_of(text)
    return DirectoryBackend.create_root(path) if create else DirectoryBackend(path)


def normalized(url: str | os.PathLike[str]) -> str:
    """The URL by which the backend that ``url`` names will call itself. Nothing is opened, and nothing asked.

    Raises:
        UsageError: ``url`` names none, or holds a credential, which is not repeated.
        RefusedError: a storage class that cannot be read back.
    """
    text = os.fspath(url)
    if text.startswith("memory:"):
        return _require_text(text)
    if text.startswith("s3://"):
        from ckptstore.backends.s3.address import S3Address

        return S3Address.parse(text).url
    return Path(os.path.abspath(_path_of(text))).as_uri()


def _bucket(url: str) -> PruneBackend:
    from ckptstore.backends.s3.address import S3Address

    address = S3Address.parse(url)
    try:
        from ckptstore.backends.s3.backend import S3Backend
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed, which stores in buckets need"
        raise UsageError("store s3://…", why, "pip install 'ckptstore[s3]'") from None
    return S3Backend(address)


def _path_of(text: str) -> str:
    if not text or "\0" in text:
        raise UsageError(f"store {text!r}", "not the name of a store", _SUPPORTED)
    if not _SCHEME.match(text):
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        raise UsageError("store", "not a URL", _SUPPORTED) from None
    if "@" in parts.netloc:
        raise UsageError(f"store {parts.scheme}://…", "a user or a password stands in the URL", _SUPPORTED)
    if parts.scheme != "file":
        raise UsageError(f"store {parts.scheme}://", "no backend for this kind of URL", _SUPPORTED)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(f"store {text!r}", "a file URL is file:///absolute/path, with ? and # escaped", _SUPPORTED)
    try:
        return os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))
    except UnicodeEncodeError:
        raise UsageError(f"store {text!r:.200}", "holds what is no text", _SUPPORTED) from None


def _require_text(text: str) -> str:
    """``text``, which receipts will repeat. UsageError if it has no UTF-8 encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"store {text!r:.200}", "holds what is no text", _SUPPORTED) from None
    return text
