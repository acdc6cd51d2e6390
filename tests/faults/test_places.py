"""Stores in places that are not what a store wants: full to the byte, read-only in parts, without hard links, reached
by a link, moved meanwhile, with a folder on another device. What cannot be done is refused by name and costs nothing
(B051).

Public sources: bghira/SimpleTuner#2353, pytorch/pytorch#10577, open-mmlab/mmdetection#12069,
facebookresearch/metaseq#53.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.errors import BackendError, NoSpaceError, ReadOnlyError
from tests.support import operations
from tests.support.backends import run_without_privilege
from tests.support.invariants import broken, temporaries
from tests.support.operations import OPERATIONS, STORES
from tests.support.training import make_training

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as on Linux")

KEY = "objects/ab/" + "ab" * 32


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with operations.one_thread():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, threads: None) -> Path:
    return operations.prepare(tmp_path_factory.mktemp("places"))


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "place"))


class Room:
    """A device that takes so many bytes and no more; the write that reaches its end takes what fits."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int) -> None:
        self.left = room
        self.ends: list[int] = []  # how much had been written after each call
        self._room = room
        self._write = os.write
        patch.setattr(os, "write", self._take)

    def _take(self, fd: int, piece: Any) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(fd, piece[: self.left])
        self.left -= taken
        self.ends.append(self._room - self.left)
        return taken


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on what a sync does."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("step", [997, pytest.param(1, marks=pytest.mark.deep)])
def test_an_object_on_a_disk_that_is_full_at_any_byte_is_absent_or_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    data = random.Random("full").randbytes(65_536)
    backend = DirectoryBackend.create_root(tmp_path / "store")
    for room in range(0, len(data), step):
        with monkeypatch.context() as patch:
            Room(patch, room)
            with pytest.raises(NoSpaceError, match="65536 bytes needed"):
                backend.create(KEY, data)
        assert backend.stat(KEY) is None
        assert os.listdir(tmp_path / "store" / "tmp") == []
    with monkeypatch.context() as patch:
        Room(patch, len(data))
        assert backend.create(KEY, data)
    assert backend.get(KEY) == data


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_save_on_a_disk_that_is_full_at_any_byte_costs_a_second_try(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    """A state of 64 KiB. Nothing depends on where inside a write the disk is full, so each write is met at its first
    byte, in the middle, at its last one, and exactly at its end; and in the dense run besides at every 509th byte."""

    def save(path: Path, room: int) -> tuple[Room, ckptstore.CkptStoreError | None]:
        training = make_training()
        with ckptstore.open(path).run("main", **training.objects()) as run:
            step = run.resume()
            training.step()
            with monkeypatch.context() as patch:
                device = Room(patch, room)
                full = told_by(lambda: run.save(step + 1))
                if full is None:
                    return device, told_by(run.wait)
            run.save(step + 1)
            return device, full

    def told_by(work: Callable[[], object]) -> ckptstore.CkptStoreError | None:
        try:
            work()
        except NoSpaceError as error:
            return error
        return None

    shutil.copytree(base / "store", tmp_path / "whole")
    device, _ = save(tmp_path / "whole", 2**40)
    expected = ckptstore.open(tmp_path / "whole").head("main")
    starts = [0, *device.ends[:-1]]
    places = {
        start + offset for start, end in zip(starts, device.ends, strict=True) for offset in (0, 1, end - start - 1)
    }
    places |= {(start + end) // 2 for start, end in zip(starts, device.ends, strict=True)}
    if dense:
        places |= set(range(0, device.ends[-1], 509))
    told = 0
    for room in sorted(places) if dense else random.Random(1).sample(sorted(places), 8):
        path = tmp_path / f"{room}"
        shutil.copytree(base / "store", path)
        _, full = save(path, room)
        told += full is not None
        assert ckptstore.open(path).head("main") == expected
        assert broken(path) == []
        assert temporaries(path) == []
        shutil.rmtree(path)
    assert told > 0


def looking(store: ckptstore.Store, folder: Path) -> None:
    """Everything that only reads a store."""
    root = store.resolve("main")
    assert store.verify("main").ok
    history = [digest for digest, _ in store.history(root)]
    assert len(history) == 2
    assert store.diff(history[0], history[1]).exit_code == 1
    training = make_training()
    assert store.run("main", **training.objects()).resume() == 2
    ckptstore.export_weights(store, root, folder / "looked.safetensors")
    ckptstore.extract_checkpoint(store, root, folder / "looked")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_where_there_are_no_hard_links_a_store_is_read_only_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    refused = []
    for name in ("save", "save_sharded", "push", "pull_a_part", "trees", "move", "bring_weights", "make_a_store"):
        with pytest.raises(ReadOnlyError, match=r"makes no hard links.*a store can be read from it"):
            OPERATIONS[name](folder)
        refused.append(name)
    assert temporaries(folder / "store") == []
    looking(ckptstore.open(folder / "store"), folder)
    assert OPERATIONS["pack_evidence"](folder)
    assert OPERATIONS["unpack_weights"](folder)
    monkeypatch.undo()
    assert broken(folder / "store") == []
    assert OPERATIONS["save"](folder)


def test_a_store_works_where_it_is_reached_by_a_link(base: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    shutil.copytree(base, tmp_path / "straight")
    for name in ("save", "push", "trees", "know_remotes", "make_a_store", "extract", "pack_evidence"):
        linked, straight = OPERATIONS[name](tmp_path / "link"), OPERATIONS[name](tmp_path / "straight")
        assert linked == straight, name
    for name in STORES:
        assert broken(tmp_path / "link" / name) == []


def test_a_store_that_is_moved_while_it_is_open_is_gone_and_works_where_it_is_now(folder: Path) -> None:
    training = make_training()
    with ckptstore.open(folder / "store").run("main", **training.objects()) as run:
        step = run.resume()
        training.step()
        (folder / "store").rename(folder / "moved")
        with pytest.raises(BackendError, match="the directory is gone"):
            run.save(step + 1)
        assert not (folder / "store").exists()
        assert broken(folder / "moved") == []
        (folder / "moved").rename(folder / "store")
        root = run.save(step + 1)
    (folder / "store").rename(folder / "elsewhere")
    moved = ckptstore.open(folder / "elsewhere")
    assert moved.head("main") == root
    assert moved.verify("main").ok
    with moved.catalogue() as catalogue:
        catalogue.update()
        assert not catalogue.stale()


def test_no_two_names_of_a_store_differ_in_case_alone(folder: Path) -> None:
    """So a file system that does not tell upper from lower case keeps them apart."""
    for work in OPERATIONS.values():
        work(folder)
    for store in STORES:
        names = [path.relative_to(folder).as_posix() for path in (folder / store).rglob("*")]
        assert len({name.casefold() for name in names}) == len(names)
        assert all(name == name.lower() for name in names)


WRITE_INTO = """
import os, sys
from pathlib import Path
import torch
import ckptstore
from ckptstore.errors import CkptStoreError, ReadOnlyError
from tests.support.operations import OPERATIONS
from tests.support.training import make_training

torch.set_num_threads(1)
folder = Path(sys.argv[1])
store = ckptstore.open(folder / "store")
head = store.head("main")
parts = ["", *(p.relative_to(folder / "store").as_posix() for p in (folder / "store").rglob("*") if p.is_dir())]
for part in sorted(set(parts)):
    if part.count("/") == 1 and part.split("/")[0] not in ("refs",):
        continue  # one of 256 like it
    place = folder / "store" / part
    place.chmod(0o555)
    training = make_training()
    with ckptstore.open(folder / "store").run("main", **training.objects()) as run:
        step = run.resume()
        training.step()
        try:
            run.save(step + 1, metrics={"loss": 0.5})
            print("saved", part)
        except ReadOnlyError as error:
            assert "EACCES" in str(error) and str(folder / "store") in str(error), error
            print("refused", part)
    assert ckptstore.open(folder / "store").verify("main").ok
    place.chmod(0o755)
    if store.head("main") != head:
        head = store.head("main")
for part in ("objects", "documents", "refs", "refs/main"):
    place = folder / "store" / part
    place.chmod(0)
    try:
        report = ckptstore.open(folder / "store").verify(head)
        wrong = [str(finding) for finding in report.findings]
        assert wrong or part.startswith("refs"), part
        assert all(text.startswith("unreadable") for text in wrong), wrong
        assert not wrong or "EACCES" in wrong[0], wrong
        ckptstore.open(folder / "store").head("main")
        assert not part.startswith("refs"), part
    except CkptStoreError as error:
        assert "EACCES" in str(error), error
    place.chmod(0o755)
"""


@pytest.mark.deep
def test_a_folder_that_may_not_be_written_is_named_and_one_that_may_not_be_read_is_not_called_empty(
    folder: Path,
) -> None:
    done = run_without_privilege(WRITE_INTO, str(folder))
    assert done.returncode == 0, done.stderr + done.stdout
    outcomes = dict(line.split(" ", 1)[::-1] for line in done.stdout.splitlines())
    assert outcomes["refs/main"] == "refused"
    assert "refused" in (outcomes["tmp"], outcomes["leases"])
    assert broken(folder / "store") == []


ANOTHER_DEVICE = """
import subprocess, sys
from pathlib import Path
import ckptstore
from ckptstore.errors import BackendError
from tests.support.operations import OPERATIONS, one_thread

folder = Path(sys.argv[1])
(folder / "store" / "tmp").mkdir(exist_ok=True)
subprocess.run(["mount", "-t", "tmpfs", "none", folder / "store" / "tmp"], check=True)
try:
    with one_thread():
        OPERATIONS["save"](folder)
    raise SystemExit("saved")
except BackendError as error:
    print(error)
assert ckptstore.open(folder / "store").verify("main").ok
assert list((folder / "store" / "tmp").iterdir()) == []
"""


def in_private_mounts(program: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run the Python ``program`` where it may mount what it likes and nobody else sees it; skips where that is not."""
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*private, "mount", "-t", "tmpfs", "none", str(place)], capture_output=True).returncode:
        pytest.skip("no private mounts here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*private, sys.executable, "-c", program, str(place)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.deep
def test_temporaries_on_another_device_are_refused_with_the_reason(folder: Path) -> None:
    done = in_private_mounts(ANOTHER_DEVICE, folder)
    assert done.returncode == 0, done.stderr
    assert "EXDEV" in done.stdout
    assert "one file system" in done.stdout
    assert broken(folder / "store") == []
    assert OPERATIONS["save"](folder)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["ext4", "btrfs", "xfs"])
def test_a_store_on_a_small_real_disk_that_fills_up(folder: Path, tmp_path: Path, kind: str) -> None:
    """The disk itself says when it is full, also in the middle of what the file system keeps for itself."""
    make = shutil.which(f"mkfs.{kind}")
    if make is None or os.geteuid() != 0:
        pytest.skip(f"no mkfs.{kind}, or not allowed to mount")
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as stream:
        stream.truncate(8 << 20 if kind == "ext4" else 320 << 20)
    place.mkdir()
    subprocess.run([make, "-q", str(image)], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True).returncode:
        pytest.skip("no loop mounts here")
    try:
        fill(folder, place)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(folder: Path, place: Path) -> None:
    shutil.copytree(folder / "store", place / "store")
    training = make_training()
    before = ckptstore.open(place / "store").head("main")
    rest = place / "rest"
    with rest.open("wb", buffering=0) as stream:
        while _takes(stream):
            pass
    told = 0
    with ckptstore.open(place / "store").run("main", **training.objects()) as run:
        step = run.resume()
        training.step()
        while True:
            try:
                root = run.save(step + 1)
                break
            except NoSpaceError:
                told += 1
            assert broken(place / "store") == []
            assert temporaries(place / "store") == []
            assert ckptstore.open(place / "store").head("main") == before
            os.truncate(rest, max(0, rest.stat().st_size - 16_384))
        rest.unlink()
        with suppress(NoSpaceError):  # the receipt of the readback
            run.wait()
    assert told > 0
    assert broken(place / "store") == []
    assert ckptstore.open(place / "store").head("main") == root


def _takes(stream: Any) -> bool:
    try:
        return bool(stream.write(bytes(4096)))
    except OSError:
        return False
