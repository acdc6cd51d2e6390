"""A store with one thing wrong, seen by every command: the exit code, a line for each fault, no wrong byte (B094).

Public sources: Comfy-Org/ComfyUI#15459, Comfy-Org/ComfyUI#15687.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

import ckptstore
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, receipt_prefix, ref_key
from ckptstore_cli.main import run
from tests.cli.conftest import Ckpt, Stores
from tests.support.invariants import broken

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes sockets and sparse files")


# -- what can happen to a file ----------------------------------------------------------------------------------------


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flipped(path: Path) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    clear(path)
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])


def cut(path: Path) -> None:
    data = path.read_bytes()
    clear(path)
    path.write_bytes(data[: len(data) // 2])


def emptied(path: Path) -> None:
    clear(path)
    path.touch()


def longer(path: Path) -> None:
    data = path.read_bytes()
    clear(path)
    path.write_bytes(data + b"x")


def huge(path: Path) -> None:
    clear(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)


def missing(path: Path) -> None:
    clear(path)


def folder(path: Path) -> None:
    clear(path)
    path.mkdir()


def link(path: Path) -> None:
    """To its own good bytes, outside the store."""
    elsewhere = path.parents[len(path.parents) - 1 - path.parts.index("store")] / "elsewhere"
    clear(elsewhere)
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)


def dangling(path: Path) -> None:
    clear(path)
    path.symlink_to("nowhere")


def endless(path: Path) -> None:
    clear(path)
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    clear(path)
    os.mkfifo(path)


def listener(path: Path) -> None:
    clear(path)
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # the name of a socket has 108 bytes at most
        made.bind(path.name)


BYTES = (flipped, cut, emptied, longer, huge)
NO_FILE = (link, dangling, endless, pipe, listener)
DAMAGES = (*BYTES, missing, folder, *NO_FILE)

# -- what is done with the store --------------------------------------------------------------------------------------

COMMANDS: dict[str, list[str]] = {
    "verify": ["verify", "main", "wide"],
    "verify-root": ["verify", "{second}"],
    "show": ["show", "main"],
    "show-wide": ["show", "wide"],
    "ls": ["ls", "main"],
    "log": ["log"],
    "diff": ["diff", "{first}", "{second}"],
    "diff-wide": ["diff", "main", "wide"],
    "restore": ["restore", "{second}", "restored"],
    "restore-wide": ["restore", "wide", "restored-wide"],
    "export": ["export", "wide", "exported.safetensors"],
    "push": ["push", "{second}", "far", "--create"],
    "pull": ["pull", "wide", "{store}", "--store", "far"],
    "pack": ["evidence", "pack", "{second}", "wide", "-o", "evidence.tar"],
    "ref-list": ["ref", "list"],
    "ref-show": ["ref", "show", "main"],
    "ref-log": ["ref", "log", "main"],
    "ref-move": ["ref", "move", "new", "{second}"],
    "rebuild": ["catalogue", "rebuild"],
}
PRODUCTS = {"restore": "restored", "restore-wide": "restored-wide", "export": "exported.safetensors"}
LISTING = {"verify", "verify-root", "diff", "diff-wide", "show", "show-wide", "log", "ref-list"}
"""Commands that go on after a fault, and tell it where they print the rest."""

MAIN = {"verify", "verify-root", "show", "ls", "diff", "diff-wide", "restore", "push", "pack"}
"""Commands that read the documents of the head of ``main``."""


@dataclass(frozen=True)
class Kind:
    """A file of the store, and the commands that must not succeed without it.

    ``unlisted``: those besides that must know all names in its folder, if what lies there is no file.
    """

    key: Callable[[ckptstore.Store, Stores], str]
    needed_by: set[str]
    unlisted: dict[str, int] = field(default_factory=dict)


def a_pack(store: ckptstore.Store, root: Digest) -> str:
    return next(key for key, need in store.closure(root).objects.items() if need.slots)


def a_chunk(store: ckptstore.Store, root: Digest) -> str:
    return next(key for key, need in store.closure(root).objects.items() if not need.slots)


def a_receipt(store: ckptstore.Store, root: Digest) -> str:
    return next(stat.key for stat in store.backend.list(receipt_prefix(root)))


def a_page(store: ckptstore.Store, root: Digest) -> str:
    return document_key(store.closure(root).shards[0].shard.pages[0].digest)


KINDS = {
    "pack": Kind(
        lambda store, stores: a_pack(store, stores.second), {"verify", "verify-root", "diff", "restore", "push"}
    ),
    "pack-of-weights": Kind(
        lambda store, stores: a_pack(store, stores.wide), {"verify", "restore-wide", "export", "pull"}
    ),
    "chunk-of-a-file": Kind(
        lambda store, stores: a_chunk(store, stores.wide), {"verify", "restore-wide", "pull", "pack"}
    ),
    "page": Kind(lambda store, stores: a_page(store, stores.second), MAIN),
    "shard": Kind(lambda store, stores: document_key(store.checkpoint(stores.second).shards[0]), MAIN),
    "checkpoint": Kind(lambda _, stores: document_key(stores.second), MAIN | {"log", "ref-move"}),
    "parent": Kind(lambda _, stores: document_key(stores.first), {"verify", "verify-root", "log", "diff", "pack"}),
    "tree": Kind(
        lambda store, stores: document_key(store.checkpoint(stores.wide).files or stores.wide),
        {"verify", "diff-wide", "restore-wide", "pull", "pack"},
    ),
    "preparation": Kind(
        lambda store, stores: document_key(store.checkpoint(stores.wide).run or stores.wide), {"verify", "pull", "pack"}
    ),
    "ref": Kind(
        lambda *_: ref_key("main", 2),
        {"verify", "show", "ls", "log", "diff-wide", "ref-list", "ref-show", "ref-log"},
        {"rebuild": 7},
    ),
    "earlier-ref": Kind(
        lambda *_: ref_key("main", 1),
        {"verify", "ref-log"},
        {"show": 3, "ls": 3, "log": 3, "diff-wide": 3, "ref-list": 3, "ref-show": 3, "rebuild": 7},
    ),
    "receipt": Kind(
        lambda store, stores: a_receipt(store, stores.second), set(), {"show": 3, "log": 3, "pack": 3, "rebuild": 7}
    ),
    "catalogue": Kind(lambda *_: "catalogue.sqlite", set()),
}


def expected_code(kind: str, damage: Callable[[Path], None], command: str) -> int:
    """0 if the command needs nothing that was damaged, else what it must end with."""
    what = KINDS[kind]
    if kind == "ref" and damage is missing:
        return 0  # the newest generation hidden: only a root that somebody holds tells (docs/design.md)
    if kind == "parent" and damage is missing and command in ("log", "pack"):
        return 0  # history ends there
    if kind == "catalogue" and damage is folder and command == "rebuild":
        return 7
    if kind == "shard" and damage is missing and command == "ref-move":
        return 4  # what was collected, or never arrived, gets no name
    if command in what.needed_by:
        # An empty folder in the place of a generation: nothing is listed there.
        return 4 if damage is missing or (kind == "earlier-ref" and damage is folder and command == "verify") else 3
    return what.unlisted.get(command, 0) if damage in NO_FILE else 0


def content(path: Path) -> dict[str, str]:
    """Digest of each file at or below ``path``, by its path there; empty if there is nothing."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def sound(built: Stores, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each command that writes something writes from a sound store."""
    place = tmp_path_factory.mktemp("sound")
    with chdir(place):
        for command in PRODUCTS:
            words = [
                word.format(second=built.second.hex, first=built.first.hex, store=built.url)
                for word in COMMANDS[command]
            ]
            assert run([*words, "--store", built.url]) == 0
    return {command: content(place / name) for command, name in PRODUCTS.items()}


def check_damage(
    ckpt: Ckpt, stores: Stores, sound: dict[str, dict[str, str]], kind: str, damage: Callable[[Path], None]
) -> None:
    """Do everything with the damaged store, in the current folder."""
    assert ckpt("init", "far").code == 0
    key = KINDS[kind].key(stores.open(), stores)
    damage(stores.file(key))
    for command, words in COMMANDS.items():
        filled = [word.format(first=stores.first.hex, second=stores.second.hex, store=stores.url) for word in words]
        done = ckpt(*filled, *([] if "--store" in filled else ["--store", stores.url]))
        what = f"{command} with a {damage.__name__} {kind}: {done}"
        code = expected_code(kind, damage, command)
        assert done.code == code or (code == 0 and done.code == 1 and command.startswith("diff")), what
        assert "Traceback" not in done.err + done.out, what
        assert "bug" not in done.err, what
        told = [line for line in done.err.splitlines() if line.startswith("ckpt: ") and "warning" not in line]
        if code == 0:
            assert told == [], what
        elif command in LISTING:
            assert told or done.out, what
        else:
            assert len(told) == 1, what
        if command in PRODUCTS:
            assert content(Path(PRODUCTS[command])) == (sound[command] if code == 0 else {}), what
    assert not Path("evidence.tar").exists() or ckpt("evidence", "verify", "evidence.tar").code == 0
    assert broken(Path("far")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_by_every_command_that_meets_it(
    ckpt: Ckpt, stores: Stores, sound: dict[str, dict[str, str]], kind: str
) -> None:
    """One damage for each kind of file, another one for each; all of them to all in the deep run."""
    check_damage(ckpt, stores, sound, kind, DAMAGES[list(KINDS).index(kind) % len(DAMAGES)])


@pytest.mark.deep
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_is_told_by_every_command_that_meets_it(
    ckpt: Ckpt, stores: Stores, sound: dict[str, dict[str, str]], kind: str, damage: Callable[[Path], None]
) -> None:
    check_damage(ckpt, stores, sound, kind, damage)


@pytest.mark.parametrize(
    ("damage", "code"),
    [(flipped, 9), (cut, 9), (emptied, 9), (longer, 9), (huge, 9), (missing, 4), *((bad, 3) for bad in NO_FILE)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_without_its_header_nothing_is_a_store(
    ckpt: Ckpt, stores: Stores, damage: Callable[[Path], None], code: int
) -> None:
    damage(stores.file("ckptstore.json"))
    for words in (["log"], ["verify", "main"], ["ref", "move", "new", stores.second.hex], ["catalogue", "rebuild"]):
        done = ckpt(*words, "--store", stores.url)
        assert done.code == code
        assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("kind", ["page", "shard", "checkpoint", "ref", "pack"])
def test_good_bytes_of_another_file_are_wrong_bytes(ckpt: Ckpt, stores: Stores, kind: str) -> None:
    """Each in the place of another one of its kind, both of them whole."""
    store = stores.open()
    pairs = {
        "page": [a_page(store, stores.second), a_page(store, stores.first)],
        "shard": [document_key(store.checkpoint(root).shards[0]) for root in (stores.second, stores.first)],
        "checkpoint": [document_key(stores.second), document_key(stores.first)],
        "ref": [ref_key("main", 2), ref_key("wide", 1)],
        "pack": [a_pack(store, stores.second), a_pack(store, stores.first)],
    }[kind]
    path, other = map(stores.file, pairs)
    clear(path)
    shutil.copyfile(other, path)
    assert ckpt("verify", "main", "--store", stores.url).code == 3
    assert ckpt("restore", "main", "restored", "--store", stores.url).code == 3
    assert not Path("restored").exists()


@pytest.mark.parametrize("name", ["refs", "objects", "documents", "tmp", "receipts", "pins", "leases", "features"])
def test_a_folder_of_the_store_is_never_a_link(ckpt: Ckpt, stores: Stores, name: str) -> None:
    """Not even to the folder itself, moved elsewhere: who can make a link could lead every write astray."""
    place = stores.file(name)
    place.mkdir(exist_ok=True)
    link(place)
    far = ckptstore.open("far", create=True)
    store_words = ["--store", stores.url]
    codes = {words[0]: ckpt(*words, *store_words).code for words in (["verify", "main"], ["ref", "move", "x", "main"])}
    assert set(codes.values()) <= {0, 3}
    assert codes["ref"] == (0 if name in ("objects", "receipts", "pins") else 3)
    assert broken(far.backend.path) == []  # type: ignore[attr-defined]
