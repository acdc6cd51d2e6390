"""The difference of two checkpoints as a value: for machines as JSON without floats that are no numbers, for people as
lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ckptstore.diff.changes import Change
from ckptstore.diff.numeric import Comparison
from ckptstore.findings import Finding, exit_code
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.page import Role, show_role

DIFFERENT = 1
"""Exit code for two checkpoints that are not the same."""

Status = Literal["values", "kind", "added", "removed", "unreadable"]


@dataclass(frozen=True, slots=True)
class TensorSide:
    """A tensor on one side: dtype, shape, tensor digest."""

    dtype: str
    shape: tuple[int, ...]
    digest: Digest

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor whose tensor digest is not the same on both sides.

    Attributes:
        path, role: which one.
        status: ``values`` (compared element by element), ``kind`` (another dtype or shape, so no element was compared),
            ``added``, ``removed``, or ``unreadable`` (``finding`` says which bytes are missing or bad, and where).
        left, right: the tensor on each side, None where there is none.
        comparison: the figures, if it was compared.
        first: index of the first differing element, one number for each dimension.
        finding: what could not be read.
    """

    path: str
    role: Role
    status: Status
    left: TensorSide | None
    right: TensorSide | None
    comparison: Comparison | None = None
    first: tuple[int, ...] | None = None
    finding: Finding | None = None

    def __str__(self) -> str:
        name = f"{show_role(self.role)} {self.path!r}"
        if self.comparison is not None:
            return f"{name} {self.left}: {_figures(self.comparison, self.first)}"
        if self.finding is not None:
            return f"{name} {self.left}: unreadable, {self.finding}"
        if self.status == "kind":
            return f"{name}: {self.left} -> {self.right}"
        return f"{name}: {self.status}, {self.left or self.right}"


@dataclass(frozen=True, slots=True)
class RngChange:
    """A random generator of one shard that is not in the same state on both sides."""

    shard: int
    name: str
    status: Literal["different", "added", "removed"]

    def __str__(self) -> str:
        return f"shard {self.shard} {self.name}: {self.status}"


@dataclass(frozen=True, slots=True)
class HyperChange:
    """A hyper-parameter of an optimizer that has another value.

    Attributes:
        optimizer, key: which one; ``key`` with its nested place, as ``betas[0]``.
        left, right: typed values; None: nothing.
        paths: parameters that it changed for, as far as their pages were read.
        groups: groups that it changed for as a whole; their members are on pages that both sides share.
    """

    optimizer: str
    key: str
    left: Json
    right: Json
    paths: tuple[str, ...]
    groups: tuple[int, ...]

    def __str__(self) -> str:
        change = Change(f"{self.optimizer} {self.key}", self.left, self.right)
        whose = [f"group {group}" for group in self.groups]
        if self.paths:
            more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
            whose.append(f"{self.paths[0]!r}{more}")
        return f"{change} ({', '.join(whose)})"


@dataclass(frozen=True, slots=True)
class Move:
    """Entries that other shards hold: one entry, or a page of them that begins with this one."""

    role: Role
    path: str
    entries: int
    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not the same in two checkpoints.

    Attributes:
        left, right: their roots.
        same_state, same_progress: whether state roots and progresses are equal.
        fields: step, parent, run, state_root, rng_root, files, number of shards.
        progress: cursors, counters, states of schedulers, scalers and data sources.
        binding: what decides bits.
        deviations: the notes that a checkpoint is no exact continuation, on each side, if they differ.
        hyper: hyper-parameters.
        implementation: optimizer types, and group settings that only choose an implementation.
        tensors: tensors that differ.
        values: state that is no tensor (extra state, optimizer values), and members that an optimizer gained or lost.
        aliases: paths that share another one's tensor.
        rng: generators that differ.
        layout: entries that other shards hold.
        files: files of the trees, also of the preparation.
        equal_tensors: how many tensors were looked at and are equal; those of shared pages not counted.
        shared_entries: how many entries stand in pages that both sides share, which were not read.
        findings: documents that could not be read; what they hold could not be compared.
        documents_read, objects_read, bytes_read: what was read for all this, in keys and bytes.
    """

    left: Digest
    right: Digest
    same_state: bool
    same_progress: bool
    fields: tuple[Change, ...] = ()
    progress: tuple[Change, ...] = ()
    binding: tuple[Change, ...] = ()
    deviations: tuple[Change, ...] = ()
    hyper: tuple[HyperChange, ...] = ()
    implementation: tuple[Change, ...] = ()
    tensors: tuple[TensorChange, ...] = ()
    values: tuple[Change, ...] = ()
    aliases: tuple[Change, ...] = ()
    rng: tuple[RngChange, ...] = ()
    layout: tuple[Move, ...] = ()
    files: tuple[Change, ...] = ()
    equal_tensors: int = 0
    shared_entries: int = 0
    findings: tuple[Finding, ...] = ()
    documents_read: int = 0
    objects_read: int = 0
    bytes_read: int = 0

    @property
    def relation(self) -> Literal["identical", "same-state", "different"]:
        """``identical``: one root. ``same-state``: state root and progress are equal, the rest is not."""
        if self.left == self.right:
            return "identical"
        return "same-state" if self.same_state and self.same_progress else "different"

    @property
    def exit_code(self) -> int:
        """0 if identical, 1 if not; if something could not be read, the exit code of the worst finding."""
        unread = [tensor.finding for tensor in self.tensors if tensor.finding is not None]
        code = exit_code([*self.findings, *unread])
        return code or (0 if self.relation == "identical" else DIFFERENT)

    def headline(self) -> str:
        """The result in one line."""
        if self.relation == "identical":
            return f"identical: {self.left}"
        if self.relation == "same-state":
            parts = [
                ("layout", bool(self.layout) or any(change.name == "shards" for change in self.fields)),
                ("RNG", bool(self.rng)),
                ("step", any(change.name == "step" for change in self.fields)),
                ("parent", any(change.name == "parent" for change in self.fields)),
                ("run", any(change.name == "run" for change in self.fields)),
                ("binding", bool(self.binding)),
                ("files", bool(self.files) or any(change.name == "files" for change in self.fields)),
                ("implementation", bool(self.implementation)),
                ("deviations", bool(self.deviations)),
            ]
            other = ", ".join(name for name, differs in parts if differs)
            return f"same state and progress, other {other or 'document'}"
        if self.same_state:
            return "same state, other progress"
        return f"different: {len(self.tensors)} tensors differ, {self.equal_tensors} others are equal"

    def lines(self) -> Iterator[str]:
        """The whole difference for people, a line at a time; what is not printable in a name is escaped."""
        yield self.headline()
        for change in self.fields:
            yield str(change)
        named: list[tuple[str, Sequence[object]]] = [
            ("progress", self.progress),
            ("binding", self.binding),
            ("deviation", self.deviations),
            ("hyper-parameter", self.hyper),
            ("implementation", self.implementation),
            ("tensor", self.tensors),
            ("value", self.values),
            ("alias", self.aliases),
            ("generator", self.rng),
            ("moved", tuple(self._moves())),
            ("file", self.files),
            ("unreadable", self.findings),
        ]
        for name, items in named:
            for item in items:
                yield f"{name} {item}"
        shared = f"; {self.shared_entries} entries on shared pages not read" if self.shared_entries else ""
        yield f"read {self.documents_read} documents and {self.objects_read} objects, {self.bytes_read} bytes{shared}"

    def _moves(self) -> Iterator[str]:
        """Moves from the same shards to the same shards, as one."""
        moves: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Move]] = {}
        for move in self.layout:
            moves.setdefault((move.left, move.right), []).append(move)
        for (left, right), items in moves.items():
            entries = sum(move.entries for move in items)
            what = f"{show_role(items[0].role)} {items[0].path!r}"
            yield f"shard {_numbers(left)} -> {_numbers(right)}: {entries} entries, the first is {what}"

    def to_json(self) -> dict[str, Any]:
        """Everything by name, with full digests; no number in it is a NaN or an infinity."""
        body: dict[str, Any] = {"relation": self.relation, "exit_code": self.exit_code}
        for field in fields(self):
            body[field.name] = _plain(getattr(self, field.name))
        return body


def _plain(item: Any) -> Any:
    if isinstance(item, Digest):
        return str(item)
    if isinstance(item, (Change, Comparison)):
        return item.to_json()
    if isinstance(item, Finding):
        place = item.place
        return {
            "kind": item.kind.value,
            "shard": place.shard,
            "part": place.part,
            "role": _plain(place.role),
            "path": place.path,
            "chunk": place.chunk,
            "key": item.key,
            "message": item.message,
            "expected": item.expected,
            "actual": item.actual,
        }
    if isinstance(item, tuple):
        return [_plain(part) for part in item]
    if isinstance(item, (TensorSide, TensorChange, RngChange, HyperChange, Move)):
        return {field.name: _plain(getattr(item, field.name)) for field in fields(item)}
    return item


def _figures(found: Comparison, first: tuple[int, ...] | None) -> str:
    parts = [f"{found.differing} of {found.elements} elements differ, first at {list(first or ())}"]
    if found.differing > found.equal_values + found.unordered:
        parts.append(f"max abs {found.max_abs:.6g}, max rel {found.max_rel:.6g}, max {found.max_ulp} ULP")
    if found.equal_values:
        parts.append(f"{found.equal_values} in their bits alone, values equal")
    if found.unordered:
        parts.append(f"{found.unordered} unordered (NaN)")
    if found.nan_left or found.nan_right:
        parts.append(f"NaN {found.nan_left} -> {found.nan_right}")
    return "; ".join(parts)


def _numbers(indices: tuple[int, ...]) -> str:
    return ", ".join(map(str, indices)) or "none"
