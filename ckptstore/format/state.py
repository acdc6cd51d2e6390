"""State root and rng root: what was learned, free of layout; and the generators (F-23 to F-29)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ckptstore.errors import MalformedError
from ckptstore.format import canonical, values
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.merkle import MerkleTree
from ckptstore.format.page import (
    ALIAS,
    BUFFER,
    HYPER,
    OPTIM,
    WEIGHT,
    Entry,
    HyperEntry,
    Role,
    TensorEntry,
    show_role,
    sort_key,
)
from ckptstore.format.shard import Alias, Optimizer, RngEntry

LeafKey: TypeAlias = "tuple[str, Role]"
"""(path, role) of a leaf of the state tree."""

Leaves: TypeAlias = "dict[LeafKey, Json]"
"""Leaf values by (path, role): a tensor digest, a typed value, or an owner."""

_STATE = MerkleTree("state")
_RNG = MerkleTree("rng")


def shard_leaves(entries: Iterable[Entry], optimizers: Iterable[Optimizer], aliases: Iterable[Alias]) -> Leaves:
    """The leaves of one shard: its entries, with the hyper-parameters of each parameter's group, and its aliases.

    Raises:
        MalformedError: entries are not sorted across pages, or one repeats; one names an optimizer, a group or a tensor
            that the shard does not hold; or an alias is also an entry.
    """
    groups = {optimizer.name: optimizer.groups for optimizer in optimizers}
    leaves: Leaves = {}
    refs: list[tuple[str, LeafKey]] = []
    last: tuple[bytes, bytes] | None = None
    for entry in entries:
        where = f"{show_role(entry.role)} {entry.path!r:.120}"
        key = sort_key(entry.role, entry.path)
        if last is not None and key <= last:
            raise MalformedError(where, "entries are not sorted by (role, path) across pages, or one repeats")
        last = key
        if entry.role[0] in (OPTIM, HYPER) and entry.role[1] not in groups:
            raise MalformedError(where, "its shard describes no such optimizer")
        if isinstance(entry, TensorEntry):
            leaves[entry.path, entry.role] = {"tensor": str(entry.digest)}
        elif isinstance(entry, HyperEntry):
            if entry.group >= len(groups[entry.role[1]]):
                raise MalformedError(where, f"group {entry.group} is not described")
            leaves[entry.path, entry.role] = {"value": groups[entry.role[1]][entry.group].hyper}
        else:
            leaves[entry.path, entry.role] = {"value": entry.value}
            found = values.entry_refs(values.from_json(entry.value, where))
            refs += [(where, (entry.path, entry.role + ref.suffix)) for ref in found]
    for where, target in refs:
        if not _is_tensor(leaves.get(target)):
            raise MalformedError(where, f"refers to {show_role(target[1])}, which is no tensor of its shard")
    add_aliases(leaves, aliases)
    return leaves


def add_aliases(leaves: Leaves, aliases: Iterable[Alias]) -> None:
    """Add alias leaves. MalformedError if the path is a tensor of its own as well."""
    for alias in aliases:
        if (alias.path, WEIGHT) in leaves or (alias.path, BUFFER) in leaves:
            raise MalformedError(f"alias {alias.path!r:.120}", "is also a tensor of its own")
        if (alias.path, ALIAS) in leaves:
            raise MalformedError(f"alias {alias.path!r:.120}", "is declared twice")
        leaves[alias.path, ALIAS] = {"owner": alias.owner}


def join_leaves(
    shards: Sequence[Leaves], ties: Iterable[Alias], replicas: Iterable[LeafKey]
) -> tuple[Leaves, list[str]]:
    """The leaves of a whole checkpoint, and every reason why its shards do not join.

    The same (path, role) in several shards is refused unless it is a declared replica with equal values; an owner of
    an alias must exist.
    """
    declared = set(replicas)
    joined: Leaves = {}
    holders: dict[LeafKey, list[int]] = {}
    different: set[LeafKey] = set()
    wrong: list[str] = []
    for index, leaves in enumerate(shards):
        for key, value in leaves.items():
            holders.setdefault(key, []).append(index)
            if joined.setdefault(key, value) != value:
                different.add(key)
    for key, indices in holders.items():
        if len(indices) > 1 and key not in declared:
            wrong.append(f"{_name(key)} is in shards {_list(indices)} and not declared a replica")
        elif key in different:
            wrong.append(f"{_name(key)} is declared a replica but differs between shards {_list(indices)}")
    wrong += [f"{_name(key)} is declared a replica and in no shard" for key in sorted(declared - joined.keys())]
    try:
        add_aliases(joined, ties)
    except MalformedError as error:
        wrong.append(str(error))
    for (path, role), value in joined.items():
        if role == ALIAS and type(value) is dict:
            owner = value["owner"]
            if not any((owner, kind) in joined for kind in (WEIGHT, BUFFER)):
                wrong.append(f"alias {path!r:.120} names the owner {owner!r:.120}, which no shard holds")
            if any((path, kind) in joined for kind in (WEIGHT, BUFFER)):
                wrong.append(f"alias {path!r:.120} is also a tensor of its own")
        elif role == BUFFER and (path, WEIGHT) in joined:
            wrong.append(f"{path!r:.120} is a weight and a buffer")
    return joined, wrong


def state_root(leaves: Leaves) -> Digest:
    """Merkle root over the leaves sorted by (UTF-8 path, canonical role)."""
    order = sorted(leaves, key=lambda key: sort_key(key[1], key[0])[::-1])
    data = [canonical.encode({"path": path, "role": list(role), "value": leaves[path, role]}) for path, role in order]
    return _STATE.root(data, {})


def rng_root(shards: Sequence[Sequence[RngEntry]]) -> Digest:
    """Merkle root over (shard, name, value) of all generators, in the order of shards and names."""
    data = [
        canonical.encode({"shard": index, "name": entry.name, "value": entry.value})
        for index, entries in enumerate(shards)
        for entry in entries
    ]
    return _RNG.root(data, {"shards": len(shards)})


def differences(expected: Mapping[LeafKey, Json], actual: Mapping[LeafKey, Json]) -> list[str]:
    """One line for each leaf that is missing, unexpected or different, sorted."""
    lines = []
    for key in sorted(expected.keys() | actual.keys()):
        if key not in actual:
            lines.append(f"{_name(key)} is missing")
        elif key not in expected:
            lines.append(f"{_name(key)} is unexpected")
        elif expected[key] != actual[key]:
            lines.append(f"{_name(key)} differs: expected {_brief(expected[key])}, actual {_brief(actual[key])}")
    return lines


def _is_tensor(leaf: Json) -> bool:
    return type(leaf) is dict and "tensor" in leaf


def _name(key: LeafKey) -> str:
    return f"{show_role(key[1])} {key[0]!r:.120}"


def _list(indices: Iterable[int]) -> str:
    return ", ".join(str(index) for index in indices)


def _brief(value: Json) -> str:
    return f"{canonical.encode(value).decode():.160}"
