"""Sharded saves commit once or not at all, and every participant learns the same (faults B012, B050 to B055)."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Attempt, Digest, ShardReceipt, Tie, TrainingState
from ckptstore.errors import BackendError, CkptStoreError, CommitAbortedError, ConflictError, NotFoundError
from ckptstore.format.records import RefRecord
from ckptstore.store import Store
from tests.support.distant import Liar
from tests.support.faulty import FaultyBackend
from tests.support.states import memory_store
from tests.support.training import commit_state


def halves(scale: float = 1.0) -> list[TrainingState]:
    torch.manual_seed(0)
    modules = [nn.ModuleDict({"first": nn.Linear(9, 9)}), nn.ModuleDict({"second": nn.Linear(9, 9)})]
    for module in modules:
        for parameter in module.parameters():
            parameter.data.mul_(scale)
    return [TrainingState(model=module) for module in modules]


def test_two_shards_are_one_checkpoint(store: Store) -> None:
    root = commit_state(store, "main", halves(), 1)
    assert store.head("main") == root
    assert store.verify("main").ok
    fresh = halves(0.0)
    for index, state in enumerate(fresh):
        store.restore(root, state, shard=index)
    assert commit_state(store, "again", fresh, 1) == root


def test_the_state_root_does_not_depend_on_who_owns_what(store: Store) -> None:
    whole = nn.ModuleDict({"first": nn.Linear(9, 9), "second": nn.Linear(9, 9)})
    parts = [nn.ModuleDict({name: whole[name]}) for name in ("first", "second")]
    one = commit_state(store, "one", [TrainingState(model=whole)], 1)
    two = commit_state(store, "two", [TrainingState(model=part) for part in parts], 1)
    other = commit_state(store, "other", [TrainingState(model=part) for part in reversed(parts)], 1)
    assert len({one, two, other}) == 3
    assert len({store.checkpoint(root).state_root for root in (one, two, other)}) == 1


def test_a_tie_across_shards_is_the_tie_of_one_owner(store: Store) -> None:
    def modules() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.ModuleDict({"embed": nn.Linear(9, 9, bias=False)}), nn.ModuleDict({"body": nn.Linear(9, 9)})

    first, second = modules()
    whole = nn.ModuleDict({**dict(first.items()), **dict(second.items()), "head": nn.Linear(9, 9, bias=False)})  # type: ignore[operator]
    whole["head"].weight = whole["embed"].weight
    one = commit_state(store, "one", [TrainingState(model=whole)], 1)
    tie = Tie("head.weight", "embed.weight")
    two = commit_state(store, "two", [TrainingState(model=first), TrainingState(model=second)], 1, ties=[tie])
    untied = commit_state(store, "untied", [TrainingState(model=first), TrainingState(model=second)], 1)
    assert store.checkpoint(one).state_root == store.checkpoint(two).state_root
    assert store.checkpoint(one).state_root != store.checkpoint(untied).state_root
    with pytest.raises(CommitAbortedError, match=r"names the owner 'nobody\.weight', which no shard holds"):
        commit_state(store, "odd", [TrainingState(model=first)], 1, ties=[Tie("z", "nobody.weight")])


def test_a_shard_may_hold_no_tensor_at_all(store: Store) -> None:
    """B038 (pytorch/pytorch#131976)."""
    root = commit_state(store, "main", [halves()[0], TrainingState()], 1)
    assert store.verify(root).ok
    store.restore(root, TrainingState(), shard=1)


def receipts_of(store: Store, attempt: Attempt) -> list[ShardReceipt]:
    return [store.save_shard(s, attempt, step=1, index=i, count=2, binding={"a": 1}) for i, s in enumerate(halves())]


CHANGES: dict[str, dict[str, Any]] = {
    "attempt": {"attempt": secrets.token_hex(16)},
    "step": {"step": 2},
    "parent": {"parent": Digest.of(b"another parent")},
    "run": {"run": Digest.of(b"another run")},
    "binding": {"binding": {"t": "dict", "v": []}},
    "files": {"files": Digest.of(b"files")},
    "position": {"index": 0},
}


@pytest.mark.parametrize("what", CHANGES)
def test_receipts_that_do_not_belong_together_are_refused(store: Store, what: str) -> None:
    """F-127. B055 (TensorAuto/OpenTau#396): identity is decided once and compared; each difference is named."""
    attempt = store.begin("main")
    first, second = receipts_of(store, attempt)
    with pytest.raises(CommitAbortedError, match=what if what != "position" else r"shards \[0, 0\] are there"):
        store.commit(attempt, [first, replace(second, **CHANGES[what])])
    assert store.head("main") is None


def test_a_missing_shard_is_refused_when_it_is_saved_not_when_it_is_loaded(store: Store) -> None:
    """B055."""
    attempt = store.begin("main")
    first, _ = receipts_of(store, attempt)
    with pytest.raises(CommitAbortedError, match=r"shards \[0\] are there, 0 to 1 are expected"):
        store.commit(attempt, [first])


def test_shards_of_two_attempts_are_never_joined_even_if_they_are_equal(store: Store) -> None:
    one, two = store.begin("main"), store.begin("main")
    with pytest.raises(CommitAbortedError, match="shard 1 is of another attempt"):
        store.commit(one, [receipts_of(store, one)[0], receipts_of(store, two)[1]])


def test_an_attempt_travels_as_text(store: Store) -> None:
    attempt = store.begin("main")
    assert Attempt.parse(str(attempt)) == attempt
    commit_state(store, "main", halves(), 1)
    attempt = store.begin("main")
    assert Attempt.parse(str(attempt)) == attempt
    with pytest.raises(ckptstore.errors.UsageError):
        Attempt.parse("main:x")


class Participants:
    """Two workers and a coordinator in threads, each with its own store object, and what each of them learned."""

    def __init__(self, url: str, deadline: float = 1.0) -> None:
        self.url, self.deadline = url, deadline
        self.attempt = ckptstore.open(url).begin("main")
        self.learned: dict[str, Any] = {}

    def worker(
        self, index: int, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
    ) -> None:
        store = ckptstore.open(self.url)
        try:
            before()
            receipt = store.save_shard(halves()[index], self.attempt, step=1, index=index, count=2)
            after()
            self.learned[f"worker {index}"] = store.verdict(self.attempt, receipt, self.deadline)
        except CkptStoreError as error:
            self.learned[f"worker {index}"] = error
        except RuntimeError as error:
            store.give_up(self.attempt, index=index, count=2, step=1, reason=str(error))
            self.learned[f"worker {index}"] = error

    def coordinator(self) -> None:
        try:
            self.learned["coordinator"] = ckptstore.open(self.url).commit(self.attempt, count=2, deadline=self.deadline)
        except CkptStoreError as error:
            self.learned["coordinator"] = error

    def run(self, *targets: Callable[[], None]) -> float:
        threads = [threading.Thread(target=target) for target in targets]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return time.monotonic() - start


def fail() -> None:
    raise RuntimeError("the disk of stage 1 is gone")


def test_every_participant_learns_the_root(store: Store) -> None:
    """F-129."""
    group = Participants(store.url, deadline=20.0)
    group.run(lambda: group.worker(0), lambda: group.worker(1), group.coordinator)
    assert set(group.learned.values()) == {store.head("main")}


@pytest.mark.parametrize("phase", ["before", "after"])
def test_when_a_worker_raises_every_other_one_aborts_at_once(store: Store, phase: str) -> None:
    """F-131. B054 (alan-turing-institute/autocast#386): long before the deadline, naming the shard."""
    group = Participants(store.url, deadline=20.0)
    took = group.run(lambda: group.worker(0), lambda: group.worker(1, **{phase: fail}), group.coordinator)
    assert isinstance(group.learned["coordinator"], CommitAbortedError)
    assert isinstance(group.learned["worker 0"], CommitAbortedError)
    assert store.head("main") is None
    assert took < 15
    if phase == "before":
        assert "shard 1" in str(group.learned["coordinator"])
        assert "the disk of stage 1 is gone" in str(group.learned["coordinator"])


def test_when_a_worker_stalls_all_return_within_the_deadline(store: Store) -> None:
    """F-130. B054."""
    group = Participants(store.url, deadline=0.5)
    group.run(lambda: group.worker(0), lambda: group.worker(1, before=lambda: time.sleep(2)), group.coordinator)
    assert all(isinstance(learned, CommitAbortedError) for learned in group.learned.values())
    assert set(group.learned) == {"worker 0", "worker 1", "coordinator"}
    assert "no receipt of shard 1 of 2" in str(group.learned["coordinator"])
    assert store.head("main") is None


def test_when_the_coordinator_dies_unknown_becomes_aborted_for_everybody(store: Store) -> None:
    """B054: and a coordinator that wakes up late must fail."""
    group = Participants(store.url, deadline=0.3)
    group.run(lambda: group.worker(0), lambda: group.worker(1))
    assert all(isinstance(learned, CommitAbortedError) for learned in group.learned.values())
    receipts = receipts_of(store, group.attempt)
    with pytest.raises(ConflictError):
        store.commit(group.attempt, receipts)
    assert store.head("main") is None


def test_of_many_movers_exactly_one_wins_and_the_others_are_told(disk_store: Store) -> None:
    roots = [commit_state(disk_store, f"r{i}", halves(1.0 + i), 1) for i in range(8)]
    won: list[Digest] = []
    lost: list[ConflictError] = []
    barrier = threading.Barrier(8)

    def move(root: Digest) -> None:
        mine = ckptstore.open(disk_store.url)
        head = mine.refs.head("shared")
        barrier.wait()
        try:
            mine.refs.move("shared", root, head)
            won.append(root)
        except ConflictError as error:
            lost.append(error)

    threads = [threading.Thread(target=move, args=(root,)) for root in roots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [disk_store.head("shared")]
    assert len(lost) == 7


def test_a_lost_answer_is_settled_by_reading_the_record(store: Store) -> None:
    """F-125. A create that took effect although it raised is a win, not an error."""
    from ckptstore.errors import BackendError
    from tests.support.faulty import FaultyBackend

    root = commit_state(store, "main", halves(), 1)
    faulty = FaultyBackend(store.backend)
    faulty.fail("create", BackendError("create", "connection reset"), prefix="refs/", nth=1, took_effect=True)
    record = Store(faulty).refs.move("other", root, None)
    assert isinstance(record, RefRecord)
    assert store.head("other") == root
    faulty.fail("create", BackendError("create", "connection reset"), prefix="refs/", nth=1)
    with pytest.raises(BackendError):
        Store(faulty).refs.move("third", root, None)
    assert store.head("third") is None


def test_a_listing_that_lags_hides_no_generation(store: Store) -> None:
    """F-123. B064 (NVIDIA-NeMo/Megatron-Bridge#4865): later generations are asked for by name."""
    roots = [commit_state(store, "main", halves(scale), step) for step, scale in ((1, 1.0), (2, 2.0), (3, 3.0))]

    class Lagging:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def list(self, prefix: str) -> Any:
            if not prefix.startswith("refs/"):
                return self.inner.list(prefix)
            return iter(list(self.inner.list(prefix))[:-2])

    assert Store(Lagging(store.backend)).head("main") == roots[-1]


def test_a_ref_can_name_what_a_listing_lacks() -> None:
    """B064: whether a shard is there is decided by reading it."""
    behind = memory_store()
    root = commit_state(behind, "main", halves(), 1)
    store = Store(Liar(behind.backend, there=False))  # type: ignore[arg-type]
    store.move_ref("again", root, None)
    assert store.head("again") == root


def test_restarted_participants_end_at_the_same_step(store: Store) -> None:
    """B012 (meta-pytorch/torchft#192): a stage dies after its shard is durable; nothing of the attempt is taken."""
    first = commit_state(store, "main", halves(), 1)
    attempt = store.begin("main")
    store.save_shard(halves(2.0)[0], attempt, step=2, index=0, count=2)
    assert store.head("main") == first
    retry = commit_state(store, "main", halves(2.0), 2)
    straight = commit_state(store, "copy", halves(), 1), commit_state(store, "copy", halves(2.0), 2)
    assert (first, retry) == straight


def test_the_latest_is_never_taken_by_name(tmp_path: Path) -> None:
    """B050 (vllm-project/speculators#739): what no ref names is not a checkpoint to resume from."""
    store = ckptstore.open(tmp_path / "s", create=True)
    root = commit_state(store, "main", halves(), 5)
    attempt = store.begin("main")
    store.save_shard(halves(3.0)[0], attempt, step=1000, index=0, count=2)
    (tmp_path / "s" / "tmp").mkdir(exist_ok=True)
    (tmp_path / "s" / "tmp" / "step-1000").write_bytes(b"half")
    assert ckptstore.open(tmp_path / "s").head("main") == root


def test_a_checkpoint_whose_files_are_not_there_is_not_committed(store: Store, tmp_path: Path) -> None:
    """Everything in the closure is there before the checkpoint is: also the preparation, its trees and their files."""
    (tmp_path / "plan.json").write_text("{}")
    tree = store.put_tree(tmp_path)
    for run in (Digest.of(b"nothing"), store.put_preparation(tree, tree, Digest.of(b"no tree"))):
        attempt = store.begin("main")
        receipt = store.save_shard(halves()[0], attempt, step=1, run=run)
        with pytest.raises(NotFoundError):
            store.commit(attempt, [receipt])
    run = store.put_preparation(tree, tree, tree)
    store.backend.delete(next(stat.key for stat in store.backend.list("objects/6e/")))
    fresh = ckptstore.open(store.url)
    attempt = fresh.begin("main")
    with pytest.raises(NotFoundError, match=r"plan\.json"):
        fresh.commit(attempt, [fresh.save_shard(halves()[0], attempt, step=1, run=run)])
    assert store.head("main") is None


def test_workers_hear_at_once_of_a_coordinator_that_cannot_read_their_receipts() -> None:
    """B054: its error is its own, and the fence is for all."""
    faulty = FaultyBackend(memory_store().backend)
    store = Store(faulty)
    attempt = store.begin("main")
    receipts = [store.save_shard(state, attempt, step=1, index=index, count=2) for index, state in enumerate(halves())]
    faulty.fail("list", BackendError("list", "EIO"), nth=1, prefix="receipts/")
    with pytest.raises(BackendError, match="EIO"):
        store.commit(attempt, count=2, deadline=60)
    with pytest.raises(CommitAbortedError):
        store.verdict(attempt, receipts[0], deadline=60)
    assert store.head("main") is None
