"""Targets that are files: evidence archives, safetensors, configuration and price tables."""

from __future__ import annotations

import json
import struct
import tomllib
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import ckptstore
from ckptstore import evidence
from ckptstore.backends.traffic import Traffic
from ckptstore.errors import CkptStoreError, RefusedError, UsageError
from ckptstore.evidence import ustar
from ckptstore.evidence.manifest import LIMIT, NAME, Manifest
from ckptstore.export.tensorfile import open_tensor_file
from ckptstore.export.weights import import_weights
from ckptstore.format import canonical
from ckptstore.format.digest import Digest, derive
from ckptstore.format.keys import is_ref_name
from ckptstore.remotes import CONFIG, add_remote, known_remotes, open_remote, remove_remote
from ckptstore.transfers.prices import Prices
from tests.fuzz.target import Run, Target, Tree, dump_json, load_json

_CONFIG_LIMIT = 2**18
_PRICES_LIMIT = 2**16


def targets() -> Iterator[Target]:
    """One for each kind of file."""
    yield Target(
        "evidence-manifest",
        _manifest,
        lambda: [_inside(data) for data in _archives()],
        LIMIT,
        load=load_json,
        dump=dump_json,
        seal=_seal,
        bombs=_MANIFEST_BOMBS,
        bomb_bytes=LIMIT // 2,
        executions=350,
    )
    yield Target(
        "evidence-archive",
        _archive,
        _archives,
        2**20,
        (b"ustar\0", b"MANIFEST.json", bytes(512), b"0000644\0", b"00000000000\0"),
        load=lambda data: json.loads(_inside(data)),
        dump=_with_manifest,
        seal=_seal,
        bombs=_ARCHIVE_BOMBS,
        bomb_bytes=LIMIT // 2,
        executions=100,
        also=_fit_contents,
    )
    yield Target(
        "safetensors",
        _safetensors,
        _tensor_files,
        2**20,
        (b'"dtype":"F32"', b'"shape":[', b'"data_offsets":[0,', b"__metadata__", b"BF16", b"C64"),
        load=_header,
        dump=_with_header,
        bombs=HEADER_BOMBS,
        executions=150,
    )
    yield Target("safetensors-import", _import, _exports, 2**20, load=_header, dump=_with_header, executions=20)
    yield _toml("config", _config, _CONFIGS, _CONFIG_LIMIT, 60)
    yield _toml("prices", _prices, _PRICES, _PRICES_LIMIT, 150)


def _toml(name: str, run: Run, seeds: list[bytes], limit: int, executions: int) -> Target:
    # The library's expressions for numbers keep something for each digit.
    return Target(
        name,
        run,
        lambda: seeds,
        limit,
        _TOML_WORDS,
        bombs=_TOML_BOMBS,
        bomb_bytes=limit,
        per_byte=160,
        executions=executions,
    )


# Evidence


def _manifest(data: bytes, _folder: Path) -> None:
    assert Manifest.parse(data).encode() == data, "it was accepted, and its encoding is another"


def _archive(data: bytes, folder: Path) -> None:
    path = folder / "archive.tar"
    path.write_bytes(data)
    info = evidence.verify(path)
    assert evidence.faults(path) == (), "it was accepted, and has faults"
    with TemporaryDirectory(dir=folder) as inside:
        evidence.unpack(path, Path(inside, "out"))
        members = {member.path: Path(inside, "out", member.path) for member in info.members}
        again = Path(inside, "again.tar")
        evidence.pack(members, again, info.references)
        assert again.read_bytes() == data, "what it holds makes another archive"


@cache
def _archives() -> list[bytes]:
    reference = evidence.Reference("objects/ab/cd", 5, Digest.of(b"a"))
    contents: list[tuple[dict[str, bytes], list[evidence.Reference]]] = [
        ({}, []),
        ({"a": b"", "b/c": b"text"}, [reference]),
        ({"d/é": bytes(600), "e": b"x" * 512, "f/g/h": b"\0"}, []),
    ]
    found = []
    with TemporaryDirectory() as folder:
        for number, (members, references) in enumerate(contents):
            path = Path(folder, f"{number}.tar")
            evidence.pack(members, path, references)
            found.append(path.read_bytes())
    return found


def _inside(data: bytes) -> bytes:
    size = ustar.size_of(data[: ustar.BLOCK])
    if size is None:
        raise ValueError("no archive")
    return data[ustar.BLOCK : ustar.BLOCK + size]


def _built(manifest: bytes, contents: bytes) -> bytes:
    head = ustar.header(NAME, len(manifest)) + manifest + bytes(ustar.padding(len(manifest)))
    return head + contents


def _with_manifest(data: bytes, tree: Tree) -> bytes:
    """The archive with another manifest, and as many zeros after its members as that asks for."""
    old = _inside(data)
    contents = data[ustar.span(len(old)) :].rstrip(b"\0")
    made = _built(dump_json(b"", tree), contents)
    return made + bytes(ustar.padding(len(made))) + bytes(ustar.ending(len(made) + ustar.padding(len(made))))


def _fit_contents(random: Random, data: bytes) -> bytes:
    """An archive of other members, all of it right."""
    members = {
        f"{random.choice('abcd/é')}{number}": random.randbytes(random.choice((0, 1, 511, 600))) for number in (1, 2)
    }
    with TemporaryDirectory() as folder:
        try:
            evidence.pack(members, Path(folder, "a.tar"))
        except CkptStoreError:
            return data
        return Path(folder, "a.tar").read_bytes()


def _seal(tree: Tree) -> None:
    body = {"members": tree["members"], "references": tree["references"]}

    tree["seal"] = str(Digest(derive("ckptstore 1 evidence seal", canonical.encode(body))))


def _sealed(members: list[canonical.Json], references: list[canonical.Json]) -> bytes:
    tree: Tree = {"kind": "evidence", "format": 1, "members": members, "references": references}
    _seal(tree)
    return canonical.encode(tree)


def _member(path: str) -> canonical.Json:
    return {"path": path, "size": 0, "sha256": sha256(b"").hexdigest(), "blake3": str(Digest.of(b""))}


def _many_members(size: int) -> bytes:
    return _sealed([_member(f"{number:08d}") for number in range(size // 190)], [])


def _deep_members(size: int) -> bytes:
    return _sealed([_member(f"{number:06d}/" + "a/" * 70 + "a" * 90) for number in range(size // 420)], [])


def _many_references(size: int) -> bytes:
    digest = str(Digest.of(b""))
    return _sealed([], [{"key": f"{number:08d}", "size": 0, "digest": digest} for number in range(size // 120)])


_MANIFEST_BOMBS = {"members": _many_members, "deep members": _deep_members, "references": _many_references}
_ARCHIVE_BOMBS: Mapping[str, Callable[[int], bytes]] = {
    **{name: (lambda size, make=make: _built(make(size), b"")) for name, make in _MANIFEST_BOMBS.items()},
    "zeros": lambda size: bytes(size),
    "a size beyond all": lambda _size: ustar.header(NAME, ustar.MAX_SIZE) + bytes(512),
    "a member of 8 GiB": lambda _size: _built(
        _sealed([{**_member("a"), "size": ustar.MAX_SIZE}], []),  # type: ignore[dict-item]
        b"",
    ),
}


# Safetensors


def _safetensors(data: bytes, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    with open_tensor_file(path) as file:
        size = sum(sum(len(chunk) for chunk in tensor.chunks()) for tensor in file.tensors)
        assert size == sum(tensor.nbytes for tensor in file.tensors), "its tensors are not as long as their shapes"
        assert size <= len(data), "there are more bytes in it than it has"


def _import(data: bytes, folder: Path) -> None:
    path = folder / "import.safetensors"
    path.write_bytes(data)
    with TemporaryDirectory(dir=folder) as inside:
        made = ckptstore.open(Path(inside, "store"), create=True)
        imported = import_weights(made, path, ref="main")
        assert made.verify(imported.root).ok, "what was imported does not verify"


def _file(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def _header(data: bytes) -> Tree:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def _with_header(data: bytes, tree: Tree) -> bytes:
    length = int.from_bytes(data[:8], "little")
    return _file(json.dumps(tree, separators=(",", ":")).encode(), data[8 + length :])


@cache
def _tensor_files() -> list[bytes]:
    def one(dtype: str, shape: list[int], start: int, stop: int) -> Tree:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}

    headers: list[tuple[Tree, int]] = [
        ({}, 0),
        ({"a": one("F32", [2, 2], 0, 16)}, 16),
        ({"a": one("BF16", [3], 0, 6), "b": one("BF16", [0], 6, 6), "__metadata__": {"format": "pt"}}, 6),
        ({"s": one("C64", [], 0, 8), "t": one("BOOL", [1], 8, 9)}, 9),
    ]
    return [_file(json.dumps(header).encode(), bytes(range(size))) for header, size in headers]


@cache
def _exports() -> list[bytes]:
    said = {"aliases": {"b": "a"}, "buffers": ["a"], "root": str(Digest.of(b"r")), "step": 3}
    header = {
        "__metadata__": {"ckptstore": canonical.encode(said).decode()},
        "a": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]},
    }
    return [*_tensor_files(), _file(json.dumps(header).encode(), bytes(128))]


def _head_of(entry: str) -> Callable[[int], bytes]:
    def made(size: int) -> bytes:
        number = max(1, size // (len(entry) + 12))
        return _file(("{" + ",".join(f'"{n:08d}":{entry}' for n in range(number)) + "}").encode(), b"")

    return made


HEADER_BOMBS: Mapping[str, Callable[[int], bytes]] = {
    "names": _head_of('{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'),
    "dimensions": lambda size: _file(
        b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % (b"1," * (size // 2) + b"1"), bytes(4)
    ),
    "long dimensions": lambda size: _file(
        b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % ((b"9" * 4000 + b",") * (size // 4001) + b"1"),
        bytes(4),
    ),
    "brackets": lambda size: _file(b"[" * size, b""),
    "deep shape": lambda size: _file(b'{"a":{"dtype":"F32","shape":%s' % (b"[" * size), b""),
    "a fraction and more than it holds": lambda _size: _file(
        b'{"a":{"dtype":"F32","shape":[1.5,%s],"data_offsets":[0,4]}}' % (b"9" * 400), bytes(4)
    ),
    "a header beyond the file": lambda _size: struct.pack("<Q", 2**63) + b"{}",
}


# TOML


def _config(data: bytes, folder: Path) -> None:
    """The remotes of a store, read and changed: what another one says stays as it is."""
    store = _emptied(folder)
    path = folder / "configured" / CONFIG
    path.write_bytes(data)
    remotes = known_remotes(store)
    for name, url in remotes.items():
        assert is_ref_name(name), "a remote of no name"
        assert url, "a remote without URL"
    if len(data) > 2**14:
        return
    before = tomllib.loads(data.decode())
    if "extra-one" not in remotes and "extra-one" not in before.get("remotes", {}):
        add_remote(store, "extra-one", "s3://bucket/prefix", check=False)
        assert known_remotes(store) == {**remotes, "extra-one": "s3://bucket/prefix"}, "another remote has changed"
        remove_remote(store, "extra-one")
        assert known_remotes(store) == remotes, "another remote has changed"
        after = tomllib.loads(path.read_text())
        assert {**after, "remotes": after.get("remotes", {})} == {**before, "remotes": before.get("remotes", {})}
    try:
        open_remote(store, "nowhere-at-all")
    except (CkptStoreError, UsageError):
        return


@cache
def _emptied(folder: Path) -> ckptstore.Store:
    return ckptstore.open(folder / "configured", create=True)


def _prices(data: bytes, _folder: Path) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise RefusedError("price table", "not UTF-8") from None
    prices = Prices.parse(text)
    cost = prices.cost(Traffic({"PutObject": 10**6, "GetObject": 1}, 10**15, 10**15), 10**15)
    assert cost.once >= 0, "it is paid for nothing"
    assert f"{cost.once:.2f}", "it cannot be told"
    assert cost.stored_month >= Decimal(0), "it is paid for storing"


_CONFIGS = [
    b"",
    b'[remotes.origin]\nurl = "s3://bucket/prefix"\n',
    b'# mine\n[remotes]\n[remotes.a]\nurl = "/tmp/a" # there\n\n'
    b"[remotes.\"b-1\"]\nurl = 'file:///x'\n[other]\nkey = 1\n",
    b'remotes.a.url = "/tmp/b"\n[x]\ny = [1, 2.5, 1979-05-27T07:32:00Z, {z = true}]\n',
    b"remotes = 3\n",
]
_PRICES = [
    b'currency = "USD"\nas_of = "2026-01-31"\nsource = "list"\n',
    b'currency = "EUR"\nas_of = 2026-01-31\nsource = "x"\nbytes_per_gb = 1073741824\n'
    b"[requests_per_1000]\nwrite = 0.005\nlist = 0.005\nread = 0.0004\ndelete = 0\n[per_gb]\nin = 0\nout = 0.09\n"
    b"[per_gb_month]\nstored = 0.023\n",
]
_TOML_WORDS = (
    b"[remotes.",
    b"url = ",
    b'"""',
    b"'''",
    b"= inf",
    b"= nan",
    b"0x",
    b"1e999999999",
    b"1e-999999999",
    b".",
    b"[[",
    b"]]",
    b"#",
)
_TOML_BOMBS: Mapping[str, Callable[[int], bytes]] = {
    "brackets": lambda size: b"a = " + b"[" * (size - 4),
    "braces": lambda size: b"a = " + b"{a=" * ((size - 4) // 3),
    "dotted key": lambda size: b"a." * ((size - 4) // 2) + b"a=1",
    "dotted table": lambda size: b"[" + b"a." * ((size - 4) // 2) + b"a]",
    "dotted key with blanks": lambda size: b"a . " * ((size - 4) // 4) + b"a=1",
    "quoted key": lambda size: b'"a".' * ((size - 4) // 4) + b"a=1",
    "dotted keys": lambda size: b"".join(b"a%d.b.c.d.e.f=1\n" % n for n in range(size // 24)),
    "keys": lambda size: b"".join(b"a%07d=1\n" % n for n in range(size // 12)),
    "tables": lambda size: b"".join(b"[remotes.a%07d]\n" % n for n in range(size // 20)),
    "lists of tables": lambda size: b"[[a]]\n" * (size // 6),
    "digits": lambda size: b"a = " + b"9" * (size - 4),
    "hexadecimal digits": lambda size: b"a = 0x" + b"f" * (size - 6),
    "long text": lambda size: b'a = "' + b"a" * (size - 6) + b'"',
    "open texts": lambda size: b'a = """' + b'"" ' * ((size - 7) // 3),
    "exponent": lambda size: b"a = 1e" + b"9" * (size - 6),
}
