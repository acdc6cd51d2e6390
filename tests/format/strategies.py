"""Hypothesis strategies for typed values and for every kind of document of format 1."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable
from math import prod
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint, Deviation, Replica
from ckptstore.format.digest import Digest
from ckptstore.format.dtypes import ITEM_SIZES
from ckptstore.format.page import (
    BUFFER,
    EXTRA,
    WEIGHT,
    Entry,
    HyperEntry,
    Role,
    ValueEntry,
    make_tensor_entry,
    sort_key,
)
from ckptstore.format.progress import Counter as StateCounter
from ckptstore.format.progress import Cursor, NamedState, Progress
from ckptstore.format.records import (
    CollectionMarker,
    Lease,
    Pin,
    Receipt,
    RefRecord,
    Retired,
    ShardReceipt,
    Store,
)
from ckptstore.format.shard import Alias, Group, Optimizer, PageRef, RngEntry, RolePacks, Shard
from ckptstore.format.tensors import CHUNK, INLINE
from ckptstore.format.tree import Excluded, File, Preparation, Tree

MAX_INT = 2**53 - 1

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For machines that do other things besides: no example fails for the time that it takes."""

texts = st.text(max_size=12)
names = st.text(min_size=1, max_size=12)
counts = st.integers(0, 40) | st.integers(0, MAX_INT)
digests = st.binary(min_size=32, max_size=32).map(Digest)
nonces = st.text("0123456789abcdef", min_size=32, max_size=32)

floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0]) | st.floats()
"""All bit patterns, NaN payloads included."""


@st.composite
def small_tensors(draw: st.DrawFn) -> values.TensorValue:
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = prod(shape) * ITEM_SIZES[dtype]
    return values.TensorValue(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**4000) + 1, 10**4000 - 1)
    | floats
    | texts
    | st.binary(max_size=12)
    | small_tensors()
)
_keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(_keys, inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | pairs
        | pairs.map(lambda items: Counter(items))
        | pairs.map(lambda items: OrderedDict(items))
    )


python_values: st.SearchStrategy[Any] = st.recursive(_leaves, _containers, max_leaves=12)
"""Every kind of value that can be stored."""

typed = python_values.map(values.to_json)
typed_dicts = st.dictionaries(names, python_values, max_size=3).map(values.to_json)


def same(left: object, right: object) -> bool:
    """Equal in type and in bits, all the way down; NaN equals itself, and 1, 1.0 and True differ."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        pairs = [_in_order(left), _in_order(right)]
        return len(left) == len(right) and all(
            same(a, b) for x, y in zip(*pairs, strict=True) for a, b in zip(x, y, strict=True)
        )
    return left == right


def _in_order(mapping: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    if type(mapping) is OrderedDict:
        return mapping.items()
    return sorted(mapping.items(), key=lambda pair: str(values.to_json(pair[0])))


optim_roles = st.lists(names, min_size=1, max_size=3).map(lambda keys: ("optim", "adam", *keys))


@st.composite
def tensor_entries(draw: st.DrawFn) -> Entry:
    role: Role = draw(st.sampled_from([WEIGHT, BUFFER, EXTRA, ("extra", "a")]) | optim_roles)
    path = draw(texts)
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    if draw(st.booleans()):
        shape.append(draw(st.integers(INLINE + 1, 3 * CHUNK // ITEM_SIZES[dtype])))
    size = prod(shape) * ITEM_SIZES[dtype]
    if size <= INLINE:
        return make_tensor_entry(path, role, dtype, shape, (), draw(st.binary(min_size=size, max_size=size)))
    count = -(-size // CHUNK)
    first = draw(st.integers(0, 255))
    chunks = [Digest.of(bytes([first, number % 3])) for number in range(count)]
    return make_tensor_entry(path, role, dtype, shape, chunks, None)


entries: st.SearchStrategy[Entry] = (
    tensor_entries()
    | st.builds(ValueEntry, texts, st.just(EXTRA) | optim_roles, typed)
    | st.builds(HyperEntry, texts, names.map(lambda name: ("hyper", name)), st.integers(0, 9))
)


@st.composite
def pages(draw: st.DrawFn) -> tuple[Entry, ...]:
    unique = {sort_key(entry.role, entry.path): entry for entry in draw(st.lists(entries, min_size=1, max_size=6))}
    return tuple(unique[key] for key in sorted(unique))


def _sorted_by(key: Any, items: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=most, unique_by=key).map(lambda found: tuple(sorted(found, key=key)))


roles = st.lists(texts, min_size=1, max_size=4).map(tuple)
page_refs = st.builds(PageRef, digests, st.integers(1, 1024), roles, texts)
role_packs = st.builds(RolePacks, roles, st.lists(digests, min_size=1, max_size=3).map(tuple))
rng_entries = st.builds(RngEntry, names, typed)
groups = st.builds(Group, typed_dicts, typed_dicts)
optimizers = st.builds(Optimizer, names, names, st.lists(groups, max_size=2).map(tuple))
aliases = (
    st.tuples(texts, texts)
    .filter(lambda pair: pair[0] != pair[1])
    .map(lambda pair: sorted(pair, key=str.encode))
    .map(lambda pair: Alias(pair[1], pair[0]))
)


def _role_key(item: Any) -> bytes:
    return sort_key(item.role, "")[0]


def _place_key(item: Any) -> tuple[bytes, bytes]:
    return sort_key(item.role, item.path)


def _name_key(item: Any) -> str:
    return str(item.name)


def _path_key(item: Any) -> bytes:
    return bytes(item.path.encode())


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    count = draw(st.integers(1, 9))
    return Shard(
        index=draw(st.integers(0, count - 1)),
        count=count,
        pages=draw(_sorted_by(_place_key, page_refs)),
        packs=draw(_sorted_by(_role_key, role_packs)),
        rng=draw(_sorted_by(_name_key, rng_entries)),
        optimizers=draw(_sorted_by(_name_key, optimizers, 2)),
        aliases=draw(_sorted_by(_path_key, aliases)),
    )


cursors = st.builds(Cursor, names, counts, st.none() | counts)
states = st.builds(NamedState, st.sampled_from(["scheduler", "scaler", "data", "value"]), names, typed)
histograms = st.dictionaries(st.integers(-1, MAX_INT), st.integers(1, MAX_INT), min_size=1, max_size=3).map(
    lambda found: tuple(sorted(found.items()))
)
counters = st.builds(StateCounter, names, st.booleans(), histograms)
progresses = st.builds(
    Progress,
    cursors=st.dictionaries(names, cursors, max_size=2).map(lambda found: tuple(sorted(found.items()))),
    states=_sorted_by(lambda state: (state.kind, state.name), states, 2),
    counters=_sorted_by(_name_key, counters, 2),
    micro_index=st.integers(0, 3),
)

optional_digests = st.none() | digests
checkpoints = st.builds(
    Checkpoint,
    step=counts,
    parent=optional_digests,
    run=optional_digests,
    state_root=digests,
    rng_root=digests,
    shards=st.lists(digests, min_size=1, max_size=3).map(tuple),
    ties=_sorted_by(_path_key, aliases),
    replicas=_sorted_by(_place_key, st.builds(Replica, roles, texts)),
    progress=progresses,
    binding=typed_dicts,
    files=optional_digests,
    deviations=st.lists(st.builds(Deviation, names, texts, texts), max_size=2).map(tuple),
)

_parts = st.text(min_size=1, max_size=6).filter(lambda part: part not in (".", "..") and not set(part) & {"/", "\0"})
paths = st.lists(_parts, min_size=1, max_size=3).map("/".join)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    chosen: list[str] = []
    for path in sorted(draw(st.sets(paths, max_size=6)), key=str.encode):
        if not any(f"{path}/".startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    files, excluded = [], []
    for path in chosen:
        if draw(st.integers(0, 3)) == 0:
            excluded.append(Excluded(path, draw(names)))
            continue
        size = draw(st.integers(0, 3 * CHUNK))
        chunks = tuple(Digest.of(bytes([number])) for number in range(-(-size // CHUNK)))
        files.append(File(path, draw(st.booleans()), size, chunks, draw(st.none() | names)))
    return Tree(tuple(files), tuple(excluded))


@st.composite
def ref_records(draw: st.DrawFn) -> RefRecord:
    generation = draw(st.integers(1, MAX_INT))
    previous = None if generation == 1 else draw(digests)
    return RefRecord(generation, previous, draw(optional_digests), draw(nonces))


@st.composite
def shard_receipts(draw: st.DrawFn) -> ShardReceipt:
    count = draw(st.integers(1, 9))
    failure = draw(texts)
    return ShardReceipt(
        attempt=draw(nonces),
        index=draw(st.integers(0, count - 1)),
        count=count,
        step=draw(counts),
        parent=draw(optional_digests),
        run=draw(optional_digests),
        binding=draw(typed_dicts),
        progress=draw(progresses),
        files=draw(optional_digests),
        shard=None if failure else draw(digests),
        failure=failure,
    )


receipts = st.builds(
    Receipt,
    operation=names,
    subject=digests,
    closure=optional_digests,
    documents=counts,
    objects=counts,
    bytes_read=counts,
    method=names,
    time=names,
    where=names,
    exceptions=st.lists(texts, max_size=2).map(tuple),
    details=st.none() | typed,
)
pins = st.builds(Pin, st.none() | st.sets(counts, min_size=1, max_size=3).map(lambda s: tuple(sorted(s))), names)

documents: dict[str, st.SearchStrategy[Any]] = {
    "page": pages(),
    "shard": shards(),
    "checkpoint": checkpoints,
    "tree": trees(),
    "preparation": st.builds(Preparation, digests, digests, digests),
    "ref": ref_records(),
    "receipt": receipts,
    "shard-receipt": shard_receipts(),
    "pin": pins,
    "retired": st.builds(Retired, names),
    "lease": st.builds(Lease, names, names, names),
    "collection": st.builds(CollectionMarker, names, names, names, nonces),
    "store": st.builds(Store, nonces),
}
"""By kind, the values whose documents are of that kind."""
