"""Collections: a plan, and what was done of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from ckptstore.collection.exclusion import exclusive
from ckptstore.collection.inventory import Inventory, take_inventory
from ckptstore.collection.plan import Plan, plan
from ckptstore.collection.policy import Policy
from ckptstore.collection.sweep import Swept, sweep
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import check_ref_name, is_ref_name
from ckptstore.lazy import load
from ckptstore.meter import OnProgress
from ckptstore.names import MIN_PREFIX
from ckptstore.readbacks.copies import RootCopies
from ckptstore.store import CATALOGUE_VARIABLE, Store

_HEX = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection would do, or did.

    Args:
        plan: what stays and what goes.
        swept: what was deleted; None if only the plan was made.
        broken: leases and markers of dead or lost writers that were taken away, in words.
        notes: what else its user may want to know.
    """

    plan: Plan
    swept: Swept | None = None
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def collect(
    store: Store,
    policy: Policy | None = None,
    *,
    delete: bool = False,
    retire: Sequence[Digest | str] = (),
    break_leases_older_than: int | None = None,
    min_verified_copies: int = 0,
    progress: OnProgress | None = None,
) -> Collection:
    """Plan a collection, and with ``delete`` do it.

    Args:
        store: the store.
        policy: which checkpoints are kept; by default all that something leads to.
        delete: delete; else nothing is written, and a store that cannot be written will do.
        retire: checkpoints that go though something leads to them: digests, names of refs, or unique prefixes.
        break_leases_older_than: seconds; leases of writers that may be dead are passed over if they are as old.
        min_verified_copies: retire a closure only if at least so many other stores are known to hold verified copies.
        progress: called with (bytes deleted, bytes in all).

    Raises:
        RefusedError: something that is to be kept cannot be read, or something is not understood; lists all of it.
            Nothing was deleted.
        ConflictError: writers are at work, or another collection is; nothing was deleted. Or somebody ended this one.
        NotFoundError, UsageError: no such checkpoint to retire, or a prefix that fits several.
    """
    planning = partial(
        plan,
        store.backend,
        policy or Policy(),
        ledger=partial(verified_elsewhere, store),
        retire=resolved(store, retire),
        min_verified_copies=min_verified_copies,
    )
    if not delete:
        return Collection(planning())
    with exclusive(store, break_leases_older_than=break_leases_older_than) as guard:
        made = planning()
        swept = sweep(store.backend, made, guard, progress)
        store.objects.forget()  # what this process knew to be there may be gone
        notes = (*guard.notes, *swept.notes, *_about_catalogue(store, swept))
        return Collection(made, swept, guard.broken, notes)


def _about_catalogue(store: Store, swept: Swept) -> tuple[str, ...]:
    """That the catalogue has rows of what is gone, if there is one; it is only added to, and made anew on demand."""
    path = getattr(store.backend, "path", None)
    is_there = bool(os.environ.get(CATALOGUE_VARIABLE)) or (path is not None and (path / "catalogue.sqlite").exists())
    return ("the catalogue lists what is gone until ckpt catalogue rebuild",) if is_there and swept.deleted_keys else ()


def verified_elsewhere(store: Store, roots: Iterable[Digest]) -> Mapping[Digest, int]:
    """By checkpoint, how many other stores are known here to hold a verified copy of all of it. One that cannot be read
    has no number."""
    found = load("ckptstore.readbacks.durability").ledger(store, list(roots))
    return {item.root: _elsewhere(item, found.at) for item in found.roots}


def resolved(store: Store, names: Iterable[Digest | str]) -> frozenset[Digest]:
    """What ``names`` mean. Other than for a reader, a checkpoint need not be readable, nor there at all.

    Raises:
        NotFoundError: nothing has that name.
        UsageError: it is none, or a prefix that fits several documents.
    """
    inventory: Inventory | None = None
    found = set()
    for name in names:
        if isinstance(name, Digest):
            found.add(name)
            continue
        digits = name.removeprefix("b3:")
        if not name.startswith("b3:") and is_ref_name(name):
            head = store.head(check_ref_name(name))
            if head is None:
                raise NotFoundError(f"ref {name}", f"it names nothing in {store.url}", "ckpt ref list lists refs")
            found.add(head)
        elif not _HEX.fullmatch(digits) or len(digits) < MIN_PREFIX:
            why = f"neither a ref nor {MIN_PREFIX} hex digits or more of a digest"
            raise UsageError(f"checkpoint {name!r:.80}", why)
        elif len(digits) == 64:
            found.add(Digest.parse(digits))
        else:
            inventory = inventory or take_inventory(store.backend)
            found.add(_beginning_with(digits, inventory, store.url))
    return frozenset(found)


def _beginning_with(digits: str, inventory: Inventory, url: str) -> Digest:
    known = {Digest(raw) for raw in inventory.documents} | inventory.pins.keys() | inventory.retired
    fitting = sorted(digest for digest in known if digest.hex.startswith(digits))
    if not fitting:
        hint = "give all 64 digits of one that is not there any more"
        raise NotFoundError(f"checkpoint {digits}", f"nothing in {url} begins so", hint)
    if len(fitting) > 1:
        listed = ", ".join(digest.short for digest in fitting[:8])
        raise UsageError(f"prefix {digits}", f"it fits {len(fitting)} documents: {listed}", "give more digits")
    return fitting[0]


def _elsewhere(item: RootCopies, at: datetime) -> int:
    distinct = {id(key.copies): key.copies for key in item.keys}.values()
    return min(
        (sum(copy.is_verified(at) and not copy.holder.here for copy in copies) for copies in distinct), default=0
    )
