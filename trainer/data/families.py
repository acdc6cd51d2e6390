"""Four generated families of JSON questions, each with an exact checker that works from the question alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from ckptstore.errors import MalformedError
from trainer.data.draws import Draws

COLOURS = ("red", "blue", "teal", "lime", "pink", "gold", "gray", "cyan", "plum", "rust", "navy", "mint")
ANIMALS = (
    "ant", "ape", "bat", "bee", "cat", "cow", "cub", "dog", "eel", "elk", "emu", "fox",
    "gnu", "hen", "hog", "kid", "owl", "pig", "pup", "ram", "rat", "ray", "sow", "yak",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How many items a question has and the range of its numbers, both ends included."""

    items: int
    low: int
    high: int


EASY = Difficulty(items=3, low=10, high=99)
HARD = Difficulty(items=4, low=10, high=499)


@dataclass(frozen=True, slots=True)
class Task:
    """One question and its right answer, both compact JSON."""

    family: str
    question: str
    answer: str


def _lookup(draws: Draws, difficulty: Difficulty) -> dict[str, object]:
    names = draws.sample(COLOURS, difficulty.items)
    data = {name: draws.between(difficulty.low, difficulty.high) for name in names}
    return {"task": "lookup", "data": data, "key": draws.choose(names)}


def _largest(draws: Draws, difficulty: Difficulty) -> dict[str, object]:
    numbers = [draws.between(difficulty.low, difficulty.high) for _ in range(difficulty.items)]
    return {"task": "largest", "items": numbers}


def _last(draws: Draws, difficulty: Difficulty) -> dict[str, object]:
    return {"task": "last", "items": draws.sample(ANIMALS, difficulty.items)}


def _count_on(draws: Draws, difficulty: Difficulty) -> dict[str, object]:
    items = {name: draws.choose(("on", "off")) for name in draws.sample(ANIMALS, difficulty.items)}
    return {"task": "count_on", "items": items}


_MAKERS: MappingProxyType[str, Callable[[Draws, Difficulty], dict[str, object]]] = MappingProxyType(
    {"lookup": _lookup, "largest": _largest, "last": _last, "count_on": _count_on}
)
FAMILIES = tuple(_MAKERS)


def make(family: str, draws: Draws, difficulty: Difficulty) -> Task:
    """The next question of ``family`` from the stream ``draws``, with its answer ``{"value": ...}``."""
    question = _compact(_MAKERS[family](draws, difficulty))
    return Task(family, question, _compact({"value": solve(question)}))


def solve(question: str) -> int | str:
    """The right value for a question text.

    Raises:
        MalformedError: the text is not a question of one of the four families.
    """
    try:
        value = _solve(json.loads(question))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise MalformedError(f"question {question!r:.80}", f"of no known family ({type(error).__name__})") from None
    if type(value) is int or type(value) is str:
        return value
    raise MalformedError(f"question {question!r:.80}", "its answer is neither a number nor a word")


def _solve(body: dict[str, object]) -> object:
    match body:
        case {"task": "lookup", "data": dict(data), "key": key}:
            return data[key]
        case {"task": "largest", "items": list(items)}:
            return max(items)
        case {"task": "last", "items": list(items)}:
            return items[-1]
        case {"task": "count_on", "items": dict(items)}:
            return sum(state == "on" for state in items.values())
        case _:
            raise ValueError(body)


def check(question: str, text: str) -> bool:
    """True if ``text`` is one JSON object ``{"value": v}`` and nothing else, with ``v`` right in value and type.

    ``2`` is not ``2.0``, ``true`` or ``"2"``; a key twice, another key or any text around the object is wrong.

    Raises:
        MalformedError: ``question`` is of no known family.
    """
    expected = solve(question)
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return False
    if type(pairs) is not _Pairs or len(pairs) != 1:
        return False
    name, value = pairs[0]
    return name == "value" and type(value) is type(expected) and value == expected


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object in order, so that a key that appears twice is seen twice."""


def _compact(body: dict[str, object]) -> str:
    return json.dumps(body, separators=(",", ":"))
