"""Every kind of key under every kind of damage: found, named, counted, never handed out, repaired (B066, B094).

Public sources: treeverse/dvc#7268, #5502, #10498. docs/damage.md shows the table.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CkptStoreError
from ckptstore.findings import Finding
from ckptstore.findings import Kind as FindingKind
from ckptstore.repairs.header import repair_header
from ckptstore.repairs.repair import repair
from ckptstore.store import Store
from tests.store import damagecases
from tests.store.damagecases import ASIDE, COPY, ITSELF, KINDS, STORE
from tests.support.damages import DAMAGES, ON_ANY_BACKEND, World, opened, shard_states
from tests.support.invariants import broken

CELLS = [(kind, damage) for kind in KINDS for damage in DAMAGES]
FEW = [
    (kind, list(DAMAGES)[(5 * number + turn) % len(DAMAGES)]) for number, kind in enumerate(KINDS) for turn in (0, 8)
]
"""Two kinds of damage for each kind of key, so that each is met."""

OF_CLOSURE = [kind for kind in KINDS if STORE in KINDS[kind].healed]


@pytest.fixture(scope="module")
def keys(built: World) -> dict[str, list[str]]:
    return built.kinds()


@pytest.fixture(scope="module")
def sound(built: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What each reader hands out of a sound store."""
    return dict(read_everything(built.open(), built, tmp_path_factory.mktemp("sound"), strict=True))


def read_everything(store: Store, world: World, folder: Path, *, strict: bool = False) -> Iterator[tuple[str, object]]:
    """What each reader hands out; one that refuses hands out nothing, or is an error if that is ``strict``."""
    for name, read in READERS.items():
        try:
            yield name, read(store, world.second, folder)
        except CkptStoreError:
            if strict:
                raise


def restored(store: Store, root: Digest, _folder: Path) -> object:
    found = []
    for shard in (0, 1):
        state = shard_states(7.0)[shard]
        store.restore(root, state, shard=shard)
        found += [tensor.detach().clone() for _, tensor in state.tensors().values()]
    return [tensor.numpy().tobytes() for tensor in found]


def tree(store: Store, root: Digest, folder: Path) -> object:
    files = store.checkpoint(root).files
    assert files is not None
    place = folder / f"tree {secrets.token_hex(4)}"
    store.get_tree(files, place)
    return content(place)


def exported(store: Store, root: Digest, folder: Path) -> object:
    target = folder / f"{secrets.token_hex(4)}.safetensors"
    ckptstore.export_weights(store, root, target)
    return target.read_bytes()


def pushed(store: Store, root: Digest, _folder: Path) -> object:
    other = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    ckptstore.push(store, other, root)
    # History is sent as far as it can be read, and missed at the other end where it cannot.
    assert {finding.kind for finding in other.verify(root).findings} <= {FindingKind.ANCESTOR}
    return dict(other.closure(root).sizes())


def pulled(store: Store, root: Digest, _folder: Path) -> object:
    other = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    ckptstore.pull(store, other, root, shards=[0])
    return dict(other.closure(root, [0]).sizes())


def compared(store: Store, root: Digest, _folder: Path) -> object:
    """With its parent; what cannot be read of either is told, and no number about it."""
    parent = store.checkpoint(root).parent
    assert parent is not None
    found = store.diff(parent, root)
    return sorted(str(change) for change in found.tensors if change.finding is None)


def listed(store: Store, root: Digest, _folder: Path) -> object:
    return [(entry.path, entry.digest) for view in store.closure(root).shards.values() for entry in view.tensors()]


READERS = {
    "restore": restored,
    "tree": tree,
    "export": exported,
    "push": pushed,
    "pull": pulled,
    "diff": compared,
    "list": listed,
}


def content(place: Path) -> dict[str, bytes]:
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def findings(world: World) -> list[Finding]:
    try:
        return list(world.open().verify("main").findings)
    except CkptStoreError:
        return []  # the ref has no head, or the store no header: the error is all there is


def check(
    world: World, keys: dict[str, list[str]], sound: dict[str, object], kind: str, damage: str, folder: Path
) -> None:
    key, other = keys[kind]
    good = world.file(key).read_bytes()
    before = dict(sound)
    DAMAGES[damage](world.file(key), world.file(other))
    found, healer = damagecases.code(kind, damage), damagecases.healer(kind, damage)
    assert damagecases.observe(world, kind) == found

    # Named, and counted.
    told = findings(world)
    if kind == "ref, newest" and damage in ("bytes of another", "hard link to another"):
        # Good by itself, it does not follow the one before: that one is named, with what it should be.
        assert {finding.key for finding in told} == {keys["ref, earlier"][0]}
        assert told[0].message == "not the record that the next generation follows"
        told = []
    assert {finding.key for finding in told} <= {key}
    if KINDS[kind].told and found and told:
        assert all(any(name in str(f.place) for name in KINDS[kind].told.split("|")) or f.place.path for f in told)
    if kind in OF_CLOSURE:
        assert bool(told) == bool(found)
        assert len({(str(finding.place), finding.message) for finding in told}) == len(told)
        assert kind == "pack" or len(told) == (1 if found else 0)

    # Never handed out: what a reader gives is what it gave before, or it refuses.
    if kind not in ("header", "feature"):
        for name, handed in read_everything(world.open(), world, folder):
            if name == "diff":
                assert set(handed) <= set(before[name]), name  # type: ignore[call-overload]
            else:
                assert handed == before[name], name

    # Repaired.
    if kind in ("header", "feature"):
        assert bool(repair_header(world.near).healed) == (healer == ITSELF)
    sources = {STORE: [world.open("far")], COPY: [world.open("copy")]}.get(healer, [])
    done = repair(world.open(), "main", sources)
    assert done.ok, done.findings
    if healer in (STORE, COPY, ITSELF, ASIDE) and kind not in ("header", "feature"):
        assert [item.key for item in done.healed] == [key]
    else:
        assert done.healed == ()
    assert world.open().verify("main").ok
    assert damagecases.observe(world, kind) == 0 or kind == "feature"
    if healer in (STORE, COPY) or kind == "header":
        assert world.file(key).read_bytes() == good
    if damage not in ("mode 0666", "missing") and kind != "lease":
        assert kind in ("feature", "lease") or list((world.near / "quarantine").iterdir())


@pytest.mark.parametrize(("kind", "damage"), FEW)
def test_damage_is_found_named_counted_and_repaired(
    built: World,
    keys: dict[str, list[str]],
    sound: dict[str, object],
    tmp_path: Path,
    kind: str,
    damage: str,
) -> None:
    check(opened(built, tmp_path), keys, sound, kind, damage, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "damage"), [cell for cell in CELLS if cell not in FEW])
def test_any_damage_is_found_named_counted_and_repaired(
    built: World,
    keys: dict[str, list[str]],
    sound: dict[str, object],
    tmp_path: Path,
    kind: str,
    damage: str,
) -> None:
    check(opened(built, tmp_path), keys, sound, kind, damage, tmp_path)


def test_the_few_that_are_tried_each_time_meet_every_kind_and_every_damage() -> None:
    assert {kind for kind, _ in FEW} == set(KINDS)
    assert {damage for _, damage in FEW} == set(DAMAGES)


def in_memory(world: World) -> Store:
    backend = MemoryBackend()
    store = world.open()
    for stat in store.backend.list(""):
        backend.create(stat.key, store.backend.get(stat.key))
    return Store(backend)


@pytest.mark.parametrize("kind", OF_CLOSURE)
def test_damage_in_memory_is_found_and_repaired(
    built: World, keys: dict[str, list[str]], tmp_path: Path, kind: str
) -> None:
    """All that can happen to bytes without files, one after the other."""
    store = in_memory(built)
    assert isinstance(store.backend, MemoryBackend)
    key, other = keys[kind]
    files = tmp_path / "it", tmp_path / "another"
    good = store.backend.get(key)
    for damage in ON_ANY_BACKEND:
        files[0].write_bytes(good)
        files[1].write_bytes(store.backend.get(other))
        DAMAGES[damage](*files)
        store.backend.delete(key)
        if files[0].exists():
            store.backend.create(key, files[0].read_bytes())
        assert {finding.key for finding in Store(store.backend).verify(built.second).findings} == {key}
        done = repair(Store(store.backend), built.second, [built.open("far")])
        assert (done.ok, [item.key for item in done.healed]) == (True, [key])
        assert store.backend.get(key) == good
        assert (key, good) not in store.backend.quarantined


def test_the_page_shows_the_table_of_the_tests() -> None:
    page = damagecases.PAGE.read_text("utf-8")
    assert damagecases.written(page) == page, "run python -m tests.store.damagecases"


def test_a_store_full_of_damage_is_repaired_in_one_go(
    built: World, keys: dict[str, list[str]], sound: dict[str, object], tmp_path: Path
) -> None:
    """Every kind at once, each with another damage."""
    world = opened(built, tmp_path)
    hurt = [kind for kind in KINDS if kind not in ("header", "feature", "lease", "ref, newest")]
    for number, kind in enumerate(hurt):
        damage = [name for name in DAMAGES if name not in ("mode 0666", "hard link to another", "bytes of another")]
        DAMAGES[damage[number % len(damage)]](*(world.file(key) for key in keys[kind]))
    done = repair(world.open(), "main", [world.open("far"), world.open("copy")])
    assert done.ok, done.findings
    assert {item.key for item in done.healed} >= {keys[kind][0] for kind in hurt if kind not in ("receipt", "pin")}
    assert world.open().verify("main").ok
    assert broken(world.near) == []
    assert dict(read_everything(world.open(), world, tmp_path, strict=True)) == sound
