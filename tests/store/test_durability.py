"""The durability ledger: a receipt counts for what it covers, for as long as it says, and for nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest, Receipt
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import BackendError
from ckptstore.format import values
from ckptstore.format.keys import document_key, receipt_key
from ckptstore.format.records import closure_digest
from ckptstore.format.tree import File, Tree
from ckptstore.readbacks.actors import bits, readback_details, store_id, this_actor
from ckptstore.readbacks.copies import Copy, Holder, RootCopies
from ckptstore.readbacks.coverage import Evidence
from ckptstore.readbacks.durability import Ledger, ledger
from ckptstore.readbacks.readbacks import Part
from ckptstore.remotes import add_remote
from ckptstore.store import Store
from ckptstore.verify import verify
from tests.support.faulty import FaultyBackend
from tests.support.training import commit_state

FAR = "ab" * 16
OTHER = "cd" * 16
NOW = datetime.now(UTC).replace(microsecond=0)


def states(changed: float = 0.0) -> list[ckptstore.TrainingState]:
    """Two shards; ``changed`` changes the second."""
    torch.manual_seed(0)
    modules = [nn.Linear(300, 300), nn.Linear(300, 400)]
    with torch.no_grad():
        modules[1].weight.add_(changed)
    return [ckptstore.TrainingState(model=nn.ModuleDict({f"m{i}": module})) for i, module in enumerate(modules)]


@pytest.fixture
def store(disk_store: Store) -> Store:
    return disk_store


@pytest.fixture
def root(store: Store) -> Digest:
    return commit_state(store, "main", states(), 1)


def told(store: Store, root: Digest, ago: timedelta = timedelta(), part: Part = Part(), **changes: Any) -> Receipt:  # noqa: B008
    """A receipt about ``root`` as a push to a store far away leaves one, ``ago`` before now."""
    sizes = store.closure(root, part.shards, files=part.files).sizes()
    details = {"by": "ops@far", "max_age_seconds": 0, "store": FAR} | changes.pop("details", {})
    receipt = Receipt(
        operation="push",
        subject=root,
        closure=closure_digest(sizes),
        documents=sum(key.startswith("documents/") for key, _ in sizes),
        objects=sum(key.startswith("objects/") for key, _ in sizes),
        bytes_read=sum(size for _, size in sizes),
        method="server-read",
        time=(NOW - ago).strftime("%Y-%m-%dT%H:%M:%SZ"),
        where="s3://far/store",
        exceptions=part.exceptions(),
        details=values.to_json({name: value for name, value in details.items() if value is not None}),
    )
    return replace(receipt, **changes)


def here(store: Store, root: Digest, **changes: Any) -> Receipt:
    """A receipt about ``root`` in ``store`` itself."""
    details = {"store": store_id(store.backend), "by": this_actor()}
    return told(store, root, operation="verify", method="direct", where=store.url, details=details, **changes)


def only(found: Ledger) -> RootCopies:
    (root,) = found.roots
    return root


def copies(found: Ledger, max_age: timedelta | None = None) -> int:
    return only(found).verified(found.at, max_age)


def by_key(found: Ledger) -> dict[str, tuple[Copy, ...]]:
    """The copies of each key that some receipt tells of."""
    return {item.key: tuple(copy for copy in item.copies if copy.evidence is not None) for item in only(found).keys}


def sole(found: Ledger) -> tuple[Holder, Evidence]:
    """The only copy that receipts tell of, the same for all keys."""
    ((copy,), *others) = by_key(found).values()
    assert all(other == (copy,) for other in others)
    assert copy.evidence is not None
    return copy.holder, copy.evidence


# -- what counts -------------------------------------------------------------------------------------------------------


def test_nothing_is_verified_before_somebody_has_read_it_back(store: Store, root: Digest) -> None:
    found = ledger(store)
    assert only(found).root == root
    assert {item.key for item in only(found).keys} == {key for key, _ in store.closure(root).sizes()}
    assert copies(found) == 0
    assert only(found).oldest(found.at) is None
    assert [holder.name for holder in found.holders] == ["this store"]


def test_this_store_counts_once_it_was_verified(store: Store, root: Digest) -> None:
    report = store.verify(root)
    store.add_receipt(report.receipt(store.url))
    found = ledger(store)
    assert copies(found) == (1 if report.method.reaches_medium else 0)
    holder, evidence = sole(found)
    assert (holder.here, evidence.readback.by) == (True, this_actor())


def test_each_store_counts_once_and_the_newest_readback_is_shown(store: Store, root: Digest) -> None:
    for days, where in ((9, "s3://far/store"), (3, "s3://renamed/store"), (5, "s3://far/store")):
        store.add_receipt(told(store, root, timedelta(days=days), where=where))
    store.add_receipt(told(store, root, timedelta(days=1), details={"store": OTHER}, where="s3://other/store"))
    found = ledger(store)
    assert copies(found) == 2
    assert [(holder.id, holder.url) for holder in found.holders[1:]] == [
        (OTHER, "s3://other/store"),
        (FAR, "s3://renamed/store"),
    ]
    for newest, older in by_key(found).values():
        assert newest.evidence is not None
        assert older.evidence is not None
        assert newest.evidence.read_at == NOW - timedelta(days=1)
        assert older.evidence.read_at == NOW - timedelta(days=3)
    assert only(found).oldest(found.at) == NOW - timedelta(days=3)


def test_a_readback_that_is_too_old_does_not_count(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root, timedelta(days=3)))
    found = ledger(store)
    assert copies(found, timedelta(days=4)) == 1
    assert copies(found, timedelta(days=2)) == 0
    assert only(found).lacking(1, found.at, timedelta(days=2)) == len(only(found).keys)


@pytest.mark.parametrize("method", ["cached", "none", "memory", "prayer"])
def test_only_what_reached_a_lasting_medium_is_verified(store: Store, root: Digest, method: str) -> None:
    store.add_receipt(told(store, root, method=method))
    found = ledger(store)
    assert copies(found) == 0
    assert all(len(item) == 1 for item in by_key(found).values())


def test_a_receipt_that_is_worse_hides_none_that_is_better(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root, timedelta(days=2)))
    store.add_receipt(told(store, root, timedelta(days=1), method="cached", operation="read"))
    store.add_receipt(told(store, root, timedelta(days=-30)))
    found = ledger(store)
    for (copy,) in by_key(found).values():
        assert copy.evidence is not None
        assert copy.evidence.read_at == NOW - timedelta(days=2)


def test_a_clock_that_is_wrong_is_shown_and_proves_no_age(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root, timedelta(days=-30)))
    found = ledger(store)
    assert copies(found) == 1
    assert copies(found, timedelta(days=365)) == 0
    assert sole(found)[1].future


def test_metrics_are_no_readback(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root, operation="metrics"))
    assert copies(ledger(store)) == 0


# -- what a receipt covers ---------------------------------------------------------------------------------------------


def test_a_receipt_about_any_root_counts_for_the_objects_that_it_shares(store: Store, root: Digest) -> None:
    second = commit_state(store, "main", states(1.0), 2)
    store.add_receipt(told(store, root))
    found = by_key(ledger(store, [second]))
    shared = dict(store.closure(root).sizes()).keys() & found.keys()
    assert 0 < len(shared) < len(found)
    assert {key for key, item in found.items() if item} == shared
    assert copies(ledger(store, [root])) == 1


def test_a_receipt_about_some_shards_covers_those(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root, part=Part((1,))))
    found = by_key(ledger(store))
    assert {key for key, item in found.items() if item} == dict(store.closure(root, [1]).sizes()).keys()
    store.add_receipt(told(store, root, part=Part((0,))))
    assert copies(ledger(store)) == 1


def test_exceptions_that_are_not_understood_cover_nothing(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root, exceptions=("without the difficult half",)))
    assert copies(ledger(store)) == 0


def test_a_receipt_about_a_shard_on_its_way_counts_for_what_is_in_it(store: Store, root: Digest) -> None:
    view = store.closure(root).shards[0]
    part = {key: size for key, size in store.closure(root, [0]).sizes() if key != document_key(root)}
    receipt = replace(
        told(store, root),
        subject=view.digest,
        closure=closure_digest(part.items()),
        documents=sum(key.startswith("documents/") for key in part),
        objects=sum(key.startswith("objects/") for key in part),
        bytes_read=sum(part.values()),
    )
    store.add_receipt(receipt)
    assert {key for key, item in by_key(ledger(store)).items() if item} == part.keys()


def test_what_was_not_read_now_keeps_its_own_time(store: Store, root: Digest) -> None:
    """A verification that leaves out what its process had read back before says which keys it read."""
    second = commit_state(store, "main", states(1.0), 2)
    before = set(store.closure(root).objects)
    store.add_receipt(told(store, root, timedelta(days=5)))
    report = verify(store.backend, second, skip=before)
    assert 0 < report.objects < len(report.keys)
    receipt = report.receipt("s3://far/store")
    details = {"read": bits(report.read or ())}
    store.add_receipt(
        told(store, second, timedelta(days=1), objects=report.objects, bytes_read=receipt.bytes_read, details=details)
    )
    for key, (copy,) in by_key(ledger(store, [second])).items():
        assert copy.evidence is not None
        assert copy.evidence.read_at == NOW - timedelta(days=5 if key in before else 1)


def test_a_run_says_how_old_what_it_does_not_read_again_may_be(store: Store) -> None:
    """So that the ledger need not go back to the beginning of the run."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"frozen": nn.Linear(300, 300), "trained": nn.Linear(300, 300)})
    with store.run("main", model=model, readback="behind") as run:
        run.resume()
        for step in (1, 2):
            with torch.no_grad():
                model["trained"].weight.add_(1.0)
            run.save(step)
    first, second = (store.receipts(root) for root, _ in [*store.history(store.resolve("main"))][::-1])
    assert [len(found) for found in (first, second)] == [1, 1]
    details = values.from_json(second[0].details)
    assert isinstance(details, dict)
    assert second[0].objects < first[0].objects
    assert isinstance(details["read"], bytes)
    assert isinstance(details["max_age_seconds"], int)
    assert details["max_age_seconds"] > 0
    found = ledger(store)
    assert found.findings == ()
    assert all(len(item) == 1 for item in by_key(found).values())


def test_what_nobody_tells_to_have_read_is_not_guessed(store: Store, root: Digest) -> None:
    sizes = dict(store.closure(root).sizes())
    documents = {key for key in sizes if key.startswith("documents/")}
    size = sum(size for key, size in sizes.items() if key in documents)
    store.add_receipt(told(store, root, objects=1, bytes_read=size + 1))
    assert {key for key, item in by_key(ledger(store)).items() if item} == documents


def test_what_an_older_readback_stood_for_is_as_old_as_that_may_have_been(store: Store, root: Digest) -> None:
    accepted = ("3 keys accepted unread, by readbacks of the same version at most 86400 s old",)
    whole = told(store, root, timedelta(hours=1), details={"max_age_seconds": 86_400})
    store.add_receipt(replace(whole, bytes_read=10, exceptions=accepted))
    assert only(ledger(store)).oldest(NOW) == NOW - timedelta(hours=25)
    store.add_receipt(told(store, root, timedelta(hours=9)))
    assert only(ledger(store)).oldest(NOW) == NOW - timedelta(hours=9)
    store.add_receipt(whole)
    assert only(ledger(store)).oldest(NOW) == NOW - timedelta(hours=1)


def test_what_has_no_version_in_a_receipt_was_not_read_for_it(store: Store, root: Digest) -> None:
    keys = sorted(key for key, _ in store.closure(root).sizes())
    versions = [None if number % 2 else "v" for number in range(len(keys))]
    details = {"max_age_seconds": 600, "versions": versions}
    store.add_receipt(told(store, root, timedelta(hours=2), details=details, bytes_read=10))
    found = by_key(ledger(store))
    for number, key in enumerate(keys):
        (copy,) = found[key]
        assert copy.evidence is not None
        assert copy.evidence.read_at == NOW - timedelta(hours=2, seconds=600 if number % 2 else 0)


# -- forged and damaged receipts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (lambda r: replace(r, closure=Digest.of(b"another")), "another closure"),
        (lambda r: replace(r, closure=None), "another closure"),
        (lambda r: replace(r, exceptions=("only shards 0",)), "another closure"),
        (lambda r: replace(r, bytes_read=r.bytes_read - 1), "fewer bytes"),
        (lambda r: replace(r, time="yesterday"), "not of the form"),
        (lambda r: replace(r, time="0001-01-01T00:00:00Z"), "not of the form"),
        (lambda r: replace(r, details=values.to_json([1])), "no mapping"),
        (lambda r: replace(r, details=values.to_json({"store": "far"})), "32 hex digits"),
        (lambda r: replace(r, details=values.to_json({"by": 7})), "not a text"),
        (lambda r: replace(r, details=values.to_json({"max_age_seconds": -1})), "number of seconds"),
        (lambda r: replace(r, details=values.to_json({"max_age_seconds": 10**30})), "number of seconds"),
        (lambda r: replace(r, details=values.to_json({"max_age_seconds": 9, "versions": []})), "say of each key"),
        (lambda r: replace(r, details=values.to_json({"max_age_seconds": 9, "versions": "v"})), "not a list"),
        (lambda r: replace(r, details=values.to_json({"read": [True]})), "not told in bits"),
        (lambda r: replace(r, bytes_read=1, details=values.to_json({"read": b""})), "say of each key"),
    ],
)
def test_a_forged_receipt_is_told_and_does_not_count(
    store: Store, root: Digest, forge: Callable[[Receipt], Receipt], why: str
) -> None:
    forged = forge(told(store, root))
    digest = store.add_receipt(forged)
    found = ledger(store)
    assert copies(found) == 0
    (finding,) = found.findings
    assert finding.key == receipt_key(root, digest)
    assert why in finding.message


def test_a_receipt_under_another_name_is_told_and_does_not_count(store: Store, root: Digest) -> None:
    data = told(store, root).encode()
    store.backend.create(receipt_key(root, Digest.of(b"another")), data)  # type: ignore[attr-defined]
    store.backend.create(receipt_key(root, Digest.of(b"no receipt")), b"no receipt")  # type: ignore[attr-defined]
    found = ledger(store)
    assert copies(found) == 0
    assert sorted(finding.kind.value for finding in found.findings) == ["corrupt", "malformed"]


def test_receipts_about_what_is_not_here_say_nothing(store: Store, root: Digest) -> None:
    store.add_receipt(replace(told(store, root), subject=Digest.of(b"gone")))
    found = ledger(store)
    assert (copies(found), found.findings) == (0, ())


# -- which store it is -------------------------------------------------------------------------------------------------


def test_a_store_that_was_made_anew_takes_the_copies_of_the_old_one_away(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root, timedelta(days=2)))
    assert copies(ledger(store)) == 1
    second = commit_state(store, "main", states(1.0), 2)
    store.add_receipt(told(store, second, timedelta(days=1), details={"store": OTHER}))
    found = ledger(store, [root])
    assert copies(found) == 0
    assert [(holder.id, holder.replaced) for holder in found.holders[1:]] == [(OTHER, False), (FAR, True)]


def test_folders_of_one_name_on_two_hosts_are_two_stores(store: Store, root: Digest) -> None:
    for host, identity in (("one", FAR), ("two", OTHER)):
        store.add_receipt(told(store, root, where="file:///ckpts", details={"by": f"ops@{host}", "store": identity}))
    assert copies(ledger(store)) == 2


def test_receipts_that_do_not_say_which_store_count_for_this_one_alone(store: Store, root: Digest) -> None:
    """Those of earlier releases; a store may have moved since, and would count twice."""
    store.add_receipt(told(store, root, timedelta(days=2), details={"store": None}))
    found = ledger(store)
    assert copies(found) == 0
    assert found.holders[1].id is None
    store.add_receipt(replace(here(store, root), details=None))
    found = ledger(store)
    assert copies(found) == 1
    assert only(found).verified_at(found.holders[0], found.at) == len(only(found).keys)


def test_a_remote_that_no_receipt_tells_of_is_listed(store: Store, root: Digest) -> None:
    add_remote(store, "far", "s3://far/store", check=False)
    add_remote(store, "never", "s3://never/store", check=False)
    store.add_receipt(told(store, root))
    found = ledger(store)
    assert [(holder.name, holder.url) for holder in found.holders] == [
        ("this store", store.url),
        ("far", "s3://far/store"),
        ("never", "s3://never/store"),
    ]
    assert copies(found) == 1


def test_an_object_that_is_gone_from_this_store_is_no_copy(store: Store, root: Digest) -> None:
    store.add_receipt(here(store, root))
    key = max(store.closure(root).objects)
    assert copies(ledger(store)) == 1
    store.backend.delete(key)
    found = ledger(store)
    assert (copies(found), only(found).lacking(1, found.at)) == (0, 1)


# -- asking the remotes ------------------------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "far", create=True)


def test_a_push_can_be_seen_without_asking_where_it_went(store: Store, root: Digest, far: Store) -> None:
    add_remote(store, "far", far.url)
    done = ckptstore.push(store, far, root)
    found = ledger(store)
    lasting = done.receipt.method != "cached"
    assert copies(found) == (1 if lasting else 0)
    holder, evidence = sole(found)
    assert (holder.name, holder.id) == ("far", store_id(far.backend))
    assert (evidence.readback.by, evidence.readback.receipt.operation) == (this_actor(), "push")


def test_a_remote_is_asked_for_its_own_receipts_and_for_what_it_has(store: Store, root: Digest, far: Store) -> None:
    ckptstore.push(store, far, root)
    add_remote(store, "far", far.url)
    far.add_receipt(here(far, root))
    far.add_receipt(told(store, root))  # about a third store: hearsay
    found = ledger(store, ask={"far": far})
    assert copies(found) == 1
    assert [receipt.where for receipt in found.learned] == [far.url]
    for receipt in found.learned:
        store.add_receipt(receipt)
    assert (copies(ledger(store)), ledger(store, ask={"far": far}).learned) == (1, ())
    far.backend.delete(max(store.closure(root).objects))
    asked = ledger(store, ask={"far": far})
    assert (copies(asked), only(asked).lacking(1, asked.at)) == (0, 1)
    assert copies(ledger(store)) == 1


def test_what_a_remote_has_and_nobody_read_back_is_shown_and_does_not_count(
    store: Store, root: Digest, far: Store
) -> None:
    """B066: a name is no proof of content."""
    for key, _ in store.closure(root).sizes():
        far.backend.create(key, store.backend.get(key))
    add_remote(store, "far", far.url)
    found = ledger(store, ask={"far": far})
    assert copies(found) == 0
    for item in only(found).keys:
        assert {(copy.holder.name, copy.evidence, copy.present) for copy in item.copies} == {
            ("this store", None, True),
            ("far", None, True),
        }


def test_a_remote_made_anew_is_noticed_when_it_is_asked(store: Store, root: Digest, far: Store, tmp_path: Path) -> None:
    add_remote(store, "far", far.url)
    ckptstore.push(store, far, root)
    store.add_receipt(here(far, root))
    assert copies(ledger(store)) == 1
    shutil.rmtree(tmp_path / "far")
    anew = ckptstore.open(tmp_path / "far", create=True)
    found = ledger(store, ask={"far": anew})
    assert copies(found) == 0
    assert [(holder.name, holder.replaced) for holder in found.holders] == [
        ("this store", False),
        ("far", False),
        (far.url, True),
    ]


def test_a_remote_that_fails_is_told_and_the_others_are_asked(store: Store, root: Digest, far: Store) -> None:
    ckptstore.push(store, far, root)
    far.add_receipt(here(far, root))
    broken = FaultyBackend(far.backend)
    broken.fail("list", BackendError("listing receipts", "gone"), nth=1)
    found = ledger(store, ask={"broken": Store(broken), "far": far})
    assert copies(found) == 1
    assert [str(fault) for fault in found.faults] == ["remote broken: listing receipts: gone"]


def test_a_root_that_cannot_be_read_is_told_and_the_others_are_counted(store: Store, root: Digest) -> None:
    store.add_receipt(told(store, root))
    found = ledger(store, [Digest.of(b"nothing"), root])
    assert copies(found) == 1
    assert [fault.exit_code for fault in found.faults] == [4]


# -- size --------------------------------------------------------------------------------------------------------------


def test_twenty_thousand_objects_and_the_receipts_of_many_days(store: Store, root: Digest) -> None:
    """Closures are read once, however many receipts there are about them."""
    names = [f"{number:05d}" for number in range(20_000)]
    tree = Tree(tuple(File(name, False, 1, (Digest.of(name.encode()),)) for name in names))
    memory = ckptstore.open("memory:twenty-thousand", create=True)
    ckptstore.push(store, memory, root)
    files = memory.objects.put_document(tree.encode())
    large = memory.objects.put_document(replace(memory.checkpoint(root), files=files).encode())
    receipt = told(memory, large)
    for number in range(40):
        details = values.to_json({"store": f"{number % 4:032x}"})
        memory.add_receipt(
            replace(receipt, time=f"2026-01-01T00:00:{number:02d}Z", details=details, where=f"s3://b{number % 4}")
        )
    counting = CountingBackend(memory.backend)
    found = ledger(Store(counting), [large])
    assert len(only(found).keys) > 20_000
    assert copies(found) == 4
    assert only(found).verified_at(found.holders[1], found.at) == len(only(found).keys)
    assert counting.by_key("get")[document_key(files)].calls == 1


def test_who_reads_is_in_every_receipt_of_a_readback(store: Store, root: Digest) -> None:
    identity = store_id(store.backend)
    assert values.from_json(readback_details(identity)) == {
        "by": this_actor(),
        "max_age_seconds": 0,
        "store": identity,
    }
    assert store.verify(root).receipt(store.url).details == readback_details(identity)
    user, _, host = this_actor().partition("@")
    assert user
    assert host
