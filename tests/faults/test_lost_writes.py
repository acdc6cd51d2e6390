"""A power loss at any moment of any operation, whatever of it had reached the disk, costs nothing that was committed
(B050, B053, B051).

Public sources: vllm-project/speculators#739, huggingface/transformers#35580; plur-ai/plur#796,
tinyhumansai/opencompany#1049, daintreehq/daintree#6053, open-mercato/cezar#70.

The system calls of each operation are recorded, and what a disk may hold after a loss of power is derived from every
prefix of them with subsets of what was not synced (tests/support/lostwrites.py says which). Each different outcome is
laid out and looked at; then the operation is done again.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.owners import Owner, this_process
from ckptstore.catalogue import CatalogueError
from ckptstore.format.digest import Digest
from tests.support import operations
from tests.support.invariants import broken, inodes, temporaries
from tests.support.lostwrites import Recording, Tree, states
from tests.support.operations import DELETING, OPERATIONS, STORES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CATALOGUE = "catalogue.sqlite"


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with operations.one_thread():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, threads: None) -> Path:
    return operations.prepare(tmp_path_factory.mktemp("lost"))


@pytest.fixture(scope="module")
def dead() -> str:
    """The owner of what a process that is gone left behind."""
    here = this_process()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        return str(Owner(here.boot, here.namespace, child.pid, 1))


class Losses:
    """The outcomes of a power loss in one operation, and what they are held to."""

    def __init__(self, base: Path, folder: Path, name: str, dead: str) -> None:
        self.work = OPERATIONS[name]
        self._deletes = name in DELETING
        self._hurt = set(broken(base / "hurt"))
        self._base, self._folder, self._dead = base, folder, dead
        whole = folder / "whole"
        shutil.copytree(base, whole)
        self._recording = Recording(whole, (CATALOGUE,))
        self.expected = self._recording.record(lambda: self.work(whole))
        self.chance = random.Random(name)
        self.catalogues = self._kept_catalogues(whole)
        self.points = 0
        self.reused = 0

    def outcomes(self) -> list[tuple[int, Tree]]:
        """Each different state of the disk once, with the number of calls after which it was met first. States that
        differ in temporaries alone count once."""
        found: dict[frozenset[tuple[str, bytes | None]], tuple[int, Tree]] = {}
        for moment, tree in states(self._recording, self.chance):
            self.points += 1
            found.setdefault(frozenset(item for item in tree.items() if "/tmp/" not in item[0]), (moment, tree))
        return list(found.values())

    def check(self, number: int, tree: Tree) -> None:
        """Lay one outcome out, look at it, and do the operation again."""
        folder = self._folder / f"{number}"
        self._lay_out(folder, tree, number)
        stores = [folder / name for name in STORES if (folder / name / "ckptstore.json").exists()]
        assert folder / "store" in stores
        for path in stores:
            assert broken(path) == []
        assert set(broken(folder / "hurt")) <= self._hurt
        before = ckptstore.open(self._base / "store")
        after = ckptstore.open(folder / "store")
        for ref in before.refs.names():
            kept = before.head(ref)
            assert kept in [record.root for record in after.refs.log(ref)], f"{ref} lost its head"
            assert kept is not None
            assert after.verify(kept).ok
        kept_inodes = {path: inodes(path) for path in stores}
        assert self.work(folder) == self.expected
        for path in [folder / name for name in STORES if (folder / name / "ckptstore.json").exists()]:
            assert broken(path) == []
            good = kept_inodes.get(path, {})
            if not self._deletes:
                assert good.items() <= inodes(path).items(), "what was there and good was written again"
                self.reused += len(good)
            # The next writer, whoever it is, sweeps up after the dead.
            ckptstore.open(path).add_receipt(ckptstore.Receipt("sweep", ROOT, None, 0, 0, 0, "none", "", ""))
            assert temporaries(path) == []
        self._check_catalogue(folder / "store")
        shutil.rmtree(folder)

    def _lay_out(self, folder: Path, tree: Tree, number: int) -> None:
        folder.mkdir()
        mine = str(this_process())
        for path, data in sorted(tree.items()):
            place = folder / path.replace(mine, self._dead)
            if data is None:
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            named = path.split("/")[1:2] in (["leases"], ["gc"])
            place.write_bytes(data.replace(mine.encode(), self._dead.encode()) if named else data)
            place.chmod(0o644 if place.name == "config.toml" else 0o444)
        for name, data in self.catalogues[number % len(self.catalogues)].items():
            (folder / "store" / name).write_bytes(data)

    def _kept_catalogues(self, whole: Path) -> list[dict[str, bytes]]:
        """What may be left of the catalogue, which SQLite writes by calls of its own: the old one, the new one with and
        without its log, none, and half of the new one."""
        old = _catalogue_of(self._base / "store")
        new = _catalogue_of(whole / "store")
        data = new.get(CATALOGUE, b"")
        half = data[: len(data) // 2]
        return [old, new, {CATALOGUE: data}, {}, {CATALOGUE: half}, {CATALOGUE: half.ljust(len(data), b"\0")}]

    def _check_catalogue(self, path: Path) -> None:
        """It is an index: what is left of it is used, or refused and made anew, with the same rows."""
        store = ckptstore.open(path)
        try:
            with store.catalogue() as catalogue:
                catalogue.update()
        except CatalogueError:
            pass
        with store.catalogue() as catalogue:
            catalogue.rebuild()
            assert not catalogue.stale()


ROOT = Digest.of(b"any")


def _catalogue_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob(f"{CATALOGUE}*") if not file.name.endswith(".lock")}


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk that is looked at is a made-up one: the real one need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


FEW = 2


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_power_loss_in_an_operation_costs_nothing_but_the_operation(
    base: Path, tmp_path: Path, name: str, dead: str
) -> None:
    losses = Losses(base, tmp_path, name, dead)
    outcomes = losses.outcomes()
    for number in range(min(FEW, len(outcomes))):
        at = (2 * number + 1) * len(outcomes) // (2 * FEW) if len(outcomes) > FEW else number
        losses.check(at, outcomes[at][1])


@pytest.mark.deep
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_power_loss_in_an_operation_costs_anything_but_the_operation(
    base: Path, tmp_path: Path, name: str, dead: str
) -> None:
    losses = Losses(base, tmp_path, name, dead)
    outcomes = losses.outcomes()
    for number, (moment, tree) in enumerate(outcomes):
        try:
            losses.check(number, tree)
        except Exception as error:
            error.add_note(f"after {moment} calls of {name}")
            raise
    print(f"\n{name}: {losses.points} crash points, {len(outcomes)} outcomes, {losses.reused} good objects used again")
