"""Whatever goes wrong is one line on stderr, an exit code, and never a traceback."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from ckptstore import Digest
from ckptstore_cli import root as commands
from ckptstore_cli.main import main
from ckptstore_cli.output import escape
from tests.cli.conftest import Ckpt, Stores
from tests.cli.test_moving import damage


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["frobnicate"], 2),
        (["log", "--frobnicate"], 2),
        (["show"], 2),
        (["show", "main", "wide"], 2),
        (["log", "-n", "0"], 2),
        (["verify"], 2),
        (["verify", "main", "--shard", "-1"], 2),
        (["verify", "wide", "--shard", "2"], 2),
        (["show", "UPPER"], 2),
        (["show", "b3:12"], 2),
        (["ref", "move", "dead", "main"], 2),
        (["ref", "frobnicate"], 2),
        (["completion", "tcsh"], 2),
        (["import", "x.safetensors"], 2),
        (["push", "main", "gopher://host"], 2),
        (["show", "nothing"], 4),
        (["show", "0" * 64], 4),
        (["show", "b3:" + "0" * 12], 4),
        (["verify", "0" * 64], 4),
        (["diff", "main", "0" * 64], 4),
        (["ref", "show", "nothing"], 4),
        (["ref", "log", "nothing"], 4),
        (["ref", "move", "new", "0" * 64], 4),
        (["import", "nothing.safetensors", "--ref", "new"], 4),
        (["export", "main", "no/such/folder/x.safetensors"], 4),
        (["evidence", "verify", "nothing.tar"], 4),
        (["pull", "main", "nowhere"], 4),
    ],
)
def test_a_wrong_request_is_one_line(ckpt: Ckpt, stores: Stores, arguments: list[str], code: int) -> None:
    done = ckpt("--store", stores.url, *arguments)
    assert done.code == code, done.err
    assert len(done.err.splitlines()) == 1 or arguments == ["verify", "0" * 64]
    assert "Traceback" not in done.err
    as_json = ckpt("--store", stores.url, *arguments, "--json")
    assert as_json.code == code
    if as_json.err:
        assert as_json.error().keys() == {"type", "error", "what", "why", "hint", "exit_code"}
        assert as_json.error()["exit_code"] == code


def test_without_a_store_the_error_says_how_to_name_one(ckpt: Ckpt) -> None:
    done = ckpt("log")
    assert done.code == 4
    assert "--store" in done.err
    assert "CKPT_STORE" in done.err


def test_a_directory_without_a_store_is_missing(ckpt: Ckpt, tmp_path: Path) -> None:
    assert ckpt("log", "--store", tmp_path).code == 4
    assert ckpt("log", "--store", tmp_path / "nowhere").code == 4


def test_an_ambiguous_prefix_lists_what_it_fits(ckpt: Ckpt, stores: Stores) -> None:
    store = stores.open()
    document = store.checkpoint(stores.wide)
    seen: dict[str, bytes] = {}
    for step in count(1000):
        data = replace(document, step=step).encode()
        prefix = Digest.of(data).hex[:4]
        if prefix in seen:
            break
        seen[prefix] = data
    both = sorted(store.objects.put_document(item) for item in (data, seen[prefix]))
    done = ckpt("show", prefix, "--store", stores.url)
    assert done.code == 2
    assert all(root.short in done.err for root in both)
    assert ckpt("ref", "move", "new", both[0].hex[:40], "--store", stores.url).code == 0


def test_a_store_of_another_format_is_refused_as_such(ckpt: Ckpt, stores: Stores) -> None:
    header = stores.file("ckptstore.json")
    header.chmod(0o644)
    header.write_bytes(header.read_bytes().replace(b'"format":1', b'"format":2'))
    assert ckpt("log", "--store", stores.url).code == 9
    header.write_bytes(b"{}")
    assert ckpt("log", "--store", stores.url).code == 9


def test_a_damaged_head_is_corrupt_and_names_its_key(ckpt: Ckpt, stores: Stores) -> None:
    damage(stores.file("refs/main/0000000000000002"))
    done = ckpt("show", "main", "--json", "--store", stores.url)
    assert done.code == 3
    assert "refs/main/0000000000000002" in done.error()["why"]


def test_an_unforeseen_error_is_called_a_bug(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(commands.COMMANDS, "log", ("no_such_module", ""))
    done = ckpt("log")
    assert done.code == 7
    assert len(done.err.splitlines()) == 1
    assert "bug" in done.err
    assert ckpt("log", "--json").error()["error"] == "internal"
    monkeypatch.setenv("CKPT_DEBUG", "1")
    assert "Traceback" in ckpt("log").err


def test_an_error_cannot_drive_the_terminal(ckpt: Ckpt, stores: Stores) -> None:
    done = ckpt("show", "x\x1b[2J\u202e", "--store", stores.url)
    assert done.code == 2
    assert "\x1b" not in done.err
    assert "\u202e" not in done.err


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit) as ended:
        main(["log"])
    assert ended.value.code == 5
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.3.weight", "layers.3.weight"),
        ("größe.重み", "größe.重み"),
        ("a\tb\nc", r"a\x09b\x0ac"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("zero\u200bwidth\u2028line", r"zero\u200bwidth\u2028line"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_could_drive_or_deceive_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown
