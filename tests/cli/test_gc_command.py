"""ckpt gc: lists what it would delete, and deletes just that when it is told to."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

import ckptstore
from ckptstore.format.keys import document_key
from ckptstore.pinning import pin
from tests.cli.conftest import Ckpt, Done, Stores, process
from tests.support.lines import line


def keys(store: ckptstore.Store) -> dict[str, int]:
    return {stat.key: stat.size for stat in store.backend.list("")}


def listed(done: Done) -> dict[str, int]:
    """Keys and sizes that a command says it deletes."""
    return {record["key"]: record["bytes"] for record in done.records() if record["type"] == "deletion"}


@pytest.fixture
def lines(tmp_path: Path) -> ckptstore.Store:
    """A store with four verified checkpoints under ``main``."""
    store = ckptstore.open(tmp_path / "lines", create=True)
    line(store, [1, 2, 3, 4])
    return store


def url(store: ckptstore.Store) -> Path:
    path = getattr(store.backend, "path")  # noqa: B009
    assert isinstance(path, Path)
    return path


def test_it_lists_and_deletes_nothing_unless_it_is_told_to(ckpt: Ckpt, lines: ckptstore.Store) -> None:
    before = keys(lines)
    done = ckpt("gc", "--keep-last", 2, "--store", url(lines))
    assert (done.code, keys(lines)) == (0, before)
    gone = {row.split()[1]: int(row.split()[2].replace(",", "")) for row in done.lines() if row.startswith("delete  ")}
    assert gone.items() <= before.items()
    total = sum(gone.values())
    assert done.lines()[-1].startswith(f"would delete {len(gone)} keys, {total:,} bytes; ")
    assert [row.split()[0] for row in done.lines() if not row.startswith(("delete", "would"))] == [
        *("keep", "keep", "retire", "retire")
    ]


def test_what_it_lists_is_what_it_deletes(ckpt: Ckpt, lines: ckptstore.Store) -> None:
    dry = ckpt("gc", "--keep-last", 2, "--json", "--store", url(lines))
    before = keys(lines)
    real = ckpt("gc", "--keep-last", 2, "--delete", "--yes", "--json", "--store", url(lines))
    assert (dry.code, real.code) == (0, 0)
    after = keys(lines)
    assert listed(dry) == listed(real) == {key: size for key, size in before.items() if key not in after}
    plan, done = (next(r for r in real.records() if r["type"] == kind) for kind in ("collection-plan", "collected"))
    assert (
        (done["keys"], done["bytes"]) == (plan["keys"], plan["bytes"]) == (len(listed(dry)), sum(listed(dry).values()))
    )
    assert (plan["remaining_keys"], plan["remaining_bytes"]) == (len(after), sum(after.values()))
    assert ckpt("verify", "main", "--store", url(lines)).code == 0


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ((), [4, 3, 2, 1]),
        (("--keep-last", 1), [4]),
        (("--keep-every", 2), [4, 2]),
        (("--keep-every-time", "6h"), [4, 1]),
        (("--keep-best", "1:loss:min"), [4, 3, 2, 1]),  # none of them has recorded a loss
        (("--keep-last", 2, "--keep-every", 2), [4, 3, 2]),
        (("--keep-last", 1, "--min-verified-copies", 1), [4, 3, 2, 1]),
    ],
)
def test_options_are_rules(ckpt: Ckpt, lines: ckptstore.Store, options: tuple[object, ...], steps: list[int]) -> None:
    done = ckpt("gc", *options, "--json", "--store", url(lines))
    kept = [record for record in done.records() if record["type"] == "kept"]
    assert [record["step"] for record in kept] == steps
    assert [record["wanting"] for record in kept].count(True) == (3 if "--min-verified-copies" in options else 0)


@pytest.mark.parametrize(
    "options",
    [
        ("--keep-last", 0),
        ("--keep-every", 0),
        ("--keep-every-time", "0"),
        ("--keep-every-time", "soon"),
        ("--keep-best", "loss"),
        ("--keep-best", "0:loss"),
        ("--min-verified-copies", -1),
        ("--retire", "b3:xyz"),
        ("--yes",),
    ],
)
def test_what_cannot_be_meant_is_refused(ckpt: Ckpt, lines: ckptstore.Store, options: tuple[object, ...]) -> None:
    before = keys(lines)
    done = ckpt("gc", *options, "--store", url(lines))
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert keys(lines) == before


def test_without_a_terminal_and_without_yes_nothing_is_deleted(ckpt: Ckpt, lines: ckptstore.Store) -> None:
    before = keys(lines)
    done = ckpt("gc", "--keep-last", 1, "--delete", "--store", url(lines))
    assert done.code == 5
    assert "--yes" in done.err
    assert "would delete" in done.out
    assert keys(lines) == before


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 5), ("", 5)])
def test_at_a_terminal_it_asks(lines: ckptstore.Store, answer: str, code: int) -> None:
    before = len(keys(lines))
    terminal, theirs = pty.openpty()
    try:
        command = process("gc", "--keep-last", 1, "--delete", "--store", url(lines), stdin=theirs)
        os.write(terminal, f"{answer}\n".encode())
        out, err = command.communicate(timeout=60)
    finally:
        os.close(terminal)
        os.close(theirs)
    assert command.returncode == code, err
    assert "[y/N]" in err
    assert ("\ndeleted " in out) == (code == 0)
    assert (len(keys(lines)) < before) == (code == 0)


def test_all_reasons_not_to_delete_are_in_one_line(ckpt: Ckpt, stores: Stores) -> None:
    store = stores.open()
    store.backend.create("notes.txt", b"x")
    store.backend.create(f"pins/{'ab' * 32}/{'cd' * 16}", b"{}")
    before = keys(store)
    done = ckpt("gc", "--delete", "--yes", "--json", "--store", stores.url)
    assert done.code == 5
    told = done.error()
    assert told["error"] == "refused"
    assert "notes.txt" in told["why"]
    assert f"pins/{'ab' * 32}" in told["why"]
    assert keys(store) == before


def test_a_checkpoint_that_cannot_be_read_goes_by_name(ckpt: Ckpt, lines: ckptstore.Store) -> None:
    head = lines.head("main")
    assert head is not None
    (shard,) = lines.checkpoint(head).shards
    lines.backend.delete(document_key(shard))
    refused = ckpt("gc", "--delete", "--yes", "--store", url(lines))
    assert refused.code == 5
    assert "--retire" in refused.err
    done = ckpt("gc", "--delete", "--yes", "--retire", "main", "--json", "--store", url(lines))
    assert done.code == 0
    assert [(r["root"], r["reason"]) for r in done.records() if r["type"] == "retired"] == [
        (str(head), "retired by name")
    ]
    assert ckpt("gc", "--store", url(lines)).code == 0


def test_what_only_a_lack_of_copies_keeps_is_told(ckpt: Ckpt, lines: ckptstore.Store) -> None:
    done = ckpt("gc", "--keep-last", 3, "--min-verified-copies", 1, "--store", url(lines))
    assert "kept only because too few verified copies are elsewhere" in done.err
    assert "only 0 of 1 verified copies" in done.out


def test_a_writer_at_work_is_told_and_keeps_everything(ckpt: Ckpt, lines: ckptstore.Store) -> None:
    with lines.lease():
        dry = ckpt("gc", "--keep-last", 1, "--store", url(lines))
        assert dry.code == 0
        assert "1 lease of writers" in dry.err


def test_a_pin_is_a_reason(ckpt: Ckpt, lines: ckptstore.Store) -> None:
    roots = [root for root, _ in lines.history(lines.resolve("main"))]
    pin(lines, roots[3], reason="the \x1b[31mpaper")
    done = ckpt("gc", "--keep-last", 1, "--store", url(lines))
    assert "pinned: the \\x1b[31mpaper" in done.out
