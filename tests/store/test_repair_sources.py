"""Where a repair gets good bytes from: stores in their order, remotes, a live state, and other packs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import BackendError, UsageError
from ckptstore.format.keys import document_key
from ckptstore.repairs.repair import LIVE, repair
from ckptstore.store import Store
from tests.support.damages import World, clear, distant, flip, shard_states, sizes, write
from tests.support.distant import Distant
from tests.support.faulty import FaultyBackend

# -- where it comes from ----------------------------------------------------------------------------------------------


def test_sources_are_asked_in_their_order_and_a_liar_is_found_out(world: World) -> None:
    """What one gives that has not the right digest is never stored; the next one is asked."""
    key = world.kinds()["chunk"][0]
    clear(world.file(key))
    liar = FaultyBackend(world.open("far").backend)
    liar.flip_bit(key, 12)
    done = repair(world.open(), world.second, [Store(liar), world.open("copy")])
    assert [item.source for item in done.healed] == [world.open("copy").url]
    assert done.notes == (f"{liar.url}: 1 of the keys asked for is damaged there, too",)
    assert world.open().verify(world.second).ok
    clear(world.file(key))
    assert not repair(world.open(), world.second, [Store(liar)]).ok
    assert not world.file(key).exists()


def test_a_source_that_cannot_be_reached_is_told_once_and_not_asked_again(world: World) -> None:
    for key in sizes(world.open(), world.second):
        clear(world.file(key))
    away = FaultyBackend(Distant())
    asked: list[str] = []

    def fail(key: str) -> None:
        asked.append(key)
        raise BackendError(f"reading key {key}", "no route to host")

    for operation in ("get", "readback", "list", "stat"):
        away.before(operation, fail)
    done = repair(world.open(), world.second, [Store(away), world.open("far")])
    assert done.ok
    assert len(done.notes) == 1
    assert "no route to host" in done.notes[0]
    assert len(asked) == 1


def test_two_partial_sources_make_a_whole(world: World, tmp_path: Path) -> None:
    parts = [ckptstore.open(tmp_path / f"part{shard}", create=True) for shard in (0, 1)]
    for shard, part in enumerate(parts):
        ckptstore.pull(world.open("far"), part, world.second, shards=[shard])
    for key in sizes(world.open(), world.second):
        clear(world.file(key))
    done = repair(world.open(), world.second, parts)
    assert done.ok
    assert {item.source for item in done.healed} == {part.url for part in parts}


def test_remotes_are_asked_after_the_sources_and_only_if_they_may(world: World, tmp_path: Path) -> None:
    store = world.open()
    ckptstore.add_remote(store, "gone", str(tmp_path / "nowhere"), check=False)
    ckptstore.add_remote(store, "vault", str(world.far))
    key = world.kinds()["pack"][0]
    clear(world.file(key))
    assert not repair(world.open(), world.second, remotes=False).ok
    done = repair(world.open(), world.second)
    assert done.ok
    assert [item.source for item in done.healed] == ["remote vault"]
    assert len(done.notes) == 1
    assert done.notes[0].startswith("remote gone: ")


def test_damaged_remotes_do_not_stop_what_sources_can_give(world: World) -> None:
    (world.near / "config.toml").write_text("[remotes\n")
    clear(world.file(world.kinds()["pack"][0]))
    done = repair(world.open(), world.second, [world.open("far")])
    assert done.ok
    assert "config.toml" in done.notes[0]


def test_a_store_is_no_source_of_itself(world: World) -> None:
    with pytest.raises(UsageError, match="is to be repaired"):
        repair(world.open(), world.second, [world.open()])


def test_a_read_only_source_will_do(world: World) -> None:
    class Reading:
        def __init__(self, backend: MemoryBackend | DirectoryBackend) -> None:
            for name in ("url", "traits", "get", "readback", "stat", "present", "list"):
                setattr(self, name, getattr(backend, name))

    key = world.kinds()["chunk"][0]
    clear(world.file(key))
    source = Store(Reading(DirectoryBackend(world.far)))  # type: ignore[arg-type]
    assert repair(world.open(), world.second, [source]).ok


# -- from a live state ------------------------------------------------------------------------------------------------


def live() -> ckptstore.TrainingState:
    """Shard 0 as it was saved last."""
    return shard_states(2.0)[0]


def test_a_live_state_gives_its_tensors_chunk_by_chunk(world: World) -> None:
    closure = world.open().closure(world.second, [0], files=False)
    keys = list(closure.objects)
    assert any(need.slots for need in closure.objects.values())
    for key in keys:
        clear(world.file(key))
    done = repair(world.open(), world.second, state=live())
    assert done.ok
    assert {item.key for item in done.healed} == set(keys)
    assert all(LIVE in item.source for item in done.healed)
    assert world.open().verify(world.second).ok


def test_a_live_state_that_is_the_saved_one_gives_pages_too(world: World) -> None:
    view = world.open().closure(world.second).shards[0]
    keys = [document_key(page.digest) for page in view.shard.pages]
    for key in keys:
        clear(world.file(key))
    assert repair(world.open(), world.second, state=live()).ok
    fresh = world.open()
    shard = document_key(view.digest)
    fresh.restore(world.second, state := shard_states(5.0)[0], shard=0)  # now its generators are the stored ones
    clear(world.file(shard))
    assert repair(world.open(), world.second, state=state).ok
    assert world.open().verify(world.second).ok


def test_a_live_state_that_has_moved_on_gives_only_what_is_the_same(world: World) -> None:
    """Proven by digest: the weight has changed, the norm has not."""
    closure = world.open().closure(world.second, [0], files=False)
    pack = next(key for key, need in closure.objects.items() if need.slots)
    chunk = next(key for key, need in closure.objects.items() if not need.slots)
    for key in (pack, chunk):
        clear(world.file(key))
    moved = shard_states(3.0)[0]
    before = [tensor.clone() for _, tensor in moved.tensors().values()]
    done = repair(world.open(), world.second, state=moved)
    assert [item.key for item in done.healed] == [pack]
    assert {finding.key for finding in done.findings} == {chunk}
    assert all(map(torch.equal, before, [tensor for _, tensor in moved.tensors().values()]))


def test_a_live_state_helps_a_store_behind_a_network(world: World) -> None:
    """Documents are fetched in advance there, before it is known where they belong."""
    store = distant(world)
    view = store.closure(world.second).shards[0]
    for key in (document_key(view.shard.pages[0].digest), next(iter(store.closure(world.second, [0]).objects))):
        store.backend.delete(key)
    done = repair(Store(store.backend), world.second, state=live())
    assert done.ok
    assert all(str(item.place) for item in done.healed)


# -- packs ------------------------------------------------------------------------------------------------------------


def pack_of(world: World, store: Store) -> tuple[str, list[tuple[int, int]]]:
    """A pack with several chunks that is only in the second checkpoint, and where its chunks lie."""
    key = world.kinds()["pack"][0]
    slots = store.closure(world.second).objects[key].slots
    assert len(slots) > 1
    return key, sorted((offset, length) for offset, length, _ in slots)


def test_two_damaged_copies_of_a_pack_make_a_good_one(world: World) -> None:
    key, slots = pack_of(world, world.open())
    flip(world.file(key), slots[0][0])
    flip(world.far / key, slots[-1][0])
    done = repair(world.open(), world.second, [world.open("far")])
    assert done.ok
    assert "what is left of it here" in done.healed[0].source
    assert world.open().verify(world.second).ok


def test_a_cut_pack_gives_the_chunks_that_it_still_has(world: World) -> None:
    key, slots = pack_of(world, world.open())
    write(world.file(key), world.file(key).read_bytes()[: slots[-1][0] + 1])
    write(world.far / key, b"\0" * slots[0][1] + (world.far / key).read_bytes()[slots[0][1] :])
    assert repair(world.open(), world.second, [world.open("far")]).ok


def test_chunks_of_a_pack_come_from_packs_of_other_checkpoints(world: World) -> None:
    """The weight of the second checkpoint is new; what did not change lies in a pack of the first as well."""
    key, slots = pack_of(world, world.open())
    need = world.open().closure(world.second).objects[key]
    first = world.open().closure(world.first)
    shared = {chunk for other in first.objects.values() for _, _, chunk in other.slots}
    spoiled = next(offset for offset, _, chunk in need.slots if chunk in shared)
    flip(world.file(key), spoiled)
    done = repair(world.open(), world.second)
    assert done.ok
    assert "other packs here" in done.healed[0].source
    flip(world.file(key), next(offset for offset, _, chunk in need.slots if chunk not in shared))
    assert not repair(world.open(), world.second).ok
    assert slots
