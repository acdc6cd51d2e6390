"""Push and pull to what may lie, lag, go away or change what it is given (faults B066, B067, B069, B074)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.counting import OPERATIONS, CountingBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.protocol import Buffer
from ckptstore.errors import (
    BackendError,
    CkptStoreError,
    ConflictError,
    CorruptError,
    NoSpaceError,
    NotFoundError,
    ReadOnlyError,
    RefusedError,
)
from ckptstore.format.keys import document_key
from ckptstore.store import Store
from tests.support.distant import Distant, Framing, Liar, SignedFraming, made
from tests.support.faulty import FaultyBackend
from tests.support.pairs import states
from tests.support.training import commit_state


@pytest.fixture
def root(store: Store) -> Digest:
    return commit_state(store, "main", states(), 1)


@pytest.fixture
def far(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "far", create=True)


@pytest.fixture
def distant() -> MemoryBackend:
    return made(Distant())


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, in seconds; none is waited for."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


class TestHints:
    """What a HEAD or a listing says costs requests if it is wrong, and nothing else."""

    @pytest.mark.parametrize("there", [True, False])
    @pytest.mark.parametrize("make", [MemoryBackend, Distant])
    def test_a_lie_does_not_change_what_arrives(
        self, store: Store, root: Digest, make: type[MemoryBackend], there: bool
    ) -> None:
        second = commit_state(store, "main", [states()[0], states(1.0)[1]], 2)
        liar = Liar(made(make()), there=there)
        for _ in range(2):
            done = ckptstore.push(store, Store(liar), second, ref="main")
            assert done.receipt.bytes_read == sum(size for _, size in store.closure(second).sizes())
        assert (done.sent_keys, done.sent_bytes) == (0, 0)
        report = Store(liar).verify("main")
        assert report.ok
        assert [ancestor.root for ancestor in report.ancestors] == [root]

    @pytest.mark.parametrize("there", [True, False])
    def test_a_lie_about_wrong_bytes_does_not_keep_them(
        self, store: Store, root: Digest, distant: MemoryBackend, there: bool
    ) -> None:
        key = max(store.closure(root).objects)
        distant.create(key, b"wrong")
        done = ckptstore.push(store, Store(Liar(distant, there=there)), root)
        assert (done.repaired_keys, done.present_keys) == (1, 0)
        assert distant.quarantined == ((key, b"wrong"),)
        assert Store(distant).verify(root).ok

    def test_an_endpoint_that_contradicts_itself_without_end_is_left(
        self, store: Store, root: Digest, distant: MemoryBackend, pauses: list[float]
    ) -> None:
        """It has no such key, and refuses to create it because it is there."""

        class Absurd(FaultyBackend):
            def create(self, key: str, data: Buffer) -> bool:
                return False if key.startswith("objects/") else super().create(key, data)

        with pytest.raises(CorruptError, match="not in the store"):
            ckptstore.push(store, Store(Absurd(distant)), root)
        assert sum(pauses) < 60


class TestRequests:
    def test_nothing_is_asked_about_one_key_that_can_be_asked_about_all(
        self, store: Store, root: Digest, distant: MemoryBackend
    ) -> None:
        counting = CountingBackend(distant)
        ckptstore.push(store, Store(counting), root)
        sizes = dict(store.closure(root).sizes())
        assert counting.total("stat", prefix="objects/").calls == counting.total("stat", prefix="documents/").calls == 0
        created, read = counting.by_key("create"), counting.by_key("readback", "get")
        assert {key: (created[key].calls, read[key].calls) for key in sizes} == dict.fromkeys(sizes, (1, 1))
        counting.reset()
        ckptstore.push(store, Store(counting), root)
        read = counting.by_key("readback", "get")
        assert {key: read[key].calls for key in sizes} == dict.fromkeys(sizes, 1)
        assert (
            counting.total("create", prefix="objects/").calls
            == counting.total("create", prefix="documents/").calls
            == 0
        )

    def test_documents_of_one_level_travel_together(self, store: Store, root: Digest, distant: MemoryBackend) -> None:
        shards = [document_key(digest) for digest in store.checkpoint(root).shards]
        barrier = threading.Barrier(len(shards), timeout=30)
        faulty = FaultyBackend(distant)
        for key in shards:
            faulty.before("create", lambda _: barrier.wait(), prefix=key)
        ckptstore.push(store, Store(faulty), root)
        assert not barrier.broken


class TestStale:
    """An endpoint that does not give at once what it was given."""

    def test_what_was_stored_is_looked_for_a_few_times(
        self, store: Store, root: Digest, distant: MemoryBackend, pauses: list[float]
    ) -> None:
        faulty = FaultyBackend(distant)
        for key in (max(store.closure(root).objects), document_key(root)):
            for nth in (1, 2):
                faulty.fail("readback", NotFoundError(f"key {key}"), nth=nth, prefix=key)
        assert ckptstore.push(store, Store(faulty), root, ref="main").repaired_keys == 0
        assert len(pauses) == 4
        assert Store(distant).verify("main").ok

    def test_what_never_appears_is_missing_in_the_end(
        self, store: Store, root: Digest, distant: MemoryBackend, pauses: list[float]
    ) -> None:
        key = max(store.closure(root).objects)
        faulty = FaultyBackend(distant)
        faulty.fail("readback", NotFoundError(f"key {key}"), prefix=key)
        with pytest.raises(CorruptError, match=f"readback after sending failed: missing.*{key}"):
            ckptstore.push(store, Store(faulty), root, ref="main")
        assert 0 < sum(pauses) < 60
        assert Store(distant).receipts(root) == []
        assert distant.stat(document_key(root)) is None

    def test_a_copy_that_lags_behind_a_repair_is_given_time(
        self, store: Store, root: Digest, distant: MemoryBackend, pauses: list[float]
    ) -> None:
        key = max(store.closure(root).objects)
        distant.create(key, b"wrong")
        faulty = FaultyBackend(distant)
        faulty.flip_bit(key, 3)
        faulty.before("replace", lambda _: None, prefix=key)

        def heal_later(_key: str) -> None:
            if len(pauses) == 2:
                faulty.flip_bit(key, 3)
                pauses.append(0.0)

        faulty.before("readback", heal_later, prefix=key)
        assert ckptstore.push(store, Store(faulty), root).repaired_keys == 1

    def test_a_disk_is_not_waited_for(self, store: Store, root: Digest, far: Store, pauses: list[float]) -> None:
        faulty = FaultyBackend(far.backend)
        faulty.fail("readback", NotFoundError("key"), prefix="objects/")
        with pytest.raises(CorruptError, match="readback after sending failed"):
            ckptstore.push(store, Store(faulty), root)
        assert pauses == []


class TestGivingUp:
    """B074 (goharbor/harbor#23005): the state can be continued, and the message says what is missing."""

    @pytest.mark.parametrize("error", [BackendError, ReadOnlyError, NoSpaceError])
    def test_it_says_what_is_missing_and_how_to_go_on(
        self, store: Store, root: Digest, distant: MemoryBackend, error: type[BackendError]
    ) -> None:
        closure = store.closure(root)
        faulty = FaultyBackend(distant)
        faulty.fail("create", error("writing key", "503 SlowDown"), prefix=max(closure.objects))
        with pytest.raises(error) as told:
            ckptstore.push(store, Store(faulty), root, ref="main")
        assert type(told.value) is error
        total = sum(size for _, size in closure.sizes())
        assert f"of {len(closure.sizes())} keys" in told.value.why
        assert f"of {total:,} bytes" in told.value.why
        assert "503 SlowDown" in told.value.why
        assert "nothing that refers to them was written" in told.value.why
        assert "run it again" in told.value.hint
        assert list(distant.list("documents/")) == []
        assert list(distant.list("leases/")) == []
        done = ckptstore.push(store, Store(distant), root, ref="main")
        assert done.present_bytes > 0
        assert done.sent_bytes + done.present_bytes == total

    def test_it_says_that_only_the_receipt_is_missing(self, store: Store, root: Digest, distant: MemoryBackend) -> None:
        faulty = FaultyBackend(distant)
        faulty.fail("create", BackendError("writing key", "gone"), prefix="receipts/")
        with pytest.raises(BackendError, match="all keys are there and were read back, but there is no receipt"):
            ckptstore.push(store, Store(faulty), root)

    @pytest.mark.parametrize(
        ("direction", "took_effect", "stride"),
        [
            ("push", True, 5),
            ("pull", False, 5),
            pytest.param("push", False, 1, marks=pytest.mark.deep),
            pytest.param("push", True, 1, marks=pytest.mark.deep),
            pytest.param("pull", False, 1, marks=pytest.mark.deep),
            pytest.param("pull", True, 1, marks=pytest.mark.deep),
        ],
    )
    def test_what_was_interrupted_at_any_call_is_continued(
        self, store: Store, root: Digest, took_effect: bool, direction: str, stride: int
    ) -> None:
        """Nothing is sent a second time, and nothing is there before what it refers to."""
        second = commit_state(store, "main", states(2.0), 2)
        sizes = dict(store.closure(second).sizes())
        move: Callable[..., ckptstore.Transfer] = getattr(ckptstore, direction)
        number, interrupted = 0, True
        while interrupted:
            number += stride
            distant = made(Distant())
            faulty = FaultyBackend(distant)
            calls = iter(range(1, 10**6))
            lock = threading.Lock()

            def interrupt(_key: str, calls: object = calls, lock: threading.Lock = lock, at: int = number) -> None:
                with lock:
                    now = next(calls)  # type: ignore[call-overload]
                if now == at:
                    raise BackendError("storage", "the connection is gone")

            for operation in OPERATIONS:
                (faulty.after if took_effect else faulty.before)(operation, interrupt)
            try:
                move(store, Store(faulty), second, ref="main")
                interrupted = False
            except CkptStoreError:
                pass
            there = {stat.key for stat in distant.list("")}
            if document_key(second) in there:
                assert sizes.keys() <= there
            kept = sum(size for key, size in sizes.items() if key in there)
            counting = CountingBackend(distant)
            done = move(store, Store(counting), second, ref="main")
            assert done.sent_bytes == sum(sizes.values()) - kept
            assert done.present_bytes == kept
            assert counting.total("replace").calls == 0
            assert Store(distant).verify("main").ok
        assert number > 3 * len(sizes)


class TestWhatCannotBeVerified:
    def test_an_archived_object_is_named(self, store: Store, root: Digest, distant: MemoryBackend) -> None:
        ckptstore.push(store, Store(distant), root)
        key = max(store.closure(root).objects)
        faulty = FaultyBackend(distant)
        faulty.fail("readback", RefusedError("reading", "InvalidObjectState", "restore it first"), prefix=key)
        with pytest.raises(RefusedError) as told:
            ckptstore.push(store, Store(faulty), root, ref="main")
        assert "cannot be read back, so nothing is verified" in told.value.why
        assert key in told.value.why
        assert told.value.hint == "restore it first"
        assert Store(distant).head("main") is None
        assert len(Store(distant).receipts(root)) == 1  # that of the first push

    @pytest.mark.parametrize("make", [Framing, SignedFraming])
    def test_chunk_framing_inside_an_object_is_recognised(
        self, store: Store, root: Digest, make: type[Framing], pauses: list[float]
    ) -> None:
        """B069 (boto/boto3#4435)."""
        backend = made(make())
        for _ in range(2):
            with pytest.raises(CorruptError, match="chunk framing") as told:
                ckptstore.push(store, Store(backend), root, ref="main")
            assert "checksums=required" in told.value.hint
            assert "objects/" in told.value.why
        assert list(backend.list("documents/")) == []
        assert Store(backend).receipts(root) == []


def test_what_would_be_refused_in_the_end_is_refused_before_anything_is_sent(
    store: Store, root: Digest, distant: MemoryBackend
) -> None:
    ckptstore.push(store, Store(distant), root, ref="main")
    other = commit_state(store, "other", states(4.0), 1)
    before = [stat.key for stat in distant.list("")]
    with pytest.raises(ConflictError, match="no ancestor"):
        ckptstore.push(store, Store(distant), other, ref="main")
    assert [stat.key for stat in distant.list("")] == before


def test_an_ancestor_that_is_damaged_there_is_repaired(store: Store, root: Digest, distant: MemoryBackend) -> None:
    second = commit_state(store, "main", states(1.0), 2)
    ckptstore.push(store, Store(distant), second, ref="main")
    distant.replace(document_key(root), b"{}")
    assert not Store(distant).verify("main").ok
    ckptstore.push(store, Store(distant), second, ref="main")
    assert Store(distant).verify("main").ok
