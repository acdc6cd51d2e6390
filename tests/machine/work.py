"""What people and their training do with stores, done to a world."""

from __future__ import annotations

import ckptstore
from ckptstore.errors import CommitAbortedError, ConflictError
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.pinning import pin as put_pin
from ckptstore.pinning import unpin as remove_pins
from ckptstore.store import Store
from tests.machine.model import Harm, Truth
from tests.machine.states import Recipe, live
from tests.machine.world import Kill, World


def save(world: World, name: str, ref: str, recipe: Recipe, shards: int, kill: Kill | None = None) -> str:
    """Save the next step of a ref, as one shard or as two."""
    held = world.held[name]
    parent = held.head(ref)
    step = 1 + (world.model.truths[parent].step if parent is not None else 0)
    lives = [live(recipe, None if shards == 1 else index) for index in range(shards)]
    truth = Truth(step, parent, tuple(one.content() for one in lives))

    def work(store: Store) -> Digest:
        attempt = store.begin(ref)
        receipts = [
            store.save_shard(one.state, attempt, step=step, index=index, count=shards)
            for index, one in enumerate(lives)
        ]
        return store.commit(attempt, receipts)

    trusted = {key for key in held.damage if world.stores[name].objects.is_verified(key)}
    root, told = world.do(work, [name], kill)
    if root is None:
        root = world.moved(name, ref)
        if root is not None:
            assert kill is not None, "a save that failed moved its ref"
            checkpoint = world.stores[name].checkpoint(root)
            assert (checkpoint.step, checkpoint.parent) == (step, parent)
    if root is not None:
        assert world.model.truths.setdefault(root, truth) == truth
        world.named(held, ref, root)
        held.whole.add(root)
    world.settle(name)
    if root is not None:
        # What this process did not see itself is never taken for what is to be stored.
        unhealed = {key for key in world.model.closure(root) if key in held.damage}
        assert unhealed <= {key for key in trusted if key in held.damage and held.damage[key][0] is Harm.FLIPPED}
    return told


def give_up(world: World, name: str, ref: str, recipe: Recipe, kill: Kill | None = None) -> str:
    """Of two workers one has no shard: nobody has a checkpoint."""

    def work(store: Store) -> None:
        attempt = store.begin(ref)
        store.save_shard(live(recipe, 0).state, attempt, step=10**6, index=0, count=2)
        store.give_up(attempt, index=1, count=2, step=10**6, reason="out of memory")
        try:
            store.commit(attempt, count=2, deadline=0.0)
        except CommitAbortedError:
            return
        raise AssertionError("half a state was committed")

    _, told = world.do(work, [name], kill)
    assert world.moved(name, ref) is None
    world.settle(name)
    return told


def push(
    world: World, source: str, target: str, root: Digest, ref: str | None, pull: bool, kill: Kill | None = None
) -> str:
    """Copy a whole checkpoint; push and pull are the same thing seen from two sides."""
    held = world.held[target]
    head = None if ref is None else held.head(ref)
    conflict = head is not None and head not in world.model.lineage(root)
    carry = ckptstore.pull if pull else ckptstore.push

    def work(here: Store, there: Store) -> object:
        try:
            done = carry(here, there, root, ref=ref)
        except ConflictError:
            assert conflict
            return None
        assert not conflict
        return done

    done, told = world.do(work, [source, target], kill)
    if done is not None:
        held.whole.add(root)
        if ref is not None:
            world.named(held, ref, root)
    elif ref is not None and (moved := world.moved(target, ref)) is not None:
        assert kill is not None
        assert moved == root
        world.named(held, ref, root)
        held.whole.add(root)
    world.settle(source)
    world.settle(target)
    if root in held.whole and (done is not None or (ref is not None and held.head(ref) == root and kill)):
        assert held.damage.keys().isdisjoint(world.model.closure(root))
    if done is not None:
        there = world.keys(target)
        for past in world.model.lineage(root):
            if document_key(past) not in world.keys(source) or document_key(past) in world.held[source].damage:
                break
            assert document_key(past) in there
    return told


def pull_shard(world: World, source: str, target: str, root: Digest, shard: int, kill: Kill | None = None) -> str:
    """Copy one shard of a checkpoint."""
    before = world.pins(target)

    def work(here: Store, there: Store) -> object:
        return ckptstore.pull(here, there, root, shards=[shard])

    done, told = world.do(work, [source, target], kill)
    held = world.held[target]
    new = {nonce: pin for nonce, pin in world.pins(target).items() if nonce not in before}
    assert set(new.values()) <= {(root, (shard,))}
    assert len(new) == 1 if done is not None else len(new) <= 1
    held.pins |= new
    if done is not None:
        held.partial.setdefault(root, set()).add(shard)
    world.settle(source)
    world.settle(target)
    if done is not None:
        assert held.damage.keys().isdisjoint(world.model.closure(root, {shard}))
    return told


def move(world: World, name: str, ref: str, root: Digest | None, kill: Kill | None = None) -> str:
    """Let a ref name another root, an older one perhaps, or nothing."""
    held = world.held[name]
    before = world.stores[name].refs.head(ref)

    def work(store: Store) -> object:
        return store.move_ref(ref, root, held.head(ref))

    done, told = world.do(work, [name], kill)
    after = world.stores[name].refs.head(ref)
    if after != before:  # also where it names what it named, or nothing, once more
        assert after is not None
        assert after.root == root
        world.named(held, ref, root)
    assert done is None or after != before
    return told


def pin(world: World, name: str, root: Digest, shards: tuple[int, ...] | None, kill: Kill | None = None) -> str:
    """Ask a store to keep a root, or some of its shards."""
    before = world.pins(name)
    done, told = world.do(lambda store: put_pin(store, root, shards=shards), [name], kill)
    new = {nonce: kept for nonce, kept in world.pins(name).items() if nonce not in before}
    assert set(new.values()) <= {(root, shards)}
    assert len(new) == 1 if done is not None else len(new) <= 1
    world.held[name].pins |= new
    return told


def unpin(world: World, name: str, number: int) -> None:
    """Take the pins on a checkpoint away again."""
    pins = world.held[name].pins
    root, _ = list(pins.values())[number % len(pins)]
    remove_pins(world.stores[name], root)
    for nonce in [nonce for nonce, (pinned, _) in pins.items() if pinned == root]:
        del pins[nonce]
