"""What the fault matrix does its work in: a bucket prefix behind a fault proxy, and the operations of a store there."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends import open_backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.s3.backend import S3Backend
from ckptstore.errors import CkptStoreError
from ckptstore.findings import raise_finding
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key, receipt_prefix, retired_key
from ckptstore.format.records import Receipt
from ckptstore.store import Store
from tests.support import s3 as server
from tests.support.faultproxy import FaultProxy
from tests.support.http1 import Request
from tests.support.invariants import children
from tests.support.training import Training, make_training

LEFT_OUT = -1
"""In place of an exit code."""

PROVING = ("verify", "push", "pull")
"""Operations of receipts that say that bytes were read back."""


@dataclass(frozen=True, slots=True)
class Seed:
    """A store with two checkpoints, as keys and bytes, and what their training looked like."""

    keys: dict[str, bytes]
    root: Digest
    first: Digest
    model: dict[str, torch.Tensor]

    def store(self) -> Store:
        """The same in memory, away from every network."""
        backend = MemoryBackend()
        for key, data in self.keys.items():
            backend.create(key, data)
        return Store(backend)


@cache
def seed() -> Seed:
    """Made once: ref ``main`` at step 2, its parent at step 1, and what the shared server honours."""
    with MOMENT, pytest.MonkeyPatch.context() as environ:
        server.lead(environ)
        store = ckptstore.open(server.shared().url(**server.shared().url_options), create=True)
        training = make_training()
        with store.run("main", **training.objects(), readback="before-commit") as run:
            run.resume()
            training.step()
            first = run.save(1)
            training.step()
            root = run.save(2)
    keys = {stat.key: store.backend.get(stat.key) for stat in store.backend.list("")}
    header = Digest.of(keys["ckptstore.json"])
    about = receipt_prefix(header)
    kept = {key: data for key, data in keys.items() if not key.startswith("receipts/") or key.startswith(about)}
    return Seed(kept, root, first, {name: tensor.clone() for name, tensor in training.model.state_dict().items()})


MOMENT = threading.RLock()
"""torch's generators are the process's: one operation at a time may seed, save or restore them."""


class World:
    """A prefix of the shared server's bucket, and a proxy on the way there.

    Args:
        keys: what the prefix holds at first.
        options: of the store's URL.
    """

    def __init__(self, keys: dict[str, bytes], **options: str) -> None:
        shared = server.shared()
        self.seed = seed()
        self.prefix = server.fresh_prefix()
        self.proxy = FaultProxy(shared.server.port, shared.server.admin, shared.server.reader)
        self.options = options
        self.once_open: Callable[[], object] = lambda: None
        """Called whenever the store was opened through the proxy."""
        self._keys = keys
        self._direct = shared.url(self.prefix, **shared.url_options)

    @property
    def url(self) -> str:
        """Of the store, through the proxy."""
        options = {"endpoint_url": self.proxy.endpoint, "addressing": "path", **self.options}
        return server.shared().url(self.prefix, **options)

    def store(self, *, create: bool = False) -> Store:
        """Opened anew through the proxy, as another process would."""
        store = ckptstore.open(self.url, create=create)
        self.once_open()
        return store

    def behind(self) -> Store:
        """Opened without the proxy: what really is there."""
        return ckptstore.open(self._direct)

    def heal(self, **options: str) -> None:
        """Nothing goes wrong any more, and the URL has other options."""
        self.once_open = lambda: None
        self.options = options
        self.proxy.heal()

    def __enter__(self) -> World:
        backend = open_backend(self._direct, create=True)
        assert isinstance(backend, S3Backend)
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(backend.create, self._keys, self._keys.values()):
                pass
        self.proxy.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.stop()


def broken(store: Store, does: Operation | None = None, spoils: Collection[str] = ()) -> list[str]:
    """Every way in which a store breaks what must be true at every instant, for one that is not in a directory.

    A document is there only after all that it needs, and what a ref names is whole. A server that keeps other bytes
    than it was given (``spoils``) makes keys bad: then nothing that needs them may be there.
    """
    keys = {stat.key: stat.size for stat in store.backend.list("")}
    wrong: list[str] = []
    good: set[str] = set()
    documents: dict[str, bytes] = {}
    for key in keys:
        digest = digest_of_key(key)
        if digest is None:
            continue
        data = store.backend.get(key)
        if Digest.of(data) == digest:
            good.add(key)
            if key.startswith("documents/"):
                documents[key] = data
        elif not spoils:
            wrong.append(f"{key} is visible and has other bytes")
    for key, data in documents.items():
        digest = digest_of_key(key)
        assert digest is not None
        if retired_key(digest) not in keys:
            wrong += [f"{key} is visible before {child}" for child in children(data) if child not in good]
    for name in () if spoils and does is not None and "/refs/" in does.about else store.refs.names():
        wrong += [f"ref {name}: {finding}" for finding in store.refs.findings(name)[0]]
        head = store.head(name)
        if head is not None:
            wrong += [f"head of {name}: {finding}" for finding in store.verify(head).findings]
    return wrong


def proofs(store: Store, root: Digest) -> int:
    """How many receipts say that ``root`` was read back."""
    return sum(receipt.operation in PROVING for receipt in store.receipts(root))


# -- operations -------------------------------------------------------------------------------------------------------

Act = Callable[[World], object]


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that a user does to a store in a bucket.

    Args:
        act: does it through the proxy, as a process that has just started; raises our error, or its result was checked
            and is right.
        uses: kinds of requests that it makes once the store is open.
        about: what is in the target of those that matter (a regular expression; HEAD and listings matter in any case).
        keys: prefixes of the seed's keys that are there before.
        opens: faults come while it opens the store, not only when it is open.
        writes: it leaves more behind than a receipt or a note.
        makes: it makes the store itself.
        proves: it leaves a receipt that says that all was read back.
        alone: it touches torch's generators.
    """

    act: Act
    uses: frozenset[str]
    about: str = "/(objects|documents)/"
    keys: tuple[str, ...] = ("",)
    opens: bool = False
    writes: bool = False
    makes: bool = False
    proves: bool = False
    alone: bool = False

    def world(self, **options: str) -> World:
        """What it starts from."""
        held = {key: data for key, data in seed().keys.items() if key.startswith(self.keys)} if self.keys else {}
        return World(held, **options)

    def guard(self) -> AbstractContextManager[object]:
        """Held while it runs."""
        return MOMENT if self.alone else nullcontext()

    def strikes(self, request: Request, kinds: frozenset[str]) -> bool:
        """Whether a fault that strikes these kinds of requests strikes this one."""
        kind = kind_of(request)
        return kind in kinds and (kind in ("list", "head") or re.search(self.about, request.target) is not None)


def kind_of(request: Request) -> str:
    """get, head, put or delete an object, list objects, or config (of the whole bucket)."""
    if "/" in request.path.strip("/"):
        return request.method.lower()
    return "list" if "list-type" in request.query else "config"


def _open(world: World) -> None:
    store = world.store()
    assert store.head("main") == world.seed.root
    assert [root for root, _ in store.history(world.seed.root)] == [world.seed.root, world.seed.first]


def _init(world: World) -> None:
    found = world.store(create=True).capabilities()
    assert found is not None
    assert (found.conditional_create, found.ranged_get) == (True, True)


def _verify(world: World) -> None:
    store = world.store()
    report = store.verify("main")
    if report.findings:
        worst = [finding for finding in report.findings if finding.error().exit_code == report.exit_code]
        raise_finding(worst[0])
    assert report.root == world.seed.root
    store.add_receipt(report.receipt(store.url))


def _pull(world: World) -> None:
    target = Store(MemoryBackend())
    target.backend.create("ckptstore.json", world.seed.keys["ckptstore.json"])
    try:
        source = world.store()
        ckptstore.pull(source, target, source.resolve("main"), ref="main")
    except CkptStoreError:
        assert broken(target) == []
        assert proofs(target, world.seed.root) == 0
        assert target.refs.names() == []
        raise
    assert target.head("main") == world.seed.root
    assert broken(target) == []


def _push(world: World) -> None:
    ckptstore.push(world.seed.store(), world.store(), world.seed.root, ref="main")
    assert world.behind().head("main") == world.seed.root


def _save(world: World) -> None:
    training = make_training()
    with world.store().run("main", **training.objects(), readback="before-commit") as run:
        step = run.resume()
        assert step == 0
        training.step()
        root = run.save(1)
    assert root == world.seed.first
    assert world.behind().head("main") == root


def _resume(world: World) -> None:
    training = make_training(1)
    with world.store().run("main", **training.objects()) as run:
        assert run.resume() == 2
    _assert_restored(training, world.seed)


def _assert_restored(training: Training, expected: Seed) -> None:
    live = training.model.state_dict()
    assert live.keys() == expected.model.keys()
    for name, tensor in expected.model.items():
        assert torch.equal(live[name], tensor), name


def _move_ref(world: World) -> None:
    store = world.store()
    head = store.head("main")
    if head != world.seed.first:
        store.move_ref("main", world.seed.first, head)
    assert world.behind().head("main") == world.seed.first


def _receipts(world: World) -> None:
    store = world.store()
    note = Receipt("note", world.seed.root, None, 0, 0, 0, "none", "2026-01-01T00:00:00Z", "here")
    store.add_receipt(note)
    found = store.receipts(world.seed.root)
    assert found in ([], [note])
    if not found:
        raise LeftOutError("receipts", "one that is damaged is no receipt")


class LeftOutError(CkptStoreError):
    """Not an error: what is damaged was left out, as the operation says that it does."""

    exit_code = LEFT_OUT


def _diff(world: World) -> None:
    difference: Any = world.seed.store().diff("main", "main", world.store())
    assert not difference.findings or difference.findings[0].error()
    if difference.findings:
        raise_finding(difference.findings[0])
    assert difference.same_state
    assert difference.same_progress


_ALL = frozenset({"get", "list", "head", "put", "delete"})
_READS = frozenset({"get", "list", "head"})
_EMPTY = ("ckptstore.json", "receipts/")

OPERATIONS: dict[str, Operation] = {
    "init": Operation(_init, _ALL - {"head"}, about="", keys=(), opens=True, writes=True, makes=True),
    "open": Operation(_open, _READS - {"head"}, about="", opens=True),
    "verify": Operation(_verify, _READS, proves=True),
    "pull": Operation(_pull, _READS - {"head"}),
    "push": Operation(_push, _READS | {"put"}, keys=_EMPTY, writes=True, proves=True),
    "save": Operation(_save, _READS | {"put"}, keys=_EMPTY, writes=True, alone=True),
    "resume": Operation(_resume, _READS - {"head"}, alone=True),
    "diff": Operation(_diff, _READS - {"head"}),
    "move ref": Operation(_move_ref, frozenset({"get", "list", "put"}), about="/refs/", writes=True),
    "receipts": Operation(_receipts, frozenset({"get", "list", "put"}), about="/receipts/"),
}
"""By the name that docs/remote-faults.md gives them."""
