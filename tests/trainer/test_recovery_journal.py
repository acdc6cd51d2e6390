"""The journal of a run: what was written is there after any end of its writer, and nothing else is taken for it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import Digest
from ckptstore.errors import CkptStoreError, MalformedError
from trainer.recovery import entries
from trainer.recovery.entries import Entry, encode, parse
from trainer.recovery.journal import RunJournal

ENTRIES: list[Entry] = [
    entries.Opened(7, 2, 0, 0),
    entries.Chosen(Digest.of(b"root"), 3, ("checkpoint: damaged",)),
    entries.Lost(1, (1,), ("host-1",), "silence", "3 heartbeats", 3100, 20),
]


def written(path: Path) -> bytes:
    journal = RunJournal(path)
    for entry in ENTRIES:
        journal.append(entry)
    journal.close()
    return path.read_bytes()


def test_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path / "j")
    assert RunJournal(tmp_path / "j").entries == ENTRIES


def test_a_line_that_was_cut_off_is_forgotten_and_what_follows_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = written(path)
    lines = data.splitlines(keepends=True)
    last = len(data) - len(lines[-1])
    for cut in range(last, len(data), 30):
        path.write_bytes(data[:cut])
        journal = RunJournal(path)
        assert journal.entries == ENTRIES[:-1]
        journal.append(ENTRIES[0])
        journal.close()
        assert RunJournal(path).entries == [*ENTRIES[:-1], ENTRIES[0]]


def test_a_whole_line_that_is_no_entry_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "j"
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"entry":"opened"}\n' + lines[2])
    with pytest.raises(MalformedError, match="line 2"):
        RunJournal(path)
    assert path.read_bytes().endswith(lines[2])


def test_a_line_without_an_end_that_is_longer_than_any_entry_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(written(path) + b"x" * (entries.LINE_LIMIT + 1))
    with pytest.raises(MalformedError, match="the limit is"):
        RunJournal(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_refused_by_our_own_error(line: bytes) -> None:
    try:
        time, entry = parse(line)
    except CkptStoreError:
        return
    assert parse(encode(entry, time)) == (time, entry)


@given(st.sampled_from(ENTRIES), st.data())
def test_a_changed_line_is_an_entry_or_refused_by_our_own_error(entry: Entry, data: st.DataObject) -> None:
    line = bytearray(encode(entry, "2026-01-01T00:00:00.000Z"))
    line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CkptStoreError):
        parse(bytes(line))
