"""How the stores of the museum are broken: steps by name, on keys by name, of a copy of the golden store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.backends.owners import Owner, this_process
from ckptstore.format import canonical
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import STORE_KEY, digest_of_key, document_key, object_key, receipt_key, ref_key
from ckptstore.format.records import Lease, Receipt, RefRecord
from ckptstore.store import Store

NOWHERE = Digest.of(b"no checkpoint")
FORGED = "forged"
_NONCE = "abcdef00" * 4
_WHEN = "2026-01-01T00:00:00Z"


def names(store: Store) -> dict[str, str]:
    """Keys of a whole store by what they are: ``main.checkpoint``, ``wide.shard1``, ``ref.main.2`` …"""
    found: dict[str, str] = {"header": STORE_KEY}
    for ref in ("main", "best", "wide"):
        root = store.resolve(ref)
        found[f"{ref}.checkpoint"] = document_key(root)
        closure = store.closure(root)
        for index, view in sorted(closure.shards.items()):
            found[f"{ref}.shard{index}"] = document_key(view.digest)
            for number, page in enumerate(view.shard.pages):
                found[f"{ref}.page{index}.{number}"] = document_key(page.digest)
        packs = [digest for view in closure.shards.values() for p in view.shard.packs for digest in p.digests]
        for number, digest in enumerate(packs):
            found[f"{ref}.pack{number}"] = object_key(digest)
        assert closure.checkpoint is not None
        if closure.checkpoint.files is not None:
            found[f"{ref}.files"] = document_key(closure.checkpoint.files)
        if closure.checkpoint.run is not None:
            found[f"{ref}.run"] = document_key(closure.checkpoint.run)
            parts = store.preparation(closure.checkpoint.run)
            found |= {f"{ref}.run.{part}": document_key(getattr(parts, part)) for part in ("plan", "inputs", "sources")}
        receipts = [stat.key for stat in store.backend.list(f"receipts/{root.hex}/")]
        found |= {f"receipt.{ref}": key for key in receipts[:1]}
        found |= {f"pin.{ref}": stat.key for stat in store.backend.list(f"pins/{root.hex}/")}
    for name in store.refs.names():
        for record in store.refs.log(name):
            found[f"ref.{name}.{record.generation}"] = ref_key(name, record.generation)
    (found["retired"],) = (stat.key for stat in store.backend.list("retired/"))
    return found


class Breaking:
    """The store in the folder ``path``, on its way to being broken. ``keys`` are those of :func:`names`."""

    def __init__(self, path: Path, keys: dict[str, str]) -> None:
        self.path = path
        self.keys = keys
        self.forged: Digest | None = None
        self._kept = {key: path.joinpath(key).read_bytes() for key in keys.values()}

    def do(self, verb: str, *given: Any) -> None:
        """One step of a recipe."""
        step: Callable[..., None] = getattr(self, f"_{verb}")
        step(*given)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _flip(self, name: str, at: int) -> None:
        data = bytearray(self._read(name))
        data[at % len(data)] ^= 4
        self._put(name, bytes(data))

    def _cut(self, name: str, size: int) -> None:
        self._put(name, self._read(name)[:size])

    def _empty(self, name: str) -> None:
        self._put(name, b"")

    def _append(self, name: str, text: str) -> None:
        self._put(name, self._read(name) + text.encode())

    def _delete(self, name: str) -> None:
        self._file(name).unlink()

    def _swap(self, one: str, other: str) -> None:
        data = self._read(one), self._read(other)
        self._put(one, data[1])
        self._put(other, data[0])

    def _copy(self, source: str, target: str) -> None:
        self._put(target, self._read(source))

    # -- names --------------------------------------------------------------------------------------------------------

    def _upper(self, name: str) -> None:
        file = self._file(name)
        file.rename(file.with_name(file.name.upper()))

    def _link(self, name: str) -> None:
        file = self._file(name)
        outside = self.path.parent / "outside"
        shutil.move(file, outside)
        file.symlink_to(outside)

    def _folder(self, name: str) -> None:
        self._file(name).unlink()
        self._file(name).mkdir()

    def _write(self, key: str, content: Any) -> None:
        folder, _, last = key.rpartition("/")
        if last in self.keys:
            key = f"{folder}/{self._digest(last).hex}"
        self._put(key, content.encode() if isinstance(content, str) else canonical.encode(content))

    # -- documents and records ----------------------------------------------------------------------------------------

    def _edit(self, name: str, path: list[str | int], value: Any) -> None:
        """Change a document where it stands."""
        self._put(name, self._changed(self._read(name), path, value))

    def _document(self, content: Any) -> None:
        data = canonical.encode(content)
        self._put(document_key(Digest.of(data)), data)

    def _forge(self, name: str, path: list[str | int], value: Any) -> None:
        """Change a document, and everything above it, so that every digest is right; a ref names the checkpoint."""
        digest = self._digest(name)
        data = self._changed(self._kept[self.keys[name]], path, value)
        while True:
            new = Digest.of(data)
            self._put(document_key(new), data)
            kind = json.loads(data)["kind"]
            if kind == "checkpoint":
                break
            ref = name.partition(".")[0]
            above, digest = self._above(ref, digest, kind), new
            data = self._kept[above].replace(self._replaced.hex.encode(), new.hex.encode())
            digest = Digest.parse(above.rpartition("/")[2])
        self.forged = new
        self._put(ref_key(FORGED, 1), RefRecord(1, None, new, _NONCE).encode())

    def _above(self, ref: str, digest: Digest, kind: str) -> str:
        """The key of the document of a checkpoint that names ``digest``."""
        self._replaced = digest
        wanted = {"page": f"{ref}.shard", "shard": f"{ref}.checkpoint", "tree": f"{ref}.checkpoint"}[kind]
        for name, key in self.keys.items():
            if name.startswith(wanted) and digest.hex.encode() in self._kept[key]:
                return key
        raise AssertionError(f"nothing names {digest}")

    def _record(self, ref: str, generation: int, root: str, after: str) -> None:
        """Plant a record of a ref, with a good check, after the one of that name."""
        named = NOWHERE if root == "nowhere" else self._digest(root)
        previous = Digest.of(self._kept[self.keys[after]])
        self._put(ref_key(ref, generation), RefRecord(generation, previous, named, _NONCE).encode())

    def _receipt(self, name: str) -> None:
        """A receipt that claims a readback of everything."""
        root = self._digest(name)
        made = Receipt("verify", root, NOWHERE, 10**6, 10**6, 10**12, "direct", _WHEN, "file:///elsewhere").encode()
        self._put(receipt_key(root, Digest.of(made)), made)

    def _lease(self, owner: str) -> None:
        here = this_process()
        gone = Owner(here.boot, here.namespace, here.pid, here.started + 1)
        process = str(gone) if owner == "dead" else "stranger"
        self._put(f"leases/{_NONCE}", Lease("elsewhere.example", process, _WHEN).encode())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self.path / self.keys.get(name, name)

    def _read(self, name: str) -> bytes:
        return self._file(name).read_bytes()

    def _put(self, name: str, data: bytes) -> None:
        file = self._file(name)
        file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(0o444)

    def _digest(self, name: str) -> Digest:
        digest = digest_of_key(self.keys[name])
        assert digest is not None
        return digest

    def _changed(self, data: bytes, path: list[str | int], value: Any) -> bytes:
        document: Any = canonical.decode(data, DOCUMENT_LIMIT)
        place = document
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = place[path[-1]][::-1] if value == "reversed" else self._resolved(value)
        return canonical.encode(document)

    def _resolved(self, value: Any) -> Any:
        """A value in which names of documents are their digests."""
        if isinstance(value, list):
            return [self._resolved(item) for item in value]
        if value == "nowhere":
            return str(NOWHERE)
        return str(self._digest(value)) if isinstance(value, str) and value in self.keys else value


def named(path: Path) -> dict[str, str]:
    """The names of the keys of the golden store at ``path``."""
    return names(ckptstore.open(path))
