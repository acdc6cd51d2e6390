"""Trees: folders of files into the store and out of it, every byte hashed both ways."""

from __future__ import annotations

import os
import stat as st
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from ckptstore.backends.beside import remove_stale
from ckptstore.backends.durable import storage_errors, write_file_durably
from ckptstore.errors import CorruptError, NotFoundError, RefusedError
from ckptstore.findings import Place
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.tensors import CHUNK
from ckptstore.format.tree import Excluded, File, Tree, check_path
from ckptstore.objects import Objects
from ckptstore.outside import require_outside


def put_tree(objects: Objects, directory: Path, exclude: Mapping[str, str] | None = None) -> Digest:
    """Store all files below ``directory``; returns the digest of the tree document.

    Every regular file is taken, whatever its name, unless ``exclude`` names its exact path with a reason; an in-root
    link is stored as the file that it leads to, with a note.

    Raises:
        RefusedError: something is neither a regular file nor such a link, an excluded path is not there, or a file
            changed while it was read.
        NotFoundError: there is no such directory.
    """
    with storage_errors(f"reading {directory}", directory):
        there = directory.is_dir()
    if not there:
        raise NotFoundError(f"directory {directory}", "not there, or not a directory")
    exclude = dict(exclude or {})
    files = []
    found = set()
    with storage_errors(f"reading {directory}", directory):
        paths = list(_walk(directory))
    for path in paths:
        values.check_text(path, f"file name {path!r:.200}")
    for path in sorted(paths, key=str.encode):
        check_path(path)
        found.add(path)
        if path not in exclude:
            files.append(_put_file(objects, directory, path))
    missing = sorted(exclude.keys() - found)
    if missing:
        raise RefusedError(f"tree of {directory}", f"excluded but not there: {', '.join(missing)}")
    excluded = tuple(Excluded(path, reason) for path, reason in sorted(exclude.items(), key=lambda i: i[0].encode()))
    return objects.put_document(Tree(tuple(files), excluded).encode())


def read_tree(objects: Objects, digest: Digest) -> Tree:
    """The tree with this digest, verified."""
    data = objects.document(digest, Place(part=f"tree {digest.short}"))
    assert data is not None
    return Tree.parse(data)


def get_tree(objects: Objects, digest: Digest, directory: Path, paths: Collection[str] | None = None) -> int:
    """Write the files of a tree below ``directory``, each verified before it gets its name; returns the bytes written.

    Args:
        objects: the store.
        digest: of the tree document.
        directory: where the files go.
        paths: only these files of the tree; the objects of the others are not read.

    Raises:
        NotFoundError: a path is not in the tree.
        RefusedError: a file is there already with other bytes, or a link in the place of a folder; or ``directory``
            lies in a store.
        CorruptError, NotFoundError: an object is bad or missing; names the file.
    """
    require_outside(directory)
    written = 0
    tree = read_tree(objects, digest)
    absent = sorted(set(paths or ()) - {file.path for file in tree.files})
    if absent:
        raise NotFoundError(f"tree {digest.short}", f"it has no file {', '.join(absent)}")
    # Also where nothing is written now: a writer can die when its file has got its name, and before the other one goes.
    for folder in {(directory / file.path).parent for file in tree.files}:
        with storage_errors(f"writing below {folder}", folder):
            if not _in_the_way(directory, folder):
                remove_stale(folder)
    for file in tree.files:
        if paths is not None and file.path not in paths:
            continue
        target = directory / file.path
        with storage_errors(f"writing {target}", target):
            for folder in _in_the_way(directory, target.parent):
                why = "is there already and is no folder, or a link to one"
                raise RefusedError(f"folder {folder}", why, "choose an empty directory")
            there = os.path.lexists(target)
        if there:
            if file_matches(directory, file):
                continue
            raise RefusedError(f"file {target}", "is there already with other bytes", "choose an empty directory")
        write_file_durably(target, file_bytes(objects, digest, file), mode=0o755 if file.executable else 0o644)
        written += file.size
    return written


def file_bytes(objects: Objects, digest: Digest, file: File) -> Iterator[bytes]:
    """The verified chunks of one file of the tree with this digest."""
    for number, (chunk, length) in enumerate(zip(file.chunks, file.lengths(), strict=True)):
        data = objects.read(chunk, length, Place(part=f"tree {digest.short}", path=file.path, chunk=number))
        assert data is not None
        yield data


def file_matches(directory: Path, file: File) -> bool:
    """Whether ``directory`` holds exactly this file: a regular file with these bytes and this mode."""
    try:
        descriptor = os.open(directory / file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    status = os.fstat(descriptor)
    if not st.S_ISREG(status.st_mode):
        os.close(descriptor)
        return False
    with os.fdopen(descriptor, "rb") as stream:
        if status.st_size != file.size:
            return False
        if bool(status.st_mode & 0o100) != file.executable:
            return False
        return all(
            Digest.of(stream.read(length)) == chunk for chunk, length in zip(file.chunks, file.lengths(), strict=True)
        )


def _walk(directory: Path) -> Iterator[str]:
    """Paths of all files and links below, in any order; not recursive, because a path has room for 2,000 folders."""
    prefixes = [""]
    while prefixes:
        prefix = prefixes.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    prefixes.append(f"{path}/")
                elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                    yield path
                else:
                    why = "neither a regular file, a folder nor a link"
                    raise RefusedError(f"file {directory / path}", why, "exclude it")


def _in_the_way(directory: Path, folder: Path) -> list[Path]:
    """What is a link or no folder between ``directory`` and ``folder``, which lies below, the deepest first."""
    between = [folder, *folder.parents][: len(folder.parts) - len(directory.parts)]
    return [path for path in between if path.is_symlink() or (path.exists() and not path.is_dir())]


def _put_file(objects: Objects, directory: Path, path: str) -> File:
    """Store one file from one open descriptor; its size and times are looked at again after reading."""
    source = directory / path
    what = f"reading file {source}"
    with storage_errors(what, source):
        link = os.readlink(source) if source.is_symlink() else None
    if link is not None:
        try:
            resolved = source.resolve()
        except (OSError, RuntimeError):  # links in a circle
            resolved = source
        if not resolved.is_relative_to(directory.resolve()) or not resolved.is_file():
            raise RefusedError(
                f"link {source}", f"leads to {link!r:.80}, not to a file below {directory}", "exclude it by name"
            )
        source = resolved
    with storage_errors(what, source):
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            before = os.fstat(descriptor)
            if not st.S_ISREG(before.st_mode):
                raise RefusedError(f"file {source}", "not a regular file", "exclude it by name")
            chunks, size = [], 0
            while data := stream.read(CHUNK):
                chunks.append(objects.put_object(data))
                size += len(data)
            after = os.fstat(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != after.st_size:
        raise RefusedError(f"file {source}", "it changed while it was read", "try again when nobody writes to it")
    return File(path, bool(before.st_mode & 0o100), size, tuple(chunks), link)


def check_files(directory: Path, tree: Tree, wanted: Mapping[str, str]) -> None:
    """Check a host's files against a tree before anything runs.

    Args:
        directory: where the files were staged.
        tree: what they must be.
        wanted: path of each required file, with its role (for the message).

    Raises:
        RefusedError: names every file that is missing or not the one of the tree, with its role.
        CorruptError: a wanted path is not in the tree at all.
    """
    files = {file.path: file for file in tree.files}
    wrong = []
    for path, role in sorted(wanted.items()):
        if path not in files:
            raise CorruptError(f"file {path!r:.120} ({role})", "the tree does not hold it")
        if not (directory / path).exists():
            wrong.append(f"{path} ({role}) is missing")
        elif not file_matches(directory, files[path]):
            wrong.append(f"{path} ({role}) is not the file of the prepared tree")
    if wrong:
        raise RefusedError(
            f"staged files in {directory}", "; ".join(wrong), "stage exactly the prepared files, then start again"
        )
