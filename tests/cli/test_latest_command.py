"""ckpt latest: the newest whole checkpoint on stdout, what was passed over on stderr."""

from __future__ import annotations

from pathlib import Path

import ckptstore
from ckptstore.format.keys import document_key
from tests.cli.conftest import PROGRAM, Ckpt, Stores
from tests.cli.test_moving import damage
from tests.support.backends import run_without_privilege


def break_head(stores: Stores) -> str:
    """Damage an object that only the head of ``main`` needs; its key."""
    store = stores.open()
    key: str = min(store.closure(stores.second).objects.keys() - store.closure(stores.first).objects.keys())
    damage(stores.file(key))
    return key


def test_the_head_is_printed_and_a_receipt_is_kept(ckpt: Ckpt, stores: Stores) -> None:
    done = ckpt("latest", "main", "--store", stores.url)
    assert (done.code, done.out, done.err) == (0, f"{stores.second}\n", "")
    assert [receipt.operation for receipt in stores.open().receipts(stores.second)][-1] in ("verify", "read")
    (record,) = ckpt("latest", "main", "--json", "--store", stores.url).records()
    assert (record["root"], record["head"], record["step"]) == (str(stores.second), str(stores.second), 2)
    assert (record["skipped"], record["move"], record["receipt"]) == ([], None, True)


def test_what_is_passed_over_is_told_with_the_command_that_repairs_it(ckpt: Ckpt, stores: Stores) -> None:
    key = break_head(stores)
    done = ckpt("latest", "main", "--store", stores.url)
    assert (done.code, done.out) == (0, f"{stores.first}\n")
    passed, move = done.err.splitlines()
    assert f"ckpt repair {stores.second.hex} --from URL" in passed
    assert key in passed
    assert move.endswith(f"ckpt ref move main {stores.first.hex} --expect {stores.second.hex}")
    (record,) = ckpt("latest", "main", "--json", "--store", stores.url).records()
    assert [(item["root"], item["step"]) for item in record["skipped"]] == [(str(stores.second), 2)]
    assert record["move"]


def test_the_command_that_it_names_moves_the_ref(ckpt: Ckpt, stores: Stores) -> None:
    break_head(stores)
    (record,) = ckpt("latest", "main", "--json", "--store", stores.url).records()
    assert ckpt(*record["move"].split()[1:], "--store", stores.url).code == 0
    assert stores.open().head("main") == stores.first


def test_if_nothing_is_whole_the_error_lists_all(ckpt: Ckpt, stores: Stores) -> None:
    break_head(stores)
    stores.file(document_key(stores.first)).unlink()
    done = ckpt("latest", "main", "--json", "--store", stores.url)
    assert (done.code, done.out) == (3, "")
    told = done.error()
    assert stores.first.short in told["why"]
    assert stores.second.short in told["why"]
    assert "ckpt repair" in told["hint"]


def test_a_root_is_no_ref_and_a_missing_ref_is_missing(ckpt: Ckpt, stores: Stores) -> None:
    assert ckpt("latest", stores.second, "--store", stores.url).code == 2
    assert ckpt("latest", "other", "--store", stores.url).code == 4


def test_without_a_ref_there_must_be_one_only(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    done = ckpt("latest", "--store", stores.url)
    assert done.code == 2
    assert "main, wide" in done.err
    far = tmp_path / "far"
    ckpt("push", "main", far, "--create", "--store", stores.url)
    assert ckpt("latest", "--store", far).out == f"{stores.second}\n"


def test_a_pushed_history_is_retired_and_not_gone_back_to(ckpt: Ckpt, stores: Stores, tmp_path: Path) -> None:
    far = tmp_path / "far"
    ckpt("push", "main", far, "--create", "--store", stores.url)
    store = ckptstore.open(far)
    damage(far / min(store.closure(stores.second).objects))
    done = ckpt("latest", "main", "--json", "--store", far)
    assert done.code == 3
    assert "it was retired" in done.error()["why"]


def test_a_store_that_cannot_be_written_has_a_latest(stores: Stores) -> None:
    for path in sorted(stores.path.rglob("*"), reverse=True):
        path.chmod(0o444 if path.is_file() else 0o555)
    stores.path.chmod(0o555)
    try:
        done = run_without_privilege(PROGRAM, "--store", stores.url, "latest", "main")
        assert (done.returncode, done.stdout) == (0, f"{stores.second}\n")
        assert "no receipt is kept" in done.stderr
    finally:
        for path in (stores.path, *stores.path.rglob("*")):
            if path.is_dir():
                path.chmod(0o755)
