"""Changes between two plain values: what is at which nested place on either side, by exact type and bits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptstore.errors import CkptStoreError
from ckptstore.format import values
from ckptstore.format.canonical import Json, encode
from ckptstore.format.progress import Progress
from ckptstore.format.tree import Tree

_MAPPINGS = ("dict", "counter", "ordered-dict")
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is not the same on both sides.

    Attributes:
        name: where, from the outside in: ``scheduler sched.last_epoch``.
        left, right: what stands there, as JSON without floats (typed values as in the format); None: nothing does.
    """

    name: str
    left: Json
    right: Json

    def to_json(self) -> dict[str, Json]:
        """All attributes by name."""
        return {"name": self.name, "left": self.left, "right": self.right}

    def __str__(self) -> str:
        if self.left is None:
            return f"{self.name}: new, {show(self.right)}"
        if self.right is None:
            return f"{self.name}: gone, it was {show(self.left)}"
        return f"{self.name}: {show(self.left)} -> {show(self.right)}"


def show(node: Json) -> str:
    """``node`` for people: a typed value as Python writes it, anything else as it is, cut to one short line."""
    if type(node) is str:
        text = node if node.isprintable() else repr(node)
    elif type(node) is dict and node.get("t") == "tensor":
        text = f"tensor {node.get('dtype')} {node.get('shape')}"
    elif type(node) is dict and "t" in node:
        try:
            text = repr(values.from_json(node))
        except CkptStoreError:
            text = repr(node)
    else:
        text = repr(node)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def value_changes(name: str, left: Json, right: Json) -> Iterator[Change]:
    """Every innermost place at which two typed values differ in type or bits.

    NaNs with equal bits are equal; 1, 1.0 and True, a tuple and a list, are not.
    """
    if left == right and encode(left) == encode(right):
        return
    if type(left) is dict and type(right) is dict and left.get("t") == right.get("t"):
        tag, inside, other = left.get("t"), left.get("v"), right.get("v")
        if type(inside) is list and type(other) is list:
            if tag in _MAPPINGS:
                yield from _mapping_changes(name, inside, other)
                return
            if tag in ("tuple", "list"):
                for index in range(max(len(inside), len(other))):
                    item = inside[index] if index < len(inside) else None
                    yield from _item_changes(f"{name}[{index}]", item, other[index] if index < len(other) else None)
                return
    yield Change(name, left, right)


def _item_changes(name: str, left: Json, right: Json) -> Iterator[Change]:
    if left is None or right is None:
        yield Change(name, left, right)
    else:
        yield from value_changes(name, left, right)


def _mapping_changes(name: str, left: list[Json], right: list[Json]) -> Iterator[Change]:
    sides: list[dict[bytes, tuple[Json, Json]]] = []
    for pairs in (left, right):
        sides.append({encode(pair[0]): (pair[0], pair[1]) for pair in pairs if type(pair) is list})
    before, after = sides
    for key in sorted(before.keys() | after.keys()):
        node = (before.get(key) or after[key])[0]
        inner = f"{name}{_key(node)}"
        yield from _item_changes(
            inner, before[key][1] if key in before else None, after[key][1] if key in after else None
        )
    common = [[key for key in side if key in before and key in after] for side in sides]
    if common[0] != common[1]:
        yield Change(f"{name} (order of keys)", [before[k][0] for k in common[0]], [before[k][0] for k in common[1]])


def _key(node: Json) -> str:
    text = node.get("v") if type(node) is dict and node.get("t") == "str" else None
    if type(text) is str and text.isidentifier() and text.isprintable():
        return f".{text}"
    return f"[{show(node)}]"


def progress_changes(left: Progress, right: Progress) -> tuple[Change, ...]:
    """What differs between two progresses: micro index, cursors, counters, and states of schedulers and the like."""
    found: list[Change] = []
    if left.micro_index != right.micro_index:
        found.append(Change("micro_index", left.micro_index, right.micro_index))
    cursors = [
        {
            f"cursor {name!r}.{field}": getattr(cursor, field)
            for name, cursor in progress.cursors
            for field in ("unit", "position", "per_step")
        }
        for progress in (left, right)
    ]
    found += plain_changes(*cursors)
    counters: list[dict[str, Json]] = []
    for progress in (left, right):
        flat: dict[str, Json] = {}
        for counter in progress.counters:
            pairs = ", ".join(f"{value} ({times}x)" for value, times in counter.values)
            flat[f"counter {counter.name!r}"] = pairs
            flat[f"counter {counter.name!r}.tracks_step"] = counter.tracks_step
        counters.append(flat)
    found += plain_changes(*counters)
    states = [{(state.kind, state.name): state.value for state in progress.states} for progress in (left, right)]
    for kind, name in sorted(states[0].keys() | states[1].keys()):
        where = f"{kind} {name!r}"
        found += _item_changes(where, states[0].get((kind, name)), states[1].get((kind, name)))
    return tuple(found)


def plain_changes(left: Mapping[str, Json], right: Mapping[str, Json]) -> Iterator[Change]:
    """Names that stand for different things, or on one side only; sorted by name."""
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield Change(name, left.get(name), right.get(name))


def tree_changes(name: str, left: Tree | None, right: Tree | None) -> tuple[Change, ...]:
    """Files that two trees do not both hold with equal bytes and mode, and exclusions that differ."""
    sides: list[dict[str, Json]] = []
    for tree in (left, right):
        flat: dict[str, Json] = {}
        for file in tree.files if tree else ():
            mode = "executable" if file.executable else "plain"
            link = f", link to {file.link!r}" if file.link is not None else ""
            content = ", ".join(str(chunk) for chunk in file.chunks) or "empty"
            flat[f"{name} {file.path!r}"] = f"{file.size} bytes, {mode}{link}, {content}"
        for item in tree.excluded if tree else ():
            flat[f"{name} {item.path!r} (excluded)"] = item.reason
        sides.append(flat)
    return tuple(plain_changes(*sides))
