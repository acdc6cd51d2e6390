"""Each fault of a network or a server, under each operation: what comes of it, and that nothing wrong does.

The cells run in the background, several at a time, because most of their time is waiting. docs/remote-faults.md shows
what is expected of each.
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import BackendError, CkptStoreError
from ckptstore_cli.main import run
from tests.remote.faultcases import FAULTS, PAGE, Fault, written
from tests.remote.faultworld import OPERATIONS, Operation, World, broken, proofs, seed
from tests.support import s3 as server
from tests.support.faultactions import (
    Action,
    Blackhole,
    GoDown,
    LostAnswer,
    ResetRequest,
    ResetResponse,
    Truncate,
)
from tests.support.faultanswers import Status, StorageClass
from tests.support.faultbytes import FlipResponse, OtherBody, StoreFraming, WholeInsteadOfRange, WrongContentRange
from tests.support.sweeps import EVERY, share

HANGING = {"attempt_seconds": "0.7"}
"""Patience under a fault that hangs: what hangs is left alone soon."""
SHORT, LONG = 4.0, 40.0
"""Seconds for what is done under a lasting fault: one that ends only with patience, and one that shows at once."""
SLACK = 30.0
"""How many seconds later a loaded machine may notice."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault under one operation, that passes or lasts."""

    fault: str
    operation: str
    lasts: bool


def cells(name: str, *, every: bool) -> list[Cell]:
    """The cells of a fault; not ``every``: a tenth of its operations, turn and turn about passing and lasting."""
    fault, row = FAULTS[name], list(FAULTS).index(name)
    met = [operation for operation, does in OPERATIONS.items() if fault.strikes & does.uses]
    if every:
        return [Cell(name, operation, lasts) for operation in met for lasts in (False, True)]
    return [
        Cell(name, operation, (row + column) % 2 == 1)
        for column, operation in enumerate(met[row % 10 :: 10] or met[:1])
    ]


def run_cell(cell: Cell) -> str:
    """What is wrong with a cell; empty if it is as it should be."""
    fault, does = FAULTS[cell.fault], OPERATIONS[cell.operation]
    try:
        with does.guard(), does.world(**(HANGING if fault.hangs else {})) as world:
            return "; ".join(_judged(cell, fault, does, world))
    except Exception:
        return traceback.format_exc()


def _judged(cell: Cell, fault: Fault, does: Operation, world: World) -> list[str]:
    error, hits, late = _struck(cell, fault, does, world)
    expected = fault.code(cell.operation, lasts=cell.lasts)
    code = 0 if error is None else error.exit_code
    wrong = [] if hits else ["the fault was not met"]
    if code != expected:
        wrong.append(f"exit code {code}, expected {expected}: {error}")
    if late > SLACK:
        wrong.append(f"it ended {late:.1f} s after its deadline")
    if error is not None:
        if not (error.what and error.why):
            wrong.append(f"an error that says little: {error!r}")
        if does.proves and proofs(world.behind(), world.seed.root):
            wrong.append("a receipt says that all was read back")
        if does.writes and not does.makes:
            wrong += [f"before it heals: {problem}" for problem in broken(world.behind(), does, fault.spoils)]
        world.heal()
        if cell.operation in fault.spoils:
            return wrong
        does.act(world)
    return wrong + broken(world.behind(), does, fault.spoils) if does.writes else wrong


def _struck(cell: Cell, fault: Fault, does: Operation, world: World) -> tuple[CkptStoreError | None, int, float]:
    """How the operation ended under the fault, how often that was met, and how many seconds late it was."""
    action = fault.action()
    if isinstance(action, GoDown) and cell.lasts:
        action.seconds = None
    times = None if cell.lasts else 1 if fault.hangs or isinstance(action, GoDown) else fault.times
    limit = None if not cell.lasts else SHORT if fault.code(cell.operation, lasts=True) == 7 else LONG
    began = time.monotonic()
    rules = []
    with ExitStack() as stack:

        def begin() -> None:
            nonlocal began
            began = time.monotonic()
            rules.append(
                world.proxy.add(action, when=lambda request: does.strikes(request, fault.strikes), times=times)
            )
            stack.enter_context(ckptstore.deadline(limit))

        if does.opens:
            begin()
        else:
            world.once_open = begin
        error: CkptStoreError | None = None
        try:
            does.act(world)
        except CkptStoreError as raised:
            error = raised
        late = 0.0 if limit is None else time.monotonic() - began - limit
    return error, sum(rule.hits for rule in rules), late


def check(wanted: list[Cell]) -> None:
    """All of them at once: most of what they do is to wait."""
    seed()  # which needs the environment for itself
    with ThreadPoolExecutor(8) as pool:
        found = zip(wanted, pool.map(run_cell, wanted), strict=True)
    wrong = [f"{cell.operation}, {'lasting' if cell.lasts else 'passing'}: {text}" for cell, text in found if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    """It ends as the table says, with no wrong byte handed out, nothing called verified, and nothing broken behind."""
    check(cells(name, every=False))


@pytest.mark.deep
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_a_sweep_of_cells(name: str) -> None:
    check(list(share(cells(name, every=True), name)))


@pytest.mark.deep
@pytest.mark.parametrize(
    "action", [ResetRequest(), LostAnswer(), Status(503, "SlowDown"), LostAnswer(hang=True)], ids=repr
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_single_request_may_fail(s3: server.SharedServer, operation: str, action: Action) -> None:
    """Each request of an operation in turn, from one of the first to the last."""
    does = OPERATIONS[operation]
    number = share(range(EVERY), f"{operation} {action}")[0]
    while True:
        with does.guard(), does.world(**HANGING) as world:
            rule = world.proxy.add(action, skip=number, times=1)
            does.act(world)
            if does.writes:
                assert broken(world.behind()) == []
        if not rule.hits:
            break
        number += EVERY
    assert number > EVERY


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("operation", ["verify", "pull", "push", "save", "resume"])
def test_requests_that_fail_by_chance(s3: server.SharedServer, operation: str, seed: int) -> None:
    """One in three, in one way or another, until all of it is done nevertheless."""
    does = OPERATIONS[operation]
    with does.guard(), does.world(**HANGING) as world:
        for number, action in enumerate(
            [ResetRequest(), LostAnswer(), Status(500, "InternalError"), Status(503), Truncate(9), Blackhole()]
        ):
            world.proxy.add(action, probability=0.055, seed=100 * seed + number)
        does.act(world)
        world.heal()
        assert broken(world.behind()) == []


@pytest.mark.parametrize(
    ("arguments", "action", "code"),
    [
        (["verify", "main"], Status(503, "SlowDown"), 7),
        (["verify", "main"], FlipResponse(30), 3),
        (["verify", "main"], Status(404, "NoSuchKey"), 4),
        (["verify", "main"], StorageClass(), 5),
        (["log", "main"], FlipResponse(30), 3),
        (["show", "main"], Truncate(20), 7),
        (["pull", "main"], OtherBody(b"somebody else's bytes"), 3),
        (["pull", "main"], ResetResponse(20), 7),
        (["push", "main"], Status(507, "InsufficientStorage"), 8),
        (["push", "main"], StoreFraming(), 3),
    ],
    ids=repr,
)
def test_the_command_ends_with_the_exit_code_and_one_line(
    s3: server.SharedServer,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    action: Action,
    code: int,
) -> None:
    command = arguments[0]
    does = OPERATIONS[{"push": "push", "pull": "pull"}.get(command, "verify")]
    local = tmp_path / "local"
    assert run(["init", str(local)]) == 0
    with does.world(operation_seconds="2", attempt_seconds="2") as world:
        if command == "push":
            ckptstore.pull(world.seed.store(), ckptstore.open(local), world.seed.root, ref="main")
        world.proxy.add(action, path="/(objects|documents)/", method="PUT" if command == "push" else "GET")
        full = [*arguments, world.url, "--store", str(local)]
        if command not in ("push", "pull"):
            full = [*arguments, "--store", world.url]
        capfd.readouterr()
        assert run(full) == code
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        assert said.err or said.out
        assert proofs(world.behind(), world.seed.root) == 0
        world.heal()
        assert run(full) == 0


def test_a_part_that_was_asked_for_is_what_comes(s3: server.SharedServer) -> None:
    """Other parts are asked for again; a whole object in place of a part has it in it."""
    with OPERATIONS["open"].world(operation_seconds="2", attempt_seconds="2") as world:
        key, data = next(item for item in world.seed.keys.items() if item[0].startswith("objects/"))
        backend = world.store().backend
        world.proxy.add(WholeInsteadOfRange(), method="GET")
        assert backend.get(key, 100, 50) == data[100:150]
        assert backend.get(key, 100) == data[100:]
        assert backend.get(key, len(data) + 5, 7) == b""
        world.proxy.heal()
        for _ in range(2):
            world.proxy.add(WrongContentRange(), method="GET", times=1)
            assert backend.get(key, 100, 50) == data[100:150]
        world.proxy.add(WrongContentRange(), method="GET")
        with pytest.raises(BackendError, match=key):
            backend.get(key, 100, 50)


def test_the_page_in_docs_shows_this_table() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.remote.faultcases"
