"""What a power loss may leave of a folder: recorded system calls, and the states of a disk that they allow.

The strictest reading of the rules: bytes of a file are safe after an fsync of it, a name after an fsync of its folder,
and until then each may have reached the device or not, in any order. A rename is the new name and then the loss of the
old one. Real file systems keep more order than this; none may keep less.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from threading import RLock
from typing import Any

import pytest

RECORDED = ("open", "mkdir", "write", "ftruncate", "fsync", "link", "rename", "replace", "unlink", "rmdir", "close")
"""Calls of :mod:`os` that change what is below a folder, or make a change safe."""

TEMPORARY = ("tmp",)
"""Folders whose names nobody relies on."""

ALL_SUBSETS = 5
"""Up to so many effects that are not safe yet, each subset of them is tried; of more, none, all, each alone, all but
each, and as many at random as there are effects."""


@dataclass(frozen=True, slots=True)
class Name:
    """``name`` in the folder ``where`` comes to mean ``node``, or nothing."""

    where: int
    name: str
    node: int | None


@dataclass(frozen=True, slots=True)
class Bytes:
    """``data`` comes to lie at ``offset`` of the file ``where``."""

    where: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Length:
    """The file ``where`` comes to have this length."""

    where: int
    length: int


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything that happened to ``where`` before is safe."""

    where: int


Effect = Name | Bytes | Length
Event = Effect | Synced
Tree = dict[str, bytes | None]
"""What a folder holds: bytes of each file by its path, None for a folder."""


@dataclass
class Disk:
    """Folders and files by number; folder 0 is the one that is looked at."""

    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk({number: dict(names) for number, names in self.folders.items()}, dict(self.files))

    def apply(self, effect: Effect, *, torn: bool = False) -> None:
        """``torn``: bytes are there in length only."""
        match effect:
            case Name(where, name, None):
                self.folders.setdefault(where, {}).pop(name, None)
            case Name(where, name, node):
                assert node is not None
                self.folders.setdefault(where, {})[name] = node
            case Bytes(where, offset, data):
                old = self.files.get(where, b"")
                new = bytes(len(data)) if torn else data
                self.files[where] = old[:offset].ljust(offset, b"\0") + new + old[offset + len(data) :]
            case Length(where, length):
                self.files[where] = self.files.get(where, b"")[:length].ljust(length, b"\0")

    def tree(self) -> Tree:
        found: Tree = {}
        rest = [("", 0)]
        while rest:
            prefix, folder = rest.pop()
            for name, node in self.folders.get(folder, {}).items():
                path = f"{prefix}{name}"
                if node in self.files:
                    found[path] = self.files[node]
                else:
                    found[path] = None
                    rest.append((f"{path}/", node))
        return found


class Recording:
    """Records what the calls of this process do below ``folder``, threads included.

    What bypasses :mod:`os` (a buffered file that is written) is seen when the file is synced, named or left. Files
    whose names begin with one of ``apart`` are not recorded: something else writes them.
    """

    def __init__(self, folder: Path, apart: tuple[str, ...] = ()) -> None:
        self.folder = folder.resolve()
        self.before = Disk()
        self.events: list[Event] = []
        self._apart = apart
        self._nodes: dict[tuple[int, int], int] = {}
        self._seen: dict[int, bytes] = {}  # bytes of each file as recorded so far
        self._paths: dict[int, str] = {}  # some path of each file
        self._lock = RLock()
        self._count = 0
        self._scan(self.folder)

    def _scan(self, folder: Path) -> int:
        number = self._new(os.stat(folder))
        self.before.folders[number] = names = {}
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                names[entry.name] = self._scan(Path(entry.path))
            elif not entry.name.startswith(self._apart or ("\0",)):
                names[entry.name] = node = self._new(entry.stat())
                self.before.files[node] = self._seen[node] = Path(entry.path).read_bytes()
                self._paths[node] = entry.path
        return number

    def _new(self, found: os.stat_result) -> int:
        number = self._nodes[found.st_dev, found.st_ino] = self._count
        self._count += 1
        return number

    def record(self, work: Callable[[], object]) -> object:
        """Do ``work``; returns what it came to."""
        with pytest.MonkeyPatch.context() as patch:
            for name in RECORDED:
                patch.setattr(os, name, partial(self._around, getattr(self, f"_{name}"), getattr(os, name)))
            came_to = work()
        for node in list(self._paths):
            self._look(node, self._paths[node])
        return came_to

    def _around(self, record: Callable[..., Any], real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock:
            return record(arguments, options, lambda: real(*arguments, **options))

    def _place(self, path: Any, folder: int | None) -> tuple[int | None, str, str]:
        """(Number of the folder, None if it is none of ours; name; path) of what a call names."""
        text = os.fsdecode(os.fspath(path))
        above = f"/proc/self/fd/{folder}" if folder is not None else ""
        where = os.path.join(above, os.path.dirname(text)) if above or os.path.dirname(text) else "."
        name = os.path.basename(text)
        if name.startswith(self._apart or ("\0",)):
            return None, name, text
        try:
            found = os.stat(where)
        except OSError:
            return None, name, text
        return self._nodes.get((found.st_dev, found.st_ino)), name, os.path.join(os.path.realpath(where), name)

    def _node(self, path: str) -> int | None:
        try:
            found = os.lstat(path)
        except OSError:
            return None
        node = self._nodes.get((found.st_dev, found.st_ino))
        return self._met(path) if node is None else node

    def _look(self, node: int, path: str) -> None:
        """Note bytes that came into a file past the calls that are recorded."""
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except OSError:
            return
        if node in self._seen and data != self._seen[node]:
            self._add(Length(node, 0))
            self._add(Bytes(node, 0, data))

    def _add(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Bytes(where, offset, data):
                old = self._seen.get(where, b"")
                self._seen[where] = old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :]
            case Length(where, length):
                self._seen[where] = self._seen.get(where, b"")[:length].ljust(length, b"\0")
            case _:
                pass

    def _open(self, arguments: tuple[Any, ...], options: dict[str, Any], call: Callable[[], Any]) -> Any:
        flags = arguments[1] if len(arguments) > 1 else options.get("flags", 0)
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return call()
        where, name, path = self._place(arguments[0], options.get("dir_fd"))
        there = os.path.lexists(path)
        fd = call()
        if where is not None and not there:
            node = self._new(os.fstat(fd))
            self._seen[node] = b""
            self._paths[node] = path
            self.before.files[node] = b""
            self._add(Name(where, name, node))
        elif where is not None and flags & os.O_TRUNC and (node_there := self._node(path)) is not None:
            self._add(Length(node_there, 0))
        return fd

    def _mkdir(self, arguments: tuple[Any, ...], options: dict[str, Any], call: Callable[[], Any]) -> Any:
        where, name, path = self._place(arguments[0], options.get("dir_fd"))
        call()
        if where is not None:
            node = self._new(os.lstat(path))
            self.before.folders[node] = {}
            self._add(Name(where, name, node))

    def _write(self, arguments: tuple[Any, ...], _options: dict[str, Any], call: Callable[[], Any]) -> Any:
        node = self._of(arguments[0])
        if node is None or node not in self._seen:
            return call()
        at = os.lseek(arguments[0], 0, os.SEEK_CUR)
        taken = call()
        self._add(Bytes(node, at, bytes(memoryview(arguments[1])[:taken])))
        return taken

    def _ftruncate(self, arguments: tuple[Any, ...], _options: dict[str, Any], call: Callable[[], Any]) -> Any:
        node = self._of(arguments[0])
        call()
        if node is not None:
            self._add(Length(node, arguments[1]))

    def _fsync(self, arguments: tuple[Any, ...], _options: dict[str, Any], call: Callable[[], Any]) -> Any:
        node = self._of(arguments[0])
        if node in self._seen:
            self._look(node, f"/proc/self/fd/{arguments[0]}")
        call()
        if node is not None:
            self._add(Synced(node))

    def _close(self, arguments: tuple[Any, ...], _options: dict[str, Any], call: Callable[[], Any]) -> Any:
        node = self._of(arguments[0])
        if node in self._seen:
            self._look(node, f"/proc/self/fd/{arguments[0]}")
        return call()

    def _link(self, arguments: tuple[Any, ...], options: dict[str, Any], call: Callable[[], Any]) -> Any:
        _, _, source = self._place(arguments[0], options.get("src_dir_fd"))
        where, name, _ = self._place(arguments[1], options.get("dst_dir_fd"))
        node = self._node(source)
        if node is not None:
            self._look(node, source)
        call()
        if where is not None and node is not None:
            self._add(Name(where, name, node))

    def _rename(self, arguments: tuple[Any, ...], options: dict[str, Any], call: Callable[[], Any]) -> Any:
        old_where, old_name, source = self._place(arguments[0], options.get("src_dir_fd"))
        where, name, path = self._place(arguments[1], options.get("dst_dir_fd"))
        node = self._node(source)
        if node is not None:
            self._look(node, source)
        call()
        if where is not None and node is not None:
            self._add(Name(where, name, node))
            self._paths[node] = path
        if old_where is not None:
            self._add(Name(old_where, old_name, None))

    _replace = _rename

    def _unlink(self, arguments: tuple[Any, ...], options: dict[str, Any], call: Callable[[], Any]) -> Any:
        where, name, _ = self._place(arguments[0], options.get("dir_fd"))
        call()
        if where is not None:
            self._add(Name(where, name, None))

    _rmdir = _unlink

    def _of(self, fd: int) -> int | None:
        found = os.fstat(fd)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            return None
        node = self._nodes.get((found.st_dev, found.st_ino))
        if node is None and stat.S_ISREG(found.st_mode):
            node = self._met(os.readlink(f"/proc/self/fd/{fd}"))
        return node

    def _met(self, path: str) -> int | None:
        """A file that a library made past the calls that are recorded has come up; None if it is none of ours."""
        where, name, _ = self._place(path, None)
        if where is None or not os.path.isfile(path):
            return None
        node = self._new(os.lstat(path))
        self._seen[node] = b""
        self._paths[node] = path
        self.before.files[node] = b""
        self._add(Name(where, name, node))
        self._look(node, path)
        return node


def states(recording: Recording, chance: random.Random) -> Iterator[tuple[int, Tree]]:
    """(Number of events that happened, what is left) for a power loss at each moment, and each choice of effects that
    were not safe yet, within :data:`ALL_SUBSETS`."""
    durable = recording.before.copy()
    pending: list[Effect] = []
    temporary = {
        node for _, names in recording.before.folders.items() for name, node in names.items() if name in TEMPORARY
    }
    for number in range(len(recording.events) + 1):
        if number:
            event = recording.events[number - 1]
            if isinstance(event, Synced):
                for effect in [effect for effect in pending if effect.where == event.where]:
                    durable.apply(effect)
                pending = [effect for effect in pending if effect.where != event.where]
            else:
                pending.append(event)
                if isinstance(event, Name) and event.name in TEMPORARY and event.node is not None:
                    temporary.add(event.node)
        for kept, torn in _choices(pending, temporary, chance):
            disk = durable.copy()
            for index, effect in enumerate(pending):
                if index in kept:
                    disk.apply(effect, torn=index in torn)
            yield number, disk.tree()


def _choices(
    pending: list[Effect], temporary: set[int], chance: random.Random
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Which of the effects are kept, and which of those in length only."""
    named = {effect.node for effect in pending if isinstance(effect, Name) and effect.where not in temporary}
    loose = [
        index
        for index, effect in enumerate(pending)
        if (isinstance(effect, Name) and effect.where in temporary)
        or (not isinstance(effect, Name) and effect.where not in named)
    ]
    rest = [index for index in range(len(pending)) if index not in set(loose)]
    some = [index for index in loose if chance.random() < 0.5]
    for number, chosen in enumerate(_subsets(rest, chance)):
        for besides in ([], loose, some)[: 3 if loose else 1]:
            kept = frozenset([*chosen, *besides])
            torn = frozenset(index for index in kept if isinstance(pending[index], Bytes))
            yield kept, frozenset()
            if torn and number % 2:
                yield kept, torn


def _subsets(items: list[int], chance: random.Random) -> Iterator[tuple[int, ...]]:
    if len(items) <= ALL_SUBSETS:
        for size in range(len(items) + 1):
            yield from combinations(items, size)
        return
    yield ()
    yield tuple(items)
    for item in items:
        yield (item,)
        yield tuple(other for other in items if other != item)
        yield tuple(other for other in items if chance.random() < 0.5)
