"""A store with one of everything, copies of it, and what can happen to a file of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.findings import Kind
from ckptstore.format.keys import (
    document_key,
    feature_key,
    lease_key,
    pin_key,
    receipt_key,
    receipt_prefix,
    ref_key,
    retired_key,
)
from ckptstore.format.records import Feature, Lease, Pin, Retired
from ckptstore.repairs.outcome import Repair
from ckptstore.store import Store
from tests.support.distant import Distant

PIN, LEASE = "ab" * 16, "cd" * 16


def shard_states(shift: float = 0.0) -> list[ckptstore.TrainingState]:
    """Two workers' state: the first has a weight that is an object, both have packs of several chunks."""
    torch.manual_seed(0)
    found = []
    for name, module in (("first", nn.Linear(300, 300)), ("second", nn.Linear(30, 20))):
        whole = nn.ModuleDict({name: module, f"{name}_norm": nn.LayerNorm(300)})
        with torch.no_grad():
            module.weight.add_(shift)
        found.append(ckptstore.TrainingState(model=whole))
    return found


@dataclass(frozen=True)
class World:
    """A folder with ``near``, the store; ``copy``, a plain copy of its files; ``far``, to which it was pushed.

    In ``near``: ref ``main`` at ``first`` and ``second``, each with files and a preparation; a receipt, a pin, a lease,
    a retirement and a feature.
    """

    path: Path
    first: Digest
    second: Digest
    receipt: Digest

    @property
    def near(self) -> Path:
        return self.path / "near"

    @property
    def far(self) -> Path:
        return self.path / "far"

    @property
    def copy(self) -> Path:
        return self.path / "copy"

    def open(self, name: str = "near") -> Store:
        """One of the stores, in a process that knows nothing of it yet."""
        return ckptstore.open(self.path / name)

    def file(self, key: str) -> Path:
        """Where a key of the store lies."""
        return self.near / key

    def kinds(self) -> dict[str, list[str]]:
        """Keys by kind: the one that is damaged, and then one for which it could be mistaken."""
        store = self.open()
        old, new = store.closure(self.first), store.closure(self.second)
        checkpoint = store.checkpoint(self.second)
        assert checkpoint.run is not None
        assert checkpoint.files is not None
        preparation = store.preparation(checkpoint.run)
        packs = {root: [k for k, need in c.objects.items() if need.slots] for root, c in ((0, old), (1, new))}
        chunks = {
            root: [k for k, need in c.objects.items() if not need.slots and need.places[0].role]
            for root, c in ((0, old), (1, new))
        }
        files = [k for k, need in new.objects.items() if not need.slots and not need.places[0].role]
        others = list(store.backend.list(receipt_prefix(self.first)))
        page = [document_key(c.shards[1].shard.pages[0].digest) for c in (new, old)]
        return {
            "checkpoint": [document_key(self.second), document_key(self.first)],
            "shard": [document_key(checkpoint.shards[1]), document_key(old.shards[1].digest)],
            "page": page,
            "tree": [document_key(preparation.plan), document_key(checkpoint.files)],
            "preparation": [document_key(checkpoint.run), document_key(checkpoint.files)],
            "chunk": [chunks[1][0], chunks[0][0]],
            "pack": [next(k for k in packs[1] if k not in old.objects), packs[0][0]],
            "file": [files[0], files[1]],
            "ancestor": [document_key(self.first), document_key(self.second)],
            "ref, newest": [ref_key("main", 2), ref_key("other", 2)],
            "ref, earlier": [ref_key("main", 1), ref_key("other", 1)],
            "receipt": [receipt_key(self.second, self.receipt), others[0].key],
            "pin": [pin_key(self.second, PIN), retired_key(self.first)],
            "retirement": [retired_key(self.first), pin_key(self.second, PIN)],
            "lease": [lease_key(LEASE), pin_key(self.second, PIN)],
            "feature": [feature_key("single-writer"), retired_key(self.first)],
            "header": ["ckptstore.json", feature_key("single-writer")],
        }


def build(path: Path) -> World:
    """Make a world in an empty folder."""
    store = ckptstore.open(path / "near", create=True, single_writer=True)
    for name in ("plan", "files"):
        (path / name).mkdir()
        (path / name / "settings.json").write_bytes(f'{{"of":"{name}"}}'.encode())
    (path / "files" / "vocabulary.bin").write_bytes(bytes(range(256)) * 20)
    plan, files = (store.put_tree(path / name) for name in ("plan", "files"))
    run = store.put_preparation(plan, files, files)
    roots = []
    for step in (1, 2):
        attempt = store.begin("main")
        receipts = [
            store.save_shard(state, attempt, step=step, index=index, count=2, run=run, files=files)
            for index, state in enumerate(shard_states(float(step)))
        ]
        roots.append(store.commit(attempt, receipts))
        store.move_ref("other", roots[-1], store.head("other"))
    first, second = roots
    receipt = store.add_receipt(store.verify(second).receipt(store.url))
    store.add_receipt(store.verify(first).receipt(store.url))
    backend = store.backend
    backend.create(pin_key(second, PIN), Pin(None, "kept for a while").encode())
    backend.create(retired_key(first), Retired("its closure may go").encode())
    backend.create(lease_key(LEASE), Lease("elsewhere", "1-2-3", "2026-09-14T03:56:28Z").encode())
    assert backend.stat(feature_key("single-writer")) is not None
    assert Feature.parse(backend.get(feature_key("single-writer")))
    ckptstore.push(store, ckptstore.open(path / "far", create=True), second, ref="main")
    shutil.copytree(path / "near", path / "copy")
    return World(path, first, second, receipt)


def opened(world: World, path: Path) -> World:
    """A copy of a world that may be changed. Its ``copy`` says the same as ``near``, at another place."""
    ignored = shutil.ignore_patterns("catalogue.sqlite*")
    shutil.copytree(world.near, path / "near", ignore=ignored)
    for name in ("far", "copy"):  # of which no file is changed in place
        shutil.copytree(world.path / name, path / name, ignore=ignored, copy_function=os.link)
    return World(path, world.first, world.second, world.receipt)


# -- what can happen to a file ----------------------------------------------------------------------------------------

Damage = Callable[[Path, Path], None]
"""Does it to a file; the other one is of a kind that it could be mistaken for."""


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write(path: Path, data: bytes) -> None:
    clear(path)
    path.write_bytes(data)


def flipped(where: Callable[[int], int]) -> Damage:
    def damage(path: Path, _other: Path) -> None:
        data = bytearray(path.read_bytes())
        data[where(len(data))] ^= 1
        write(path, bytes(data))

    return damage


def without_its_last_byte(path: Path, _other: Path) -> None:
    write(path, path.read_bytes()[:-1])


def half(path: Path, _other: Path) -> None:
    data = path.read_bytes()
    write(path, data[: len(data) // 2])


def emptied(path: Path, _other: Path) -> None:
    write(path, b"")


def grown(path: Path, _other: Path) -> None:
    write(path, path.read_bytes() + b"x")


def missing(path: Path, _other: Path) -> None:
    clear(path)


def swapped(path: Path, other: Path) -> None:
    """Each has the bytes of the other."""
    mine, others = path.read_bytes(), other.read_bytes()
    write(path, others)
    if other != path:
        write(other, mine)


def mistaken(path: Path, other: Path) -> None:
    write(path, other.read_bytes())


def folder(path: Path, _other: Path) -> None:
    clear(path)
    path.mkdir()
    (path / "within").write_bytes(b"something")


def pipe(path: Path, _other: Path) -> None:
    clear(path)
    os.mkfifo(path)


def link_to_good_bytes(path: Path, _other: Path) -> None:
    elsewhere = path.parents[len(path.parents) - 1 - path.parts.index("near")] / "elsewhere"
    clear(elsewhere)
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)


def dangling_link(path: Path, _other: Path) -> None:
    clear(path)
    path.symlink_to("nowhere")


def hard_link(path: Path, other: Path) -> None:
    """Another file of the store has this name, too."""
    clear(path)
    os.link(other, path)


def text(path: Path, _other: Path) -> None:
    write(path, b"Not what you are looking for.\n")


def writable(path: Path, _other: Path) -> None:
    """The bytes are good, and anybody may change them."""
    path.chmod(0o666)


DAMAGES: dict[str, Damage] = {
    "bit flipped at the start": flipped(lambda _: 0),
    "bit flipped in the middle": flipped(lambda size: size // 2),
    "bit flipped at the end": flipped(lambda size: size - 1),
    "last byte lost": without_its_last_byte,
    "cut to half": half,
    "emptied": emptied,
    "missing": missing,
    "grown by a byte": grown,
    "bytes of another": mistaken,
    "hard link to another": hard_link,
    "text": text,
    "a folder": folder,
    "a pipe": pipe,
    "a link to good bytes": link_to_good_bytes,
    "a dangling link": dangling_link,
    "mode 0666": writable,
}
"""By the name that docs/damage.md gives them."""

ON_ANY_BACKEND = tuple(DAMAGES)[:9]
"""Those that can also happen to an object of a bucket."""


def sizes(store: Store, root: Digest) -> dict[str, int]:
    return dict(store.closure(root).sizes())


def flip(path: Path, at: int = 0) -> bytes:
    """Turn over a bit; returns the bad bytes."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    write(path, bytes(data))
    return bytes(data)


def damage_all(store: Store, keys: list[str]) -> None:
    for key in keys:
        data = store.backend.get(key)
        store.backend.replace(key, data[:-1] + bytes([data[-1] ^ 1]))


def kinds(done: Repair) -> set[Kind]:
    return {finding.kind for finding in done.findings}


def distant(world: World) -> Store:
    """The store, at the other end of a network."""
    backend = Distant()
    store = world.open()
    for stat in store.backend.list(""):
        if not stat.key.startswith("features/"):
            backend.create(stat.key, store.backend.get(stat.key))
    return Store(backend)
