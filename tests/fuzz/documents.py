"""Targets of the format: documents and records of every kind, canonical JSON itself, typed values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptStoreError
from ckptstore.format import canonical, progress, state, values
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.packs import PackLayout
from ckptstore.format.page import TensorEntry, make_tensor_entry
from ckptstore.format.records import Receipt
from ckptstore.format.shard import Shard
from ckptstore.readbacks.notes import Note, note_of
from ckptstore.readbacks.readbacks import readback_of
from ckptstore_cli import describe, output
from tests.format.kinds import LIMITS, MANIFESTS, PARSERS, encode, valid_documents
from tests.fuzz.target import Target, Tree, dump_json, load_json

Bomb = Callable[[int], bytes]

_EXECUTIONS = dict.fromkeys(("page", "shard", "checkpoint", "tree", "receipt", "shard-receipt"), 450)
_HASH = 2**61 - 1  # what Python's hash of an integer is taken modulo


def targets() -> Iterator[Target]:
    """A target for each kind of document and record, and what lies below them all."""
    for kind in PARSERS:
        yield Target(
            kind,
            partial(_document, kind),
            partial(_seeds, kind),
            LIMITS[kind],
            load=load_json,
            dump=dump_json,
            seal=_SEALS.get(kind),
            bombs=_bombs(kind),
            bomb_bytes=LIMITS[kind],
            executions=_EXECUTIONS.get(kind, 250),
        )
    every = [data for _, _, data in valid_documents()]
    deep: Mapping[str, Bomb] = {
        "brackets": lambda size: b"[" * size,
        "braces": lambda size: b'{"a":' * (size // 5),
        "closed": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
        "empty lists": lambda size: b"[" + b"[]," * (size // 3 - 1) + b"[]]",
        "zeros": lambda size: b"[" + b"0," * (size // 2 - 2) + b"0]",
        "digits": lambda size: b"9" * size,
        "one text": lambda size: b'"' + b"a" * (size - 2) + b'"',
        "escapes": lambda size: b'"' + b"\\u0001" * (size // 6) + b'"',
        "lone surrogates": lambda size: b'"' + b"\\udc80" * (size // 6) + b'"',
        "names": lambda size: b"{" + b",".join(b'"%07d":0' % number for number in range(size // 13)) + b"}",
        "one name": lambda size: b"{" + b'"a":0,' * (size // 6) + b'"a":0}',
        "fraction": lambda size: b"0." + b"1" * size,
        "exponent": lambda size: b"1e" + b"9" * size,
    }
    yield Target(
        "canonical-json",
        _canonical,
        lambda: every,
        4 * 2**20,
        load=load_json,
        dump=dump_json,
        bombs=deep,
        bomb_bytes=4 * 2**20,
        executions=450,
    )
    yield Target(
        "typed-value",
        _typed,
        _typed_seeds,
        4 * 2**20,
        load=load_json,
        dump=dump_json,
        bombs=_VALUE_BOMBS,
        bomb_bytes=4 * 2**20,
        executions=500,
    )


def _seeds(kind: str) -> list[bytes]:
    folder = MANIFESTS / "invalid" / kind
    valid = [data for found, _, data in valid_documents() if found == kind]
    if kind == "receipt":
        valid += _notes()
    return valid + [data for file in sorted(folder.glob("*.json")) if len(data := file.read_bytes()) < 4096]


def _notes() -> list[bytes]:
    """What a scrub and a readback leave."""
    details = {
        "store": "0" * 32,
        "by": "user@host",
        "max_age_seconds": 60,
        "objects": bytes(64),
        "documents": bytes(32),
        "records": ["refs/main/0000000000000001"],
        "versions": ["a", None],
        "read": b"\x03",
    }
    time = "2026-09-14T03:56:28Z"
    said: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("scrub", ()),
        ("verify", ("only shards 0, 1",)),
        ("push", ("without its files",)),
    )
    return [
        Receipt(
            name, Digest.of(b""), None, 1, 2, 3, "direct", time, "file:///a", rest, values.to_json(details)
        ).encode()
        for name, rest in said
    ]


def _document(kind: str, data: bytes, _folder: Path) -> None:
    value = PARSERS[kind](data)
    assert encode(kind, value) == data, "it was accepted, and its encoding is another"
    if kind == "page":
        _use_page(value)
    elif kind == "shard":
        _use_shard(value)
    elif kind == "checkpoint":
        _show(describe.checkpoint(Digest.of(data), value))
        _ours(lambda: progress.problems(value.step, value.progress, {}))
        _ours(lambda: progress.count_updates([], value.progress.states))
    elif kind == "receipt":
        _show(describe.receipt(value))
        output.escape(describe.receipt_line(value))
        readback_of(Digest.of(data), value, lambda _finding: None)
        _ours(lambda: _use_note(note_of(Digest.of(data), value)))


def _use_page(entries: tuple[Any, ...]) -> None:
    """What every reader does with the entries of a page."""
    layout = PackLayout()
    for entry in entries:
        if isinstance(entry, TensorEntry):
            lengths = entry.lengths()
            assert sum(lengths) == (0 if entry.inline is not None else entry.nbytes), "its chunks are not the tensor"
            if entry.tail:
                layout.place(entry.path, entry.chunks[-1], entry.tail)
    layout.lengths()
    progress.count_updates(entries, [])
    _ours(lambda: state.state_root(state.shard_leaves(entries, [], [])))


def _use_note(note: Note) -> None:
    """What a durability ledger does with the note of a scrub."""
    assert note.read_at <= note.readback.time, "it was read after it was noted"
    assert isinstance(note.counts, bool)


def _use_shard(shard: Shard) -> None:
    _ours(lambda: state.state_root(state.shard_leaves([], shard.optimizers, shard.aliases)))
    state.rng_root([shard.rng])


def _ours(use: Callable[[], object]) -> None:
    """Use it; what is refused here is refused in time."""
    try:
        use()
    except CkptStoreError:
        return


def _show(value: object) -> None:
    output.escape(json.dumps(value, allow_nan=False))


def _canonical(data: bytes, _folder: Path) -> None:
    value = canonical.decode(data, 4 * 2**20)
    assert canonical.encode(value) == data, "it was accepted, and its encoding is another"


def _typed(data: bytes, _folder: Path) -> None:
    node = canonical.decode(data, 4 * 2**20)
    value = values.from_json(node)
    assert canonical.encode(values.to_json(value)) == data, "it was accepted, and its encoding is another"
    _show(describe.plain(value))


def _typed_seeds() -> list[bytes]:
    found = []
    for _, _, data in valid_documents():
        waiting: list[Json] = [json.loads(data)]
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict) and "t" in node:
                found.append(canonical.encode(node))
            if isinstance(node, dict):
                waiting += node.values()
            elif isinstance(node, list):
                waiting += node
    return sorted(set(found))


# Digests that are made to fit again


def _seal_ref(tree: Tree) -> None:
    body = {name: tree[name] for name in ("generation", "previous", "root", "nonce")}
    tree["check"] = str(Digest.of(canonical.encode(body)))


def _seal_page(tree: Tree) -> None:
    for entry in tree["entries"]:
        tensor = entry.get("tensor") if isinstance(entry, dict) else None
        if isinstance(tensor, dict):
            try:
                inline = bytes.fromhex(tensor["inline"]) if "inline" in tensor else None
                chunks = [Digest.parse(text) for text in tensor.get("chunks", ())]
                made = make_tensor_entry("", ("weight",), tensor["dtype"], tensor["shape"], chunks, inline)
            except (CkptStoreError, ValueError, TypeError, KeyError, OverflowError):
                continue
            tensor["digest"] = str(made.digest)


_SEALS: Mapping[str, Callable[[Tree], None]] = {"ref": _seal_ref, "page": _seal_page}


# Bombs


def _fill(make: Callable[[int], Json], size: int) -> list[Json]:
    """As many of these as ``size`` bytes hold."""
    found: list[Json] = []
    for number in count():
        size -= len(canonical.encode(make(number))) + 1
        if size < 0:
            return found
        found.append(make(number))
    raise AssertionError


def _bomb(kind: str, field: str, make: Callable[[int], Json]) -> Bomb:
    """A document of ``kind`` in which ``field`` is filled up."""
    first = next(data for found, _, data in valid_documents() if found == kind)

    def made(size: int) -> bytes:
        tree = json.loads(first)
        parts = field.split(".")
        node = tree
        for part in parts[:-1]:
            node = node[part]
        node[parts[-1]] = []
        node[parts[-1]] = _fill(make, size - len(canonical.encode(tree)))
        return canonical.encode(tree)

    return made


def _value_bomb(make: Callable[[int], Json]) -> Bomb:
    return lambda size: canonical.encode(make(size))


_NONE: Json = {"t": "none"}


def _int(number: int) -> Json:
    return {"t": "int", "v": str(number)}


def _mapping(keys: Callable[[int], Json]) -> Callable[[int], Json]:
    def made(size: int) -> Json:
        pairs = _fill(lambda number: [keys(number), _NONE], size - 30)
        return {"t": "dict", "v": sorted(pairs, key=lambda pair: canonical.encode(pair[0]))}  # type: ignore[index]

    return made


def _nested(size: int) -> Json:
    value: Json = {"t": "list", "v": _fill(lambda _n: _NONE, size - 600)}
    for _ in range(26):
        value = {"t": "tuple", "v": [value]}
    return value


_VALUES: Mapping[str, Callable[[int], Json]] = {
    "nones": lambda size: {"t": "list", "v": _fill(lambda _n: _NONE, size - 30)},
    "nested": _nested,
    "keys": _mapping(lambda number: {"t": "str", "v": f"{number:08d}"}),
    "keys of one hash": _mapping(lambda number: _int(1 + number * _HASH)),
    "keys of one hash, in tuples": _mapping(lambda number: {"t": "tuple", "v": [_int(1 + number * _HASH)]}),
    "long integers": lambda size: {"t": "list", "v": _fill(lambda _n: _int(10**3999), size - 30)},
    "long keys": _mapping(lambda number: {"t": "str", "v": f"{number:08d}" + "a" * 100_000}),
    "bytes": lambda size: {"t": "bytes", "v": "00" * (size // 2 - 20)},
    "tensors": lambda size: {
        "t": "list",
        "v": _fill(lambda _n: {"dtype": "u8", "shape": [0] * 64, "t": "tensor", "v": ""}, size - 30),
    },
}
_VALUE_BOMBS: Mapping[str, Bomb] = {name: _value_bomb(make) for name, make in _VALUES.items()}

_DIGEST = "b3:" + "0" * 64


def _tensor(number: int) -> Json:
    entry = make_tensor_entry(f"{number:08d}", ("weight",), "u8", [64], (), bytes(64))
    body: dict[str, Json] = {"digest": str(entry.digest), "dtype": "u8", "inline": "00" * 64, "shape": [64]}
    return {"path": entry.path, "role": ["weight"], "tensor": body}


def _bombs(kind: str) -> Mapping[str, Bomb]:
    made: dict[str, Bomb] = {}
    for name, field, make in _FIELD_BOMBS.get(kind, ()):
        made[name] = _bomb(kind, field, make)
    place = {"receipt": "details", "checkpoint": "binding", "shard-receipt": "binding"}.get(kind)
    if place is not None:
        first = next(data for found, _, data in valid_documents() if found == kind)
        for name, value in _VALUES.items():
            wanted = value if place == "details" or "key" in name else _in_dict(value)
            made[name] = partial(_with_value, first, place, wanted)
    return made


def _in_dict(make: Callable[[int], Json]) -> Callable[[int], Json]:
    return lambda size: {"t": "dict", "v": [[{"t": "str", "v": ""}, make(size - 60)]]}


def _with_value(document: bytes, field: str, make: Callable[[int], Json], size: int) -> bytes:
    return canonical.encode(json.loads(document) | {field: make(size - len(document))})


_FIELD_BOMBS: Mapping[str, tuple[tuple[str, str, Callable[[int], Json]], ...]] = {
    "tree": (
        (
            "deep paths",
            "files",
            lambda n: {
                "chunks": [],
                "link": None,
                "mode": "plain",
                "path": f"{n:06d}/" + "a/" * 2040 + "a",
                "size": 0,
            },
        ),
        ("excluded", "excluded", lambda n: {"path": f"{n:08d}", "reason": "a"}),
    ),
    "shard": (
        ("aliases", "aliases", lambda n: {"owner": "", "path": f"{n:08d}"}),
        ("rng", "rng", lambda n: {"name": f"{n:08d}", "value": _NONE}),
        ("pages", "pages", lambda n: {"count": 1, "digest": _DIGEST, "path": f"{n:08d}", "role": ["weight"]}),
    ),
    "checkpoint": (
        ("shards", "shards", lambda _n: _DIGEST),
        ("ties", "ties", lambda n: {"owner": "", "path": f"{n:08d}"}),
        ("replicas", "replicas", lambda n: {"path": f"{n:08d}", "role": ["weight"]}),
        (
            "counters",
            "progress.counters",
            lambda n: {"name": f"{n:08d}", "tracks_step": False, "values": [[number, 1] for number in range(9)]},
        ),
        ("deviations", "deviations", lambda _n: {"actual": "", "code": "a", "expected": ""}),
    ),
    "page": (
        ("entries", "entries", _tensor),
        ("groups", "entries", lambda n: {"group": 0, "path": f"{n:08d}", "role": ["hyper", "a"]}),
    ),
    "pin": (("scope", "scope", lambda n: n),),
    "receipt": (("exceptions", "exceptions", lambda _n: ""),),
    "lease": (),
}
