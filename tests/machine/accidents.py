"""What happens to stores: damage to keys and records, and a catalogue that is lost."""

from __future__ import annotations

from ckptstore.errors import CorruptError
from ckptstore.format.keys import digest_of_key, ref_key
from tests.machine.model import Harm
from tests.machine.world import World, tried


def harm(world: World, name: str, number: int, harm: Harm) -> str:
    """Damage the ``number``-th object or document."""
    held = world.held[name]
    keys = [key for key in world.keys(name) if digest_of_key(key) is not None and key not in held.damage]
    if not keys:
        return "nothing there"
    key = keys[number % len(keys)]
    raw = world.raw[name]
    data = raw.get(key)
    raw.delete(key)
    now: bytes | None = None
    if harm is not Harm.GONE:
        at = number % len(data)
        now = data[:at] if harm is Harm.CUT else data[:at] + bytes([data[at] ^ 1 << number % 8]) + data[at + 1 :]
        raw.create(key, now)
    held.damage[key] = (harm, now)
    return key


def harm_ref(world: World, name: str, ref: str, number: int) -> None:
    """Damage a record of a ref, look at it from everywhere, and put it back."""
    held, raw, store = world.held[name], world.raw[name], world.stores[name]
    head = store.refs.head(ref)
    assert head is not None
    generation = number % head.generation + 1
    key = ref_key(ref, generation)
    data = raw.get(key)
    raw.delete(key)
    at = number % len(data)
    raw.create(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    found, _ = store.refs.findings(ref)
    assert key in {finding.key for finding in found}
    assert {finding.key for finding in found} <= {key, ref_key(ref, max(1, generation - 1))}
    if generation == head.generation:
        before = world.keys(name)
        for use in (lambda: store.head(ref), lambda: store.begin(ref), lambda: store.move_ref(ref, None, None)):
            _, failure = tried(use)
            assert isinstance(failure, CorruptError), "a damaged head was believed"
            assert key in str(failure)
        assert world.keys(name) == before
    raw.delete(key)
    raw.create(key, data)
    assert store.head(ref) == held.head(ref)


def drop_catalogue(world: World, name: str) -> str:
    """Throw the catalogue away and make it anew: it says the same."""
    assert world.folder is not None
    store, path = world.stores[name], world.folder / name
    with store.catalogue() as catalogue:
        catalogue.update()
        before, gone = catalogue.rows(), catalogue.stale().gone
    for file in path.glob("catalogue.sqlite*"):
        file.unlink()
    with store.catalogue() as catalogue:
        catalogue.rebuild()
        after, stale = catalogue.rows(), catalogue.stale()
    if not world.held[name].damage:
        assert not stale
        if not gone:  # what a collection or a scrub deleted is in the old one still, which says so
            assert after == before
    return "made anew"
