"""Catalogues in a PostgreSQL database: of several stores and several hosts, and of a server that fails in every way."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from sqlalchemy import Connection, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError

import ckptstore
from ckptstore.catalogue import Catalogue, CatalogueError, deadline, storage, tables
from ckptstore.catalogue.address import storage_of
from ckptstore.catalogue.storage import Session, Storage, Values
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY
from ckptstore.format.page import encode_page, make_tensor_entry
from ckptstore.format.progress import Progress
from ckptstore.format.records import ShardReceipt
from ckptstore.format.records import Store as StoreHeader
from ckptstore.format.shard import PageRef, Shard
from ckptstore.store import Store
from ckptstore_cli.main import run
from tests.support.postgres import GUARDED, PASSWORD, Server, server

Rows = dict[str, list[tuple[int | str | None, ...]]]

NO_SERVER = f"postgresql+psycopg://somebody:{PASSWORD.replace('/', '%2F').replace('@', '%40')}@127.0.0.1:1/nowhere"
LOCAL = ""
"""The URL that is none: the file in the store's directory."""


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server; the catalogues of all stores are in its database."""
    monkeypatch.setenv("CKPT_CATALOGUE", server().url())
    return server()


def rows(store: Store, url: str | None = None) -> Rows:
    with store.catalogue(url) as catalogue:
        return catalogue.rows()


def local(store: Store) -> Catalogue:
    return Catalogue.of(store.backend, LOCAL)


def identity(store: Store) -> str:
    return StoreHeader.parse(store.backend.get(STORE_KEY)).id


def schema(store: Store) -> str:
    return f"ckptstore_{identity(store)}"


def commit(store: Store, step: int = 1, ref: str = "main", path: str = "weight", size: int = 2) -> Digest:
    """A checkpoint of one tensor, made by hand."""
    entry = make_tensor_entry(path, ("weight",), "u8", (size,), (), (step % 256).to_bytes(1, "big") * size)
    page = store.objects.put_document(encode_page([entry]))
    shard = store.objects.put_document(Shard(0, 1, (PageRef(page, 1, ("weight",), path),), (), (), (), ()).encode())
    attempt = store.begin(ref)
    nothing = values.to_json({})
    receipt = ShardReceipt(attempt.nonce, 0, 1, step, attempt.parent, None, nothing, Progress(), None, shard)
    return store.commit(attempt, [receipt])


def waiting(connection: Connection) -> int:
    """Number of connections that wait for a lock."""
    return int(connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")) or 0)


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.005)


class TestRows:
    def test_both_kinds_have_the_same_rows(self, team: Server, disk_store: Store) -> None:
        for step in (1, 2):
            commit(disk_store, step)
        found = rows(disk_store)
        with local(disk_store) as catalogue:
            catalogue.update()
            assert catalogue.rows() == found
        disk_store.catalogue().rebuild()
        assert rows(disk_store) == found
        assert [row[:2] for row in found["refs"]] == [("main", 1), ("main", 2)]
        assert {row[1] for row in found["checkpoints"]} == {1, 2}

    @pytest.mark.parametrize(
        "path",
        ["null\0in it", "back\\slash \\0 \\\\", "quote ' \" % :x %s", "\u202e\U0001f600 ü", "é" * 2**15],
        ids=["null", "backslash", "quotes", "characters", "64-kib"],
    )
    def test_any_name_of_a_tensor_is_the_same_in_both(self, team: Server, disk_store: Store, path: str) -> None:
        commit(disk_store, path=path)
        found = rows(disk_store)
        assert [row[2] for row in found["tensors"]] == [path]
        with local(disk_store) as catalogue:
            catalogue.update()
            assert catalogue.rows() == found

    def test_sizes_may_pass_32_bits(self, team: Server, disk_store: Store) -> None:
        commit(disk_store)
        with disk_store.catalogue() as catalogue:
            row = ("objects", {"key": "objects/large", "size": 2**53 - 1})
            catalogue._add([row])
            assert ("objects/large", 2**53 - 1) in catalogue.rows()["objects"]

    def test_two_stores_in_one_database_do_not_meet(self, team: Server, tmp_path: Path) -> None:
        stores = [ckptstore.open(tmp_path / name, create=True) for name in ("one", "two")]
        commit(stores[0], 1)
        commit(stores[1], 2)
        one, two = rows(stores[0]), rows(stores[1])
        assert len(one["checkpoints"]) == len(two["checkpoints"]) == 1
        assert one["checkpoints"] != two["checkpoints"]
        stores[0].catalogue().rebuild()
        commit(stores[0], 3)
        assert rows(stores[1]) == two
        assert len(rows(stores[0])["checkpoints"]) == 2

    def test_two_hosts_see_one_catalogue_of_the_store_that_they_share(self, team: Server, disk_store: Store) -> None:
        other = ckptstore.open(disk_store.url)
        commit(disk_store, 1, "one")
        commit(other, 2, "two")
        assert [row[0] for row in rows(disk_store)["refs"]] == ["one", "two"]
        assert rows(other) == rows(disk_store)

    def test_a_store_that_is_in_no_directory_keeps_its_catalogue_there(self, team: Server, store: Store) -> None:
        commit(store)
        found = rows(store)
        assert len(found["checkpoints"]) == 1
        store.catalogue().rebuild()
        assert rows(store) == found

    def test_nothing_is_written_to_the_store_for_it(self, team: Server, disk_store: Store) -> None:
        commit(disk_store)
        assert not list(Path(disk_store.url).glob("catalogue*"))

    def test_a_dropped_one_is_made_again_by_the_next_commit(self, team: Server, disk_store: Store) -> None:
        commit(disk_store, 1)
        with team.connected() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {schema(disk_store)} CASCADE")
        commit(disk_store, 2)
        assert len(rows(disk_store)["checkpoints"]) == 2


class TestUrl:
    @pytest.mark.parametrize(
        "url",
        [
            f"://{PASSWORD}",
            f"mysql://somebody:{PASSWORD}@host/database",
            "postgresql+psycopg2://host/database",
            "postgresql://host:port/database",
            f"{PASSWORD}",
            "sqlite://",
            "sqlite:///:memory:",
            "sqlite:///file:here?uri=true",
        ],
    )
    def test_a_url_that_names_none_fails_no_commit_and_is_not_repeated(
        self, url: str, disk_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CKPT_CATALOGUE", url)
        root = commit(disk_store)
        assert disk_store.head("main") == root
        (record,) = caplog.records
        assert "postgresql+psycopg://user@host/database" in record.getMessage()
        assert PASSWORD not in record.getMessage()

    def test_a_file_of_sqlite_may_be_named_too(self, store: Store, tmp_path: Path) -> None:
        commit(store)
        url = f"sqlite:///{tmp_path}/kept.sqlite"
        counts = store.catalogue(url).rebuild()
        assert counts["checkpoints"] == len(rows(store, url)["checkpoints"]) == 1
        connection = sqlite3.connect(tmp_path / "kept.sqlite")
        assert connection.execute("SELECT count(*) FROM checkpoints").fetchone() == (1,)
        connection.close()

    def test_without_the_driver_it_says_what_to_install(
        self, disk_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        monkeypatch.setenv("CKPT_CATALOGUE", "postgresql://nobody@nowhere/nothing")
        commit(disk_store)
        assert "psycopg cannot be loaded" in caplog.text
        assert "pip install 'ckptstore[postgres]'" in caplog.text

    @pytest.mark.parametrize("option", ["cursor_factory=x", "no_such_option=1", "connect_timeout=long", "sslmode=odd"])
    def test_options_that_mean_nothing_fail_no_commit(
        self, option: str, disk_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CKPT_CATALOGUE", f"{NO_SERVER}?{option}")
        root = commit(disk_store)
        assert disk_store.head("main") == root
        (record,) = caplog.records
        assert "postgresql://somebody@127.0.0.1:1/nowhere: " in record.getMessage()
        assert PASSWORD not in record.getMessage()


class TestServer:
    def test_a_server_that_is_down_fails_no_commit(
        self, team: Server, disk_store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = commit(disk_store, 1)
        with team.down():
            second = commit(disk_store, 2)
        assert disk_store.head("main") == second
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("ckptstore", logging.WARNING)
        assert "see that the server runs" in record.getMessage()
        assert "\n" not in record.getMessage()
        third = commit(disk_store, 3)
        assert len(caplog.records) == 1
        assert {row[0] for row in rows(disk_store)["checkpoints"]} == {str(first), str(second), str(third)}

    def test_a_connection_that_breaks_is_an_error_and_the_next_one_goes_on(
        self, team: Server, disk_store: Store
    ) -> None:
        commit(disk_store)
        with disk_store.catalogue() as catalogue:
            before = catalogue.rows()
            with team.connected() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ckptstore'"
                )
            for _ in range(2):
                with pytest.raises(CatalogueError, match="the store itself is not affected"):
                    catalogue.rows()
        assert rows(disk_store) == before

    def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_the_deadline(
        self, team: Server, disk_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit(disk_store)
        monkeypatch.setattr(deadline, "ANSWER_SECONDS", 0.2)
        with disk_store.catalogue() as catalogue, team.connected() as connection:
            before = catalogue.rows()
            process = connection.scalar(text("SELECT pid FROM pg_stat_activity WHERE application_name = 'ckptstore'"))
            os.kill(process, signal.SIGSTOP)
            try:
                with pytest.raises(CatalogueError, match=r"no answer in 0\.2 seconds"):
                    catalogue.rows()
            finally:
                os.kill(process, signal.SIGCONT)
        assert rows(disk_store) == before
        assert "ckptstore catalogue deadline" not in {thread.name for thread in threading.enumerate()}

    def test_a_database_that_cannot_hold_every_character_is_refused(
        self, team: Server, disk_store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = f"latin_{secrets.token_hex(4)}"
        with team.connected() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        with pytest.raises(CatalogueError, match="its encoding is LATIN1"):
            rows(disk_store, team.url(database=name))

    @pytest.mark.parametrize("state", ["40001", "40P01"])
    def test_a_transaction_that_lost_to_another_is_done_again_as_a_whole(
        self, team: Server, disk_store: Store, state: str
    ) -> None:
        tries = 0

        def work(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            session.add(connection, tables.objects, [{"key": f"objects/{tries}", "size": 1}])
            if tries < 3:
                connection.exec_driver_sql(f"DO 'BEGIN RAISE EXCEPTION USING ERRCODE = ''{state}''; END'")

        with storage_of(disk_store.backend, team.url()).session(identity(disk_store)) as session:
            session.write(work)
            with session.reading() as connection:
                assert list(connection.scalars(select(tables.objects.c.key))) == ["objects/3"]


class TestDamage:
    DAMAGE: ClassVar = {
        "nothing": "DROP TABLE {0}.catalogue",
        "another-program": "UPDATE {0}.catalogue SET application = 5",
        "another-version": "UPDATE {0}.catalogue SET version = 99",
        "no-version": "DELETE FROM {0}.catalogue",
        "other-columns": "DROP TABLE {0}.catalogue; CREATE TABLE {0}.catalogue (garbage text)",
        "no-table": "DROP TABLE {0}.catalogue; CREATE VIEW {0}.catalogue AS SELECT 1 AS version",
        "another-store": "UPDATE {0}.store SET id = 'other'",
        "lost-table": "DROP TABLE {0}.refs",
        "lost-column": "ALTER TABLE {0}.checkpoints DROP COLUMN step",
        "other-type": "ALTER TABLE {0}.checkpoints ALTER COLUMN parent TYPE int USING 1",
    }

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_damaged_catalogue_fails_no_commit_and_is_rebuilt(
        self, team: Server, disk_store: Store, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        for step in (1, 2, 3):
            commit(disk_store, step)
        with team.connected() as connection:
            connection.exec_driver_sql(self.DAMAGE[damage].format(schema(disk_store)))
            connection.exec_driver_sql(f"CREATE TYPE {schema(disk_store)}.garbage AS ENUM ('a')")
        root = commit(disk_store, 4)
        assert disk_store.head("main") == root
        (record,) = caplog.records
        assert "ckpt catalogue rebuild" in record.getMessage()
        disk_store.catalogue().rebuild()
        found = rows(disk_store)
        assert [row[1] for row in found["refs"]] == [1, 2, 3, 4]
        commit(disk_store, 5)
        assert len(caplog.records) == 1
        with local(disk_store) as catalogue:
            catalogue.update()
            assert catalogue.rows() == rows(disk_store)

    def test_views_of_others_are_not_dropped_unasked(self, team: Server, disk_store: Store) -> None:
        commit(disk_store)
        view = f"dashboard_{secrets.token_hex(4)}"
        with team.connected() as connection:
            connection.exec_driver_sql(f"CREATE VIEW {view} AS SELECT root, step FROM {schema(disk_store)}.checkpoints")
            with pytest.raises(CatalogueError, match=f"public.{view}"):
                disk_store.catalogue().rebuild()
            assert connection.exec_driver_sql(f"SELECT step FROM {view}").all() == [(1,)]
            connection.exec_driver_sql(f"DROP VIEW {view}")
        assert disk_store.catalogue().rebuild()["checkpoints"] == 1


class TestRights:
    @pytest.fixture
    def reader(self, team: Server, disk_store: Store) -> str:
        """The URL of a role that may read the catalogue of the store, and do nothing else."""
        commit(disk_store)
        role = f"reader_{secrets.token_hex(4)}"
        with team.connected() as connection:
            connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
            connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema(disk_store)} TO {role}")
            connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema(disk_store)} TO {role}")
        return team.url(role=role)

    def test_who_may_only_read_can_ask(self, disk_store: Store, reader: str) -> None:
        with disk_store.catalogue(reader) as catalogue:
            assert len(catalogue.rows()["checkpoints"]) == 1
            assert not catalogue.stale()
            catalogue.update()

    def test_who_may_only_read_fails_no_commit(
        self, disk_store: Store, reader: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CKPT_CATALOGUE", reader)
        root = commit(disk_store, 2)
        assert disk_store.head("main") == root
        assert "permission denied" in caplog.text
        assert "needs the right" in caplog.text
        with pytest.raises(CatalogueError, match=r"permission denied.*needs the right"):
            disk_store.catalogue().rebuild()

    def test_who_may_make_nothing_is_told(self, team: Server, disk_store: Store, store: Store, reader: str) -> None:
        with pytest.raises(CatalogueError, match=r"permission denied.*needs the right"):
            rows(store, reader)


class TestOthers:
    def lock(self, store: Store) -> str:
        return f"BEGIN; LOCK TABLE {schema(store)}.catalogue IN ACCESS SHARE MODE"

    def test_a_rebuild_waits_for_a_transaction_of_another(
        self, team: Server, disk_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit(disk_store)
        before = rows(disk_store)
        monkeypatch.setattr(storage, "WAIT_SECONDS", 0.05)
        with team.connected() as other:
            other.exec_driver_sql(self.lock(disk_store))
            with pytest.raises(CatalogueError, match=r"lock timeout.*try again"):
                disk_store.catalogue().rebuild()
            assert rows(disk_store) == before
            other.exec_driver_sql("COMMIT")
        disk_store.catalogue().rebuild()
        assert rows(disk_store) == before

    def test_only_one_rebuilds(self, team: Server, disk_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        commit(disk_store)
        monkeypatch.setattr(storage, "WAIT_SECONDS", 0.05)
        with self.place(disk_store).replacement(identity(disk_store)):
            assert len(rows(disk_store)["checkpoints"]) == 1
            with pytest.raises(CatalogueError, match="try again"):
                disk_store.catalogue().rebuild()
        disk_store.catalogue().rebuild()

    def test_who_waits_while_a_rebuild_ends_sees_all_of_the_new_tables(self, team: Server, disk_store: Store) -> None:
        first = commit(disk_store, 1)
        seen: list[str] = []

        def read(session: Session) -> None:
            with session.reading() as connection:
                seen.extend(connection.scalars(select(tables.checkpoints.c.root)))

        second = self.meanwhile(disk_store, read)
        assert sorted(seen) == sorted((str(first), str(second)))

    def test_what_is_written_while_a_rebuild_ends_is_not_lost(self, team: Server, disk_store: Store) -> None:
        commit(disk_store, 1)
        late: Values = {"key": "objects/late", "size": 1}
        self.meanwhile(
            disk_store,
            lambda session: session.write(lambda connection: session.add(connection, tables.objects, [late])),
        )
        assert ("objects/late", 1) in rows(disk_store)["objects"]

    def meanwhile(self, store: Store, work: Callable[[Session], None]) -> Digest:
        """Let ``work`` wait, in a session opened before, for the end of a rebuild that adds a commit at the last
        moment; returns its root."""
        place, name = storage_of(store.backend, server().url()), identity(store)
        with place.session(name) as session:
            worker = threading.Thread(target=work, args=[session])
            with place.replacement(name) as new, Catalogue(store.backend, new.storage) as catalogue:
                catalogue.update()
                with new.taking_the_place(), server().connected() as watching, pytest.MonkeyPatch.context() as patch:
                    worker.start()
                    until(lambda: waiting(watching))
                    patch.delenv("CKPT_CATALOGUE")
                    root = commit(store, 2)
                    catalogue.update()
                    catalogue.close()
            worker.join()
        return root

    def test_what_a_rebuild_that_died_left_is_not_used(self, team: Server, disk_store: Store) -> None:
        commit(disk_store)
        before = rows(disk_store)
        with team.connected() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {schema(disk_store)}_new")
            connection.exec_driver_sql(f"CREATE TABLE {schema(disk_store)}_new.refs (garbage int)")
            disk_store.catalogue().rebuild()
            assert rows(disk_store) == before
            left = connection.scalars(
                text("SELECT nspname FROM pg_namespace WHERE nspname LIKE :name"), {"name": f"{schema(disk_store)}%"}
            )
            assert list(left) == [schema(disk_store)]

    def place(self, store: Store) -> Storage:
        return storage_of(store.backend, server().url())


class TestPassword:
    """It is nowhere: in no message, log, output or traceback."""

    def told(self, store: Store, url: str) -> Iterator[str]:
        with pytest.raises(CatalogueError) as caught:
            rows(store, url)
        yield str(caught.value)
        yield repr(caught.value)
        yield "".join(traceback.format_exception(caught.value))
        catalogue = store.catalogue(url)
        yield catalogue.name
        yield repr(catalogue)

    def test_of_a_server_that_is_not_there(self, disk_store: Store) -> None:
        texts = list(self.told(disk_store, NO_SERVER))
        assert all(PASSWORD not in text and "s3cr3t" not in text for text in texts)
        assert "postgresql://somebody@127.0.0.1:1/nowhere" in texts[0]

    def test_of_an_option_of_the_url(self, disk_store: Store) -> None:
        url = make_url("postgresql+psycopg://somebody@127.0.0.1:1/nowhere").update_query_dict({"password": PASSWORD})
        assert all(PASSWORD not in text for text in self.told(disk_store, url.render_as_string(hide_password=False)))

    def test_of_one_that_is_refused(self, team: Server, disk_store: Store) -> None:
        url = team.url(role=GUARDED, password=f"{PASSWORD}?")
        texts = list(self.told(disk_store, url))
        assert "password authentication failed" in texts[0]
        assert all(PASSWORD not in text for text in texts)

    def test_of_one_that_is_right(
        self,
        team: Server,
        disk_store: Store,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        caplog.set_level(logging.DEBUG)
        monkeypatch.setenv("CKPT_CATALOGUE", team.url(role=GUARDED, password=PASSWORD))
        commit(disk_store)
        assert run(["catalogue", "rebuild", "--json", "--store", disk_store.url]) == 0
        out, err = capfd.readouterr()
        assert json.loads(out)["catalogue"].startswith(f"postgresql://{GUARDED}@")
        assert all(PASSWORD not in text and "s3cr3t" not in text for text in (out, err, caplog.text))

    def test_of_what_the_driver_repeats(self, disk_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        place = storage_of(disk_store.backend, NO_SERVER)
        error = SQLAlchemyError(f"no connection with password={PASSWORD}")
        explained = place.explain(error)
        assert explained is not None
        assert explained[0].endswith("password=***")


class TestCommand:
    """``ckpt catalogue``."""

    def test_it_rebuilds_the_one_that_is_named(self, disk_store: Store, capfd: pytest.CaptureFixture[str]) -> None:
        commit(disk_store)
        url = server().url()
        for words in (["--catalogue", url, "rebuild"], ["rebuild", "--catalogue", url]):
            assert run(["catalogue", *words, "--json", "--store", disk_store.url]) == 0
            told = json.loads(capfd.readouterr().out)
            assert told["rows"]["checkpoints"] == 1
            assert told["catalogue"].startswith("postgresql://postgres@")
        assert rows(disk_store, url) == rows(disk_store)

    def test_without_a_server_it_ends_in_one_line_and_with_exit_code_7(
        self, disk_store: Store, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_CATALOGUE", NO_SERVER)
        assert run(["catalogue", "rebuild", "--store", disk_store.url]) == 7
        out, err = capfd.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("ckpt: catalogue postgresql://somebody@127.0.0.1:1/nowhere: ")
        assert "see that the server runs" in line
        assert PASSWORD not in line
