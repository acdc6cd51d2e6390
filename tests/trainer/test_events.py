"""Lines by which processes are heard: whole, in order, and refused when they are not events."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from ckptstore.errors import MalformedError
from trainer.workers import events
from trainer.workers.events import Emitter, Event, Heartbeat


def test_an_event_survives_its_line(tmp_path: Path) -> None:
    emitter = Emitter(tmp_path / "deep" / "events.jsonl")
    sent = emitter.emit("update", update=3, loss=0.25, exact={"loss": "0x1.0p-2"}, text="ü\n\u2028")
    emitter.close()
    (read,) = events.read(tmp_path / "deep" / "events.jsonl")
    assert (read.name, read.time, dict(read.fields)) == (sent.name, sent.time, dict(sent.fields))
    assert abs(read.at - sent.at) < 1e-5
    assert read["loss"] == 0.25
    assert sent.encode().count(b"\n") == 1


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(MalformedError, match=r"joined.*no field binding"):
        events.make("joined", {})["binding"]


@pytest.mark.parametrize("name", ["event", "at", "time"])
def test_a_field_cannot_take_a_reserved_name(name: str) -> None:
    with pytest.raises(MalformedError, match=name):
        events.make("x", {name: 1})


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"Traceback (most recent call last):\n",
        b"[]\n",
        b'{"event":"x","at":1}\n',
        b'{"event":1,"at":1,"time":"t"}\n',
        b'{"event":"x","at":"1","time":"t"}\n',
        b'{"event":"x","at":1,"time":"t","loss":NaN}\n',
        b"\xff\xfe\n",
        b"[" * 100_000,
    ],
)
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(MalformedError):
        Event.parse(line)


def test_a_line_that_is_too_long_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(MalformedError, match="limit"):
        Event.parse(b'{"event":"' + b"x" * events.LINE_LIMIT)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = events.make("update", {"update": 1}).encode()
    path.write_bytes(whole + events.make("update", {"update": 2}).encode()[:-5])
    assert [event["update"] for event in events.read(path)] == [1]
    path.write_bytes(whole[:-5] + b"\n" + whole)
    with pytest.raises(MalformedError):
        list(events.read(path))


def test_lines_of_many_threads_stay_whole_and_in_the_order_of_their_times(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    emitter = Emitter(tmp_path / "events.jsonl", write_end)
    collected = bytearray()

    def drain() -> None:
        while data := os.read(read_end, 1000):
            collected.extend(data)

    reader = threading.Thread(target=drain)
    reader.start()
    filler = "x" * 5000  # longer than what a pipe takes in one piece at times
    writers = [
        threading.Thread(target=lambda n=n: [emitter.emit("e", writer=n, filler=filler) for _ in range(20)])  # type: ignore[misc]
        for n in range(4)
    ]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    os.close(write_end)
    reader.join()
    os.close(read_end)
    emitter.close()
    in_file = (tmp_path / "events.jsonl").read_bytes()
    assert bytes(collected) == in_file
    found = list(events.read(tmp_path / "events.jsonl"))
    assert len(found) == 80
    assert [event.at for event in found] == sorted(event.at for event in found)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_who_listens_learns_of_an_event_that_the_full_disk_does_not_take() -> None:
    read_end, write_end = os.pipe()
    emitter = Emitter(Path("/dev/full"), write_end)
    with pytest.raises(OSError, match="No space left"):
        emitter.emit("error", type="NoSpaceError", message="the disk is full")
    assert Event.parse(os.read(read_end, 4096))["message"] == "the disk is full"
    orphaned = threading.Event()
    heartbeat = Heartbeat(emitter, 0.01, orphaned.set)
    heartbeat.start()
    for _ in range(3):  # it goes on
        assert json.loads(os.read(read_end, 4096).splitlines()[0])["event"] == events.HEARTBEAT
    assert not orphaned.is_set()
    heartbeat.stop()
    emitter.close()
    os.close(read_end)
    os.close(write_end)


def test_a_heartbeat_says_so_when_nobody_reads_any_more(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    emitter, orphaned = Emitter(tmp_path / "events.jsonl", write_end), threading.Event()
    heartbeat = Heartbeat(emitter, 0.01, orphaned.set)
    heartbeat.start()
    line = os.read(read_end, 4096).splitlines()[0]
    assert json.loads(line)["event"] == events.HEARTBEAT
    assert not orphaned.is_set()
    os.close(read_end)
    assert orphaned.wait(10)
    heartbeat.stop()
    os.close(write_end)
    emitter.close()
