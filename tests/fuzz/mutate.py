"""Changes to inputs: to their bytes, and to the JSON in them, from a random generator of their own.

What is tried is what parsers get wrong: cut, flip, splice, duplicate, swap, nest, grow numbers, other types, Unicode
that looks alike or cannot be encoded, digests that do not fit or are made to fit again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

from ckptstore.errors import CkptStoreError
from tests.fuzz.target import Target, Tree

NUMBERS = (0, 1, -1, 2, 63, 64, 65, 255, 256, 1024, 1025, 2**31, 2**53 - 1, 2**53, -(2**53), 2**63, 2**64, 10**40)
TEXTS = (
    "",
    "a",
    "0",
    "..",
    "/",
    "a/../b",
    "\0",
    "\x1b[2J",
    "\u202etxt",  # right to left from here
    "\u00e9",
    "e\u0301",  # the same to the eye
    "\U0001f600",
    "\uff11\uff12",  # digits, of another width
    "\u0663",  # a digit, in Arabic
    "\u017f",  # in lower case an s
    "b3:" + "0" * 64,
    "0" * 64,
    "f" * 32,
    "7ff8000000000001",
    "f32",
    "none",
    "x" * 300,
)
SCRAPS = (
    b"",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\\u0000",
    b" ",
    b"\n",
    b",",
    b":",
    b'"',
    b"\\",
    b"[",
    b"{",
    b"]",
    b"}",
    b"[]",
    b"{}",
    b"null",
    b"true",
    b"-0",
    b"1e9",
    b"1e999",
    b"0.0",
    b"NaN",
    b"Infinity",
    b"9" * 18,
    b"9" * 5000,
    b"[" * 70,
    b'{"a":' * 70,
    b"[" * 3000,
)
_NUMBER = re.compile(rb"-?[0-9]+")
_MOST_NODES = 4000


def mutated(target: Target, data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """``data`` changed in one to four ways; ``others`` are inputs of the same target to take pieces from."""
    if target.also is not None and random.random() < 0.3:
        data = target.also(random, data)
    if target.load is not None and target.dump is not None and random.random() < 0.6:
        try:
            tree = target.load(data)
            for _ in range(random.choice((1, 1, 2, 4))):
                tree = _change_tree(tree, lambda: _loaded(target, others, random), random)
            if target.seal is not None and random.random() < 0.8:
                target.seal(tree)
            return target.dump(data, tree)[: target.limit + 1]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, CkptStoreError):
            pass  # no JSON is left in it: its bytes are changed
    for _ in range(random.choice((1, 1, 2, 4))):
        data = random.choice(_BYTES)(data, others, target.words, random)
    return data[: target.limit + 1]


def _loaded(target: Target, others: Sequence[bytes], random: Random) -> Tree:
    assert target.load is not None
    try:
        return target.load(random.choice(others))
    except (ValueError, RecursionError):  # a seed need not be one of those that are accepted
        return None


# Bytes


def _span(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice((1, 1, 2, 4, 16, 64, 1000)))


def _flip(data: bytes, _o: Sequence[bytes], _w: Sequence[bytes], random: Random) -> bytes:
    if not data:
        return b"\x80"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _cut(data: bytes, _o: Sequence[bytes], _w: Sequence[bytes], random: Random) -> bytes:
    start, stop = _span(data, random)
    return data[:start] + (data[stop:] if random.random() < 0.7 else b"")


def _insert(data: bytes, _o: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    start, stop = _span(data, random)
    piece = random.choice(words) if words and random.random() < 0.5 else random.choice(SCRAPS)
    return data[:start] + piece + data[stop if random.random() < 0.5 else start :]


def _splice(data: bytes, others: Sequence[bytes], _w: Sequence[bytes], random: Random) -> bytes:
    other = random.choice(others)
    start, stop = _span(other, random)
    at = random.randrange(len(data) + 1)
    return data[:at] + (other[start:stop] + data[at:] if random.random() < 0.7 else other[start:])


def _repeat(data: bytes, _o: Sequence[bytes], _w: Sequence[bytes], random: Random) -> bytes:
    start, stop = _span(data, random)
    return data[:start] + data[start:stop] * random.choice((2, 2, 3, 20)) + data[stop:]


def _swap(data: bytes, _o: Sequence[bytes], _w: Sequence[bytes], random: Random) -> bytes:
    (a, b), (c, d) = sorted((_span(data, random), _span(data, random)))
    return data if b > c else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _grow_number(data: bytes, _o: Sequence[bytes], _w: Sequence[bytes], random: Random) -> bytes:
    found = list(_NUMBER.finditer(data[:65536]))
    if not found:
        return data
    match = random.choice(found)
    number = random.choice((*NUMBERS, int(match[0][:20]) + random.choice((-1, 1, 8))))
    return data[: match.start()] + b"%d" % number + data[match.end() :]


_BYTES: tuple[Callable[[bytes, Sequence[bytes], Sequence[bytes], Random], bytes], ...] = (
    _flip,
    _cut,
    _insert,
    _splice,
    _repeat,
    _swap,
    _grow_number,
)


# JSON


def _places(tree: Tree) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < _MOST_NODES:
        node = waiting.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            waiting.append(node[key])
    return found


def _change_tree(tree: Tree, other: Callable[[], Tree], random: Random) -> Tree:
    places = _places(tree)
    if not places:
        return _other_value(tree, other, random)
    node, key = random.choice(places)
    way = random.randrange(8)
    if way == 0:
        del node[key]
    elif way == 1 and isinstance(node, list):
        for _ in range(random.choice((1, 1, 3, 40))):
            node.insert(key, deepcopy(node[key]))
    elif way == 1:
        node[random.choice(TEXTS)] = node.pop(key)
    elif way == 2:
        there, where = random.choice(places)
        if not _holds(node[key], there) and not _holds(there[where], node):
            node[key], there[where] = there[where], node[key]
    elif way == 3:
        there, where = random.choice(places)
        node[key] = deepcopy(there[where])
    elif way == 4:
        value = node[key]
        for _ in range(random.choice((1, 2, 20, 60))):
            value = [value] if random.random() < 0.5 else {random.choice(("v", "t", "a")): value}
        node[key] = value
    else:
        node[key] = _other_value(node[key], other, random)
    return tree


def _other_value(value: Tree, other: Callable[[], Tree], random: Random) -> Tree:
    if isinstance(value, str) and random.random() < 0.6:
        at = random.randrange(len(value) + 1)
        cut = at + random.choice((0, 0, 1, 5))
        return value[:at] + random.choice((*TEXTS, chr(random.randrange(0xD800)))) + value[cut:]
    if isinstance(value, int) and random.random() < 0.6:
        return int(value) + random.choice((-1, 1, 7, 2**32))
    way = random.randrange(6)
    if way == 0:
        return random.choice(NUMBERS)
    if way == 1:
        return random.choice(TEXTS)
    if way == 2:
        return random.choice((None, True, False, [], {}, [[]], 1.5))
    if way == 3:
        inside = _places(other())
        if inside:
            node, key = random.choice(inside)
            return deepcopy(node[key])
    return random.choice(_typed(random))


def _typed(random: Random) -> tuple[Tree, ...]:
    return (
        {"t": "none"},
        {"t": "int", "v": str(random.choice(NUMBERS))},
        {"t": "f64", "v": f"{random.getrandbits(64):016x}"},
        {"t": "bool", "v": True},
        {"t": "str", "v": random.choice(TEXTS)},
        {"t": "bytes", "v": "00ff"},
        {"t": "list", "v": []},
        {"t": "tuple", "v": [{"t": "none"}]},
        {"t": "dict", "v": [[{"t": "int", "v": "1"}, {"t": "none"}]]},
        {"t": "counter", "v": [[{"t": "str", "v": "a"}, {"t": "int", "v": "1"}]]},
        {"t": "ordered-dict", "v": [[{"t": "none"}, {"t": "none"}]]},
        {"t": "tensor", "dtype": random.choice(("u8", "f32", "c128", "bool")), "shape": [random.randrange(3)], "v": ""},
        {"t": "entry", "v": ["0"]},
    )


def _holds(tree: Tree, wanted: Any) -> bool:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if node is wanted:
            return True
        if isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return False
