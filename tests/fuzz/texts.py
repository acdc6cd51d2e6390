"""Targets of what people and environments type: digests, keys, names, attempts, URLs, durations, command lines."""

from __future__ import annotations

import io
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest.mock import patch

import click

import ckptstore
from ckptstore.backends import normalized
from ckptstore.backends.owners import Owner
from ckptstore.backends.s3.address import S3Address
from ckptstore.catalogue.address import storage_of
from ckptstore.commits.attempts import Attempt
from ckptstore.errors import CkptStoreError, MalformedError, UsageError
from ckptstore.format import keys
from ckptstore.format.digest import Digest
from ckptstore.names import resolve
from ckptstore_cli.duration import duration
from ckptstore_cli.exits import MEANINGS
from ckptstore_cli.main import run as ckpt
from ckptstore_cli.size import size
from tests.format.kinds import VECTORS
from tests.fuzz.target import Run, Target

LIMIT = 2**17
"""Bytes: a system hands over no longer argument."""

_HEX = b"0123456789abcdef" * 4
_ROOT = b"8c15cc44cb5d4a23b2f8d23857c3d8b38e4a34afde39d80f5a817e852c934f31"


def targets() -> Iterator[Target]:
    """One for each text."""
    words = (b"b3:", _HEX, b"refs/", b"objects/", b"documents/", b"/", b":", b"-", b"0000000000000001", b"main")
    s3 = (
        b"s3://",
        b"bucket",
        b"/prefix",
        b"?",
        b"&",
        b"=",
        b"%2F",
        b"@",
        b"#",
        b"endpoint_url=http://h:1",
        b"threads=",
        b"attempt_seconds=1.5",
        b"operation_seconds=1e3",
        b"nan",
        b"inf",
        b"_1",
        b"storage_class=GLACIER",
        b"region=",
        b"file:///",
        b"memory:",
        b"[",
        b"]",
    )
    yield _text("digest", _digest, [b"b3:" + _HEX, _HEX, b"b3:", b"B3:" + _HEX], words, 350)
    yield _text("key", _key, _KEYS, words, 350)
    yield _text("attempt", _attempt, [b"main:0:-:" + b"0" * 32, b"main:7:" + _HEX + b":" + b"f" * 32], words, 350)
    yield _text("owner", _owner, [b"0123456789abcdef-f0000000-4294967295-18446744073709551615"], (b"-",), 300)
    yield _text("s3-url", _s3, _URLS[:8], s3, 350)
    yield _text("store-url", _url, _URLS, s3, 350)
    yield _text("catalogue-url", _catalogue, _CATALOGUES, (b"://", b"sqlite", b"@", b"?", b"+psycopg"), 200)
    yield _text("duration", _duration, [b"3600", b"90m", b"12h", b"7d", b"1.5h", b"0"], (b"d", b".", b"9"), 350)
    yield _text("size", _size, [b"1048576", b"500MB", b"10GiB", b"1.5kB"], (b"iB", b".", b"9", b"K"), 300)
    yield _text("name", _name, [b"main", _ROOT, b"b3:" + _ROOT, b"8c15", b"b3:6e40"], (*words, b"8c", b"6e"), 150)
    yield _text("command-line", _command_line, _COMMANDS, _WORDS, 30)


def _text(name: str, run: Run, seeds: list[bytes], words: tuple[bytes, ...], executions: int) -> Target:
    bombs: dict[str, Callable[[int], bytes]] = {
        "letters": lambda size: b"a" * size,
        "digits": lambda size: b"main:" + b"9" * (size - 5),
        "slashes": lambda size: b"a/" * (size // 2),
        "dots": lambda size: b"s3://" + b"a." * (size // 2 - 3),
        "options": lambda size: b"s3://bucket/p?" + b"a=b&" * (size // 4 - 4),
        "percents": lambda size: b"file:///" + b"%41" * (size // 3 - 3),
        "seconds": lambda size: b"s3://bucket?threads=" + b"9" * (size - 20),
        "brackets": lambda size: b"file://" + b"[" * (size - 7),
    }
    return Target(name, run, lambda: seeds, LIMIT, words, bombs=bombs, bomb_bytes=LIMIT, executions=executions)


def argument(data: bytes) -> str:
    """Bytes as a process gets them in its arguments and variables: what is no UTF-8 becomes lone surrogates."""
    return os.fsdecode(data)


def _digest(data: bytes, _folder: Path) -> None:
    text = argument(data)
    assert str(Digest.parse(text)).removeprefix("b3:") == text.removeprefix("b3:"), "it prints otherwise"


def _key(data: bytes, _folder: Path) -> None:
    text = argument(data)
    parsed = keys.parse_ref_key(text)
    assert parsed is None or keys.ref_key(*parsed) == text, "the key of its name and generation is another"
    digest = keys.digest_of_key(text)
    if digest is not None:
        assert text in (keys.object_key(digest), keys.document_key(digest)), "the key of its digest is another"
    if keys.is_ref_name(text):
        assert keys.parse_ref_key(keys.ref_key(text, 1)) == (text, 1), "a name that is legal and gives no key"
        return
    if parsed is None and digest is None:
        raise UsageError("key", "none of these")


def _attempt(data: bytes, _folder: Path) -> None:
    text = argument(data)
    assert str(Attempt.parse(text)).replace("b3:", "") == text.replace("b3:", ""), "it prints otherwise"


def _owner(data: bytes, _folder: Path) -> None:
    found = Owner.parse(argument(data))
    if found is None:
        raise UsageError("owner", "none")
    assert Owner.parse(str(found)) == found, "it prints as another"
    found.liveness()


def _s3(data: bytes, _folder: Path) -> None:
    address = S3Address.parse(argument(data))
    assert S3Address.parse(address.url) == address, "its URL is that of another"
    address.url.encode()


def _url(data: bytes, _folder: Path) -> None:
    url = normalized(argument(data))
    assert normalized(url) == url, "its URL has another URL"
    url.encode()


def _catalogue(data: bytes, folder: Path) -> None:
    text = argument(data)
    if text:
        storage_of(_store(folder).backend, text)


def _duration(data: bytes, _folder: Path) -> None:
    try:
        seconds = duration(argument(data))
    except click.BadParameter as error:
        error.format_message().encode()
        raise MalformedError("duration", "none") from None
    assert 0 <= seconds < math.inf, "no number of seconds"


def _size(data: bytes, _folder: Path) -> None:
    try:
        found = size(argument(data))
    except click.BadParameter as error:
        error.format_message().encode()
        raise MalformedError("size", "none") from None
    assert found >= 1, "no bytes"


@cache
def _store(folder: Path) -> ckptstore.Store:
    """The two checkpoints of the format's own example, in a copy: a verification leaves a receipt."""
    shutil.copytree(VECTORS / "store", folder / "example")
    return ckptstore.open(folder / "example")


def _name(data: bytes, folder: Path) -> None:
    store = _store(folder)
    text = argument(data)
    root = resolve(store.backend, store.refs, text)
    assert root.hex.startswith(text.removeprefix("b3:")) or keys.is_ref_name(text), "it is the name of another"


def _command_line(data: bytes, folder: Path) -> None:
    """Commands that only read, with arguments as they come; a line is one of them."""
    command, *arguments = [argument(part).replace("\0", "") for part in data.split(b"\n")]
    if command not in _READING:
        raise UsageError("command", "none of those that only read")
    out, err = io.StringIO(), io.StringIO()
    words = ["--store", _store(folder).url, command, *arguments]
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ, {"COLUMNS": "80"}), _Inside(folder):
        code = ckpt(words)
    assert code in MEANINGS, f"ends with {code}, which means nothing"
    assert "this is a bug" not in err.getvalue(), err.getvalue()
    assert "Traceback" not in err.getvalue(), err.getvalue()
    printed = out.getvalue() + err.getvalue()
    assert all(character in "\n\t" or character >= " " for character in printed), "a control character in what it says"
    if code:
        raise CkptStoreError("command line", f"ends with {code}")


class _Inside:
    """Work in a folder for the time of a block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._before = os.getcwd()
        os.chdir(self._folder)

    def __exit__(self, *_error: object) -> None:
        os.chdir(self._before)


_KEYS = [
    b"refs/main/0000000000000001",
    b"refs/a.b-c_d/9999999999999999",
    b"objects/01/" + _HEX,
    b"documents/01/" + _HEX,
    b"main",
    b"abcd",
]
_URLS = [
    b"s3://bucket",
    b"s3://bucket/a/b",
    b"s3://bucket/a?endpoint_url=http://localhost:8333&addressing=path&checksums=sha256&threads=4",
    b"s3://bucket?attempt_seconds=1.5&operation_seconds=1234567.25",
    b"s3://bucket/p?region=eu-central-1&profile=a%20b&ca_bundle=/etc/x.pem",
    b"s3://bucket/p?sse=aws:kms&sse_kms_key_id=arn:aws:kms:x:y/z&bucket_owner=123456789012",
    b"s3://bucket/p?storage_class=STANDARD_IA",
    b"s3://bucket/p?operation_seconds=86400&attempt_seconds=0.001",
    b"file:///tmp/a%20b",
    b"file://localhost/tmp",
    b"/tmp/a",
    b"relative/path",
    b"memory:name",
    b"https://example.com",
    b"file:///tmp/%80",
    b"//tmp",
]
_CATALOGUES = [
    b"postgresql+psycopg://user@host/database",
    b"postgresql://h/d?sslmode=require",
    b"sqlite:////tmp/a.sqlite",
    b"sqlite://",
    b"mysql://a/b",
    b"postgresql://u:p@[::1]:5432/d",
]
_READING = ("show", "log", "ls", "verify", "diff", "ref", "durability", "latest", "gc", "completion")
_COMMANDS = [
    b"show\nmain",
    b"show\n--json\n8c15",
    b"log\nmain",
    b"ls\nmain\n--json",
    b"verify\nmain",
    b"diff\n6e40\n8c15",
    b"ref\nlist",
    b"ref\nshow\nmain",
    b"durability\nmain",
    b"verify\n--shard\n0\nmain",
    b"show\n--help",
    b"completion\nbash",
    b"latest\nmain",
    b"gc\n--keep-last\n1",
    b"gc\n--keep-every-time\n7d\n--keep-best\n3:loss:min\n--min-verified-copies\n1",
]
_WORDS = (
    b"\n999999999d\n",
    b"\n--keep-last\n",
    b"\n-1\n",
    b"\n" + b"9" * 30 + b"\n",
    b"\n",
    b"--json",
    b"--shard",
    b"--help",
    b"--store",
    b"--",
    b"-",
    b"b3:",
    b"8c15",
    b"\x1b[2J",
    b"\xff",
    b"main",
)
