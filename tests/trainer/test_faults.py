"""Whatever dies around a commit, a fresh group ends in the root of the run to which nothing happened (fault B012)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import Digest, Store
from ckptstore.errors import CorruptError
from ckptstore.format.keys import object_key
from tests.trainer.conftest import in_threads
from tests.trainer.pair import REF, Pair, prepare_small, store_preparation
from trainer.compute.result import UpdateResult
from trainer.lifecycle import replay
from trainer.lifecycle.commits import push_shards
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.preparation.prepare import Prepared
from trainer.workers.hosts import STORE
from trainer.workers.orders import Flip, Save

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Uninterrupted:
    """A run of three updates with a checkpoint after each, and the operator's store as it was after the first."""

    prepared: Prepared
    identity: Digest
    roots: dict[int, Digest]
    results: dict[int, UpdateResult]
    store: Path
    after_one: Path


@pytest.fixture(scope="module")
def run(process: None, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("uninterrupted")
    prepared = prepare_small(folder / "prepared")
    operator = ckptstore.open(folder / "operator", create=True)
    identity = store_preparation(prepared, operator)
    pair = Pair(folder / "area", prepared, identity, in_threads).started()
    roots = {}
    for step in (1, 2, 3):
        pair.train(step, step)
        roots[step] = pair.commit(operator, step)
        if step == 1:
            shutil.copytree(folder / "operator", folder / "after one")
    return Uninterrupted(prepared, identity, roots, pair.results(), folder / "operator", folder / "after one")


@pytest.fixture
def operator(run: Uninterrupted, tmp_path: Path) -> Store:
    """The operator's store with the checkpoint after update 1."""
    shutil.copytree(run.after_one, tmp_path / "operator")
    return ckptstore.open(tmp_path / "operator")


@pytest.fixture
def fresh(run: Uninterrupted, tmp_path: Path) -> Callable[[], Pair]:
    """Makes a pair on hosts that have nothing yet."""
    areas = (tmp_path / f"area-{number}" for number in range(9))
    return lambda: Pair(next(areas), run.prepared, run.identity, in_threads)


class HostLostError(Exception):
    pass


def lost(*_: Any) -> None:
    raise HostLostError


def stage_one_dies_when_stage_zero_has_stepped(pair: Pair, operator: Store) -> None:
    pair.sessions[1].optimizer.register_step_pre_hook(lost)
    with pytest.raises(HostLostError):
        pair.train(2, 2)
    made = [{int(one["step"]) for one in session.optimizer.state.values()} for session in pair.sessions]
    assert made == [{2}, {1}]


def both_die_when_both_have_stepped(pair: Pair, operator: Store) -> None:
    pair.train(2, 2)


def stage_one_dies_when_the_shard_of_stage_zero_is_saved(pair: Pair, operator: Store) -> None:
    pair.train(2, 2)
    pair.sessions[0].carry_out(Save(str(operator.begin(REF)), 2, STORE))


def the_controller_dies_when_the_shard_of_stage_zero_is_pushed(pair: Pair, operator: Store) -> None:
    pair.train(2, 2)
    receipts = pair.save(operator.begin(REF), 2)
    push_shards(pair.hosts[:1], receipts[:1], operator, "operator")


COMMIT = """
import os, signal, sys
import ckptstore
from ckptstore import Attempt, ShardReceipt, Store
from tests.support.faulty import FaultyBackend

url, when, prefix, attempt, *receipts = sys.argv[1:]
backend = FaultyBackend(ckptstore.open(url).backend)
getattr(backend, when)("create", lambda key: os.kill(os.getpid(), signal.SIGKILL), prefix=prefix)
Store(backend).commit(Attempt.parse(attempt), [ShardReceipt.parse(text.encode()) for text in receipts])
"""


def the_controller_is_killed(when: str, prefix: str) -> Callable[[Pair, Store], None]:
    """In the commit, ``when`` it creates a key with ``prefix``: a process that SIGKILL ends there."""

    def kill(pair: Pair, operator: Store) -> None:
        pair.train(2, 2)
        attempt = operator.begin(REF)
        receipts = pair.save(attempt, 2)
        push_shards(pair.hosts, receipts, operator, "operator")
        given = [operator.url, when, prefix, str(attempt), *(receipt.encode().decode() for receipt in receipts)]
        done = subprocess.run([sys.executable, "-c", COMMIT, *given], cwd=ROOT, check=False, timeout=60)
        assert done.returncode == -signal.SIGKILL

    return kill


@pytest.mark.parametrize(
    ("fault", "committed"),
    [
        pytest.param(stage_one_dies_when_stage_zero_has_stepped, 1, id="one stage stepped"),
        pytest.param(both_die_when_both_have_stepped, 1, id="both stages stepped"),
        pytest.param(stage_one_dies_when_the_shard_of_stage_zero_is_saved, 1, id="one shard saved"),
        pytest.param(the_controller_dies_when_the_shard_of_stage_zero_is_pushed, 1, id="one shard pushed"),
        pytest.param(the_controller_is_killed("before", "documents/"), 1, id="both shards pushed"),
        pytest.param(the_controller_is_killed("before", "refs/"), 1, id="root durable"),
        pytest.param(the_controller_is_killed("after", "refs/"), 2, id="ref moved"),
    ],
)
def test_a_fresh_group_ends_in_the_uninterrupted_root(
    run: Uninterrupted,
    operator: Store,
    fresh: Callable[[], Pair],
    fault: Callable[[Pair, Store], None],
    committed: int,
) -> None:
    """B012 (meta-pytorch/torchft#192, #163): no update is applied twice, and no stage is a step ahead of the other."""
    fault(fresh().restored(operator, run.roots[1]), operator)
    store = ckptstore.open(operator.url)
    head = store.head(REF)
    assert head == run.roots[committed]
    pair = fresh().restored(store, head)
    assert [pair.said(shard)[-2]["step"] for shard in range(2)] == [committed, committed]
    for step in range(committed + 1, 4):
        pair.train(step, step)
        assert pair.commit(store, step) == run.roots[step]
    assert pair.results() == {step: run.results[step] for step in range(committed + 1, 4)}
    assert store.verify(REF).exit_code == 0
    with store.catalogue() as catalogue:
        rows = catalogue.rows()
        catalogue.rebuild()
        assert catalogue.rows() == rows
    assert all(str(root) in str(rows) for root in run.roots.values())


def test_a_flipped_bit_is_found_with_its_update_and_its_tensor(
    run: Uninterrupted, operator: Store, fresh: Callable[[], Pair]
) -> None:
    """What the negative control of the experiment says, without the experiment around it."""
    pair = fresh().restored(operator, run.roots[1])
    flipped = [event["place"] for event in pair.each(Flip(1))]
    assert flipped[0] is None
    assert (flipped[1]["role"], flipped[1]["bit"]) == ("exp_avg", 31)
    pair.train(2, 3)
    root = pair.commit(operator, 3)
    kept = ckptstore.open(run.store)
    planned = {step: run.results[step] for step in (2, 3)}
    with pytest.raises(NotAsPlannedError) as raised:
        replay.require_equal(3, (kept, run.roots[3], planned), (operator, root, pair.results()))
    text = str(raised.value)
    # The loss and norm of update 2 are of weights that the moment has not touched yet.
    assert f"expected root {run.roots[3]}, seen root {root}; first difference in update 3: loss 0x" in text
    assert f"most of all weight '{flipped[1]['tensor']}'" in text
    assert f"exp_avg {flipped[1]['tensor']}" in text
    assert f"diff {run.roots[3].short} {root.short} --other" in text


def test_an_equal_replay_passes_and_a_missing_update_does_not(run: Uninterrupted) -> None:
    kept = ckptstore.open(run.store)
    same = (kept, run.roots[3], run.results)
    replay.require_equal(3, same, same)
    short = {step: result for step, result in run.results.items() if step < 3}
    with pytest.raises(NotAsPlannedError, match="first difference in update 3: only one of the two made it"):
        replay.require_equal(3, same, (kept, run.roots[3], short))


@pytest.mark.parametrize("shard", [0, 1])
def test_a_bad_byte_in_the_operators_store_is_named_and_nothing_is_restored_from_it(
    run: Uninterrupted, operator: Store, fresh: Callable[[], Pair], shard: int
) -> None:
    """The third host's store gets no bad byte, and the message says which tensors it is of and under which key."""
    chunk = max(operator.closure(run.roots[1], [shard], files=False).objects.values(), key=lambda need: need.length)
    path = Path(operator.url.removeprefix("file://")) / object_key(chunk.digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)
    pair = fresh()
    with pytest.raises(CorruptError, match=f"shard {shard}.*{object_key(chunk.digest)}"):
        pair.restored(ckptstore.open(operator.url), run.roots[1])
    store = ckptstore.open(pair.hosts[shard].store)
    assert store.backend.stat(object_key(chunk.digest)) is None
    assert [event.name for event in pair.said(shard)] == ["joined"]
