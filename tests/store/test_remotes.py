"""A store in a directory knows other stores by name, in a file that people may edit as well."""

from __future__ import annotations

import os
import threading
import tomllib
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import CkptStoreError, MalformedError, NotFoundError, RefusedError, UsageError
from ckptstore.remotes import add_remote, known_remotes, open_remote, remove_remote
from ckptstore.store import Store

BY_HAND = """# what this machine knows

[remotes.old]   # the first one
url = "/srv/old"

# about the next one
[remotes."with.dot"]
url = "s3://bucket/prefix"

[other]
kept = [1, 2]
"""


@pytest.fixture
def store(disk_store: Store) -> Store:
    return disk_store


@pytest.fixture
def far(tmp_path: Path) -> Store:
    return ckptstore.open(tmp_path / "far", create=True)


def config(store: Store) -> Path:
    return Path(store.url.removeprefix("file://")) / "config.toml"


def test_what_was_added_is_known_to_whoever_opens_the_store(store: Store, far: Store, tmp_path: Path) -> None:
    add_remote(store, "far", str(tmp_path / "far"))
    add_remote(store, "bucket", "s3://bucket/prefix?endpoint_url=http://localhost:8333", check=False)
    again = ckptstore.open(store.url)
    assert known_remotes(again) == {
        "bucket": "s3://bucket/prefix?endpoint_url=http://localhost:8333",
        "far": str(tmp_path / "far"),
    }
    assert open_remote(again, "far").url == far.url
    remove_remote(store, "bucket")
    assert list(known_remotes(again)) == ["far"]
    remove_remote(store, "far")
    assert known_remotes(again) == {}
    assert config(store).read_text() == ""


def test_a_relative_path_is_kept_as_an_absolute_one(
    store: Store, far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert add_remote(store, "far", "far") == str(tmp_path / "far")
    monkeypatch.chdir("/")
    assert open_remote(store, "far").url == far.url
    assert add_remote(store, "same", far.url) == far.url


def test_a_remotes_name_wins_over_a_path_only_if_there_is_such_a_remote(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckptstore.open("near", create=True)
    assert open_remote(store, "near").url == (tmp_path / "near").as_uri()
    other = ckptstore.open("elsewhere", create=True)
    add_remote(store, "near", "elsewhere")
    assert open_remote(store, "near").url == other.url
    assert open_remote(store, "./near").url == (tmp_path / "near").as_uri()


def test_what_is_neither_a_remote_nor_a_store_is_told_with_the_remotes_that_there_are(
    store: Store, far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_remote(store, "far", far.url)
    with pytest.raises(NotFoundError, match=r"remote fra: no remote .* \(remotes: far"):
        open_remote(store, "fra")


def test_what_people_wrote_stays(store: Store, far: Store) -> None:
    config(store).write_text(BY_HAND)
    config(store).chmod(0o600)
    add_remote(store, "far", far.url)
    text = config(store).read_text()
    assert text.startswith(BY_HAND)
    assert config(store).stat().st_mode & 0o777 == 0o600
    remove_remote(store, "with.dot")
    remove_remote(store, "far")
    text = config(store).read_text()
    assert "# what this machine knows" in text
    assert "# the first one" in text
    assert tomllib.loads(text) == {"remotes": {"old": {"url": "/srv/old"}}, "other": {"kept": [1, 2]}}
    remove_remote(store, "old")
    assert "# about the next one" in config(store).read_text()
    assert tomllib.loads(config(store).read_text()) == {"other": {"kept": [1, 2]}}


@pytest.mark.parametrize(
    "text",
    [
        'remotes = { old = { url = "/srv/old" } }\n',
        'remotes.old.url = "/srv/old"',
        '[remotes]\nold = { url = "/srv/old" }\n[other]\nx = 1\n',
        '[other]\nx = """\n[remotes.old]\n"""\n[remotes.old]\nurl = "/srv/old"\n',
        '[remotes.old]\nurl = """\n/srv/old"""\n[remotes.old.more]\nx = 1',
    ],
    ids=["inline", "dotted", "table", "in a text", "deeper"],
)
def test_tables_may_be_written_in_any_way(store: Store, far: Store, text: str) -> None:
    before = tomllib.loads(text)
    config(store).write_text(text)
    add_remote(store, "far", far.url)
    assert known_remotes(store) == {"far": far.url, "old": "/srv/old"}
    remove_remote(store, "old")
    rest = {key: value for key, value in before.items() if key != "remotes"}
    assert tomllib.loads(config(store).read_text()) == {"remotes": {"far": {"url": far.url}}} | rest


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[remotes.a]\nurl = 'x'\n[remotes.b\n", "line 3: expected"),
        (b"[remotes.a]\nurl = 'x'\nurl = 'y'\n", "line 3: cannot overwrite"),
        (b"[remotes.a]\nurl = 'x", r"line 2: expected"),
        (b"# fine\n\nx = '\xff'\n", "line 3: not UTF-8"),
        (b"x = 1\nremotes = 3\n", "line 2: it is no table"),
        (b"x = 1\n[remotes]\nfar = 'url'\n", "line 3: remote 'far' is no table"),
        (b"[remotes.far]\nadress = 'x'\n", "line 1: remote 'far' has no url"),
        (b"[remotes.far]\nurl = 7\n", "line 1: remote 'far' has no url"),
        (b"[remotes.'Far away']\nurl = 'x'\n", "not named like a ref"),
        (b"[remotes.far]\nurl = 'gopher://x/'\n", "line 1: remote far: no backend for this kind"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
        (b"#" * (2**20 + 1), "longer than"),
    ],
)
def test_a_damaged_file_is_told_with_its_line(store: Store, text: bytes, told: str) -> None:
    config(store).write_bytes(text)
    with pytest.raises(MalformedError, match=told):
        known_remotes(store)
    assert config(store).read_bytes() == text


def test_what_is_no_file_is_never_waited_for(store: Store) -> None:
    os.mkfifo(config(store))
    with pytest.raises(MalformedError, match="not a regular file"):
        known_remotes(store)


def test_a_damaged_remote_can_be_removed_and_a_damaged_file_is_not_written_over(store: Store, far: Store) -> None:
    config(store).write_text("[remotes.far]\nurl = 7\n")
    remove_remote(store, "far")
    config(store).write_text("[remotes.far\n")
    for change in (lambda: add_remote(store, "x", far.url), lambda: remove_remote(store, "far")):
        with pytest.raises(MalformedError):
            change()
    assert config(store).read_text() == "[remotes.far\n"


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:hunter2@bucket/prefix",
        "s3://bucket/prefix?endpoint_url=https://user:hunter2@host",
        "file://user:hunter2@host/store",
        "https://user:hunter2@host/store",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(store: Store, url: str) -> None:
    with pytest.raises(CkptStoreError) as told:
        add_remote(store, "far", url, check=False)
    assert "hunter2" not in str(told.value)
    assert known_remotes(store) == {}
    config(store).write_text(f"[remotes.far]\nurl = '{url}'\n")
    with pytest.raises(MalformedError) as told_again:
        known_remotes(store)
    assert "hunter2" not in str(told_again.value)


def test_a_remote_is_checked_unless_asked_not_to(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="--no-check"):
        add_remote(store, "later", str(tmp_path / "later"))
    (tmp_path / "later").mkdir()
    with pytest.raises(NotFoundError, match=r"no ckptstore\.json"):
        add_remote(store, "later", str(tmp_path / "later"))
    add_remote(store, "later", str(tmp_path / "later"), check=False)
    open_remote(store, "later", create=True)
    assert open_remote(store, "later").refs.names() == []


def test_a_store_is_no_remote_of_itself(store: Store, tmp_path: Path) -> None:
    for check in (True, False):
        with pytest.raises(RefusedError, match="this store itself"):
            add_remote(store, "me", store.url, check=check)
    (tmp_path / "link").symlink_to(store.url.removeprefix("file://"))
    with pytest.raises(RefusedError, match="this store itself"):
        add_remote(store, "me", str(tmp_path / "link"))


@pytest.mark.parametrize("name", ["", "Far", "a/b", "..", "deadbeef", "x" * 65, "far\n"])
def test_a_remote_is_named_like_a_ref(store: Store, far: Store, name: str) -> None:
    with pytest.raises(UsageError):
        add_remote(store, name, far.url)


def test_a_name_is_given_once(store: Store, far: Store) -> None:
    add_remote(store, "far", far.url)
    with pytest.raises(RefusedError, match="there is one of that name"):
        add_remote(store, "far", "/elsewhere", check=False)
    with pytest.raises(NotFoundError, match="remotes: far"):
        remove_remote(store, "fra")


def test_a_store_that_is_in_no_directory_keeps_none(far: Store) -> None:
    memory = ckptstore.open("memory:keeps-no-remotes", create=True)
    for change in (lambda: known_remotes(memory), lambda: add_remote(memory, "far", far.url)):
        with pytest.raises(RefusedError, match="only a store in a directory keeps remotes"):
            change()
    assert open_remote(memory, far.url).url == far.url
    with pytest.raises(UsageError, match="gone with its process"):
        add_remote(far, "memory", "memory:keeps-no-remotes")


def test_no_remote_is_lost_when_several_are_added_at_once(store: Store) -> None:
    names = [f"remote-{number}" for number in range(12)]
    threads = [
        threading.Thread(
            target=lambda name=name: add_remote(ckptstore.open(store.url), name, f"/srv/{name}", check=False)
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(known_remotes(store)) == sorted(names)


def test_the_file_is_no_key(store: Store, far: Store) -> None:
    before = [stat.key for stat in store.backend.list("")]
    add_remote(store, "far", far.url)
    assert [stat.key for stat in store.backend.list("")] == before
