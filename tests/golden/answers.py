"""What a store answers to every question that only reads: recorded when the golden store was made, asked ever after."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from ckptstore.format.digest import Digest
from ckptstore.format.page import show_role
from ckptstore.store import Store
from ckptstore_cli.main import run

GOLDEN = Path(__file__).parent / "v1"
"""The golden store of format 1: ``store/`` as it was, ``constants.json``, ``expected.json``."""

_SMALL = 4096


def is_constant(data: bytes) -> bool:
    """Whether a stored object is large and one byte all over: then it is written out when the store is needed."""
    return len(data) > _SMALL and data == data[:1] * len(data)


def unpacked(folder: Path) -> Path:
    """A copy of the golden store below ``folder``, with the modes that a checkout does not keep."""
    path = folder / "store"
    shutil.copytree(GOLDEN / "store", path)
    for key, (byte, size) in json.loads(GOLDEN.joinpath("constants.json").read_text()).items():
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_bytes(bytes([byte]) * size)
    for file in path.rglob("*"):
        if file.is_file():
            file.chmod(0o444)
    return path


def answers(store: Store, folder: Path) -> dict[str, Any]:
    """Everything that the store says; ``folder`` is where a catalogue may be made."""
    names = {name: [text(record.root) for record in store.refs.log(name)][::-1] for name in store.refs.names()}
    roots = sorted(store.checkpoints())
    readable = [root for root in roots if not store.verify(root, store.scope(root)).findings]
    return {
        "id": store.id,
        "keys": [len(list(store.backend.list(prefix))) for prefix in ("objects/", "documents/", "receipts/", "")],
        "refs": names,
        "verify": {str(root): verified(store, root) for root in roots},
        "tensors": {str(root): tensors(store, root) for root in readable},
        "files": {str(root): files(store, root) for root in readable},
        "history": {str(root): history(store, root) for root in roots},
        "receipts": {str(root): [receipt.operation for receipt in store.receipts(root)] for root in roots},
        "diff": {
            f"{left} {right}": difference(store, left, right) for left, right in (("main", "best"), ("main", "wide"))
        },
        "catalogue": catalogue(store, folder),
        "commands": {" ".join(line): command(store, *line) for line in COMMANDS},
    }


COMMANDS = (
    ("show", "wide"),
    ("ls", "main"),
    ("ls", "wide"),
    ("ref", "list"),
    ("pin", "--list"),
    ("gc",),
    ("gc", "--keep-last", "1"),
    ("latest", "main"),
    ("verify", "main"),
    ("verify", "gone"),
)
"""In their order, as some of them leave a receipt."""


def text(root: Digest | None) -> str | None:
    return None if root is None else str(root)


def verified(store: Store, root: Digest) -> dict[str, Any]:
    report = store.verify(root, store.scope(root))
    return {
        "step": report.step,
        "closure": str(report.closure),
        "documents": report.documents,
        "objects": report.objects,
        "bytes": report.bytes_read,
        "ancestors": [[str(past.root), past.step, past.status] for past in report.ancestors],
        "findings": sorted({f"{finding.kind.value} {finding.key}" for finding in report.findings}),
    }


def tensors(store: Store, root: Digest) -> dict[str, list[Any]]:
    """By role and path: dtype, shape, and the digest of the bytes, which are read and put together here."""
    closure = store.closure(root)
    found = {}
    for view in closure.shards.values():
        packed = {
            chunk: (pack, slot) for packs in view.packs.values() for pack in packs for chunk, slot in pack.slots.items()
        }
        for entry in view.tensors():
            data = bytes(entry.inline or b"")
            for chunk, length in zip(entry.chunks, entry.lengths(), strict=True):
                if chunk in packed and length < _LONG:
                    pack, slot = packed[chunk]
                    whole = store.objects.read(pack.digest, pack.length, view.place)
                    assert whole is not None
                    data += whole[slot.offset : slot.offset + slot.length]
                else:
                    data += store.objects.read(chunk, length, view.place) or b""
            found[f"{show_role(entry.role)} {entry.path}"] = [entry.dtype, list(entry.shape), Digest.of(data).hex]
    return found


_LONG = 262_144


def difference(store: Store, left: str, right: str) -> dict[str, Any]:
    """What is not the same in two checkpoints, by name."""
    found = store.diff(left, right)
    return {
        "relation": found.relation,
        "fields": [change.name for change in found.fields],
        "hyper": [change.key for change in found.hyper],
        "tensors": [[change.status, f"{show_role(change.role)} {change.path}"] for change in found.tensors],
        "read": [found.documents_read, found.objects_read, found.bytes_read],
        "exit": found.exit_code,
    }


def history(store: Store, root: Digest) -> list[list[Any]]:
    """The lineage of a checkpoint."""
    return [[str(past), found.step, str(found.state_root)] for past, found in store.history(root)]


def files(store: Store, root: Digest) -> dict[str, list[Any]]:
    """Files of a checkpoint and its preparation: size, whether they can be executed, the note about a link."""
    found = {}
    for digest, tree in store.closure(root).trees.items():
        for file in tree.files:
            found[f"{digest.short} {file.path}"] = [file.size, file.executable, file.link]
        for excluded in tree.excluded:
            found[f"{digest.short} {excluded.path}"] = [excluded.reason]
    return found


def catalogue(store: Store, folder: Path) -> dict[str, int]:
    """Rows by table of a catalogue that is made now."""
    with store.catalogue(f"sqlite:///{folder}/catalogue.sqlite") as found:
        return found.rebuild()


def command(store: Store, *line: str) -> list[Any]:
    """Exit code of a command, and what it prints with ``--json``, but for where the store is."""
    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = run([*line, "--json", "--store", store.url])
    return [code, *(json.loads(text, object_hook=_without_places) for text in output.getvalue().splitlines())]


def _without_places(item: dict[str, Any]) -> dict[str, Any]:
    """Where the store is, and how far down the disk a readback reached there, is another matter each time."""
    return {name: value for name, value in item.items() if name not in _PLACES}


_PLACES = ("where", "store", "url", "method", "reaches_medium", "receipt")
