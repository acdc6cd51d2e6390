"""What keeps stores well, done to a world: repair, scrub, the newest whole checkpoint, and collection."""

from __future__ import annotations

from ckptstore.collection.collect import Collection, collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.errors import RefusedError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key, document_key, retired_key
from ckptstore.readbacks.scrub import scrub
from ckptstore.repairs.repair import Repair, repair
from ckptstore.running.latest import latest
from ckptstore.store import Store
from tests.machine.model import Holding
from tests.machine.world import Kill, World, tried


def mend(world: World, name: str, source: str, root: Digest, kill: Kill | None = None) -> str:
    """Repair a checkpoint with what the other store has: all of it that the other one has whole."""
    held, giver = world.held[name], world.held[source]
    there = world.keys(source)

    def work(store: Store, other: Store) -> Repair:
        return repair(store, root, [other], remotes=False)

    done, told = world.do(work, [name, source], kill, may_fail=False)
    world.settle(name)
    world.settle(source)
    if done is not None:
        closure = world.model.closure(root)
        left = closure & held.damage.keys()
        unavailable = {key for key in closure if key in giver.damage or key not in there}
        if not any(key.startswith("documents/") for key in left):
            assert left <= unavailable, "what the other store has was not taken"
        assert done.ok == (not world.model.faults(held, world.keys(name), root))
    return told if done is None else f"{told}, {'whole' if done.ok else 'not whole'}"


def look_at_everything(world: World, name: str) -> str:
    """Scrub a store: every damaged key that is there is found, and no other."""
    held = world.held[name]
    there = world.keys(name)
    found = {damage.finding.key for damage in scrub(world.stores[name]).damaged} & there
    assert found == held.damage.keys() & there
    return "damage" if found else "clean"


def newest(world: World, name: str, ref: str) -> str:
    """The head of a ref if it is whole, else its newest ancestor that is."""
    held = world.held[name]
    head = held.head(ref)
    if head is None:
        return "none"
    usable = [root for root in world.model.lineage(head) if _is_usable(world, held, name, root)]
    readable = []
    for root in world.model.lineage(head):
        readable.append(root)
        if document_key(root) in held.damage or document_key(root) not in world.keys(name):
            break  # where it came from is only known from the log
    found, failure = tried(lambda: latest(world.stores[name], ref))
    if failure is not None:
        assert not set(usable) & set(readable), failure
        return failure.code
    assert found.root in usable
    if set(usable) & set(readable):
        assert found.root == next(root for root in readable if root in usable)
    return "head" if found.root == head else "ancestor"


def _is_usable(world: World, held: Holding, name: str, root: Digest) -> bool:
    there = world.keys(name)
    if document_key(root) not in there:
        return False
    closure = world.model.closure(root)
    return closure <= there and not closure & held.damage.keys()


def let_go(world: World, name: str, keep_last: int | None, kill: Kill | None = None) -> str:
    """Collect: the dry run says exactly what goes, and nothing goes that a ref, a pin or the policy keeps."""
    held = world.held[name]
    policy = Policy(()) if keep_last is None else Policy((KeepLast(keep_last),))
    dry, failure = tried(lambda: collect(world.stores[name], policy))
    if failure is not None:
        assert isinstance(failure, RefusedError)
        assert held.damage, failure
        before = world.keys(name)
        _, told = world.do(lambda store: collect(store, policy, delete=True), [name], None)
        assert told == "refused"
        assert not any(digest_of_key(key) for key in before - world.keys(name))
        return told
    planned = dry.plan
    before = world.keys(name)
    needed = _needed(world, held, keep_last)
    going = {stat.key for stat in planned.deletions}
    for root, shards in needed.items():
        assert going.isdisjoint(world.model.closure(root, shards)), "what is to be kept is planned to go"

    def work(store: Store) -> Collection:
        return collect(store, policy, delete=True)

    done, told = world.do(work, [name], kill, deleting=True)
    after = world.keys(name)
    gone = {key for key in before - after if not key.startswith(("leases/", "gc/"))}
    assert gone <= going, "something went that was not planned"
    if done is not None:
        assert gone == going
        assert {stat.key for stage in done.plan.stages for stat in stage} == going
    world.let_go(name, gone)
    for root in world.roots(name):
        _shrink(world, held, root, after, needed)
    for ref in held.refs:
        head = held.head(ref)
        for past in [] if head is None else world.model.lineage(head):
            assert document_key(past) in after or document_key(past) not in before, "history went"
    world.settle(name)
    return f"{told}, {'something went' if gone else 'nothing went'}"


def _shrink(world: World, held: Holding, root: Digest, there: set[str], needed: dict[Digest, set[int] | None]) -> None:
    """Tell the model what is left of a checkpoint after a collection: all of it, what is pinned, or nothing."""
    present = range(len(world.model.truths[root].shards)) if root in held.whole else held.partial[root]
    intact = {i for i in present if not world.model.closure(root, {i}) - there - held.damage.keys()}
    if intact == set(present):
        return
    kept = needed.get(root, set())
    assert kept is not None, "a checkpoint that is to be kept lost something"
    assert kept <= intact
    held.whole.discard(root)
    held.partial.pop(root, None)
    if kept:
        held.partial[root] = kept
    elif document_key(root) in there:
        assert retired_key(root) in there, "a closure went without a word"


def _needed(world: World, held: Holding, keep_last: int | None) -> dict[Digest, set[int] | None]:
    """The roots, or shards of them (None: all), that a collection may not touch; what is not whole anyway left out."""
    found: dict[Digest, set[int] | None] = {}
    for root, shards in held.pins.values():
        here = held.partial.get(root, set()) if root not in held.whole else None
        kept = here if shards is None else set(shards) if here is None else here & set(shards)
        if kept is None or found.get(root, set()) is None:
            found[root] = None
        else:
            found[root] = kept | (found.get(root) or set())
    for ref in held.refs:
        head = held.head(ref)
        if head is not None:
            present = [root for root in world.model.lineage(head) if root in held.whole]
            found |= dict.fromkeys(present[:keep_last])
    return found
