"""How a scrub goes on where another one ended: ages, budgets, and the notes that are kept."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest, Receipt
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import MalformedError, ReadOnlyError, UsageError
from ckptstore.format import values
from ckptstore.format.keys import STORE_KEY, document_key, receipt_key
from ckptstore.readbacks import notes as notebook
from ckptstore.readbacks.durability import ledger
from ckptstore.readbacks.notes import notes_about, subject_of
from ckptstore.readbacks.scrub import scrub
from ckptstore.remotes import add_remote
from ckptstore.store import Store
from tests.support.distant import Distant, made
from tests.support.faulty import FaultyBackend
from tests.support.scrubbing import (
    DAY,
    NOTES,
    counted,
    found,
    in_child,
    notes,
    path_of,
    put,
    read_by,
    replace_time,
    set_back,
    steps,
    stored,
)
from tests.support.training import commit_state

# -- ages --------------------------------------------------------------------------------------------------------------


def test_what_was_read_back_recently_is_left_out(disk_store: Store) -> None:
    roots = steps(disk_store, 2)
    first = scrub(disk_store)
    counting, reader = counted(disk_store)
    done = scrub(reader, max_age=DAY)
    assert counting.total("readback").calls == 0
    assert (done.recent_keys, done.read_keys) == (first.read_keys, 0)
    assert done.unreferenced_keys == 0
    looked = counting.by_key("get", prefix="documents/")
    assert looked.keys() == {key for key in stored(disk_store) if key.startswith("documents/")}
    assert {tally.calls for key, tally in looked.items() if key != document_key(roots[1])} == {1}
    set_back(disk_store, timedelta(days=2))
    assert scrub(disk_store, max_age=DAY).read_keys == first.read_keys


def test_receipts_of_verify_push_and_pull_count_key_by_key(disk_store: Store) -> None:
    roots = steps(disk_store, 3)
    put(disk_store, disk_store.verify(roots[0]).receipt(disk_store.url))
    keys = {key for key, _ in disk_store.closure(roots[0]).sizes()}
    read = read_by(lambda store: scrub(store, max_age=DAY), disk_store)
    assert keys.isdisjoint(read)
    assert stored(disk_store).keys() == keys | read.keys()


def test_a_receipt_about_another_store_counts_for_nothing(disk_store: Store, tmp_path: Path) -> None:
    roots = steps(disk_store, 1)
    ckptstore.push(disk_store, ckptstore.open(tmp_path / "far", create=True), roots[0])
    done = scrub(disk_store, max_age=DAY)
    assert done.recent_keys == 0


def test_what_is_dated_in_the_future_is_not_recent(disk_store: Store) -> None:
    """A clock that was ahead, or is set back now."""
    roots = steps(disk_store, 1)
    put(disk_store, disk_store.verify(roots[0]).receipt(disk_store.url))
    scrub(disk_store)
    set_back(disk_store, -timedelta(hours=1))
    for receipt in disk_store.receipts(roots[0]):
        put(disk_store, replace_time(receipt, (datetime.now(UTC) + timedelta(days=400)).strftime("%Y-%m-%dT%H:%M:%SZ")))
    for stat in list(disk_store.backend.list(f"receipts/{roots[0].hex}/")):
        if b"verify" in disk_store.backend.get(stat.key) and str(datetime.now(UTC).year).encode() in (
            disk_store.backend.get(stat.key)
        ):
            disk_store.backend.delete(stat.key)
    read = read_by(lambda store: scrub(store, max_age=DAY * 365), disk_store)
    assert read.keys() == stored(disk_store).keys()
    assert read_by(lambda store: scrub(store, max_age=DAY), disk_store) == {}


def test_what_was_read_longest_ago_comes_first(disk_store: Store) -> None:
    roots = steps(disk_store, 3)
    for days, root in ((5, roots[1]), (9, roots[2]), (1, roots[0])):
        at = (datetime.now(UTC) - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")
        put(disk_store, replace_time(disk_store.verify(root).receipt(disk_store.url), at))
    order: list[str] = []
    faulty = FaultyBackend(disk_store.backend)
    faulty.before("readback", order.append)
    scrub(Store(faulty))
    mine = [{key for key, _ in disk_store.closure(root).sizes()} for root in roots]
    own = [mine[2] - mine[1] - mine[0], mine[1] - mine[0], mine[0]]
    last = [max(order.index(key) for key in keys) for keys in own]
    first = [min(order.index(key) for key in keys) for keys in own]
    threads = 2 * disk_store.backend.traits.threads
    never = [order.index(key) for key in order if not any(key in keys for keys in mine)]
    assert max(never) < first[0] + threads
    assert last[0] < first[1] + threads
    assert last[1] < first[2] + threads


def test_reading_from_a_cache_is_no_readback_but_takes_its_turn(disk_store: Store) -> None:
    """Where nothing can be read from the medium, each scrub still gets to what it did not get to before."""
    from ckptstore.backends.protocol import ReadbackMethod

    class Cached(FaultyBackend):
        def readback(self, key: str, length: int | None = None) -> tuple[bytes, ReadbackMethod]:
            return super().readback(key, length)[0], ReadbackMethod.CACHED

    steps(disk_store, 3)
    sizes = stored(disk_store)
    half = sum(sizes.values()) // 2
    seen: list[set[str]] = []
    for _ in range(2):
        backend, keys = Cached(disk_store.backend), set[str]()
        backend.before("readback", keys.add)
        done = scrub(Store(backend), max_age=DAY, max_bytes=half)
        seen.append(keys)
        assert done.oldest is None
        assert done.never_keys == len(sizes)
        time.sleep(1.1)  # the times of receipts are whole seconds
    assert seen[0] | seen[1] >= sizes.keys()


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 1000, 400_000, 800_000])
def test_a_budget_of_bytes_is_passed_by_less_than_one_key(disk_store: Store, budget: int) -> None:
    steps(disk_store, 3)
    sizes = stored(disk_store)
    counting, reader = counted(disk_store)
    done = scrub(reader, max_bytes=budget)
    assert budget <= counting.total("readback").bytes < budget + max(sizes.values())
    assert done.read_bytes == counting.total("readback").bytes
    assert done.ended_by == "bytes"
    assert (done.left_keys, done.left_bytes) == (
        len(sizes) - done.read_keys,
        sum(sizes.values()) - done.read_bytes,
    )
    assert done.unreferenced_keys is None


def test_a_budget_that_is_enough_does_not_end_it(disk_store: Store) -> None:
    steps(disk_store, 2)
    done = scrub(disk_store, max_bytes=sum(stored(disk_store).values()), max_seconds=3600)
    assert (done.ended_by, done.left_keys, done.unreferenced_keys) == ("", 0, 0)


def test_budget_by_budget_the_whole_store_is_read_and_nothing_twice(disk_store: Store) -> None:
    steps(disk_store, 3)
    sizes = stored(disk_store)
    read: dict[str, int] = {}
    for _ in range(50):
        counting, reader = counted(disk_store)
        done = scrub(reader, max_age=DAY, max_bytes=300_000)
        for key, tally in counting.by_key("readback").items():
            read[key] = read.get(key, 0) + tally.calls
        if not done.left_keys:
            break
    assert read == dict.fromkeys(sizes, 1)


def test_a_budget_of_time_ends_it_inside_one_checkpoint(disk_store: Store) -> None:
    module = nn.ParameterList([nn.Parameter(torch.full((300, 300), float(n))) for n in range(40)])
    commit_state(disk_store, "main", [ckptstore.TrainingState(model=module)], 1)
    faulty = FaultyBackend(disk_store.backend)
    faulty.before("readback", lambda _key: time.sleep(0.05))
    done = scrub(Store(faulty), max_seconds=0.3)
    assert done.ended_by == "duration"
    assert done.left_keys > 0
    assert scrub(disk_store, max_age=DAY).read_keys == done.left_keys


def test_over_a_network_each_document_is_read_once_also_for_the_plan() -> None:
    store = Store(made(Distant()))
    steps(store, 4)
    assert any(receipt.operation == "verify" for receipt in store.receipts(store.resolve("main")))
    read = read_by(lambda reader: scrub(reader, max_age=DAY), store)
    assert {calls for key, calls in read.items() if key.startswith(("documents/", "objects/"))} == {1}
    assert not any(key.startswith("objects/") for key in read), "the commits have read those back"


def test_a_plan_takes_no_more_than_a_part_of_the_budget(disk_store: Store) -> None:
    roots = steps(disk_store, 6)
    for root in roots:
        put(disk_store, disk_store.verify(root).receipt(disk_store.url))
    for stat in list(disk_store.backend.list("documents/")):
        assert stat.size < 100_000
    counting, reader = counted(disk_store)
    done = scrub(reader, max_bytes=60_000)
    largest = max(stored(disk_store).values())
    documents = counting.total("get", prefix="documents/").bytes
    assert documents + counting.total("readback").bytes < 60_000 + largest + 40_000
    assert done.read_keys > 0


@pytest.mark.parametrize("limit", [{"max_bytes": 0}, {"max_seconds": 0.0}, {"max_age": -1.0}, {"record_every": 0}])
def test_limits_that_mean_nothing_are_refused(store: Store, limit: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(limit))):
        scrub(store, **limit)  # type: ignore[arg-type]


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(6))
def test_a_scrub_that_is_killed_anywhere_is_gone_on_with(disk_store: Store, seed: int) -> None:
    """As below, at any instant, again and again until it comes to its end."""
    module = nn.ParameterList([nn.Parameter(torch.full((300, 300), float(n))) for n in range(20)])
    commit_state(disk_store, "main", [ckptstore.TrainingState(model=module)], 1)
    chance = random.Random(seed)

    def scrub_slowly() -> None:
        slow = FaultyBackend(disk_store.backend)
        slow.before("readback", lambda _key: time.sleep(0.01))
        assert scrub(Store(slow), max_age=DAY, record_every=400_000).damaged == ()

    for _ in range(30):
        child = in_child(scrub_slowly)
        time.sleep(chance.uniform(0.01, 0.3))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert scrub(disk_store, max_age=DAY).damaged == ()
    assert disk_store.verify("main").ok


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 3, 8, 15, 22])
def test_a_scrub_that_is_killed_is_gone_on_with(disk_store: Store, nth: int) -> None:
    """At most what a note waits for, and the keys under way, are read again."""
    module = nn.ParameterList([nn.Parameter(torch.full((300, 300), float(n))) for n in range(20)])
    commit_state(disk_store, "main", [ckptstore.TrainingState(model=module)], 1)
    sizes = stored(disk_store)
    log = path_of(disk_store, "..") / "log"

    def scrub_until_killed() -> None:
        seen = 0

        def kill(key: str) -> None:
            nonlocal seen
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            with log.open("a") as file:
                file.write(f"{key}\n")

        faulty = FaultyBackend(disk_store.backend)
        faulty.after("readback", kill)
        scrub(Store(faulty), record_every=800_000)

    child = in_child(scrub_until_killed)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    before = set(log.read_text().split()) if log.exists() else set()
    again = read_by(lambda store: scrub(store, max_age=DAY), ckptstore.open(disk_store.url))
    assert before | again.keys() == sizes.keys()
    twice = sum(sizes[key] for key in before & again.keys())
    assert twice <= 800_000 + (2 * disk_store.backend.traits.threads + 1) * max(sizes.values())


def test_an_interrupt_loses_nothing_that_was_read(disk_store: Store) -> None:
    steps(disk_store, 3)
    faulty = FaultyBackend(disk_store.backend)

    def interrupt(_key: str) -> None:
        raise KeyboardInterrupt

    faulty.before("readback", interrupt, nth=12)
    with pytest.raises(KeyboardInterrupt):
        scrub(Store(faulty))
    assert sum(len(note.keys) for note in notes(disk_store)) > 0


def test_damage_is_never_noted_as_read(disk_store: Store) -> None:
    roots = steps(disk_store, 1)
    key = min(disk_store.closure(roots[0]).objects)
    faulty = FaultyBackend(disk_store.backend)
    faulty.flip_bit(key)
    scrub(Store(faulty))
    assert all(key not in note.keys for note in notes(disk_store))
    assert read_by(lambda store: scrub(store, max_age=DAY), disk_store) == {key: 1}


def test_a_checkpoint_never_counts_as_verified_by_a_part_of_a_scrub(disk_store: Store) -> None:
    """Nor by a whole one: only the ledger, which looks at each key, adds notes up."""
    roots = steps(disk_store, 1)
    done = scrub(disk_store, max_bytes=1000)
    assert done.left_keys
    assert disk_store.readbacks(roots[0]) == []
    found = ledger(disk_store)
    assert found.roots[0].verified(found.at) == 0
    done = scrub(disk_store, max_age=DAY)
    assert disk_store.readbacks(roots[0]) == []
    found = ledger(disk_store)
    assert found.roots[0].verified(found.at) == (1 if done.method.value in ("direct", "fsync-dropped") else 0)
    assert found.findings == ()


def test_notes_that_newer_ones_made_idle_are_removed(disk_store: Store) -> None:
    steps(disk_store, 2)
    for _ in range(4):
        scrub(disk_store, record_every=200_000)
        set_back(disk_store, timedelta(days=1))
    keys = [key for note in notes(disk_store) for key in note.keys]
    assert sorted(keys) == sorted(stored(disk_store))
    scrub(disk_store, max_bytes=1)
    assert {key for note in notes(disk_store) for key in note.keys} == stored(disk_store).keys()


def test_a_store_that_cannot_be_written_is_read_and_that_is_told(disk_store: Store, tmp_path: Path) -> None:
    steps(disk_store, 1)
    faulty = FaultyBackend(disk_store.backend)
    faulty.fail("create", ReadOnlyError("store", "mounted read-only"))
    done = scrub(Store(faulty))
    assert done.read_keys == len(stored(disk_store))
    ((url, why),) = done.failures
    assert (url, "read-only" in why) == (disk_store.url, True)
    assert notes(disk_store) == []
    keeper = ckptstore.open(tmp_path / "keeper", create=True)
    scrub(Store(faulty), keeper=keeper)
    assert scrub(Store(faulty), keeper=keeper, max_age=DAY).read_keys == 0, "notes in another store count as well"


def test_a_remote_is_known_here_by_its_notes(disk_store: Store, tmp_path: Path) -> None:
    roots = steps(disk_store, 2)
    far = ckptstore.open(tmp_path / "far", create=True)
    ckptstore.push(disk_store, far, roots[1], ref="main")
    add_remote(disk_store, "far", far.url)
    done = scrub(far, keeper=disk_store)
    assert far.id is not None
    assert len(list(notes_about(disk_store.backend, far.id, lambda _: None))) >= 1
    found = ledger(disk_store, [roots[1]])
    (copies,) = found.roots
    if done.method.value in ("direct", "fsync-dropped"):
        methods = {
            evidence.readback.receipt.operation
            for item in copies.keys
            for copy in item.copies
            if (evidence := copy.evidence) is not None and not copy.holder.here
        }
        assert methods <= {"push", "scrub"}
        assert copies.verified(found.at) == 1


def test_a_header_that_cannot_be_read_is_found_and_nothing_is_noted(disk_store: Store) -> None:
    steps(disk_store, 1)
    faulty = FaultyBackend(disk_store.backend)
    faulty.flip_bit(STORE_KEY, 40)
    done = scrub(Store(faulty))
    assert STORE_KEY in found(done)
    assert done.failures


@pytest.mark.parametrize(
    "details",
    [
        None,
        {"store": "ab" * 16},
        {"store": 1, "by": "", "max_age_seconds": 0, "objects": b"", "documents": b"", "records": []},
        {"store": "ab" * 16, "by": "", "max_age_seconds": -1, "objects": b"", "documents": b"", "records": []},
        {"store": "ab" * 16, "by": "", "max_age_seconds": 0, "objects": b"a" * 31, "documents": b"", "records": []},
        {"store": "ab" * 16, "by": "", "max_age_seconds": 0, "objects": "", "documents": b"", "records": []},
        {"store": "ab" * 16, "by": "", "max_age_seconds": 0, "objects": b"", "documents": b"", "records": "x"},
    ],
)
def test_what_is_no_note_tells_nothing(store: Store, details: dict[str, object] | None) -> None:
    steps(store, 1)
    assert store.id is not None
    typed = None if details is None else values.to_json(details)
    receipt = Receipt("scrub", subject_of(store.id), None, 0, 0, 0, "direct", "2026-01-01T00:00:00Z", "x", (), typed)
    with pytest.raises(MalformedError):
        notebook.note_of(Digest.of(receipt.encode()), receipt)
    put(store, receipt)
    assert notes(store) == []
    assert scrub(store, max_age=DAY).recent_keys == 0


def test_a_note_about_another_store_tells_nothing(store: Store) -> None:
    other = Store(made(MemoryBackend()))
    steps(store, 1)
    scrub(other)
    for stat in list(other.backend.list(NOTES)):
        data = other.backend.get(stat.key)
        assert store.id is not None
        store.backend.create(receipt_key(subject_of(store.id), Digest.of(data)), data)
    assert scrub(store, max_age=DAY).recent_keys == 0
