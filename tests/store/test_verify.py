"""Verify reads every byte once, and names every fault exactly (fault B094 and the damage of every kind of file)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.backends.counting import CountingBackend
from ckptstore.errors import CkptStoreError, CorruptError, RefusedError
from ckptstore.findings import Kind
from ckptstore.format.keys import STORE_KEY, document_key, object_key, ref_key
from ckptstore.format.page import Entry, TensorEntry, make_tensor_entry
from ckptstore.store import Store
from tests.support.documents import rewrite_checkpoint, rewrite_entries
from tests.support.training import commit_state


class Net(nn.Module):
    """One tensor over 16 MiB, some that go to packs, one that stands inline."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.big = nn.Parameter(torch.randn(5 * 2**20))
        self.small = nn.Linear(30, 30)
        self.tiny = nn.Parameter(torch.ones(3))


def state_of(net: Net) -> ckptstore.TrainingState:
    optimizer = torch.optim.AdamW([net.small.weight, net.small.bias, net.tiny], lr=1e-3)
    for parameter in (net.small.weight, net.small.bias, net.tiny):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return ckptstore.TrainingState(model=net, optimizer=optimizer)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Digest]:
    folder = tmp_path_factory.mktemp("verify")
    (folder / "plan").mkdir()
    (folder / "plan" / "plan.json").write_bytes(b'{"updates":1}' * 10)
    store = ckptstore.open(folder / "store", create=True)
    tree = store.put_tree(folder / "plan")
    run = store.put_preparation(tree, tree, tree)
    attempt = store.begin("main")
    receipt = store.save_shard(state_of(Net()), attempt, step=1, run=run)
    return folder / "store", store.commit(attempt, [receipt])


@pytest.fixture
def damaged(pristine: tuple[Path, Digest], tmp_path: Path) -> tuple[Path, Digest]:
    """A copy of the store whose files may be damaged."""
    import shutil

    shutil.copytree(pristine[0], tmp_path / "store")
    return tmp_path / "store", pristine[1]


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.chmod(0o644)
    path.write_bytes(bytes(data))


def test_a_whole_closure_is_read_exactly_once(pristine: tuple[Path, Digest]) -> None:
    counting = CountingBackend(ckptstore.open(pristine[0]).backend)
    store = Store(counting)
    sizes = dict(ckptstore.open(pristine[0]).closure(pristine[1]).sizes())
    report = store.verify(pristine[1])
    assert report.ok
    assert report.exit_code == 0
    read = counting.by_key("get", "readback")
    assert read.pop(STORE_KEY).calls == 1  # the receipt says which store it was
    assert {key: tally.bytes for key, tally in read.items()} == sizes
    assert all(tally.calls == 1 for tally in read.values())
    assert report.bytes_read == sum(sizes.values())
    assert report.bytes_read == sum(tally.bytes for tally in read.values())


def places(store: Store, root: Digest) -> dict[str, tuple[str, str]]:
    """Kind of file: its key, and what must be named when it is damaged."""
    closure = store.closure(root)
    view = closure.shards[0]
    big = next(entry for entry in view.tensors() if entry.path == "big")
    pack = view.packs[("weight",)][0]
    tree = next(iter(closure.trees.values()))
    tree_document = store.preparation(store.checkpoint(root).run or root).plan
    return {
        "chunk": (object_key(big.chunks[1]), "weight 'big' chunk 1"),
        "pack": (object_key(pack.digest), "shard 0 pack 0 weight"),
        "page": (document_key(view.shard.pages[0].digest), "page 0"),
        "shard": (document_key(view.digest), "shard 0 shard document"),
        "checkpoint": (document_key(root), "checkpoint document"),
        "tree": (document_key(tree_document), "plan tree"),
        "tree file": (object_key(tree.files[0].chunks[0]), "'plan.json' chunk 0"),
        "preparation": (document_key(store.checkpoint(root).run or root), "preparation"),
    }


KINDS = ["chunk", "pack", "page", "shard", "checkpoint", "tree", "tree file", "preparation"]


@pytest.mark.parametrize("damage", ["bit", "truncated", "emptied", "longer", "missing", "swapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_kind_of_file_is_found_and_named(damaged: tuple[Path, Digest], kind: str, damage: str) -> None:
    """B094 (Comfy-Org/ComfyUI#15459): key, place, expected and actual; a stable exit code; never the library's
    words."""
    folder, root = damaged
    store = ckptstore.open(folder)
    key, named = places(store, root)[kind]
    path = folder / key
    data = path.read_bytes()
    path.chmod(0o644)
    if damage == "bit":
        flip(path, len(data) // 3 if kind == "pack" else len(data) // 2, 3)
    elif damage == "missing":
        path.unlink()
    else:
        other = (folder / object_key(next(iter(store.closure(root).objects.values())).digest)).read_bytes()[: len(data)]
        changed = {"truncated": data[:-1], "emptied": b"", "longer": data + b"x", "swapped": other.ljust(len(data))}
        path.write_bytes(changed[damage])
    report = ckptstore.open(folder).verify(root)
    assert report.exit_code == (4 if damage == "missing" else 3)
    about = [finding for finding in report.findings if finding.key == key]
    assert about, report.findings
    assert any(named in str(finding.place) for finding in about)
    assert all(root.short in str(finding) for finding in about)
    if damage == "bit":
        assert about[0].kind is Kind.CORRUPT
        assert about[0].expected.startswith("b3:")
        assert about[0].actual.startswith("b3:")


def test_all_faults_are_listed_not_only_the_first(damaged: tuple[Path, Digest]) -> None:
    """B094."""
    folder, root = damaged
    store = ckptstore.open(folder)
    keys = [places(store, root)[kind][0] for kind in ("chunk", "pack", "tree file")]
    for key in keys:
        flip(folder / key, 5)
    assert {finding.key for finding in ckptstore.open(folder).verify(root).findings} == set(keys)


def test_in_a_damaged_pack_the_damaged_tensor_is_named(damaged: tuple[Path, Digest]) -> None:
    folder, root = damaged
    view = ckptstore.open(folder).closure(root).shards[0]
    entry = next(e for e in view.tensors() if (e.path, e.role) == ("small.weight", ("weight",)))
    pack = next(pack for pack in view.packs[("weight",)] if entry.chunks[0] in pack.slots)
    slot = pack.slots[entry.chunks[0]]
    flip(folder / object_key(pack.digest), slot.offset + 7)
    named = [str(finding.place) for finding in ckptstore.open(folder).verify(root).findings]
    assert any("weight 'small.weight' chunk 0" in place for place in named)
    assert not any("small.bias" in place for place in named)


@pytest.mark.parametrize("position", range(0, 330, 11))
def test_a_bit_of_a_ref_record_is_found(damaged: tuple[Path, Digest], position: int) -> None:
    folder, root = damaged
    path = folder / ref_key("main", 1)
    flip(path, position % path.stat().st_size, 1)
    with pytest.raises(CkptStoreError) as caught:
        ckptstore.open(folder).verify("main")
    assert "ref main generation 1" in str(caught.value)
    assert caught.value.exit_code == 3
    assert ckptstore.open(folder).verify(root).ok


def test_an_older_record_of_a_ref_is_held_by_the_next_one(store: Store) -> None:
    state = ckptstore.TrainingState(model=nn.Linear(2, 2))
    for step in (1, 2, 3):
        commit_state(store, "main", [state], step)
    assert store.verify("main").ok
    record = store.refs.record("main", 2)
    forged = replace(record, nonce="0" * 32)
    store.backend.replace(ref_key("main", 2), forged.encode())
    findings = store.verify("main").findings
    assert [(f.kind, f.key) for f in findings] == [(Kind.CORRUPT, ref_key("main", 2))]


def bump(entry: Entry) -> Entry:
    """One AdamW counter off by one."""
    if isinstance(entry, TensorEntry) and entry.role[-1] == "step" and entry.path == "small.bias":
        return make_tensor_entry(entry.path, entry.role, "f32", (), (), torch.tensor(2.0).numpy().tobytes())
    return entry


@pytest.mark.parametrize("recount", [False, True])
def test_an_adam_counter_off_by_one_is_refused_for_its_progress(
    damaged: tuple[Path, Digest], recount: bool, tmp_path: Path
) -> None:
    """With every digest above it recomputed; also when the counters that progress states are forged along."""
    folder, root = damaged
    store = ckptstore.open(folder)
    forged = rewrite_entries(store, root, 0, bump, recount=recount)
    report = store.verify(forged)
    assert report.exit_code == 5
    assert {finding.kind for finding in report.findings} == {Kind.PROGRESS}
    assert "optimizer.optimizer" in report.findings[0].message
    fresh = state_of(Net())
    with pytest.raises(RefusedError, match=r"optimizer\.optimizer"):
        store.restore(forged, fresh)
    with pytest.raises(RefusedError, match=r"optimizer\.optimizer"):
        store.restore(forged, fresh, shard=0)
    with pytest.raises(RefusedError, match=r"optimizer\.optimizer"):
        ckptstore.pull(store, ckptstore.open(tmp_path / "far", create=True), forged)


@pytest.mark.parametrize("kind", KINDS[:5])
def test_load_and_pull_refuse_what_verify_finds(damaged: tuple[Path, Digest], kind: str, tmp_path: Path) -> None:
    folder, root = damaged
    key, _ = places(ckptstore.open(folder), root)[kind]
    flip(folder / key, 40, 2)
    with pytest.raises(CorruptError):
        ckptstore.open(folder).restore(root, state_of(Net()))
    far = ckptstore.open(tmp_path / "far", create=True)
    with pytest.raises(CorruptError):
        ckptstore.pull(ckptstore.open(folder), far, root)
    assert far.backend.stat(document_key(root)) is None
    assert far.backend.stat(key) is None


def test_a_torn_restore_says_what_was_overwritten_and_stops_the_run(damaged: tuple[Path, Digest]) -> None:
    """F-147."""
    folder, root = damaged
    store = ckptstore.open(folder)
    view = store.closure(root).shards[0]
    pack = view.packs[("weight",)][0]
    flip(folder / object_key(pack.digest), 0)
    net = Net()
    with torch.no_grad():
        net.big.zero_()
    with ckptstore.open(folder).run(
        "main", model=net, optimizer=state_of(net).optimizers["optimizer"], binding={}
    ) as run:
        with pytest.raises(CorruptError, match=r"overwritten before that: .*weight big"):
            run.resume()
        with pytest.raises(RefusedError, match="the last restore was torn"):
            run.save(2)


def test_an_atomic_restore_leaves_the_live_state_untouched(damaged: tuple[Path, Digest]) -> None:
    """F-148."""
    folder, root = damaged
    store = ckptstore.open(folder)
    pack = store.closure(root).shards[0].packs[("weight",)][0]
    flip(folder / object_key(pack.digest), 0)
    net = Net()
    state = state_of(net)
    with torch.no_grad():
        net.big.zero_()
    with pytest.raises(CorruptError):
        ckptstore.open(folder).restore(root, state, atomic=True)
    assert not net.big.any()


def test_ancestors_are_present_retired_or_missing(store: Store) -> None:
    """F-134."""
    state = ckptstore.TrainingState(model=nn.Linear(20, 20))
    roots = []
    for step in (1, 2, 3):
        with torch.no_grad():
            state.modules[""].weight.add_(1)  # type: ignore[operator, union-attr]
        roots.append(commit_state(store, "main", [state], step))
    assert [(a.root, a.status) for a in store.verify("main").ancestors] == [
        (roots[1], "present"),
        (roots[0], "present"),
    ]
    store.backend.delete(document_key(store.checkpoint(roots[1]).shards[0]))
    report = ckptstore.open(store.url).verify("main")
    assert [a.status for a in report.ancestors] == ["missing", "present"]
    assert report.exit_code == 4
    from ckptstore.format.keys import retired_key
    from ckptstore.format.records import Retired

    store.backend.create(retired_key(roots[1]), Retired("to save space").encode())
    report = ckptstore.open(store.url).verify("main")
    assert [a.status for a in report.ancestors] == ["retired", "present"]
    assert report.ok
    store.backend.delete(document_key(roots[0]))
    report = ckptstore.open(store.url).verify("main")
    assert [a.status for a in report.ancestors] == ["retired", "missing"]
    assert [finding.kind for finding in report.findings] == [Kind.ANCESTOR]


@pytest.mark.parametrize("field", ["state_root", "rng_root"])
def test_a_root_that_does_not_follow_is_found(store: Store, field: str) -> None:
    root = commit_state(store, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    forged = rewrite_checkpoint(store, root, lambda c: {field: Digest.of(b"lie")})
    findings = store.verify(forged).findings
    assert [finding.kind for finding in findings] == [Kind.INCONSISTENT]
    assert field.replace("_", " ") in findings[0].message


def test_shards_in_another_order_are_found(store: Store) -> None:
    states = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(3, 3)})) for name in "ab"]
    root = commit_state(store, "main", states, 1)
    forged = rewrite_checkpoint(store, root, lambda c: {"shards": tuple(reversed(c.shards))})
    assert any("the shard is of another position" in f.message for f in store.verify(forged).findings)
    with pytest.raises(CorruptError):
        store.restore(forged, states[0], shard=0)


def test_readback_behind_a_save_leaves_a_receipt_of_what_was_really_read(disk_store: Store) -> None:
    model = nn.Linear(50, 50)
    with disk_store.run("main", model=model) as run:
        run.resume()
        root = run.save(1, metrics={"loss": 0.5})
    receipts = {receipt.operation: receipt for receipt in disk_store.receipts(root)}
    closure = disk_store.closure(root)
    proof = receipts.get("verify") or receipts["read"]
    assert proof.bytes_read == sum(size for _, size in closure.sizes())
    assert proof.method in ("direct", "fsync-dropped", "cached")
    assert (proof.operation == "verify") == (proof.method != "cached")
    assert receipts["metrics"].bytes_read == 0


@pytest.mark.parametrize("many", [False, True])
def test_what_verify_finds_bad_is_stored_anew_by_the_next_save_of_the_same_process(
    disk_store: Store, many: bool
) -> None:
    model = nn.Linear(50, 50)
    with disk_store.run("main", model=model) as run:
        run.resume()
        root = run.save(1)
        run.wait()
        key = next(stat.key for stat in disk_store.backend.list("objects/"))
        path = disk_store.backend.path / key  # type: ignore[attr-defined]
        path.chmod(0o600)
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        found = next(ckptstore.verify_many(disk_store, [root])) if many else disk_store.verify(root)
        assert not found.ok
        run.save(2)
    assert disk_store.verify(root).ok


def test_a_failed_readback_surfaces_at_the_end_and_never_masks_the_training_error(disk_store: Store) -> None:
    """B058 (google/orbax#605): at close, at the next save, and beside an error that is under way."""
    from ckptstore.errors import BackendError
    from tests.support.faulty import FaultyBackend

    def broken() -> Store:
        faulty = FaultyBackend(disk_store.backend)
        faulty.fail("readback", BackendError("readback", "the disk does not answer"))
        return Store(faulty)

    def save_once(ref: str, error: Exception | None = None) -> None:
        with broken().run(ref, model=nn.Linear(5, 5)) as run:
            run.resume()
            run.save(1)
            if error is not None:
                raise error

    def save_twice() -> None:
        with broken().run("b", model=nn.Linear(5, 5)) as run:
            run.resume()
            run.save(1)
            run.save(2)

    with pytest.raises(BackendError, match="the disk does not answer"):
        save_once("a")
    with pytest.raises(BackendError, match="the disk does not answer"):
        save_twice()
    with pytest.raises(ZeroDivisionError) as caught:
        save_once("c", ZeroDivisionError("training went wrong"))
    assert any("the disk does not answer" in note for note in caught.value.__notes__)


def test_readback_before_commit_keeps_the_ref_from_bytes_that_did_not_reach_the_disk(disk_store: Store) -> None:
    from tests.support.faulty import FaultyBackend

    faulty = FaultyBackend(disk_store.backend)
    store = Store(faulty)
    with store.run("main", model=nn.Linear(30, 30), readback="before-commit") as run:
        run.resume()
        faulty.after("create", lambda key: faulty.flip_bit(key, 9) if key.startswith("objects/") else None)
        with pytest.raises(CorruptError):
            run.save(1)
    assert disk_store.head("main") is None
