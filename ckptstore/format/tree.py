"""Trees: regular files by content, and preparations: plan, inputs and sources as trees (F-90 to F-98)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ckptstore.errors import MalformedError
from ckptstore.format.canonical import MAX_INT, Json
from ckptstore.format.digest import Digest
from ckptstore.format.fields import Fields, as_list, close_document, open_document, parse_digest
from ckptstore.format.tensors import chunk_count, chunk_lengths

PATH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class File:
    """A regular file: relative path, executable or not, size in bytes, chunks, and the target if it was an in-root
    link."""

    path: str
    executable: bool
    size: int
    chunks: tuple[Digest, ...]
    link: str | None = None

    def lengths(self) -> list[int]:
        """Lengths in bytes of its chunks."""
        return list(chunk_lengths(self.size))


@dataclass(frozen=True, slots=True)
class Excluded:
    """A file that was there and is left out by name, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tree:
    """Files sorted by the bytes of their paths, and what was excluded. Every file of the source is one or the other."""

    files: tuple[File, ...]
    excluded: tuple[Excluded, ...] = ()

    def encode(self) -> bytes:
        """Document bytes."""
        return close_document(
            "tree",
            {
                "files": [
                    {
                        "path": file.path,
                        "mode": "executable" if file.executable else "plain",
                        "size": file.size,
                        "chunks": [str(digest) for digest in file.chunks],
                        "link": file.link,
                    }
                    for file in self.files
                ],
                "excluded": [{"path": item.path, "reason": item.reason} for item in self.excluded],
            },
        )

    @staticmethod
    def parse(data: bytes) -> Tree:
        """The tree of document bytes; paths relative, clean, sorted, and no file where another needs a folder."""
        fields = open_document(data, "tree")
        tree = Tree(fields.items("files", _parse_file), fields.items("excluded", _parse_excluded))
        fields.end()
        files, excluded = [file.path for file in tree.files], [item.path for item in tree.excluded]
        for paths in (files, excluded):
            encoded = [path.encode() for path in paths]
            if any(left >= right for left, right in pairwise(encoded)):
                raise MalformedError("tree", "paths are not sorted, or one repeats")
        names = {*files, *excluded}
        if len(names) < len(files) + len(excluded):
            raise MalformedError("tree", "a path is a file of the tree and excluded from it")
        below = path_below_another(names)
        if below is not None:
            raise MalformedError("tree", f"{below[1]!r:.120} lies under a file")
        return tree


@dataclass(frozen=True, slots=True)
class Preparation:
    """What was fixed before a run: plan, inputs and numerical sources, each a tree. Its digest is the prepared
    identity."""

    plan: Digest
    inputs: Digest
    sources: Digest

    def encode(self) -> bytes:
        """Document bytes."""
        body: dict[str, Json] = {"plan": str(self.plan), "inputs": str(self.inputs), "sources": str(self.sources)}
        return close_document("preparation", body)

    @staticmethod
    def parse(data: bytes) -> Preparation:
        """The preparation of document bytes."""
        fields = open_document(data, "preparation")
        preparation = Preparation(fields.digest("plan"), fields.digest("inputs"), fields.digest("sources"))
        fields.end()
        return preparation


def path_below_another(paths: Iterable[str]) -> tuple[str, str] | None:
    """The first of ``paths`` that is a folder of another, with that other; None if there is none.

    The paths hold no NUL. One comparison for each of them: a path may have thousands of parts.
    """
    # What lies below a path follows it at once when "/" sorts before everything else.
    ordered = sorted(path.encode().replace(b"/", b"\0") for path in paths)
    for above, below in pairwise(ordered):
        if below.startswith(above + b"\0"):
            return above.replace(b"\0", b"/").decode(), below.replace(b"\0", b"/").decode()
    return None


def check_path(path: str) -> str:
    """``path`` if it is a relative path of clean parts, else MalformedError."""
    parts = path.split("/")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise MalformedError(f"path {path!r:.120}", "not UTF-8") from None
    if not path or size > PATH_BYTES or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise MalformedError(f"path {path!r:.120}", "not a relative path of non-empty parts without . and ..")
    return path


def _parse_file(node: Json) -> File:
    fields = Fields(node, "file")
    path = check_path(fields.text("path"))
    mode = fields.choice("mode", ("plain", "executable"))
    size = fields.count("size")
    chunks = tuple(parse_digest(item, path) for item in as_list(fields.take("chunks"), path))
    link = fields.take("link")
    fields.end()
    if size > MAX_INT or len(chunks) != chunk_count(size):
        raise MalformedError(f"file {path!r:.120}", f"{len(chunks)} chunks for {size} bytes")
    if link is not None and (type(link) is not str or not link):
        raise MalformedError(f"file {path!r:.120}", "its link target is not a text")
    return File(path, mode == "executable", size, chunks, link)


def _parse_excluded(node: Json) -> Excluded:
    fields = Fields(node, "excluded")
    item = Excluded(check_path(fields.text("path")), fields.text("reason"))
    fields.end()
    return item
