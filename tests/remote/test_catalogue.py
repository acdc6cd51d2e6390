"""A bucket that several hosts share keeps its catalogue in their database."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptstore
from ckptstore.store import Store
from tests.support.postgres import server as database
from tests.support.training import make_training, save_steps

Rows = dict[str, list[tuple[int | str | None, ...]]]


def rows(store: Store) -> Rows:
    with store.catalogue() as catalogue:
        assert not catalogue.stale()
        return catalogue.rows()


def requests(store: Store) -> int:
    assert store.traffic is not None
    return sum(store.traffic.requests.values())


def test_hosts_that_share_a_bucket_share_its_catalogue(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CKPT_CATALOGUE", database().url())
    one, two = ckptstore.open(url, create=True), ckptstore.open(url)
    roots = save_steps(one, "one", make_training(1), 2)
    roots += save_steps(two, "two", make_training(2), 1)
    local = ckptstore.open(tmp_path / "local", create=True)
    roots += save_steps(local, "three", make_training(3), 1)
    ckptstore.push(local, two, roots[-1], ref="three")
    assert caplog.records == []
    found = rows(one)
    assert {row[0] for row in found["checkpoints"]} == set(map(str, roots))
    assert rows(two) == found
    two.catalogue().rebuild()
    assert rows(one) == found
    assert len(rows(local)["checkpoints"]) == 1


def test_bringing_it_up_to_date_asks_only_for_what_is_new(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_CATALOGUE", database().url())
    store = ckptstore.open(url, create=True)
    root = save_steps(store, "main", make_training(1), 3)[-1]
    again = ckptstore.open(url)
    before = requests(again)
    again.note_in_catalogue(root)
    assert requests(again) - before == 3  # the header, and the names of refs and receipts


def test_what_a_bucket_lacks_on_purpose_is_not_asked_for_one_by_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ckptstore.open(tmp_path / "local", create=True)
    root = save_steps(local, "main", make_training(1), 25)[-1]
    monkeypatch.setenv("CKPT_CATALOGUE", database().url())
    store = ckptstore.open(url, create=True)
    ckptstore.push(local, store, root, ref="main")  # of the ancestors only the history
    assert len(rows(store)["shards"]) == 1
    before = requests(store)
    store.note_in_catalogue(root)
    assert requests(store) - before == 4  # besides, one listing of documents
