"""A catalogue that somebody damaged or prepared: an error that says to rebuild it, and the store is not affected."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from torch import nn

import ckptstore
from ckptstore.catalogue import CatalogueError
from ckptstore.store import Store
from tests.support.training import commit_state, seed_everything

Rows = dict[str, list[tuple[int | str | None, ...]]]

PLANTED = {
    "trigger": "CREATE TRIGGER planted AFTER INSERT ON refs BEGIN DELETE FROM checkpoints; END",
    "trigger that refuses": "CREATE TRIGGER planted BEFORE INSERT ON refs BEGIN SELECT RAISE(ABORT, 'no'); END",
    "view in place of a table": "DROP TABLE checkpoints; CREATE VIEW checkpoints AS SELECT * FROM refs",
    "another view": "DROP VIEW archives; CREATE VIEW archives AS SELECT 'b3:planted' AS tree",
    "view without an end": "DROP TABLE objects; CREATE VIEW objects AS WITH RECURSIVE n(i) AS "
    "(SELECT 1 UNION ALL SELECT i FROM n) SELECT i AS key, i AS size FROM n",
    "table without a column": "ALTER TABLE checkpoints DROP COLUMN step",
    "table that is gone": "DROP TABLE object_uses",
    "table more": "CREATE TABLE planted (a)",
    "column that makes its values": "ALTER TABLE refs ADD COLUMN planted GENERATED ALWAYS AS (generation + 1)",
}


@pytest.fixture(autouse=True)
def _no_other_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_CATALOGUE", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = ckptstore.open(tmp_path / "store", create=True)
    seed_everything()
    model = nn.Linear(3, 3)
    for step in (1, 2):
        commit_state(made, "main", [ckptstore.TrainingState(model=model)], step)
    return made


def file_of(store: Store) -> Path:
    return Path(store.backend.path, "catalogue.sqlite")  # type: ignore[attr-defined]


def rows(store: Store) -> Rows:
    with store.catalogue() as catalogue:
        found = catalogue.rows()
        catalogue.stale()
        return found


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_in_a_catalogue_runs_never_and_says_nothing(store: Store, planted: str) -> None:
    """B082: an index that is not as we made it is no index of ours."""
    before = rows(store)
    connection = sqlite3.connect(file_of(store))
    connection.executescript(PLANTED[planted])
    connection.close()
    with pytest.raises(CatalogueError, match="ckpt catalogue rebuild"):
        rows(store)
    with pytest.raises(CatalogueError, match="ckpt catalogue rebuild"), store.catalogue() as catalogue:
        catalogue.update()
    assert store.verify("main").ok
    store.catalogue().rebuild()
    assert rows(store) == before


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def _cut_after_a_page(data: bytes, random: Random) -> bytes:
    return data[: 4096 * random.randrange(1, len(data) // 4096)]


def _noise(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data))
    piece = random.randbytes(random.choice((1, 4, 100, 4096)))
    return data[:at] + piece + data[at + len(piece) :]


def _page_of_another(data: bytes, random: Random) -> bytes:
    pages = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    one, other = random.randrange(len(pages)), random.randrange(len(pages))
    pages[one] = pages[other]
    return b"".join(pages)


def _all_noise(data: bytes, random: Random) -> bytes:
    return data[: random.choice((0, 16, 100))] + random.randbytes(len(data))


DAMAGE: list[Callable[[bytes, Random], bytes]] = [_cut, _cut_after_a_page, _noise, _page_of_another, _all_noise]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_catalogue_is_an_error_of_ours_and_a_rebuilt_one_is_right(
    store: Store, damage: Callable[[bytes, Random], bytes]
) -> None:
    """B082: bytes of the file at random. A value that changed alone in its cell shows no more than one in a store's
    own record would: so nothing is decided by a catalogue."""
    _damage_and_rebuild(store, damage, 12)


@pytest.mark.deep
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_catalogue_damaged_often_is_an_error_of_ours(store: Store, damage: Callable[[bytes, Random], bytes]) -> None:
    _damage_and_rebuild(store, damage, 1000)


def _damage_and_rebuild(store: Store, damage: Callable[[bytes, Random], bytes], times: int) -> None:
    random = Random(damage.__name__)
    before = rows(store)
    good = file_of(store).read_bytes()
    refused = 0
    for _ in range(times):
        file_of(store).write_bytes(damage(good, random))
        try:
            found = rows(store)
        except CatalogueError:
            refused += 1
        else:
            assert found.keys() == before.keys()
    assert refused or damage is _noise
    assert store.verify("main").ok
    store.catalogue().rebuild()
    assert rows(store) == before


def somebodys_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE precious (a); INSERT INTO precious VALUES (1)")
    connection.close()


@pytest.mark.parametrize("kind", ["database", "text", "link", "folder"])
def test_a_file_that_is_no_catalogue_is_never_replaced_by_one(store: Store, tmp_path: Path, kind: str) -> None:
    """A kind of loss: a URL with a slip in it names a file that somebody needs."""
    path, other = tmp_path / "mine", tmp_path / "other"
    if kind == "database":
        somebodys_database(path)
    elif kind == "text":
        path.write_text("precious")
    elif kind == "link":
        somebodys_database(other)
        path.symlink_to(other)
    else:
        path.mkdir()
    before = {found: found.read_bytes() for found in (path, other) if found.is_file()}
    with store.catalogue(f"sqlite:///{path}") as catalogue:
        for look in (catalogue.rebuild, catalogue.update):
            with pytest.raises(CatalogueError) as caught:
                look()
            assert "rebuild" not in caught.value.hint
    assert {found: found.read_bytes() for found in (path, other) if found.is_file()} == before
    assert (path.is_symlink(), path.is_dir()) == (kind == "link", kind == "folder")


@pytest.mark.parametrize("kind", ["none", "empty", "new", "old"])
def test_a_named_file_without_content_or_with_a_catalogue_is_replaced(store: Store, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "named.sqlite"
    if kind == "empty":
        path.touch()
    elif kind == "new":
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode=wal")
        connection.close()
    elif kind == "old":
        with store.catalogue(f"sqlite:///{path}") as catalogue:
            catalogue.update()
    with store.catalogue(f"sqlite:///{path}") as catalogue:
        assert catalogue.rebuild()["checkpoints"] == 2
        assert not catalogue.stale()


def test_the_folder_of_a_catalogue_that_is_not_there_is_named(store: Store, tmp_path: Path) -> None:
    with store.catalogue(f"sqlite:///{tmp_path}/gone/file") as catalogue:
        with pytest.raises(CatalogueError, match=r"gone: there is no such directory") as caught:
            catalogue.rebuild()
        assert "make it" in caught.value.hint
