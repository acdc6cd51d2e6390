"""Deterministic evidence archives: pack, verify, unpack.

An archive is an uncompressed ustar file (evidence/ustar.py). ``MANIFEST.json`` comes first, then every member that it
lists, in its order, and a fixed end. So the manifest determines every byte but the contents, which it fixes by two
digests: an archive either is the archive of its manifest, byte for byte, or is refused. No tar reader's idea of
links, owners, duplicates or a damaged header plays a part.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from ckptstore.errors import CorruptError, MalformedError, RefusedError
from ckptstore.evidence import examine, files, ustar
from ckptstore.evidence.examine import Fault
from ckptstore.evidence.manifest import NAME, Manifest, Member, Reference, path_problem
from ckptstore.format.digest import Buffer, Digest
from ckptstore.outside import require_outside

Source = Buffer | Path

_TOLD = 30
"""Faults that a message lists: whoever makes an archive decides how many there are."""


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    """An archive every byte of which was checked.

    ``size`` is in bytes; ``sha256`` (64 hex digits) and ``blake3`` are those of the whole file and are what to write
    down: whoever holds one of them can tell this archive from any other.
    """

    path: Path
    size: int
    sha256: str
    blake3: Digest
    members: tuple[Member, ...]
    references: tuple[Reference, ...]


def pack(
    members: Mapping[str, Source], destination: str | os.PathLike[str], references: Iterable[Reference] = ()
) -> ArchiveInfo:
    """Write the archive of ``members`` to ``destination``, which must not exist, and read all of it back.

    The bytes follow from names, contents and references alone: not from the order of the mapping, times, owners,
    modes, the current directory or the locale. Each file is read once, in pieces; nothing is left behind after an
    error.

    Args:
        members: contents by path in the archive; a ``Path`` must be a regular file (no link) of at most 8 GiB - 1.
        destination: the new file.
        references: what the evidence speaks of and is too large to hold; kept sorted by key.

    Raises:
        RefusedError: a name that cannot be a member or a reference, a source that is no regular file or that changes
            its size while it is read, or a destination that exists or lies in a store.
        NotFoundError: a source, or the destination's folder, is not there.
        BackendError, NoSpaceError: the file system failed.
    """
    target = Path(destination)
    require_outside(target)
    if os.path.lexists(target):
        raise RefusedError(f"evidence archive {target}", "exists already", "pack to another name, or remove it first")
    for path in members:
        if problem := path_problem(path):
            raise RefusedError(f"member {path!a:.300}", problem, "give it another name in the archive")
    kept = tuple(sorted(references, key=lambda reference: reference.key.encode()))
    sizes = {path: _size(path, members[path]) for path in sorted(members, key=str.encode)}
    try:
        draft = Manifest(tuple(Member(path, size, "0" * 64, _ZERO) for path, size in sizes.items()), kept)
        # Digests have one length, so the manifest's place is known before its content is.
        start = ustar.span(len(draft.encode()))
    except MalformedError as error:
        raise RefusedError(error.what, error.why, "nothing was written") from None

    partial = target.with_name(f".{secrets.token_hex(8)}.tmp")
    with files.translated(f"evidence archive {target}"):
        out = files.create(partial)
        try:
            with out:
                out.seek(start)
                written = tuple(_append(out, member, members[member.path]) for member in draft.members)
                end = start + sum(ustar.span(member.size) for member in written)
                out.write(bytes(ustar.ending(end)))
                out.seek(0)
                encoded = Manifest(written, kept).encode()
                out.write(ustar.header(NAME, len(encoded)) + encoded + bytes(ustar.padding(len(encoded))))
                files.sync(out)
            with files.open_regular(partial) as readback:
                info = _verified(readback, target)
            files.publish(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return info


def verify(path: str | os.PathLike[str]) -> ArchiveInfo:
    """Read a whole archive and require that it is, byte for byte, the archive of its own manifest. Needs no store.

    Raises:
        NotFoundError: no such file.
        MalformedError: it does not begin with a manifest of this format.
        CorruptError: anything else is not as the manifest says; the message lists the faults with their members, the
            first 30 of them (:func:`faults` gives all).
    """
    with _opened(path) as file:
        return _verified(file, Path(path))


def faults(path: str | os.PathLike[str]) -> tuple[Fault, ...]:
    """All faults of an archive, in the order of its bytes. Raises as :func:`verify` only for a bad manifest."""
    with _opened(path) as file:
        return examine.examine(file, Path(path)).faults


def unpack(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> ArchiveInfo:
    """Verify the whole archive, then write its members below ``directory`` as regular files of mode 0644.

    ``directory`` is created if it is absent (its parent must exist). Nothing is written before all of the archive and
    all targets were checked; every byte is hashed again as it is written. No link is followed at or below
    ``directory``.

    Raises:
        RefusedError: a target exists, a folder on the way to one is a link or no folder, or ``directory`` lies in a
            store.
        NotFoundError, MalformedError, CorruptError: as :func:`verify`.
        BackendError, NoSpaceError: the file system failed; what had been written stays, and each file in it is whole.
    """
    require_outside(directory)
    with _opened(path) as file:
        info = _verified(file, Path(path))
        with files.Below(Path(directory)) as below:
            for member in info.members:
                below.require_free(member.path)
            at = ustar.span(len(Manifest(info.members, info.references).encode()))
            for member in info.members:
                with files.translated(f"{member.path!a} of evidence archive {path}"):
                    file.seek(at + ustar.BLOCK)
                    _write(file, member, below)
                at += ustar.span(member.size)
    return info


_ZERO = Digest(bytes(32))


def _size(path: str, source: Source) -> int:
    if isinstance(source, Path):
        with files.translated(f"member {path!a} from {source}"):
            size = files.regular_size(source)
    else:
        size = memoryview(source).nbytes
    if size > ustar.MAX_SIZE:
        why = f"{size} bytes are more than a ustar member holds"
        raise RefusedError(f"member {path!a}", why, "name it as a reference instead")
    return size


def _append(out: BinaryIO, member: Member, source: Source) -> Member:
    """Write one member and return it with the digests of what was written."""
    out.write(ustar.header(member.path, member.size))
    if isinstance(source, Path):
        with files.translated(f"member {member.path!a} from {source}"):
            file = files.open_regular(source)
        with file:
            size, sha, digest = files.copy(file, member.size, out.write)
            grown = bool(file.read(1))
        if size != member.size or grown:
            raise RefusedError(
                f"member {member.path!a}", f"{source} changed its size while it was packed", "pack again"
            )
    else:
        view = memoryview(source).cast("B")
        sha, digest = sha256(view).hexdigest(), Digest.of(view)
        out.write(view)
    out.write(bytes(ustar.padding(member.size)))
    return Member(member.path, member.size, sha, digest)


def _write(file: BinaryIO, member: Member, below: files.Below) -> None:
    """Write the member whose content begins where ``file`` is: all of it, or no file."""
    try:
        with below.create(member.path) as out:
            if files.copy(file, member.size, out.write) != (member.size, member.sha256, member.blake3):
                raise CorruptError(f"member {member.path!a}", "it changed while it was unpacked", "unpack again")
    except (OSError, CorruptError):
        below.remove(member.path)
        raise


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    with files.translated(f"evidence archive {path}"):
        return files.open_regular(Path(path), follow=True)


def _verified(file: BinaryIO, path: Path) -> ArchiveInfo:
    found = examine.examine(file, path)
    if found.faults:
        hint = "fetch the archive again, and compare its digest with the one that was written down for it"
        told = [*map(str, found.faults[:_TOLD])]
        if len(found.faults) > _TOLD:
            told.append(f"and {len(found.faults) - _TOLD:,} more")
        raise CorruptError(f"evidence archive {path}", "; ".join(told), hint)
    return ArchiveInfo(path, found.size, found.sha256, found.blake3, found.manifest.members, found.manifest.references)
