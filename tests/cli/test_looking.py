"""init, log, show, ls, diff, ref: what is in a store, for people and for machines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import BACKWARDS, Ckpt, Stores


def test_init_makes_a_store_and_leaves_one_alone(ckpt: Ckpt, tmp_path: Path) -> None:
    done = ckpt("init", tmp_path / "new" / "store", "--json")
    url = (tmp_path / "new" / "store").as_uri()
    assert done.records() == [{"type": "store", "url": url, "created": True}]
    before = (tmp_path / "new" / "store" / "ckptstore.json").read_bytes()
    assert ckpt("init", tmp_path / "new" / "store", "--json").records()[0]["created"] is False
    assert (tmp_path / "new" / "store" / "ckptstore.json").read_bytes() == before


def test_init_makes_no_store_among_other_files(ckpt: Ckpt, tmp_path: Path) -> None:
    (tmp_path / "here" / "thesis.tex").write_text("x")
    assert ckpt("init").code == 5
    assert os.listdir(tmp_path / "here") == ["thesis.tex"]


def test_the_store_is_the_nearest_upwards(ckpt: Ckpt, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = stores.path / "documents"
    monkeypatch.chdir(inner)
    assert ckpt("ref", "show", "main").out == f"{stores.second}\n"


def test_the_option_goes_before_the_variable_and_the_variable_before_the_nearest(
    ckpt: Ckpt, stores: Stores, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ckptstore.open(tmp_path / "empty", create=True)
    monkeypatch.chdir(stores.path)
    monkeypatch.setenv("CKPT_STORE", str(tmp_path / "empty"))
    assert ckpt("ref", "list").out == ""
    assert len(ckpt("--store", stores.url, "ref", "list").lines()) == 2
    assert len(ckpt("ref", "list", "--store", stores.url).lines()) == 2


def test_a_root_is_a_ref_a_digest_or_a_unique_prefix(ckpt: Ckpt, stores: Stores) -> None:
    second = stores.second
    for name in ("main", str(second), second.hex, second.hex[:12], f"b3:{second.hex[:12]}"):
        assert ckpt("show", name, "--json", "--store", stores.url).records()[0]["root"] == str(second)


def test_log_lists_the_lineage_newest_first(ckpt: Ckpt, stores: Stores) -> None:
    records = ckpt("log", "main", "--json", "--store", stores.url).records()
    assert [(record["root"], record["step"], record["refs"]) for record in records] == [
        (str(stores.second), 2, ["main"]),
        (str(stores.first), 1, []),
    ]
    assert [record["parent"] for record in records] == [str(stores.first), None]
    assert {receipt["operation"] for receipt in records[0]["receipts"]} == {"verify"}


def test_log_without_a_root_lists_every_ref_once(ckpt: Ckpt, stores: Stores) -> None:
    ckpt("ref", "move", "copy", "main", "--store", stores.url)
    records = ckpt("log", "--json", "--store", stores.url).records()
    assert [record["root"] for record in records] == [str(stores.second), str(stores.first), str(stores.wide)]
    assert records[0]["refs"] == ["copy", "main"]
    assert len(ckpt("log", "-n", 1, "--store", stores.url).lines()) == 3


def test_log_marks_only_receipts_of_a_whole_readback(ckpt: Ckpt, stores: Stores) -> None:
    assert ckpt("log", "wide", "--store", stores.url).lines()[1].endswith(" -")
    ckpt("verify", "wide", "--shard", 1, "--store", stores.url)
    assert ckpt("log", "wide", "--store", stores.url).lines()[1].endswith(" -")
    ckpt("verify", "wide", "--store", stores.url)
    assert " verify " in ckpt("log", "wide", "--store", stores.url).lines()[1]


def test_log_says_where_history_ends(ckpt: Ckpt, stores: Stores) -> None:
    first = stores.first.hex
    stores.file(f"documents/{first[:2]}/{first}").unlink()
    done = ckpt("log", "main", "--store", stores.url)
    assert done.code == 0
    assert len(done.lines()) == 2
    assert str(stores.first) in done.err


def test_show_says_what_a_checkpoint_says(ckpt: Ckpt, stores: Stores) -> None:
    (shown,) = ckpt("show", "wide", "--json", "--store", stores.url).records()
    document = stores.open().checkpoint(stores.wide)
    assert shown["step"] == 7
    assert shown["run"] == str(document.run)
    assert shown["state_root"] == str(document.state_root)
    assert shown["cursors"] == {"data": {"unit": "samples", "position": 70, "per_step": 10}}
    assert shown["binding"] == {"threads": 2}
    assert shown["ties"] == {"head.weight": "embed.weight"}
    assert [shard["digest"] for shard in shown["shards"]] == [str(digest) for digest in document.shards]
    assert [shard["tensors"] for shard in shown["shards"]] == [3, 2]
    (main,) = ckpt("show", "main", "--json", "--store", stores.url).records()
    assert main["counters"]["optimizer.optimizer"] == {"tracks_step": True, "values": [[2, 6]]}
    assert main["shards"][0]["optimizers"][0]["groups"][0]["lr"] == 0.01
    text = ckpt("show", "main", "--store", stores.url).out
    for part in (str(stores.second), str(stores.first), "torch.optim.adamw.AdamW", "binding      threads = "):
        assert part in text


def test_show_tells_what_cannot_be_read(ckpt: Ckpt, stores: Stores) -> None:
    shard = stores.open().checkpoint(stores.wide).shards[1].hex
    stores.file(f"documents/{shard[:2]}/{shard}").unlink()
    (shown,) = ckpt("show", "wide", "--json", "--store", stores.url).records()
    assert "error" not in shown["shards"][0]
    assert "not in the store" in shown["shards"][1]["error"]


def test_ls_lists_tensors_and_filters_by_role_and_path(ckpt: Ckpt, stores: Stores) -> None:
    every = ckpt("ls", "main", "--json", "--store", stores.url).records()
    entries = stores.open().closure(stores.second).shards[0].tensors()
    assert [(row["role"], row["path"], row["digest"]) for row in every] == [
        ("/".join(entry.role), entry.path, str(entry.digest)) for entry in entries
    ]
    moments = ckpt("ls", "main", "--role", "optim/*/exp_avg", "--path", "*.weight", "--json", "--store", stores.url)
    assert {(row["role"], row["path"]) for row in moments.records()} == {
        ("optim/optimizer/exp_avg", f"{number}.weight") for number in (0, 1, 4)
    }
    (row,) = ckpt("ls", "main", "--role", "weight", "--path", "0.weight", "--json", "--store", stores.url).records()
    assert (row["dtype"], row["shape"], row["bytes"], row["shard"]) == ("f32", [80, 8], 2560, 0)


def test_ls_lists_the_other_names_of_shared_tensors(ckpt: Ckpt, stores: Stores) -> None:
    (row,) = ckpt("ls", "wide", "--role", "alias", "--json", "--store", stores.url).records()
    assert (row["path"], row["owner"], row["digest"]) == ("head.weight", "embed.weight", None)
    assert "is embed.weight" in ckpt("ls", "wide", "--store", stores.url).out


def test_ls_of_one_shard_needs_no_other(ckpt: Ckpt, stores: Stores) -> None:
    shard = stores.open().checkpoint(stores.wide).shards[0].hex
    stores.file(f"documents/{shard[:2]}/{shard}").unlink()
    assert ckpt("ls", "wide", "--store", stores.url).code == 4
    rows = ckpt("ls", "wide", "--shard", 1, "--role", "weight", "--json", "--store", stores.url).records()
    assert [row["path"] for row in rows] == ["norm.bias", "norm.weight"]


@pytest.mark.parametrize("command", ["ls", "show"])
def test_no_name_drives_the_terminal(ckpt: Ckpt, stores: Stores, command: str) -> None:
    """Names come from whoever wrote the store, and may hold escape sequences or turn text around."""
    for arguments in (("wide",), ("wide", "--json")):
        out = ckpt(command, *arguments, "--store", stores.url).out
        assert "\x1b" not in out
        assert "\u202e" not in out
    rows = ckpt("ls", "wide", "--json", "--store", stores.url).records()
    assert f"{BACKWARDS}.weight" in [row["path"] for row in rows]
    assert r"back\u202ewards\x1b[31m.weight" in ckpt("ls", "wide", "--store", stores.url).out


def test_diff_of_a_root_with_itself_is_0_and_of_two_is_1(ckpt: Ckpt, stores: Stores) -> None:
    same = ckpt("diff", "main", stores.second, "--json", "--store", stores.url)
    assert same.code == 0
    assert same.records()[0]["relation"] == "identical"
    done = ckpt("diff", stores.first, "main", "--store", stores.url)
    assert done.code == 1
    assert "exp_avg" in done.out
    (record,) = ckpt("diff", stores.first, "main", "--json", "--store", stores.url).records()
    assert record["relation"] == "different"
    assert record["tensors"]


def test_diff_compares_across_stores(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    ckpt("push", "main", tmp_path / "far", "--create", "--store", stores.url)
    assert ckpt("diff", "main", "main", "--other", tmp_path / "far", "--store", stores.url).code == 0


def test_refs_are_listed_shown_moved_and_logged(ckpt: Ckpt, stores: Stores) -> None:
    def ref(*arguments: object) -> list[dict[str, object]]:
        done = ckpt("ref", *arguments, "--json", "--store", stores.url)
        assert done.code == 0, done.err
        return done.records()

    assert [(item["name"], item["root"]) for item in ref("list")] == [
        ("main", str(stores.second)),
        ("wide", str(stores.wide)),
    ]
    (moved,) = ref("move", "main", stores.first.hex[:16])
    assert (moved["root"], moved["before"]) == (str(stores.first), str(stores.second))
    assert ref("show", "main")[0]["root"] == str(stores.first)
    assert [item["generation"] for item in ref("log", "main")] == [3, 2, 1]
    assert [item["root"] for item in ref("log", "main")][:2] == [str(stores.first), str(stores.second)]


def test_a_ref_moves_only_from_what_was_expected(ckpt: Ckpt, stores: Stores) -> None:
    done = ckpt("ref", "move", "main", "wide", "--expect", stores.first, "--store", stores.url)
    assert done.code == 6
    assert str(stores.second) in done.err
    assert stores.open().head("main") == stores.second


def test_a_dropped_catalogue_is_rebuilt_with_the_same_rows(ckpt: Ckpt, stores: Stores) -> None:
    with stores.open().catalogue() as catalogue:
        before = catalogue.rows()
    for path in stores.path.glob("catalogue.sqlite*"):
        path.unlink()
    (done,) = ckpt("catalogue", "rebuild", "--json", "--store", stores.url).records()
    assert done["rows"] == {name: len(rows) for name, rows in before.items()}
    with stores.open().catalogue() as catalogue:
        assert catalogue.rows() == before


def test_every_json_line_is_one_object_with_a_type(ckpt: Ckpt, stores: Stores) -> None:
    for arguments in (["log"], ["show", "main"], ["ls", "wide"], ["verify", "main", "wide"], ["ref", "list"]):
        done = ckpt(*arguments, "--json", "--store", stores.url)
        assert done.err == ""
        for text in done.lines():
            assert type(json.loads(text)["type"]) is str
            assert text.isascii()
