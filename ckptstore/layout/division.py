"""Division: which entries, optimizers, aliases and generators each of the new shards gets. Works on documents alone.

Everything under one path stays together: a parameter, its optimizer state, its membership in a group. What an optimizer
keeps over all of its parameters can only move with all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptstore.closure import ShardView
from ckptstore.errors import RefusedError, UsageError
from ckptstore.format.checkpoint import Checkpoint, Replica
from ckptstore.format.page import ALIAS, HYPER, OPTIM, Entry, HyperEntry, Role, sort_key
from ckptstore.format.shard import Alias, Group, Optimizer, RngEntry

_NAMED = 5  # paths in a message


@dataclass(frozen=True, slots=True)
class Held:
    """An entry, and the old shard that it is taken from."""

    entry: Entry
    source: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one new shard owns; ``held`` is in the order of entries."""

    held: tuple[Held, ...]
    optimizers: tuple[Optimizer, ...]
    aliases: tuple[Alias, ...]
    rng: tuple[RngEntry, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """The new shards in order, what the checkpoint declares across them, and for each the old shard whose generators
    it takes over."""

    parts: tuple[Part, ...]
    ties: tuple[Alias, ...]
    replicas: tuple[Replica, ...]
    generators: tuple[int, ...]


@dataclass(slots=True)
class _Shares:
    """What was given to one new shard so far."""

    held: dict[tuple[Role, str], Held] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)


def divide(checkpoint: Checkpoint, views: Sequence[ShardView], wanted: Sequence[Collection[str]]) -> Division:
    """Divide a checkpoint among other shards.

    Args:
        checkpoint: its document.
        views: all of its shards, in order.
        wanted: the paths of each new shard. Every path with an entry is in at least one; in several, it is a replica.
            The other names of shared tensors may be left out: an alias then goes with its owner, and a tie stays one.
            In the shard of its owner such a name becomes an alias, in another one a tie.

    Raises:
        UsageError: a new shard gets nothing, or a path has no place, or is not in the checkpoint.
        RefusedError: what an optimizer keeps over all of its parameters would be torn apart or joined.
    """
    owners = _owners(wanted)
    names = [*checkpoint.ties, *(alias for view in views for alias in view.shard.aliases)]
    _check_paths(views, names, owners, len(wanted))
    shares = [_Shares() for _ in wanted]
    for source, view in enumerate(views):
        places = _optimizer_places(view, views, owners)
        for entry in view.entries:
            for index in places[entry.role[1]] if _is_overall(entry) else owners[entry.path]:
                shares[index].held.setdefault((entry.role, entry.path), Held(entry, source))
    ties = {tie.path: tie for tie in checkpoint.ties}
    for alias in names:
        at_owner = owners[alias.owner]
        default = () if alias.path in ties else at_owner
        at = [index for index in owners.get(alias.path, default) if index in at_owner]
        for index in at:
            shares[index].aliases[alias.path] = alias
        if at:
            ties.pop(alias.path, None)
        else:
            ties[alias.path] = alias
    generators = tuple(index % len(views) for index in range(len(wanted)))
    return Division(
        parts=tuple(_part(share, views, generators[index], bare=index == 0) for index, share in enumerate(shares)),
        ties=tuple(sorted(ties.values(), key=lambda tie: tie.path.encode())),
        replicas=_replicas(shares),
        generators=generators,
    )


def is_divided_so(checkpoint: Checkpoint, views: Sequence[ShardView], division: Division) -> bool:
    """Whether the checkpoint has exactly these shards already."""
    return (
        len(views) == len(division.parts)
        and (checkpoint.ties, checkpoint.replicas) == (division.ties, division.replicas)
        and all(
            [held.entry for held in part.held] == view.entries
            and (part.optimizers, part.aliases, part.rng) == (view.shard.optimizers, view.shard.aliases, view.shard.rng)
            for part, view in zip(division.parts, views, strict=True)
        )
    )


def _owners(wanted: Sequence[Collection[str]]) -> dict[str, tuple[int, ...]]:
    """The new shards of each path, ascending."""
    owners: dict[str, tuple[int, ...]] = {}
    for index, paths in enumerate(wanted):
        if isinstance(paths, str) or not paths:
            raise UsageError(f"new shard {index}", "it gets no path", "give each shard a collection of paths")
        if strange := [path for path in paths if type(path) is not str]:
            raise UsageError(f"new shard {index}", f"{strange[0]!r:.60} is no path", "give each shard texts")
        for path in set(paths):
            owners[path] = (*owners.get(path, ()), index)
    return owners


def _check_paths(views: Sequence[ShardView], names: Iterable[Alias], owners: Mapping[str, object], count: int) -> None:
    """UsageError unless every path with an entry has a place, and every path that has one is there."""
    held = {entry.path for view in views for entry in view.entries if not _is_overall(entry)}
    if missing := held - owners.keys():
        why = f"{_some(missing)} would be in none of the {count} new shards"
        raise UsageError("new shards", why, "give every path of the checkpoint a shard")
    if unknown := owners.keys() - held - {alias.path for alias in names}:
        raise UsageError("new shards", f"{_some(unknown)} is not in the checkpoint", "ckpt ls lists what is")


def _is_overall(entry: Entry) -> bool:
    """Whether it is state of an optimizer that belongs to no single parameter."""
    return entry.path == "" and entry.role[0] == OPTIM


def _members(entries: Iterable[Entry], name: str) -> set[str]:
    return {entry.path for entry in entries if entry.role[0] in (OPTIM, HYPER) and entry.role[1] == name} - {""}


def _optimizer_places(
    view: ShardView, views: Sequence[ShardView], owners: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Where the overall state of each optimizer of a shard goes: to the shards that get all of its parameters, and no
    others of that optimizer."""
    places: dict[str, tuple[int, ...]] = {}
    for name in {entry.role[1] for entry in view.entries if _is_overall(entry)}:
        own = _members(view.entries, name)
        everywhere = set().union(*(_members(other.entries, name) for other in views))
        at = {owners[path] for path in own} or {(0,)}
        first = next(iter(at))
        if len(at) > 1 or any(set(owners[path]) & set(first) for path in everywhere - own):
            why = (
                "it keeps state that runs over all of its parameters, and these would be torn apart or joined by others"
            )
            hint = f"give all of them, and no others of {name}, to one shard"
            raise RefusedError(f"optimizer {name} of {view.place}", why, hint)
        places[name] = first
    return places


def _part(share: _Shares, views: Sequence[ShardView], generators: int, *, bare: bool) -> Part:
    """The part of one new shard; ``bare``: it also describes the optimizers that no entry of any shard names."""
    held = sorted(share.held.values(), key=lambda one: sort_key(one.entry.role, one.entry.path))
    sources: dict[str, set[int]] = {}
    for one in held:
        if one.entry.role[0] in (OPTIM, HYPER):
            sources.setdefault(one.entry.role[1], set()).add(one.source)
    if bare:
        named = {e.role[1] for view in views for e in view.entries if e.role[0] in (OPTIM, HYPER)}
        for source, view in enumerate(views):
            for optimizer in view.shard.optimizers:
                if optimizer.name not in named:
                    sources.setdefault(optimizer.name, {source})
    optimizers = []
    numbers: dict[tuple[str, int], list[int]] = {}
    for name in sorted(sources):
        found = [(source, _described(views[source], name)) for source in sorted(sources[name])]
        optimizers.append(_merged(name, found, numbers))
    return Part(
        held=tuple(_renumbered(one, numbers) for one in held),
        optimizers=tuple(optimizers),
        aliases=tuple(sorted(share.aliases.values(), key=lambda alias: alias.path.encode())),
        rng=views[generators].shard.rng,
    )


def _described(view: ShardView, name: str) -> Optimizer:
    return next(optimizer for optimizer in view.shard.optimizers if optimizer.name == name)


def _merged(name: str, found: Sequence[tuple[int, Optimizer]], numbers: dict[tuple[str, int], list[int]]) -> Optimizer:
    """One description from those of several shards: the groups of the first, then what others have besides.
    ``numbers`` takes the new number of each group, by optimizer and old shard."""
    groups: list[Group] = []
    for source, optimizer in found:
        if optimizer.type != found[0][1].type:
            why = f"shard {found[0][0]} has a {found[0][1].type}, shard {source} a {optimizer.type}"
            raise RefusedError(f"optimizer {name}", why, "leave their parameters in different shards")
        mine: list[int] = []
        for number, group in enumerate(optimizer.groups):
            if number < len(groups) and groups[number] == group:
                mine.append(number)
            elif source != found[0][0] and group in groups:
                mine.append(groups.index(group))
            else:
                mine.append(len(groups))
                groups.append(group)
        numbers[name, source] = mine
    return Optimizer(name, found[0][1].type, tuple(groups))


def _renumbered(one: Held, numbers: Mapping[tuple[str, int], Sequence[int]]) -> Held:
    if not isinstance(one.entry, HyperEntry):
        return one
    number = numbers[one.entry.role[1], one.source][one.entry.group]
    return one if number == one.entry.group else replace(one, entry=replace(one.entry, group=number))


def _replicas(shares: Sequence[_Shares]) -> tuple[Replica, ...]:
    seen: set[tuple[Role, str]] = set()
    several: set[tuple[Role, str]] = set()
    for share in shares:
        keys = share.held.keys() | {(ALIAS, path) for path in share.aliases}
        several |= seen & keys
        seen |= keys
    return tuple(Replica(role, path) for role, path in sorted(several, key=lambda key: sort_key(*key)))


def _some(paths: Iterable[str]) -> str:
    listed = sorted(paths, key=str.encode)
    shown = ", ".join(f"{path!r:.120}" for path in listed[:_NAMED])
    return shown + (f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else "")
