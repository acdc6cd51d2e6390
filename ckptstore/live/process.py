"""The process: which objects of some kinds a program holds, and by what name.

Looked at is what the program itself can reach: the variables of its functions that run, the globals of its modules,
and whatever hangs on them. What only a library holds belongs to that library.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

MOST_OBJECTS = 500_000
"""Objects that are looked at; a program that holds more holds data, and its other objects come early."""

MOST_ITEMS = 10_000
"""Items of one container that are looked at."""

_LONGEST = 120

# What holds no objects of a program, or belongs to a loader that is found itself.
_OPAQUE = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, Tensor, np.ndarray, np.generic, ModuleType),
    *(CodeType, FrameType, Path, torch.dtype, torch.device, torch.Size, torch.UntypedStorage, torch.TypedStorage),
    _BaseDataLoaderIter,
)

_SERIES = (list, tuple, set, frozenset, deque)


@dataclass(slots=True)
class Reached:
    """Objects that were reached, and the name of each that was asked for, by identity."""

    names: dict[int, str] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    whole: bool = True

    def of(self, *kinds: type) -> Iterator[tuple[str, Any]]:
        """Name and object of all of these kinds, in the order in which they were reached."""
        return ((self.names[key], item) for key, item in self.items.items() if issubclass(type(item), kinds))


def reach(roots: Mapping[str, object], wanted: Callable[[object], bool], apart: Collection[object] = ()) -> Reached:
    """Every object for which ``wanted`` holds that can be reached from ``roots`` (by name), nearest first.

    Args:
        roots: where to begin.
        wanted: whether an object is asked for. Its own contents are looked at all the same.
        apart: objects that are not looked into.
    """
    reached = Reached()
    reached.seen = {id(item) for item in apart}
    queue: deque[tuple[str, object]] = deque(roots.items())
    while queue:
        name, item = queue.popleft()
        if issubclass(type(item), _OPAQUE) or id(item) in reached.seen:
            continue
        if len(reached.seen) >= MOST_OBJECTS:
            reached.whole = False
            break
        reached.seen.add(id(item))
        if wanted(item):
            reached.names[id(item)] = name
            reached.items[id(item)] = item
        with suppress(RuntimeError):  # another thread may add to what is looked at
            name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
            queue.extend((f"{name}{step}", child) for step, child in islice(_children(item), MOST_ITEMS))
    return reached


def program() -> dict[str, object]:
    """What a program holds by name: variables of its functions that run in any thread, then globals of its modules."""
    found: dict[str, object] = {}
    for frame in sys._current_frames().values():
        current: FrameType | None = frame
        while current is not None:
            if not _is_library(current.f_code.co_filename):
                where = current.f_code.co_name
                for name, item in _variables(current).items():
                    found.setdefault(name if where == "<module>" else f"{where}: {name}", item)
            current = current.f_back
    for module in list(sys.modules.values()):
        if type(module) is ModuleType and _is_own(module.__name__):
            for name, item in list(vars(module).items()):
                found.setdefault(f"{module.__name__}.{name}", item)
    return found


def elsewhere(kinds: tuple[type, ...], seen: Collection[int]) -> list[Any]:
    """Objects of these kinds that are alive in the process and not among the ``seen`` (identities)."""

    every, waiting = set(kinds), list(kinds)
    inherited: type
    while waiting:
        for inherited in waiting.pop().__subclasses__():
            if inherited not in every:
                every.add(inherited)
                waiting.append(inherited)

    def alive() -> list[Any]:
        return [item for item in gc.get_objects() if type(item) in every and id(item) not in seen]

    if not alive():
        return []
    gc.collect()  # schedulers and their optimizers refer to one another, so those of yesterday may still be there
    return alive()


def defaults() -> list[object]:
    """The generators that belong to the process, and those that are no generators of anybody's training."""
    own: list[object] = [torch.default_generator, np.random.mtrand._rand, getattr(random, "_inst", None)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        own += torch.cuda.default_generators
    own.append(getattr(sys.modules.get("secrets"), "_sysrand", None))
    return own


def _children(item: object) -> Iterator[tuple[str, object]]:
    """What an object refers to, with the step that leads there. Runs no code of the program."""
    kind = type(item)
    if issubclass(kind, dict):
        mapping: dict[object, object] = item  # type: ignore[assignment]
        for key, value in list(dict.items(mapping)):
            yield f"[{key!r:.40}]" if type(key) in (str, int) else "[…]", value
            yield " key", key
    elif issubclass(kind, _SERIES):
        base = next(base for base in _SERIES if issubclass(kind, base))
        for index, value in enumerate(list(islice(base.__iter__(item), MOST_ITEMS))):  # type: ignore[arg-type]
            yield f"[{index}]", value
    if kind in (dict, *_SERIES):
        return
    if kind is FunctionType:
        yield from _captured(item)
    elif kind is BuiltinMethodType:
        yield "", getattr(item, "__self__", None)
    elif issubclass(kind, type):
        if _is_own(str(type.__getattribute__(item, "__module__"))):
            for name, value in list(type.__getattribute__(item, "__dict__").items()):
                yield f".{name}", value
    else:
        try:
            attributes = object.__getattribute__(item, "__dict__")
        except AttributeError:
            attributes = {}
        for name, value in list(attributes.items()):
            yield f".{name}", value
        for value in gc.get_referents(item):
            if value is not attributes and value is not kind:
                yield "", value


def _captured(function: Any) -> Iterator[tuple[str, object]]:
    """Variables and defaults that a function keeps."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" {name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield "", function.__defaults__
    yield "", function.__kwdefaults__
    yield "", function.__dict__


def _variables(frame: FrameType) -> dict[str, object]:
    """Local variables of a frame. Python keeps the snapshot that it makes for us with the frame, and would so keep
    alive what the function lets go of; so it is emptied, unless somebody else uses it."""
    snapshot = frame.f_locals
    found = dict(snapshot)
    flags = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
    is_snapshot = sys.version_info < (3, 13) and frame.f_code.co_flags & flags == flags
    if is_snapshot and sys.gettrace() is None and sys.getrefcount(snapshot) == 3:
        snapshot.clear()
    return found


def _is_own(name: str) -> bool:
    """Whether a module is one of the program's."""
    module = sys.modules.get(name)
    # not asked as an attribute: some modules load others when they are
    path = ModuleType.__getattribute__(module, "__dict__").get("__file__") if isinstance(module, ModuleType) else None
    return name == "__main__" if not isinstance(path, str) else not _is_library(path)


_LIBRARIES = tuple(
    {str(Path(path).resolve()) + "/" for path in sysconfig.get_paths().values() if path.endswith("packages")}
    | {str(Path(sysconfig.get_paths()[name]).resolve()) + "/" for name in ("stdlib", "platstdlib")}
    | {str(Path(torch.__file__).resolve().parents[1]) + "/", str(Path(__file__).resolve().parents[1]) + "/"}
)


@cache
def _is_library(path: str) -> bool:
    """Whether a source file is none of the program's: installed, of Python itself, or ours."""
    return path.startswith("<frozen") or str(Path(path).resolve()).startswith(_LIBRARIES)
