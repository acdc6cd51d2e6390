"""A worker process: joins the group that its environment describes (``env://``) and carries out orders.

Any launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` can start it. With ``MASTER_PORT``
0 the first worker takes a free port and says which in an event, and the others wait to be told in an order, so no port
is chosen by one process and lost to another.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from ckptstore import Digest
from ckptstore.errors import CkptStoreError, UsageError
from trainer.errors import PeerLostError
from trainer.workers import fence, orders
from trainer.workers.events import Emitter, Heartbeat
from trainer.workers.exits import ORPHANED, PEER_LOST

INTERNAL = 70  # exit code of an error that is none of ours, as sysexits.h has it


@dataclass(frozen=True, slots=True)
class Options:
    """How a worker is started.

    ``area`` is the folder of the whole run: of it, the worker may only touch ``host`` and what is below ``allow``.
    ``pipe`` is the descriptor for its events, ``heartbeat`` the seconds between two signs of life, ``cuts`` where the
    group's shards begin if not where the plan says.
    """

    host: Path
    identity: Digest
    generation: int = 0
    area: Path | None = None
    allow: tuple[Path, ...] = ()
    pipe: int | None = None
    heartbeat: float = 1.0
    cuts: tuple[int, ...] | None = None


def events_path(host: Path, generation: int, shard: int) -> Path:
    """Where a worker's events are kept on its host."""
    return host / "events" / f"generation-{generation}-shard-{shard}.jsonl"


def run(options: Options, source: BinaryIO) -> NoReturn:
    """Live as a worker until an order says to close, ``source`` ends or something fails, and end the process.

    Never returns: after an error the destructors of a broken group can hang.
    """
    if options.pipe is not None:
        end_with_launcher()
    shard = _number("RANK", "0")
    emitter = Emitter(events_path(options.host, options.generation, shard), options.pipe)
    code = ORPHANED
    try:
        emitter.emit("alive", pid=os.getpid(), shard=shard, generation=options.generation)
        # Started before torch is imported, which takes seconds.
        Heartbeat(emitter, options.heartbeat, lambda: os._exit(ORPHANED)).start()
        _work(options, emitter, source)
        code = 0
    except BrokenPipeError:
        pass
    except BaseException as error:
        code = _code(error)
        with suppress(OSError):
            emitter.emit("error", type=type(error).__name__, message=str(error) or type(error).__name__, code=code)
        with suppress(OSError):
            if isinstance(error, CkptStoreError):
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
    os._exit(code)


def _work(options: Options, emitter: Emitter, source: BinaryIO) -> None:
    incoming = _orders(source)
    held = _rendezvous(emitter, incoming)
    from trainer.compute.transport import connect
    from trainer.workers.session import Session

    if options.area is not None:
        # Up only when all is loaded: torch may run a program to find its libraries (builds for CUDA run ldconfig).
        fence.install(options.area, (options.host, *options.allow))
    fenced = options.area is not None and fence.holds(options.area)
    session = Session(
        options.host,
        options.identity,
        emitter,
        lambda timeout: connect(timeout=timeout, generation=options.generation),
        fenced=fenced,
        cuts=options.cuts,
    )
    for order in incoming:
        if isinstance(order, orders.Close):
            break
        session.carry_out(order)
    session.close()
    del held


def _orders(source: BinaryIO) -> Iterator[orders.Order]:
    while line := source.readline(orders.LINE_LIMIT + 1):
        yield orders.parse(line)


def _rendezvous(emitter: Emitter, incoming: Iterator[orders.Order]) -> object | None:
    """Agree on a port where the launcher left that open; returns what has to stay alive for it."""
    if os.environ.get("MASTER_PORT") != "0" or os.environ.get("WORLD_SIZE") == "1":
        return None
    from trainer.workers.session import host_rendezvous

    held = None
    if os.environ.get("RANK") == "0":
        held = host_rendezvous(os.environ["MASTER_ADDR"], _number("WORLD_SIZE"), timeout=60.0)
        emitter.emit("listening", port=held.port)
        os.environ["MASTER_PORT"] = str(held.port)
    else:
        order = next(incoming, None)
        if not isinstance(order, orders.Join):
            raise UsageError("rendezvous", f"{order} came where the port was to come", "order join first")
        os.environ["MASTER_PORT"] = str(order.port)
    # So that env:// looks for a store that exists already, also on the first rank.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return held


def _number(variable: str, default: str = "") -> int:
    """An environment variable that launchers set. UsageError if it is no number."""
    text = os.environ.get(variable, default)
    if not text.isdecimal():
        raise UsageError(f"environment variable {variable}", f"{text!r:.40} is no number", "set it as torchrun does")
    return int(text)


def end_with_launcher() -> None:
    """Let the kernel end this process when its launcher ends, where it can: a stopped process cannot notice itself."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _code(error: BaseException) -> int:
    if isinstance(error, PeerLostError):
        return PEER_LOST
    return error.exit_code if isinstance(error, CkptStoreError) else INTERNAL
