"""Plots as inline SVG: text in, text out. Colours come from the page's style sheet, so it can be read in the dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 14, 34
_NODE = 68  # half of a node's width


@dataclass(frozen=True, slots=True)
class Series:
    """A line through (x, y); ``style`` is a class of the page's style sheet."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of seconds in a row of a timeline."""

    row: str
    began: float
    ended: float
    style: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A checkpoint in a lineage: a column for its step, a row for its branch."""

    name: str
    title: str
    column: int
    row: int
    style: str = "node"


def lines(
    title: str, series: Sequence[Series], x_name: str, y_name: str, marks: Mapping[float, str] | None = None
) -> str:
    """Lines over common axes, the lower edge at the smallest value; ``marks`` are named x positions."""
    points = [point for one in series for point in one.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_axis, y_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT), _Axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(x_axis, y_axis, x_name, y_name)]
    for x, name in (marks or {}).items():
        at = x_axis.at(x)
        parts.append(f'<line class="mark" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="note" x="{at + 4:.1f}" y="{_TOP + 10}">{escape(name)}</text>')
    for one in series:
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline class="{one.style}" points="{path}"><title>{escape(one.name)}</title></polyline>')
    return _figure(title, HEIGHT, parts, [(one.name, one.style) for one in series])


def columns(title: str, values: Sequence[tuple[float, float]], x_name: str, y_name: str) -> str:
    """One column for each (x, y), from 0 up."""
    x_axis = _Axis(min(x for x, _ in values) - 0.5, max(x for x, _ in values) + 0.5, _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(0.0, max(y for _, y in values), HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(x_axis, y_axis, x_name, y_name)]
    width = 0.8 * (x_axis.at(1.0) - x_axis.at(0.0))
    for x, y in values:
        top, bottom = y_axis.at(y), y_axis.at(0.0)
        parts.append(
            f'<rect class="column" x="{x_axis.at(x) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{bottom - top:.1f}"><title>{x:g}: {y:,.0f}</title></rect>'
        )
    return _figure(title, HEIGHT, parts, [])


def timeline(title: str, bars: Sequence[Bar], marks: Mapping[float, str]) -> str:
    """Rows of spans over seconds, in the order in which rows first appear."""
    rows = list(dict.fromkeys(bar.row for bar in bars))
    height = _TOP + 24 * len(rows) + _BOTTOM
    left = 190
    axis = _Axis(0.0, max(bar.ended for bar in bars), left, WIDTH - _RIGHT)
    parts = []
    for tick in axis.ticks():
        at = axis.at(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{height - _BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{height - _BOTTOM + 16}">{tick:g} s</text>')
    for number, row in enumerate(rows):
        parts.append(f'<text class="row" x="{left - 8}" y="{_TOP + 24 * number + 16}">{escape(row)}</text>')
    for bar in bars:
        y = _TOP + 24 * rows.index(bar.row) + 4
        begin, end = axis.at(bar.began), axis.at(bar.ended)
        text = escape(bar.label or bar.row)
        parts.append(
            f'<rect class="{bar.style}" x="{begin:.1f}" y="{y}" width="{max(1.5, end - begin):.1f}" height="16">'
            f"<title>{text}: {bar.ended - bar.began:.2f} s</title></rect>"
        )
    for second, name in marks.items():
        at = axis.at(second)
        parts.append(f'<line class="mark" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{height - _BOTTOM}"/>')
        parts.append(f'<text class="note" x="{at + 4:.1f}" y="{_TOP + 8}">{escape(name)}</text>')
    return _figure(title, height, parts, [])


def lineage(title: str, nodes: Sequence[Node], edges: Sequence[tuple[int, int, str]]) -> str:
    """Checkpoints from left to right; an edge goes from node to node, with a note."""
    rows = 1 + max(node.row for node in nodes)
    height = 40 + 84 * rows
    across = (WIDTH - 2 * _NODE - 4) / max(1, max(node.column for node in nodes))
    places = [(_NODE + 2 + node.column * across, 40 + node.row * 84) for node in nodes]
    parts = []
    for start, end, note in edges:
        (x1, y1), (x2, y2) = places[start], places[end]
        parts.append(f'<line class="edge" x1="{x1 + _NODE:.1f}" y1="{y1}" x2="{x2 - _NODE:.1f}" y2="{y2}"/>')
        # Above a level edge; left of one that goes to another branch, below the node that it comes from.
        level = y1 == y2
        x, y = (x1 + x2) / 2 - (0 if level else 10), (y1 + y2) / 2 + (-8 if level else 12)
        style = "note middle" if level else "row"
        parts.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(note)}</text>')
    for node, (x, y) in zip(nodes, places, strict=True):
        parts.append(
            f'<rect class="{node.style}" x="{x - _NODE:.1f}" y="{y - 24}" width="{2 * _NODE}" height="48" rx="6"/>'
        )
        parts.append(f'<text class="name middle" x="{x:.1f}" y="{y - 4}">{escape(node.name)}</text>')
        parts.append(f'<text class="digest middle" x="{x:.1f}" y="{y + 14}">{escape(node.title)}</text>')
    return _figure(title, height, parts, [])


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values ``low`` to ``high`` on places ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers in range, about six of them."""
        span = (self.high - self.low) or 1.0
        unit = 10.0 ** floor(log10(span / 5))
        step = next(unit * factor for factor in (1, 2, 5, 10, 20) if span / (unit * factor) <= 7)
        first = -floor(-self.low / step)
        count = floor(self.high / step) - first + 1
        return [round((first + n) * step, 10) for n in range(count)]


def _frame(x_axis: _Axis, y_axis: _Axis, x_name: str, y_name: str) -> list[str]:
    parts = []
    for tick in y_axis.ticks():
        at = y_axis.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="row" x="{_LEFT - 6}" y="{at + 4:.1f}">{tick:,.10g}</text>')
    for tick in x_axis.ticks():
        parts.append(f'<text class="tick" x="{x_axis.at(tick):.1f}" y="{HEIGHT - _BOTTOM + 16}">{tick:g}</text>')
    parts.append(f'<text class="tick" x="{WIDTH / 2}" y="{HEIGHT - 4}">{escape(x_name)}</text>')
    parts.append(f'<text class="tick" transform="translate(12 {HEIGHT / 2}) rotate(-90)">{escape(y_name)}</text>')
    return parts


def _figure(title: str, height: float, parts: Sequence[str], legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span class="key {style}">{escape(name)}</span>' for name, style in legend)
    return (
        f"<figure><figcaption>{escape(title)}{keys}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )
