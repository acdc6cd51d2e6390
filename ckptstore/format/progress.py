"""Progress: where a run is, and the rule that its counters agree (F-70 to F-76)."""

from __future__ import annotations

import struct
from collections import Counter as Histogram
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ckptstore.errors import MalformedError
from ckptstore.format import values
from ckptstore.format.canonical import MAX_INT, Json
from ckptstore.format.fields import Fields, as_list
from ckptstore.format.page import OPTIM, Entry, TensorEntry, ValueEntry

_STEP_FORMATS = {
    "u8": "<B",
    "i8": "<b",
    "u16": "<H",
    "i16": "<h",
    "u32": "<I",
    "i32": "<i",
    "u64": "<Q",
    "i64": "<q",
    "f16": "<e",
    "f32": "<f",
    "f64": "<d",
}

STATE_KINDS = ("scheduler", "scaler", "data", "value")


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a stream, counted in ``unit`` (samples, tokens, documents …).

    ``per_step``, if given, is how far one step moves it: then position == step x per_step is part of the format's
    check.
    """

    unit: str
    position: int
    per_step: int | None = None


@dataclass(frozen=True, slots=True)
class NamedState:
    """State of a scheduler, scaler, data source, or a plain value, as typed JSON."""

    kind: str
    name: str
    value: Json


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter found in the state: its values with how often each occurs, and whether it tracks the step.

    A counter that tracks the step has one value, and that is the step.
    """

    name: str
    tracks_step: bool
    values: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Cursors, states and counters of a checkpoint. ``micro_index`` is 0: commits happen at update boundaries."""

    cursors: tuple[tuple[str, Cursor], ...] = ()
    states: tuple[NamedState, ...] = ()
    counters: tuple[Counter, ...] = ()
    micro_index: int = field(default=0)

    def to_json(self) -> Json:
        """The JSON of this progress."""
        return {
            "micro_index": self.micro_index,
            "cursors": [
                {"name": name, "unit": cursor.unit, "position": cursor.position, "per_step": cursor.per_step}
                for name, cursor in self.cursors
            ],
            "states": [{"kind": s.kind, "name": s.name, "value": s.value} for s in self.states],
            "counters": [
                {
                    "name": counter.name,
                    "tracks_step": counter.tracks_step,
                    "values": [[value, times] for value, times in counter.values],
                }
                for counter in self.counters
            ],
        }

    @staticmethod
    def from_json(node: Json) -> Progress:
        """The progress of its JSON."""
        fields = Fields(node, "progress")
        progress = Progress(
            micro_index=fields.count("micro_index"),
            cursors=fields.items("cursors", _parse_cursor),
            states=fields.items("states", _parse_state),
            counters=fields.items("counters", _parse_counter),
        )
        fields.end()
        for keys, what in (
            ([name for name, _ in progress.cursors], "cursors"),
            ([(s.kind, s.name) for s in progress.states], "states"),
            ([counter.name for counter in progress.counters], "counters"),
        ):
            if any(left >= right for left, right in pairwise(keys)):  # type: ignore[operator]
                raise MalformedError("progress", f"{what} are not sorted, or one repeats")
        return progress


def count_updates(entries: Iterable[Entry], states: Iterable[NamedState]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The counters found in a state: (value, how often) by name, from every optimizer's ``step`` and scheduler's
    ``last_epoch``.

    What is no whole number from 0 to 2^53 - 1 counts as -1, so that it can agree with nothing.
    """
    found: dict[str, Histogram[int]] = {}
    for entry in entries:
        if entry.role[0] == OPTIM and entry.role[2:] == ("step",):
            found.setdefault(f"optimizer.{entry.role[1]}", Histogram())[_whole(entry)] += 1
    for state in states:
        if state.kind == "scheduler":
            value = values.from_json(state.value)
            epoch = value.get("last_epoch") if type(value) is dict else None
            if type(epoch) is int:
                found[f"scheduler.{state.name}"] = Histogram([epoch if 0 <= epoch <= MAX_INT else -1])
    return {name: tuple(sorted(histogram.items())) for name, histogram in sorted(found.items())}


def problems(step: int, progress: Progress, found: Mapping[str, tuple[tuple[int, int], ...]]) -> list[str]:
    """Every way in which cursors and counters of a checkpoint disagree; empty if they agree.

    Args:
        step: the checkpoint's step.
        progress: what the checkpoint says.
        found: what :func:`count_updates` finds in the state of all its shards.
    """
    wrong = []
    if progress.micro_index:
        wrong.append(f"micro_index is {progress.micro_index}; commits happen at update boundaries")
    stated = {counter.name: counter for counter in progress.counters}
    for name in sorted(stated.keys() | found.keys()):
        counter = stated.get(name)
        if counter is None or counter.values != found.get(name, ()):
            said = _show(counter.values) if counter else "nothing"
            wrong.append(f"{name} is {_show(found.get(name, ()))} in the state, progress says {said}")
        if counter is not None and counter.tracks_step and any(value != step for value, _ in counter.values):
            wrong.append(f"{name} is {_show(counter.values)} but tracks the step, which is {step}")
    for name, cursor in progress.cursors:
        if cursor.per_step is not None and cursor.position != step * cursor.per_step:
            expected = step * cursor.per_step
            wrong.append(f"cursor {name} is at {cursor.position} {cursor.unit}, step {step} means {expected}")
    return wrong


def part_problems(step: int, progress: Progress, found: Mapping[str, tuple[tuple[int, int], ...]]) -> list[str]:
    """As :func:`problems`, for what is found in some of the shards: each count must be within what progress says."""
    stated = {counter.name: counter for counter in progress.counters}
    wrong = []
    for name, histogram in found.items():
        said = stated[name].values if name in stated else ()
        limits = dict(said)
        if any(times > limits.get(value, 0) for value, times in histogram):
            wrong.append(f"{name} is {_show(histogram)} in the shard, progress says {_show(said)}")
    return wrong + problems(step, progress, {counter.name: counter.values for counter in progress.counters})


def _show(histogram: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{value} ({times}x)" for value, times in histogram) or "nothing"


def _whole(entry: Entry) -> int:
    value: object = None
    if isinstance(entry, ValueEntry):
        value = values.from_json(entry.value)
    elif isinstance(entry, TensorEntry) and entry.inline is not None:
        layout = _STEP_FORMATS.get(entry.dtype)
        if layout is not None and len(entry.inline) == struct.calcsize(layout):
            (value,) = struct.unpack(layout, entry.inline)
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_INT else -1


def _parse_cursor(node: Json) -> tuple[str, Cursor]:
    fields = Fields(node, "cursor")
    name = fields.text("name")
    cursor = Cursor(fields.text("unit"), fields.count("position"), fields.optional_count("per_step"))
    fields.end()
    return name, cursor


def _parse_state(node: Json) -> NamedState:
    fields = Fields(node, "state")
    state = NamedState(fields.choice("kind", STATE_KINDS), fields.text("name"), fields.take("value"))
    fields.end()
    values.plain_from_json(state.value, f"{state.kind} {state.name!r:.80}")
    return state


def _parse_counter(node: Json) -> Counter:
    fields = Fields(node, "counter")
    name = fields.text("name")
    tracks = fields.take("tracks_step")
    pairs = []
    for pair in as_list(fields.take("values"), "counter"):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) is not int:
            raise MalformedError(f"counter {name!r:.80}", "its values are not pairs of integers")
        pairs.append((pair[0], pair[1]))
    fields.end()
    sorted_once = all(left[0] < right[0] for left, right in pairwise(pairs))
    if type(tracks) is not bool or not pairs or not sorted_once or any(v < -1 or times < 1 for v, times in pairs):
        raise MalformedError(f"counter {name!r:.80}", "not a sorted histogram with a flag")
    return Counter(name, tracks, tuple(pairs))
