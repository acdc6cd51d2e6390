"""What only a process of its own shows: interrupts, closed pipes, full outputs, imports, the installed command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import PROGRAM, Stores, process

INTERRUPTED = f"""
import os, signal, sys
waiting = [True]
def hook(event, arguments):
    if waiting and event == "open" and type(arguments[0]) is str and len(arguments[0]) == 64:
        waiting.clear()
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
{PROGRAM}
"""
"""The command, interrupted as soon as it opens an object or a document."""

MODULES = """
import atexit, sys
atexit.register(lambda: print(*sorted(set(sys.argv[1].split(",")) & sys.modules.keys()), file=sys.stderr, end=""))
names = sys.argv.pop(1)
sys.argv.insert(1, names)
from ckptstore_cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows is not supported")
@pytest.mark.parametrize("command", ["verify", "show"])
def test_an_interrupt_is_130_and_one_line(built: Stores, command: str) -> None:
    child = process(command, "main", "--store", built.path, program=INTERRUPTED)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert out == ""
    assert err == "ckpt: interrupted; what was written is whole; run the same command again\n"


def test_an_interrupt_in_json_is_one_object(built: Stores) -> None:
    child = process("verify", "main", "--json", "--store", built.path, program=INTERRUPTED)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.startswith('{"type": "error", "error": "interrupted"')
    assert len(err.splitlines()) == 1


def test_an_interrupted_push_leaves_no_lease_and_nothing_half(stores: Stores, tmp_path: Path) -> None:
    import ckptstore

    far = tmp_path / "far"
    ckptstore.open(far, create=True)
    child = process("push", "main", far, "--store", stores.path, program=INTERRUPTED)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert list((far / "leases").glob("*")) == []
    again = process("push", "main", far, "--store", stores.path)
    again.communicate(timeout=60)
    assert again.returncode == 0
    assert ckptstore.open(far).verify("main").ok


def test_a_closed_pipe_is_quiet(built: Stores) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, "ls", "main", "--json", "--store", str(built.path)],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert child.stderr == b""
    assert child.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_cannot_be_written_is_told(built: Stores) -> None:
    with open("/dev/full", "w") as full:
        child = subprocess.run(
            [sys.executable, "-c", PROGRAM, "log", "--store", str(built.path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=60,
            check=False,
        )
    assert child.returncode == 8
    assert len(child.stderr.splitlines()) == 1
    assert "No space left" in child.stderr
    assert "look at where the output goes" in child.stderr


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_is_no_file_of_a_store(closed: str, built: Stores) -> None:
    """What is opened first gets the number of standard error, and whatever a library says there."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run(
        [*shell, "verify", "nothing", "--store", built.path],
        capture_output=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert child.returncode == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "main"],
        ["log"],
        ["show", "main"],
        ["ls", "main"],
        ["diff", "main", "wide"],
        ["push", "main", "FAR", "--create"],
        ["export", "main", "FILE"],
        ["restore", "main", "DIR"],
        ["evidence", "pack", "main", "-o", "TAR"],
        ["ref", "list"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_command_needs_torch(stores: Stores, tmp_path: Path, arguments: list[str]) -> None:
    """An auditor installs no torch; and what prints nothing but lines loads nothing to draw with."""
    places = {"FAR": "far", "FILE": "x.safetensors", "DIR": "dir", "TAR": "e.tar"}
    given = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    child = process("torch,rich,boto3", *given, "--store", stores.path, program=MODULES)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1 if arguments[0] == "diff" else 0, ""), out


def test_import_and_pull_need_no_torch(stores: Stores, tmp_path: Path) -> None:
    child = process("", "export", "main", tmp_path / "x.safetensors", "--store", stores.path, program=MODULES)
    child.communicate(timeout=60)
    for arguments in (["import", tmp_path / "x.safetensors", "--ref", "new"], ["pull", "main", stores.path]):
        target = stores.path if arguments[0] == "import" else tmp_path / "far"
        words = [*arguments, "--store", target, *(["--create"] if arguments[0] == "pull" else [])]
        child = process("torch,rich,boto3", *words, program=MODULES)
        _, err = child.communicate(timeout=60)
        assert (child.returncode, err) == (0, "")


def test_the_installed_command_runs(built: Stores) -> None:
    command = shutil.which("ckpt", path=os.path.dirname(sys.executable))
    if command is None:
        pytest.skip("the project is not installed in this environment")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("ckpt, version ")


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete")])
def test_completion_prints_the_script_of_a_shell(shell: str, word: str) -> None:
    child = process("completion", shell)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert word in out


def test_the_shell_is_told_what_can_follow() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "_CKPT_COMPLETE": "bash_complete",
        "COMP_WORDS": "ckpt ver",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout.split() == ["plain,verify"]


def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(built: Stores) -> None:
    import pty

    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "verify", "main", "--store", str(built.path)],
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TERM": "xterm",
            "NO_COLOR": "1",
            "COLUMNS": "100",
        },
    )
    out, _ = child.communicate(timeout=60)
    os.close(follower)
    drawn = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(leader)
    assert child.returncode == 0
    assert b"verify" in drawn
    assert b"\x1b[3" not in drawn  # NO_COLOR
    assert len(out.splitlines()) == 1
