"""ckpt scrub: a whole store, one line for each damaged key, and figures that say how far it came."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import ckptstore
from ckptstore.format.keys import document_key
from tests.cli.conftest import PROGRAM, Ckpt, Stores, process
from tests.cli.test_moving import damage
from tests.support.backends import run_without_privilege


def test_a_sound_store_is_0_and_the_next_one_has_nothing_to_read(ckpt: Ckpt, stores: Stores) -> None:
    (record,) = ckpt("scrub", "--json", "--store", stores.url).records()
    keys = {stat.key: stat.size for stat in ckptstore.open(stores.path).backend.list("")}
    assert (record["damaged"], record["exit_code"], record["ended_by"], record["noted"]) == (0, 0, None, True)
    assert record["read_keys"] == record["keys"] == len([key for key in keys if not is_note(stores, key)])
    assert (record["unreferenced_keys"], record["never_keys"], record["left_keys"]) == (0, 0, 0)
    (again,) = ckpt("scrub", "--max-age", "7d", "--json", "--store", stores.url).records()
    assert (again["read_keys"], again["recent_keys"]) == (0, record["keys"])
    assert again["oldest_seconds"] < 3600
    out = ckpt("scrub", "--max-age", "7d", "--store", stores.url).out
    assert "nothing is wrong" in out
    assert "0 that nothing leads to" in out


def is_note(stores: Stores, key: str) -> bool:
    from ckptstore.readbacks.notes import subject_of

    identity = stores.open().id
    assert identity is not None
    return key.startswith(f"receipts/{subject_of(identity).hex}/")


def test_damage_is_one_line_for_each_key_with_whom_it_hurts(ckpt: Ckpt, stores: Stores) -> None:
    store = stores.open()
    pack = next(key for key, need in store.closure(stores.wide).objects.items() if need.slots)
    lost = document_key(store.closure(stores.second).shards[0].shard.pages[0].digest)
    damage(stores.file(pack))
    stores.file(lost).unlink()
    done = ckpt("scrub", "--json", "--store", stores.url)
    assert done.code == 3
    *findings, summary = done.records()
    assert {finding["key"]: finding["kind"] for finding in findings} == {pack: "corrupt", lost: "missing"}
    by_key = {finding["key"]: finding for finding in findings}
    assert by_key[pack]["hurts"] == [str(stores.wide)]
    assert by_key[pack]["checkpoint"] == str(stores.wide)
    assert by_key[pack]["tensor"]
    assert by_key[lost]["hurts"] == [str(stores.second)]
    assert (summary["damaged"], summary["exit_code"]) == (2, 3)
    lines = ckpt("scrub", "--store", stores.url).lines()
    assert len(lines) == 3
    assert any(f"ckpt repair {stores.wide.hex}" in line for line in lines)


def test_limits_end_it_and_the_next_one_goes_on(ckpt: Ckpt, stores: Stores) -> None:
    (first,) = ckpt("scrub", "--max-bytes", "10kB", "--json", "--store", stores.url).records()
    assert (first["ended_by"], first["unreferenced_keys"]) == ("bytes", None)
    assert first["left_keys"] > 0
    assert "ended by --max-bytes" in ckpt("scrub", "--max-bytes", "1", "--store", stores.url).out
    (rest,) = ckpt("scrub", "--max-age", "1h", "--max-duration", "1h", "--json", "--store", stores.url).records()
    assert rest["ended_by"] is None
    assert rest["recent_keys"] >= first["read_keys"]
    assert rest["read_keys"] + rest["recent_keys"] == rest["keys"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-bytes", "10 GiB"),
        ("--max-bytes", "0"),
        ("--max-bytes", "10XB"),
        ("--max-duration", "0"),
        ("--max-duration", "soon"),
        ("--max-age", "-1"),
    ],
)
def test_limits_that_mean_nothing_are_2(ckpt: Ckpt, stores: Stores, arguments: tuple[str, str]) -> None:
    assert ckpt("scrub", *arguments, "--store", stores.url).code == 2


def test_sizes_are_in_thousands_or_in_powers_of_two() -> None:
    from ckptstore_cli.size import size

    texts = {"7": 7, "7B": 7, "10GiB": 10 * 2**30, "1.5MiB": 3 * 2**19, "500MB": 500_000_000, "2kB": 2000, "1KiB": 1024}
    assert {text: size(text) for text in texts} == texts


def test_a_remote_is_scrubbed_by_its_name_and_noted_in_both(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    far = tmp_path / "far"
    ckpt("push", "main", far, "--create", "--store", stores.url)
    ckpt("remote", "add", "far", far, "--store", stores.url)
    (record,) = ckpt("scrub", "--remote", "far", "--json", "--store", stores.url).records()
    assert record["store"] == far.as_uri()
    subject = next(
        stat.key.split("/")[1]
        for stat in ckptstore.open(far).backend.list("receipts/")
        if "scrub" in str(ckptstore.open(far).backend.get(stat.key))
    )
    assert list(stores.open().backend.list(f"receipts/{subject}/"))
    damage(next(path for path in (far / "objects").rglob("*") if path.is_file()))
    assert ckpt("scrub", "--remote", "far", "--store", stores.url).code == 3
    assert ckpt("scrub", "--store", stores.url).code == 0
    assert ckpt("scrub", "--remote", "gone", "--store", stores.url).code == 4


def test_a_store_that_cannot_be_written_is_read_and_that_is_told(stores: Stores) -> None:
    for path in sorted(stores.path.rglob("*"), reverse=True):
        path.chmod(0o444 if path.is_file() else 0o555)
    stores.path.chmod(0o555)
    try:
        done = run_without_privilege(PROGRAM, "--store", stores.url, "scrub")
        assert done.returncode == 0, done.stderr
        assert "nothing is wrong" in done.stdout
        (line,) = done.stderr.splitlines()
        assert "nothing is noted" in line
    finally:
        for path in (stores.path, *stores.path.rglob("*")):
            if path.is_dir():
                path.chmod(0o755)


def test_an_interrupted_scrub_is_130_and_is_gone_on_with(ckpt: Ckpt, stores: Stores) -> None:
    program = f"""
import os, signal
from ckptstore.backends.directory import DirectoryBackend
readback, seen = DirectoryBackend.readback, []
def interrupting(self, key, length=None):
    seen.append(key)
    if len(seen) == 12:
        os.kill(os.getpid(), signal.SIGINT)
    return readback(self, key, length)
DirectoryBackend.readback = interrupting
{PROGRAM}
"""
    done = process("scrub", "--store", stores.url, program=program)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 130, (out, err, signal.SIGINT)
    (record,) = ckpt("scrub", "--max-age", "1h", "--json", "--store", stores.url).records()
    assert record["recent_keys"] > 0
    assert record["read_keys"] + record["recent_keys"] == record["keys"]
