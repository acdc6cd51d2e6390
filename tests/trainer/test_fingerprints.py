"""Fingerprints of updates: what they say, that a root fixes them, and how a difference is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import Digest, Store
from ckptstore.errors import MalformedError, RefusedError, UsageError
from ckptstore.format.page import TensorEntry
from tests.trainer.conftest import in_threads
from tests.trainer.pair import REF, Pair, prepare_small, store_preparation
from trainer.compute.fingerprint import combined
from trainer.errors import NumericsError
from trainer.lifecycle.admission import drift
from trainer.lifecycle.fingerprints import FILE, put, recorded
from trainer.preparation.prepare import Prepared
from trainer.replay.lineage import between, resolve
from trainer.replay.verdict import compare_root, compare_update
from trainer.workers import fingerprints
from trainer.workers.fingerprints import Fingerprint, TensorFingerprint
from trainer.workers.orders import Flip


@dataclass(frozen=True)
class Made:
    """A run of three updates with a checkpoint after the first and the last, and the fingerprints of all."""

    prepared: Prepared
    identity: Digest
    roots: dict[int, Digest]
    record: tuple[Fingerprint, ...]
    path: Path


@pytest.fixture(scope="module")
def made(process: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    prepared = prepare_small(folder / "prepared")
    operator = ckptstore.open(folder / "operator", create=True)
    identity = store_preparation(prepared, operator)
    pair = Pair(folder / "area", prepared, identity, in_threads).started()
    pair.train(1, 1)
    roots = {1: pair.commit(operator, 1, put(operator, [pair.fingerprint(1)]))}
    pair.train(2, 3)
    roots[3] = pair.commit(operator, 3, put(operator, [pair.fingerprint(2), pair.fingerprint(3)]))
    record = tuple(pair.fingerprint(update) for update in (1, 2, 3))
    return Made(prepared, identity, roots, record, folder / "operator")


@pytest.fixture
def operator(made: Made, tmp_path: Path) -> Store:
    """The store as it was after the first checkpoint, and what came later without a ref."""
    shutil.copytree(made.path, tmp_path / "operator")
    store = ckptstore.open(tmp_path / "operator")
    store.move_ref("from-one", made.roots[1], None)
    return store


@pytest.fixture
def fresh(made: Made, tmp_path: Path) -> Callable[[], Pair]:
    areas = (tmp_path / f"area-{number}" for number in range(9))
    return lambda: Pair(next(areas), made.prepared, made.identity, in_threads)


# What they say


def test_the_last_fingerprint_before_a_checkpoint_follows_from_its_documents(made: Made) -> None:
    store = ckptstore.open(made.path)
    for step, root in made.roots.items():
        views = store.closure(root).shards.values()
        digests = {(e.role[-1], e.path): e.digest for view in views for e in view.entries if isinstance(e, TensorEntry)}
        names = [one.name for one in made.record[step - 1].state]
        roles = ("weight", "exp_avg", "exp_avg_sq")
        expected = {name: combined(*(digests[role, name] for role in roles)) for name in names}
        assert {one.name: one.digest for one in made.record[step - 1].state} == expected
        assert sorted(names) == sorted(path for role, path in digests if role == "weight")


def test_a_root_fixes_the_fingerprints_of_all_updates_since_its_parent(made: Made) -> None:
    store = ckptstore.open(made.path)
    checkpoint = store.checkpoint(made.roots[3])
    assert recorded(store, checkpoint) == made.record[1:]
    assert checkpoint.files is not None
    assert [file.path for file in store.tree(checkpoint.files).files] == [FILE]
    assert recorded(store, replace(checkpoint, files=None)) is None
    assert recorded(store, replace(checkpoint, files=store.preparation(made.identity).plan)) is None


def test_fingerprints_survive_their_bytes_and_other_bytes_are_none(made: Made) -> None:
    data = fingerprints.encode(made.record)
    assert fingerprints.parse(data) == made.record
    assert fingerprints.parse(b"") == ()
    lines = data.splitlines(keepends=True)
    for wrong in (data[:-1], data + b"{}\n", lines[0] + lines[2], lines[1] + lines[0], data + b"\n", b"\n", b"\xff\n"):
        with pytest.raises(MalformedError):
            fingerprints.parse(wrong)
    states = [{one.name: one.digest for one in made.record[0].state}] * 2
    with pytest.raises(MalformedError, match="on two shards"):
        fingerprints.make(made.record[0], states)  # type: ignore[arg-type]


def test_a_plan_says_after_which_updates_the_state_is_fingerprinted(made: Made) -> None:
    plan = replace(made.prepared.plan, fingerprints=3)
    assert [update for update in range(1, 9) if plan.fingerprinted(update)] == [2, 3, 4, 6, 8]
    with pytest.raises(MalformedError, match="after each 0 updates"):
        replace(plan, fingerprints=0)


# How a difference is named


def test_an_update_that_is_made_again_is_equal_or_its_first_tensor_is_named(made: Made) -> None:
    one = made.record[1]
    assert compare_update(one, one) is None
    other = (*one.state[:4], TensorFingerprint(one.state[4].name, Digest.of(b"bent")), *one.state[5:])
    found = compare_update(replace(one, state=other), one)
    assert found is not None
    assert (found.update, found.tensor) == (2, one.state[4].name)
    assert str(found).startswith(f"update 2, tensor {one.state[4].name}: weights or moments are not as recorded: ")
    found = compare_update(replace(one, loss=one.loss + 2**-50, state=()), one)
    assert found is not None
    assert (found.tensor, found.text) == (None, f"loss is {one.loss.hex()}, recorded is {(one.loss + 2**-50).hex()}")
    assert compare_update(replace(one, state=()), one) is None, "a state that is not recorded is not compared"
    found = compare_update(replace(one, state=one.state[1:]), one)
    assert found is not None
    assert found.tensor == one.state[0].name


def test_a_state_that_was_bent_after_its_last_update_is_found_in_the_root(
    made: Made, operator: Store, fresh: Callable[[], Pair]
) -> None:
    """Every digest of the forged checkpoint is as it should be, and so is its record of the updates."""
    pair = fresh().restored(operator, made.roots[1])
    pair.train(2, 3)
    assert tuple(pair.fingerprint(update) for update in (2, 3)) == made.record[1:]
    place = pair.each(Flip(1))[1]["place"]
    attempt = operator.begin("from-one")
    receipts = pair.save(attempt, 3, operator.checkpoint(made.roots[3]).files)
    for host, receipt in zip(pair.hosts, receipts, strict=True):
        ckptstore.push_shard(ckptstore.open(host.store), operator, receipt)
    forged = operator.commit(attempt, receipts)
    assert operator.verify(forged).exit_code == 0
    found = compare_root(operator, forged, ckptstore.open(made.path), made.roots[3], 3)
    assert found is not None
    assert (found.update, found.tensor) == (3, place["tensor"])
    assert f"exp_avg '{place['tensor']}'" in found.text
    assert "1 of 49152 elements differ" in found.text
    assert compare_root(operator, made.roots[3], ckptstore.open(made.path), made.roots[3], 3) is None


# From where to where


def test_the_line_between_two_checkpoints_is_found_by_parents(made: Made) -> None:
    store, (one, three) = ckptstore.open(made.path), made.roots.values()
    whole = between(store, None, three)
    assert [(leg.parent, leg.first, leg.last, leg.root) for leg in whole.legs] == [
        (None, 1, 1, one),
        (one, 2, 3, three),
    ]
    assert (whole.run, whole.begin, whole.end.root) == (made.identity, None, three)
    assert between(store, one, three).legs == whole.legs[1:]
    assert (resolve(store, "start"), resolve(store, REF), resolve(store, one.hex[:12])) == (None, three, one)


def test_what_is_no_line_of_updates_is_refused(made: Made, operator: Store) -> None:
    one, three = made.roots.values()
    with pytest.raises(UsageError, match="nothing to do"):
        between(operator, one, one)
    with pytest.raises(RefusedError, match="does not descend from"):
        between(operator, three, one)
    checkpoint = operator.checkpoint(three)
    for change, says in (
        ({"step": 1}, "it has 1 updates in 2 shards"),
        ({"run": Digest.of(b"another")}, "prepared identities"),
        ({"run": None}, "prepared identities"),
        ({"shards": checkpoint.shards[:1]}, "3 updates in 1 shards"),
    ):
        other = operator.objects.put_document(replace(checkpoint, **change).encode())  # type: ignore[arg-type]
        with pytest.raises(RefusedError, match=says):
            between(operator, one, other)


# A checkpoint of another machine


def test_a_checkpoint_with_another_numerical_binding_is_refused_by_the_worker_or_the_drift_is_told(
    made: Made, operator: Store, fresh: Callable[[], Pair]
) -> None:
    pair = fresh().restored(operator, made.roots[1])
    pair.train(2, 2)
    measured = pair.sessions[0].binding
    claimed: dict[str, Any] = {**measured, "canary.float32": "00", "threads": 2, "python": "3.99.0"}
    for session in pair.sessions:
        session.binding = claimed
    root = _committed(pair, operator, 2)
    here = fresh()
    untouched = {name: bool(p.isnan().all()) for name, p in here.sessions[0].shard.named_parameters()}
    with pytest.raises(NumericsError) as raised:
        here.restored(operator, root)
    for text in (f"canary.float32 is {measured['canary.float32']}, expected 00", "threads is 1, expected 2", "3.99.0"):
        assert text in str(raised.value)
    assert "--allow-numerics-drift" in raised.value.hint
    assert all(untouched.values())
    assert all(bool(p.isnan().all()) for p in here.sessions[0].shard.parameters()), "nothing was restored"
    here.restored(operator, root, drift=True)
    here.train(3, 3)
    told = drift(operator.checkpoint(root), ckptstore.format.values.to_json(dict(measured)))
    assert [(one.code, one.expected, one.actual) for one in told] == [
        ("binding.canary.float32", "'00'", repr(measured["canary.float32"])),
        ("binding.python", "'3.99.0'", repr(measured["python"])),
        ("binding.threads", "2", "1"),
    ]
    assert drift(None, None) == drift(operator.checkpoint(made.roots[3]), operator.checkpoint(made.roots[1]).binding)


def _committed(pair: Pair, operator: Store, step: int) -> Digest:
    attempt = operator.begin("from-one")
    receipts = pair.save(attempt, step)
    for host, receipt in zip(pair.hosts, receipts, strict=True):
        ckptstore.push_shard(ckptstore.open(host.store), operator, receipt)
    return operator.commit(attempt, receipts)
