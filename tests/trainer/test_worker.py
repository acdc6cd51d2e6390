"""Workers: what they are told, and what they cannot reach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptstore.errors import MalformedError, UsageError
from ckptstore.format.digest import Digest
from trainer.workers import events, orders
from trainer.workers.fence import Fence, IsolationError
from trainer.workers.orders import Arm, Close, Evaluate, Flip, Hold, Join, Restore, Save, Start, Train
from trainer.workers.worker import events_path

ROOT = Path(__file__).resolve().parents[2]
SOME = Digest.of(b"some root")


@pytest.mark.parametrize(
    "order",
    [
        Join(29_500),
        Start(),
        Restore(SOME, "store"),
        Arm(),
        Train(17, 32),
        Train(17, 32, Hold(20, 0, 1, 60)),
        Save("main:1:-:" + "0" * 32, 16, "store"),
        Flip(1),
        Evaluate(0),
        Close(),
    ],
    ids=lambda order: type(order).__name__,
)
def test_an_order_survives_its_line(order: orders.Order) -> None:
    line = orders.encode(order)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert orders.parse(line) == order
    assert type(order) in orders.DONE


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"train 1 2\n",
        b'{"order":"destroy","with":{}}\n',
        b'{"order":"arm","with":{"force":true}}\n',
        b'{"order":"arm","with":{},"twice":true}\n',
        b'{"order":"train","with":{"first":1,"last":"2","hold":null}}\n',
        b'{"order":"restore","with":{"root":"b3:00","store":"s"}}\n',
        b'{"order":"join","with":{"port":1.5}}\n',
        b'{"order":"' + b"x" * orders.LINE_LIMIT,
    ],
)
def test_what_is_no_order_is_refused(line: bytes) -> None:
    with pytest.raises(MalformedError):
        orders.parse(line)


@pytest.fixture
def area(tmp_path: Path) -> Path:
    """The folder of a run with two hosts, and a file on each."""
    for name in ("host-0", "host-1"):
        (tmp_path / "run" / "hosts" / name).mkdir(parents=True)
        (tmp_path / "run" / "hosts" / name / "file").write_text(name)
    (tmp_path / "run" / "reference").mkdir()
    (tmp_path / "elsewhere").write_text("not of the run")
    return tmp_path / "run"


def test_the_fence_lets_through_the_own_host_and_what_is_not_of_the_run(area: Path) -> None:
    fence = Fence(area, [area / "hosts" / "host-0"])
    for allowed in (
        area / "hosts" / "host-0" / "file",
        area / "hosts" / "host-0",
        area.parent / "elsewhere",
        "/dev/null",
    ):
        fence.check(allowed)
        fence.check(os.fsencode(allowed))


def test_the_fence_stops_at_every_way_to_another_host(area: Path) -> None:
    own = area / "hosts" / "host-0"
    (own / "link").symlink_to(area / "hosts" / "host-1")
    (own / "linked-file").symlink_to(area / "hosts" / "host-1" / "file")
    fence = Fence(area, [own])
    for path in (
        area / "hosts" / "host-1" / "file",
        area / "hosts" / "host-1" / "not there",
        area / "hosts" / "host-00",  # begins like the own one
        area / "hosts",
        area,
        area / "reference",
        own / ".." / "host-1" / "file",
        own / "link" / "file",
        own / "linked-file",
    ):
        with pytest.raises(IsolationError, match="another host"):
            fence.check(path)
    Fence(area, [own, area / "reference"]).check(area / "reference" / "ckptstore.json")


REACHING = """
import mmap, os, shutil, sqlite3, subprocess, sys
from pathlib import Path
import numpy, torch
from trainer.workers import fence
from trainer.workers.fence import IsolationError

area = Path(sys.argv[1])
own, other, sealed = area / "hosts/host-0", area / "hosts/host-1", area / "reference"
assert not fence.holds(area)
fence.install(area, [own])
assert fence.holds(area)
assert (own / "file").read_text() == "host-0"
(own / "new").write_text("x")
sqlite3.connect(f"file:{own}/own.sqlite?mode=rwc", uri=True).execute("create table t (c)")
torch.save([1], own / "own.pt")
assert torch.load(own / "own.pt") == [1]
os.chdir(own)
ways = {
    "open": lambda: open(other / "file"),
    "open to write": lambda: open(other / "planted", "w"),
    "os.open": lambda: os.open(other / "file", os.O_RDONLY),
    "os.open of the folder": lambda: os.open(other, os.O_RDONLY),
    "relative": lambda: open("../host-1/file"),
    "read_bytes": lambda: (other / "file").read_bytes(),
    "listdir": lambda: os.listdir(other),
    "scandir": lambda: os.scandir(other),
    "rename in": lambda: os.rename(other / "file", own / "taken"),
    "rename out": lambda: os.rename(own / "file", other / "given"),
    "link": lambda: os.link(other / "file", own / "linked"),
    "unlink": lambda: os.unlink(other / "file"),
    "mkdir": lambda: os.mkdir(other / "folder"),
    "chdir": lambda: os.chdir(other),
    "sqlite": lambda: sqlite3.connect(other / "catalogue.sqlite"),
    "sqlite by URI": lambda: sqlite3.connect(f"file:{str(other).replace('host', 'h%6Fst')}/file?mode=ro", uri=True),
    "mmap": lambda: mmap.mmap(os.open(other / "file", os.O_RDONLY), 0, access=mmap.ACCESS_READ),
    "numpy.fromfile": lambda: numpy.fromfile(other / "file", dtype="u1"),
    "numpy.memmap": lambda: numpy.memmap(other / "file", dtype="u1", mode="r"),
    "numpy.load": lambda: numpy.load(other / "file"),
    "torch.load": lambda: torch.load(other / "file"),
    "torch.load mapped": lambda: torch.load(other / "file", mmap=True),
    "shutil.copy": lambda: shutil.copy(other / "file", own / "copied"),
    "shutil.rmtree": lambda: shutil.rmtree(other),
    "walk": lambda: list(other.rglob("*")),
    "touch": lambda: os.utime(other / "file"),
    "truncate": lambda: os.truncate(other / "file", 0),
    "chmod": lambda: os.chmod(other / "file", 0),
    "subprocess": lambda: subprocess.run(["cat", str(other / "file")]),
    "system": lambda: os.system("true"),
    "fork": lambda: os.fork(),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "reference": lambda: os.listdir(sealed),
}
for name, way in ways.items():
    try:
        way()
    except IsolationError:
        continue
    sys.exit(f"{name} got through")
print(len(ways))
"""


def test_a_process_behind_the_fence_cannot_touch_another_host(area: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REACHING, str(area)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "34\n"
    assert sorted(p.name for p in (area / "hosts" / "host-1").iterdir()) == ["file"]


def start_worker(area: Path, host: str, given: bytes, *modules: Path) -> tuple[int, list[events.Event], str]:
    """A worker, alone in its world, whose orders are ``given``: exit code, events, error output.

    Folders in ``modules`` come first where it looks for modules.
    """
    directory = area / "hosts" / host
    arguments = ["-m", "trainer", "worker", "--host", str(directory), "--identity", str(SOME), "--area", str(area)]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        check=False,
        timeout=100,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*modules, ROOT))),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_PORT": "0",
        },
    )
    return done.returncode, list(events.read(events_path(directory, 0, 0))), done.stderr.decode()


# Like a build of torch for CUDA, which asks ldconfig where its libraries are.
RUNS_A_PROGRAM = """
import subprocess, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            subprocess.run(["true"], check=True)

sys.meta_path.insert(0, Finder())
"""


def test_a_torch_that_runs_a_program_while_it_is_loaded_is_let_in(area: Path, tmp_path: Path) -> None:
    """The fence goes up when all is loaded, and before anything of the run is touched."""
    (area / "hosts" / "host-0" / "plan").symlink_to(area / "hosts" / "host-1")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(RUNS_A_PROGRAM)
    _, said, _ = start_worker(area, "host-0", b"", modules)
    assert "host-1" in said[-1]["message"], "the fence is up, and it is another host that it kept the worker from"


def test_a_worker_that_reaches_for_another_host_ends_and_says_why(area: Path) -> None:
    (area / "hosts" / "host-0" / "plan").symlink_to(area / "hosts" / "host-1")
    code, said, stderr = start_worker(area, "host-0", b"")
    assert code == IsolationError.exit_code
    assert said[0].name == "alive"
    assert (said[-1].name, said[-1]["type"]) == ("error", "IsolationError")
    assert "host-1" in said[-1]["message"]
    assert stderr.startswith("IsolationError: ")
    assert "Traceback" not in stderr
    assert events.HEARTBEAT in {event.name for event in said}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "first"}, "environment variable RANK: 'first' is no number"),
        ({"WORLD_SIZE": "two", "MASTER_PORT": "0", "MASTER_ADDR": "127.0.0.1"}, "WORLD_SIZE: 'two' is no number"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_refused_in_one_line(
    area: Path, variables: dict[str, str], says: str
) -> None:
    arguments = ["-m", "trainer", "worker", "--host", str(area / "hosts" / "host-0"), "--identity", str(SOME)]
    done = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", **variables},
    )
    assert done.returncode == UsageError.exit_code
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
