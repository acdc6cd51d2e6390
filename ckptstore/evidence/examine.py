"""Reading a whole archive against its own manifest, and saying everything that is not as it should be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from ckptstore.errors import CkptStoreError, CorruptError, MalformedError
from ckptstore.evidence import files, ustar
from ckptstore.evidence.manifest import LIMIT, NAME, Manifest, Member
from ckptstore.format.digest import Digest


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as the manifest says: the member (or part of the archive) and what differs."""

    member: str
    what: str

    def __str__(self) -> str:
        return f"{self.member!a}: {self.what}"


@dataclass(frozen=True, slots=True)
class Examination:
    """What an archive says, and every way in which it is not that.

    ``size`` (bytes) and the digests are those of the whole file; they mean something only if there is no fault.
    """

    manifest: Manifest
    faults: tuple[Fault, ...]
    size: int
    sha256: str
    blake3: Digest


def examine(file: BinaryIO, path: Path) -> Examination:
    """Read an open archive once, from its start to its end as the manifest has it. ``path`` is for messages.

    Raises:
        MalformedError: it does not begin with a manifest of this format.
        CorruptError: it ends within the manifest, or the manifest is not the one that was sealed.
        BackendError: the file system failed.
    """
    with files.translated(f"evidence archive {path}"):
        sha, digest = sha256(), blake3()
        size = os.fstat(file.fileno()).st_size
        scan = _Scan(file, (sha.update, digest.update))
        manifest, faults = _read_manifest(scan, path)
        faults += _compare(scan, manifest, size)
        # What follows the end belongs to no archive: it is a fault already, and is not read.
        return Examination(manifest, tuple(faults), size, sha.hexdigest(), Digest(digest.digest()))


class _Scan:
    """Reads an archive once from its start; whatever is read passes through ``sinks``."""

    def __init__(self, file: BinaryIO, sinks: tuple[Callable[[bytes], object], ...]) -> None:
        self._file = file
        self._sinks = sinks

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end of the file. For small sizes: all of it is in memory."""
        data = self._file.read(size)
        for sink in self._sinks:
            sink(data)
        return data

    def hash(self, size: int) -> tuple[int, str, Digest]:
        """How many of the next ``size`` bytes there are, and their digests."""
        return files.copy(self._file, size, *self._sinks)


def _read_manifest(scan: _Scan, path: Path) -> tuple[Manifest, list[Fault]]:
    what = f"evidence archive {path}"
    block = scan.take(ustar.BLOCK)
    size = ustar.size_of(block)
    if len(block) < ustar.BLOCK:
        raise MalformedError(what, f"ends after {len(block)} bytes, within the first header", _WHAT_IT_SHOULD_BE)
    if size is None:
        raise MalformedError(what, "its first header states no size", _WHAT_IT_SHOULD_BE)
    if size > LIMIT:
        raise MalformedError(what, f"its first member has {size} bytes, more than a manifest may", _WHAT_IT_SHOULD_BE)
    faults = []
    if block != (expected := ustar.header(NAME, size)):
        faults.append(Fault(NAME, f"its header differs: {ustar.differences(expected, block)}"))
    data = scan.take(size)
    if len(data) < size:
        raise CorruptError(what, f"cut off within {NAME}: {len(data)} of {size} bytes are there", _WHAT_IT_SHOULD_BE)
    try:
        manifest = Manifest.parse(data)
    except CkptStoreError as error:
        why = "; ".join([*map(str, faults), f"{NAME}: {error}"])
        raise type(error)(what, why, _WHAT_IT_SHOULD_BE) from None
    return manifest, faults + _check_padding(scan, NAME, size)


def _compare(scan: _Scan, manifest: Manifest, size: int) -> Iterator[Fault]:
    """Compare all that follows the manifest, and go on after a fault: all places follow from the manifest."""
    at = ustar.span(len(manifest.encode()))
    for member in manifest.members:
        if at + ustar.span(member.size) > size:
            there = max(0, min(size - at, ustar.span(member.size)))
            yield Fault(member.path, f"cut off: {there} of the {ustar.span(member.size)} bytes that it takes are there")
        else:
            yield from _compare_member(scan, member)
        at += ustar.span(member.size)
    rest = ustar.ending(at)
    if size != at + rest:
        more = size - at - rest
        how = f"{more} bytes follow the end" if more > 0 else f"cut off: {-more} bytes are missing"
        yield Fault("end of the archive", f"{how} ({size} bytes, expected {at + rest})")
    if size >= at and any(scan.take(rest)):
        yield Fault("end of the archive", "its last blocks are not zero")


def _compare_member(scan: _Scan, member: Member) -> Iterator[Fault]:
    header, expected = scan.take(ustar.BLOCK), ustar.header(member.path, member.size)
    if header != expected:
        yield Fault(member.path, f"its header differs: {ustar.differences(expected, header)}")
    _, sha, digest = scan.hash(member.size)
    if digest != member.blake3:
        yield Fault(member.path, f"its content has {digest}, expected {member.blake3}")
    if sha != member.sha256:
        yield Fault(member.path, f"its content has sha256 {sha}, expected {member.sha256}")
    yield from _check_padding(scan, member.path, member.size)


def _check_padding(scan: _Scan, name: str, size: int) -> list[Fault]:
    return [Fault(name, "the padding after it is not zero")] if any(scan.take(ustar.padding(size))) else []


_WHAT_IT_SHOULD_BE = f"an evidence archive is an uncompressed tar that begins with {NAME}"
