"""Hosts that are machines of their own, reached by a command such as ssh: the agent over its stdin and stdout.

The controller keeps a copy of each host's folder: what is staged there is sent over, and what workers have written is
fetched, by ``tar`` through the same command. Tested with a command that runs in another folder of this machine; not
tested against machines.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ckptstore.errors import BackendError, MalformedError, NotFoundError, UsageError
from trainer.hosts.agenthost import AgentHost
from trainer.hosts.backend import ALWAYS, SSH
from trainer.hosts.connection import Connection
from trainer.workers.hosts import Cleared, Host, Shut

_SECONDS = 600.0  # for one command, which may move a shard
_WRITTEN = ("events", "logs", "store", "reference")  # what processes of a host write


@dataclass(frozen=True, slots=True)
class MachineAddress:
    """A machine: how the command names it, where other machines reach it, and through which interface (or empty)."""

    name: str
    address: str
    interface: str


@dataclass(frozen=True, slots=True)
class Machines:
    """How machines are reached.

    ``command`` runs a line of a shell there: ``{machine}`` in one of its arguments stands for the name, ``{command}``
    for the line. ``python`` is an interpreter there, with what the trainer needs; ``folder`` is where hosts get their
    folders. ``shared`` says that the operator's directory has the same path there as here.
    """

    command: tuple[str, ...]
    python: str
    folder: str
    shared: bool
    machines: tuple[MachineAddress, ...]


def read_machines(path: Path) -> Machines:
    """The machines of a TOML file (docs/launchers.md).

    Raises:
        NotFoundError: there is no such file.
        MalformedError: it does not say what it has to; names the field.
    """
    try:
        body = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise NotFoundError(f"{path}", "there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"{path}", str(error)) from None
    what = str(path)
    command = _texts(body.pop("command", None), what, "command")
    if not any("{command}" in one for one in command):
        raise MalformedError(what, "command has no {command} for what is to be run")
    found = Machines(
        command=command,
        python=_text(body.pop("python", "python3"), what, "python"),
        folder=_text(body.pop("folder", None), what, "folder"),
        shared=body.pop("shared", False) is True,
        machines=tuple(_machine(one, what) for one in body.pop("machine", ())),
    )
    if body:
        raise MalformedError(what, f"{min(body)} is not known")
    if not found.machines or not PurePosixPath(found.folder).is_absolute():
        raise MalformedError(what, "it needs at least one [[machine]], and folder has to be absolute")
    return found


class SshHosts:
    """Backend of hosts that are machines of their own. ``fresh`` as in :class:`AgentHost`."""

    kind = SSH
    claim = (
        "hosts are what the file of machines names, each reached by its command; that they are machines with hardware, "
        "kernels, disks and networks of their own is the operator's word; an audit hook in every worker refuses opens "
        "under another host's folder; losing one is SIGKILL of its agent and with it of its workers"
    )
    modes = ALWAYS
    isolated_network = False

    def __init__(self, machines: Machines, *, fresh: bool = False) -> None:
        self._left = list(machines.machines)
        self._fresh = fresh
        self._shared = machines.shared
        # Several runs may use the machines at a time, one after the other without a trace.
        self._machines = replace(machines, folder=f"{machines.folder}/run-{secrets.token_hex(8)}")

    def host(self, area: Path, name: str, readable: Sequence[Path]) -> Host:
        if not self._left:
            why = f"all {len(self._machines.machines)} machines are taken"
            raise UsageError(f"host {name}", why, "name one more in the file of machines")
        if readable and not self._shared:
            hint = "keep the operator's store in a bucket, or say shared = true if its path is the same everywhere"
            raise UsageError(f"host {name}", f"a machine does not see {readable[0]} of this one", hint)
        return SshHost(area, name, self._machines, self._left.pop(0), fresh=self._fresh)

    def reachable(self, address: str, port: int) -> tuple[str, int]:
        why = f"it listens at {address}, which other machines do not reach"
        raise UsageError("server of the run", why, "--operator s3://… of a server that they reach")

    def close(self) -> tuple[Shut, ...]:
        return ()


class SshHost(AgentHost):
    """A folder on a machine."""

    def __init__(
        self, area: Path, name: str, machines: Machines, machine: MachineAddress, *, fresh: bool = False
    ) -> None:
        super().__init__(area, name, fresh=fresh)
        self._machines, self._machine = machines, machine
        self.address, self.interface = machine.address, machine.interface or None
        self._agent: subprocess.Popen[bytes] | None = None
        self._sent: set[str] = set()
        self._run(f"mkdir -p {self._quoted}")

    @property
    def home(self) -> Path:
        return Path(self._machines.folder) / self.name

    @property
    def run_folder(self) -> Path:
        return Path(self._machines.folder)

    def listing(self) -> list[str]:
        found = self._run(f"cd {self._quoted} && find . -mindepth 1").decode().splitlines()
        return sorted(line.removeprefix("./") for line in found)

    def publish(self) -> None:
        names = {path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*")}
        new = sorted(names - self._sent)
        self._copy(new, ["tar", "-C", str(self.directory)], self._argv(f"tar -C {self._quoted} -x -f -"))
        self._sent |= names

    def collect(self) -> None:
        line = f"cd {self._quoted} && find {' '.join(_WRITTEN)} -type f -printf '%s %p\\n' 2>/dev/null || true"
        wanted = []
        for one in self._run(line).decode().splitlines():
            size, _, path = one.partition(" ")
            here = self.directory / path
            if not here.is_file() or here.stat().st_size != int(size):
                wanted.append(path)
        remote = self._argv(f"tar -C {self._quoted} -c -f - --null -T -")
        self._copy(wanted, remote, ["tar", "-C", str(self.directory), "-x", "-f", "-"], listed=True)
        self._sent |= set(wanted)

    def remove(self, folder: str) -> None:
        self._run(f"rm -rf {shlex.quote(str(self.home / folder))}")
        self._sent = {name for name in self._sent if name.partition("/")[0] != folder}
        super().remove(folder)

    def lose(self) -> None:
        """SIGKILL of the agent there: the kernel then ends its workers, which asked for that when they began."""
        if self._connection is not None and self._connection.ready is not None:
            self._run(f"kill -s KILL {self._connection.ready.pid}")
        elif self._agent is not None:
            self._agent.kill()

    def swept(self, pid: int) -> bool:
        if pid == 0:
            return True
        line = f"kill -s KILL -- -{pid} 2>/dev/null; if kill -s 0 -- -{pid} 2>/dev/null; then echo left; fi"
        return not self._run(line).strip()

    def clear(self) -> Cleared:
        self._run(f"chmod -R u+w {self._quoted} && rm -rf {self._quoted}")
        self._run(f"rmdir {shlex.quote(self._machines.folder)} 2>/dev/null || true")
        left = self._run(f"if test -e {self._quoted}; then echo left; fi").strip()
        return replace(super().clear(), gone=not left)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _folder(self, folder: Path | None) -> Path:
        return self.home  # a folder of the controller's is none there

    def _start_agent(self, environment: Mapping[str, str]) -> Connection:
        # Not the caller's own variables: they are of this machine.
        ours = {name: value for name, value in environment.items() if _belongs(name, value)}
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(ours.items()))
        arguments = " ".join(map(shlex.quote, self._agent_arguments(self._machines.python)))
        with self._stderr.open("ab") as stderr:
            agent = self._agent = self._start(
                f"cd {self._quoted} && exec env {variables} {arguments}", stdin=subprocess.PIPE, stderr=stderr
            )
        assert agent.stdin is not None
        assert agent.stdout is not None
        return Connection(agent.stdout, agent.stdin, self.name, agent.stdin.close, agent.kill)

    def _shut(self) -> Shut:
        pid = 0
        if self._agent is not None:
            with suppress(subprocess.TimeoutExpired):
                self._agent.wait(10)
            if self._agent.poll() is None:
                self._agent.kill()
                self._agent.wait()
            pid = 0 if self._connection is None or self._connection.ready is None else self._connection.ready.pid
        left = pid and self._run(f"if kill -s 0 {pid} 2>/dev/null; then echo left; fi").strip()
        return Shut(self.name, pid, (), "", not left, True, True)

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.home))

    def _argv(self, line: str) -> list[str]:
        values = {"{machine}": self._machine.name, "{command}": line}
        found = []
        for argument in self._machines.command:
            for name, value in values.items():
                argument = argument.replace(name, value)
            found.append(argument)
        return found

    def _start(self, line: str, *, stdin: int, stderr: Any) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._argv(line), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        except OSError as error:
            raise self._failed(error.strerror or "") from None

    def _run(self, line: str) -> bytes:
        """What a line of a shell prints there. BackendError with its last words if it fails."""
        with self._start(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                out, errors = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise self._failed(f"no end of {line:.80} within {_SECONDS:g} s") from None
        if process.returncode:
            raise self._failed(
                f"{process.returncode} from {line:.80}: {errors.decode(errors='replace').strip()[-200:]}"
            )
        return out

    def _copy(self, names: Sequence[str], source: list[str], target: list[str], *, listed: bool = False) -> None:
        """Move files by name from one tar to another."""
        if not names:
            return
        if not listed:
            source = [*source, "-c", "-f", "-", "--no-recursion", "--null", "-T", "-"]
        with (
            subprocess.Popen(source, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as reading,
            subprocess.Popen(target, stdin=reading.stdout, start_new_session=True) as writing,
        ):
            assert reading.stdin is not None
            assert reading.stdout is not None
            reading.stdout.close()
            with suppress(BrokenPipeError):
                reading.stdin.write(b"".join(name.encode() + b"\0" for name in names))
                reading.stdin.close()
            codes = reading.wait(_SECONDS), writing.wait(_SECONDS)
        if any(codes):
            raise self._failed(f"copying {len(names)} files ended with {codes[0]} and {codes[1]}")

    def _failed(self, why: str) -> BackendError:
        return BackendError(f"{self.name} on {self._machine.name}", why, f"try {shlex.join(self._argv('true'))}")


def _belongs(name: str, value: str) -> bool:
    """Whether a variable is of the plan or of the launcher, and not one that the caller happens to have."""
    return os.environ.get(name) != value


def _machine(one: object, what: str) -> MachineAddress:
    if not isinstance(one, dict):
        raise MalformedError(what, "machine is no table")
    name = _text(one.get("name"), what, "machine.name")
    address = _text(one.get("address", name), what, "machine.address")
    interface = one.get("interface", "")
    if type(interface) is not str or one.keys() - {"name", "address", "interface"}:
        raise MalformedError(what, f"machine {name} has more than name, address and interface, or not as texts")
    return MachineAddress(name, address, interface)


def _text(value: object, what: str, field: str) -> str:
    if type(value) is not str or not value:
        raise MalformedError(what, f"{field} is {value!r:.40}, and has to be a text")
    return value


def _texts(value: object, what: str, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise MalformedError(what, f"{field} is {value!r:.40}, and has to be a list of texts")
    return tuple(_text(one, what, field) for one in value)
