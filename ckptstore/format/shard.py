"""Shard documents: what one worker owns (F-60 to F-67)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ckptstore.errors import MalformedError
from ckptstore.format import canonical, values
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.fields import Fields, as_list, close_document, open_document, parse_digest
from ckptstore.format.page import Role, parse_role, sort_key


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page: its document, its number of entries, and the (role, path) of its first one."""

    digest: Digest
    count: int
    role: Role
    path: str


@dataclass(frozen=True, slots=True)
class RolePacks:
    """The packs of one role, in order."""

    role: Role
    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class RngEntry:
    """State of one random generator, as typed JSON."""

    name: str
    value: Json


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group: hyper-parameters that are part of the state, and selectors of the implementation."""

    hyper: Json
    selectors: Json


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer: its name in the run, its type, its groups. Members are the entries of role (hyper, name)."""

    name: str
    type: str
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """``path`` is a view identical to ``owner``: one storage, two names."""

    path: str
    owner: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard ``index`` of ``count``: pages of entries, packs by role, generators, optimizers, aliases."""

    index: int
    count: int
    pages: tuple[PageRef, ...]
    packs: tuple[RolePacks, ...]
    rng: tuple[RngEntry, ...]
    optimizers: tuple[Optimizer, ...]
    aliases: tuple[Alias, ...]

    def encode(self) -> bytes:
        """Document bytes."""
        return close_document(
            "shard",
            {
                "index": self.index,
                "count": self.count,
                "pages": [
                    {"digest": str(p.digest), "count": p.count, "role": list(p.role), "path": p.path}
                    for p in self.pages
                ],
                "packs": [{"role": list(p.role), "digests": [str(d) for d in p.digests]} for p in self.packs],
                "rng": [{"name": entry.name, "value": entry.value} for entry in self.rng],
                "optimizers": [
                    {
                        "name": optimizer.name,
                        "type": optimizer.type,
                        "groups": [{"hyper": g.hyper, "selectors": g.selectors} for g in optimizer.groups],
                    }
                    for optimizer in self.optimizers
                ],
                "aliases": encode_aliases(self.aliases),
            },
        )

    @staticmethod
    def parse(data: bytes) -> Shard:
        """The shard of document bytes; every list sorted and without repetition."""
        fields = open_document(data, "shard")
        shard = Shard(
            index=fields.count("index"),
            count=fields.count("count", 1),
            pages=fields.items("pages", _parse_page_ref),
            packs=fields.items("packs", _parse_packs),
            rng=fields.items("rng", _parse_rng),
            optimizers=fields.items("optimizers", _parse_optimizer),
            aliases=parse_aliases(fields, "aliases"),
        )
        fields.end()
        if shard.index >= shard.count:
            raise MalformedError("shard", f"index {shard.index} of {shard.count}")
        _require_sorted([sort_key(page.role, page.path) for page in shard.pages], "pages")
        _require_sorted([canonical.encode(list(packs.role)) for packs in shard.packs], "packs")
        _require_sorted([entry.name for entry in shard.rng], "rng")
        _require_sorted([optimizer.name for optimizer in shard.optimizers], "optimizers")
        return shard


def encode_aliases(aliases: tuple[Alias, ...]) -> list[Json]:
    """The JSON of a list of aliases."""
    return [{"path": alias.path, "owner": alias.owner} for alias in aliases]


def parse_aliases(fields: Fields, name: str) -> tuple[Alias, ...]:
    """A list of aliases sorted by path. The owner is bytewise smaller than the path."""

    def read(node: Json) -> Alias:
        item = Fields(node, f"{name} entry")
        alias = Alias(item.text("path", empty=True), item.text("owner", empty=True))
        item.end()
        if alias.owner.encode() >= alias.path.encode():
            raise MalformedError(f"alias {alias.path!r:.80}", "its owner is not the bytewise smallest path")
        return alias

    aliases = fields.items(name, read)
    _require_sorted([alias.path.encode() for alias in aliases], name)
    return aliases


def _parse_page_ref(node: Json) -> PageRef:
    fields = Fields(node, "page reference")
    ref = PageRef(
        digest=fields.digest("digest"),
        count=fields.count("count", 1),
        role=parse_role(fields.take("role"), fields.where),
        path=fields.text("path", empty=True),
    )
    fields.end()
    return ref


def _parse_packs(node: Json) -> RolePacks:
    fields = Fields(node, "packs")
    role = parse_role(fields.take("role"), "packs")
    digests = tuple(parse_digest(item, "packs") for item in as_list(fields.take("digests"), "packs"))
    fields.end()
    if not digests:
        raise MalformedError("packs", "a role without packs is not listed")
    return RolePacks(role, digests)


def _parse_rng(node: Json) -> RngEntry:
    fields = Fields(node, "rng entry")
    entry = RngEntry(fields.text("name"), fields.take("value"))
    fields.end()
    values.plain_from_json(entry.value, f"rng {entry.name!r:.80}")
    return entry


def _parse_optimizer(node: Json) -> Optimizer:
    fields = Fields(node, "optimizer")
    optimizer = Optimizer(fields.text("name"), fields.text("type"), fields.items("groups", _parse_group))
    fields.end()
    return optimizer


def _parse_group(node: Json) -> Group:
    fields = Fields(node, "optimizer group")
    group = Group(fields.take("hyper"), fields.take("selectors"))
    fields.end()
    for part in (group.hyper, group.selectors):
        if type(values.plain_from_json(part, "optimizer group")) is not dict:
            raise MalformedError("optimizer group", "its values are not a dict")
    return group


def _require_sorted(keys: list[bytes] | list[str] | list[tuple[bytes, bytes]], what: str) -> None:
    if any(left >= right for left, right in pairwise(keys)):  # type: ignore[operator]
        raise MalformedError("shard", f"{what} are not sorted, or one repeats")
