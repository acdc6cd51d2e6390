"""Whatever a process does to stores and beside them: one list for every test that interrupts, starves or starts anew.

Each operation works in a folder that :func:`prepare` made and returns what it came to. Done again it comes to the same,
whether the first time was the whole of it, a part of it, or nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import ckptstore
from ckptstore import evidence
from ckptstore.collection.collect import collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.export import export_weights, import_weights
from ckptstore.repairs.repair import repair
from tests.support.invariants import broken, settled
from tests.support.training import make_training, save_steps, seed_everything

Work = Callable[[Path], object]
"""Does something to the stores in a folder; returns what it came to."""

STORES = ("store", "far", "new")
"""Names of the folders that are stores, or come to be."""


def prepare(folder: Path) -> Path:
    """A store of two checkpoints and a shard that belongs to none, a damaged copy of it, an empty one, some files, and
    a safetensors file."""
    store = ckptstore.open(folder / "store", create=True)
    save_steps(store, "main", make_training(), 2)
    left = ckptstore.TrainingState(model=nn.ModuleDict({"left": nn.Linear(40, 40)}))
    store.save_shard(left, store.begin("given-up"), step=1, index=0, count=2)
    shutil.copytree(folder / "store", folder / "hurt")
    _damage(folder / "hurt")
    ckptstore.open(folder / "other", create=True)
    (folder / "files").mkdir()
    (folder / "files" / "plan.json").write_bytes(b"{}")
    (folder / "files" / "weights.bin").write_bytes(bytes(range(256)) * 300)
    export_weights(store, store.resolve("main"), folder / "weights.safetensors")
    return folder


def _damage(path: Path) -> None:
    """One byte of an object, the whole of another, and the end of a page."""
    store = ckptstore.open(path)
    closure = store.closure(store.resolve("main"))
    objects = sorted(closure.objects)
    page = next(key for key, _ in closure.sizes() if b'"kind":"page"' in store.backend.get(key)[-100:])
    _put(path / objects[0], b"\xff" * 8 + store.backend.get(objects[0])[8:])
    _put(path / page, store.backend.get(page)[:-9])
    (path / objects[1]).unlink()


def _put(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)
    file.chmod(0o444)


@contextmanager
def one_thread() -> Iterator[None]:
    """A forked child has none of the threads that torch computes with, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def save(folder: Path) -> object:
    training = make_training()
    with ckptstore.open(folder / "store").run("main", **training.objects()) as run:
        step = run.resume()
        if step < 3:
            training.step()
            run.save(step + 1, metrics={"loss": 0.5})
        return run.store.head("main")


def save_sharded(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    if store.head("wide") is None:
        seed_everything()
        attempt = store.begin("wide")
        parts = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(30, 30)})) for name in "ab"]
        receipts = [store.save_shard(part, attempt, step=1, index=i, count=2) for i, part in enumerate(parts)]
        store.commit(attempt, receipts, metrics={"loss": 0.5})
    return store.head("wide")


def save_and_push_behind(folder: Path) -> object:
    far = ckptstore.open(folder / "far", create=True)
    training = make_training()
    with ckptstore.open(folder / "store").run("main", **training.objects()) as run:
        step = run.resume()
        if step < 3:
            training.step()
            run.save(step + 1, push_to=far)
        run.wait()
        root = run.store.head("main")
        assert root is not None
        if far.head("main") != root:
            ckptstore.push(run.store, far, root, ref="main")
    return root, far.head("main")


def push(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    far = ckptstore.open(folder / "far", create=True)
    return ckptstore.push(store, far, store.resolve("main"), ref="main").root


def pull_a_part(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    far = ckptstore.open(folder / "far", create=True)
    return ckptstore.pull(store, far, store.resolve("main"), shards=[0]).root


def trees(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    tree = store.put_tree(folder / "files")
    store.get_tree(tree, folder / "out")
    written = {file.name: file.read_bytes() for file in (folder / "out").iterdir() if not file.name.startswith(".")}
    return tree, store.put_tree(folder / "files"), written


def prepare_a_run(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    tree = store.put_tree(folder / "files")
    return store.put_preparation(tree, tree, store.put_tree(folder / "files", {"plan.json": "not an input"}))


def move(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    head = store.resolve("main")
    if store.head("best") is None:
        store.move_ref("best", head, None)
    return store.head("best")


def repartition(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    if store.head("spread") is None or len(store.checkpoint(store.resolve("spread")).shards) == 1:
        # The ref that names what a run made goes on with one shard, and this one from there.
        root = store.head("spread") or store.resolve("main")
        names = sorted({entry.path for entry in store.closure(root).shards[0].entries})
        ckptstore.repartition(store, root, [names[:3], names[3:]], ref="spread")
    return store.head("spread")


def bring_weights(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    if store.head("imported") is None:
        import_weights(store, folder / "weights.safetensors", "imported")
    return store.head("imported")


def make_a_store(folder: Path) -> object:
    store = ckptstore.open(folder / "new", create=True)
    return len(store.id or ""), list(store.checkpoints())


def know_remotes(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    for name, known in (("first", True), ("second", True), ("first", False)):
        if (name in ckptstore.known_remotes(store)) is not known:
            if known:
                ckptstore.add_remote(store, name, str(folder / "other"))
            else:
                ckptstore.remove_remote(store, name)
    return sorted(ckptstore.known_remotes(store))


def note(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    root = store.resolve("main")
    store.add_receipt(ckptstore.Receipt("note", root, None, 0, 0, 0, "none", "2026-01-01T00:00:00Z", "here"))
    return [receipt.operation for receipt in store.receipts(root)].count("note")


def read_back(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    report = _verified(store)
    store.add_receipt(report.receipt(store.url))
    return report.method.value


def _verified(store: ckptstore.Store) -> ckptstore.VerifyReport:
    report = store.verify("main")
    if not report.ok:
        raise report.findings[0].error()
    return report


def rebuild_catalogue(folder: Path) -> object:
    with ckptstore.open(folder / "store").catalogue() as catalogue:
        catalogue.rebuild()
        return catalogue.rows()


def pack_evidence(folder: Path) -> object:
    path = folder / "evidence.tar"
    if not path.exists():
        evidence.pack({"plan.json": b"{}", "weights.bin": folder / "files" / "weights.bin"}, path)
    return evidence.verify(path).sha256


def unpack_weights(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    path = folder / "exported.safetensors"
    if not path.exists():
        export_weights(store, store.resolve("main"), path)
    return path.read_bytes()


def extract(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    path = folder / "extracted"
    if not path.exists():
        ckptstore.extract_checkpoint(store, store.resolve("main"), path)
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if not name.startswith(".") and "/." not in name}


def collect_garbage(folder: Path) -> object:
    store = ckptstore.open(folder / "store")
    collect(store, Policy((KeepLast(1),)), delete=True)
    return _verified(store).root, sorted(key for key in settled(store) if not key.startswith("refs/"))


def mend(folder: Path) -> object:
    store = ckptstore.open(folder / "hurt")
    done = repair(store, "main", [ckptstore.open(folder / "store")], remotes=False)
    if done.findings:
        raise done.findings[0].error()
    return broken(folder / "hurt"), sorted(key for key in settled(store) if not key.startswith("receipts/"))


OPERATIONS: dict[str, Work] = {
    work.__name__: work
    for work in (
        save,
        save_sharded,
        save_and_push_behind,
        push,
        pull_a_part,
        trees,
        prepare_a_run,
        move,
        repartition,
        bring_weights,
        make_a_store,
        know_remotes,
        note,
        read_back,
        rebuild_catalogue,
        pack_evidence,
        unpack_weights,
        extract,
        mend,
        collect_garbage,
    )
}
"""Every operation by its name, in an order in which all of them can be done in one folder."""

DELETING = ("collect_garbage",)
"""Those that delete what they find."""
