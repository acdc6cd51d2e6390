"""A server process ends when its owner says so, and never later than its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptstore.errors import BackendError, NotFoundError
from trainer.lifecycle.child import Child, program

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")

SLEEPER = ["/bin/sh", "-c", "echo $$ > pid; exec sleep 600"]
STUBBORN = ["/bin/sh", "-c", "trap '' TERM; echo $$ > pid; while :; do sleep 600; done"]

OWNER = """
import sys, time
from pathlib import Path
from trainer.lifecycle.child import Child
folder = Path(sys.argv[1])
child = Child(["/bin/sh", "-c", "echo $$ > pid; exec sleep 600"], {}, folder, folder / "log")
while not (folder / "pid").exists() or not (folder / "pid").read_text():
    time.sleep(0.01)
if sys.argv[2] == "exits":
    sys.exit()
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    found = Child(SLEEPER, {}, tmp_path, tmp_path / "log")
    yield found
    found.kill()


def eventually(look: Callable[[], bool]) -> bool:
    """Whether ``look`` comes true within a time that is long for anything that happens at all."""
    end = time.monotonic() + 30
    while not look():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def pid_in(folder: Path) -> int:
    file = folder / "pid"
    assert eventually(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def owner(folder: Path, end: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), end], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_it_stands_in_a_session_of_its_own(child: Child, tmp_path: Path) -> None:
    pid = pid_in(tmp_path)
    assert child.running
    assert os.getsid(pid) == pid != os.getsid(0)


def test_a_kill_is_over_when_it_returns(child: Child, tmp_path: Path) -> None:
    pid = pid_in(tmp_path)
    child.kill()
    child.kill()
    assert not child.running
    assert not alive(pid)
    assert child.exit_code == -signal.SIGKILL


def test_one_that_does_not_listen_is_stopped_all_the_same(tmp_path: Path) -> None:
    child = Child(STUBBORN, {}, tmp_path, tmp_path / "log")
    pid = pid_in(tmp_path)
    child.stop(grace=0.1)
    assert not alive(pid)
    assert child.exit_code == -signal.SIGKILL


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    made: list[Child] = []
    thread = threading.Thread(target=lambda: made.append(Child(SLEEPER, {}, tmp_path, tmp_path / "log")))
    thread.start()
    thread.join()
    pid = pid_in(tmp_path)
    time.sleep(0.05)  # the kernel would have needed less
    assert alive(pid)
    made[0].kill()


def test_it_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path, "sleeps") as process:
        pid = pid_in(tmp_path)
        process.kill()
    assert eventually(lambda: not alive(pid))


def test_it_ends_when_its_owner_exits(tmp_path: Path) -> None:
    with owner(tmp_path, "exits") as process:
        pid = pid_in(tmp_path)
        assert process.wait(30) == 0
    assert not alive(pid)


def test_a_fork_has_no_say_over_it(child: Child, tmp_path: Path) -> None:
    pid = pid_in(tmp_path)
    fork = os.fork()
    if fork == 0:
        child.kill()
        os._exit(0)
    os.waitpid(fork, 0)
    assert alive(pid)


def test_it_inherits_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
    child = Child(["/usr/bin/env"], {"GIVEN": "1"}, tmp_path, tmp_path / "log")
    assert eventually(lambda: not child.running)
    assert "GIVEN=1" in child.log_tail()
    assert "AWS_SECRET_ACCESS_KEY" not in child.log_tail()


def test_a_folder_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no-such-folder"):
        Child(SLEEPER, {}, tmp_path / "no-such-folder", tmp_path / "log")


def test_a_program_that_is_not_installed_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotFoundError, match=r"program weed.*neither beside.*pip install weed"):
        program("weed", "the server", "pip install weed")
    (tmp_path / "weed").write_text("")
    (tmp_path / "weed").chmod(0o755)
    assert program("weed", "the server", "") == tmp_path / "weed"
