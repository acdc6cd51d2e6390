"""Extract: a checkpoint as an ordinary directory of safetensors, JSON and files. Needs no torch.

::

    checkpoint.json             the checkpoint document: step, parent, run, roots, progress, binding, ties …
    shard-0/shard.json          where each role's tensors are; values, hyper-parameters, generators, aliases
    shard-0/model.safetensors   weights and buffers
    shard-0/optim.<optimizer>.<key>.safetensors    one file for each other role
    shard-0/raw/0000.bin        row-major little-endian bytes of a tensor whose dtype safetensors lacks
    files/…                     the files that belong to the checkpoint, unless only some shards are extracted

JSON has typed values, as in the documents: every bit of a float and every int is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ckptstore.backends.beside import remove_stale, temporary_beside
from ckptstore.backends.durable import make_folders, storage_errors, sync_folder, write_file_durably
from ckptstore.chunks import ChunkSource
from ckptstore.closure import ShardView
from ckptstore.errors import RefusedError
from ckptstore.export.tensorfile import DTYPES, write_tensor_file
from ckptstore.export.weights import named_tensor
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.page import BUFFER, WEIGHT, HyperEntry, Role, TensorEntry, ValueEntry
from ckptstore.meter import Meter, OnProgress
from ckptstore.objects import Objects
from ckptstore.outside import require_outside

if TYPE_CHECKING:
    from ckptstore.store import Store

MODEL = "model.safetensors"
_NAME_LENGTH = 160


@dataclass(frozen=True, slots=True)
class Extracted:
    """A directory that was written: where, its shards, number of files, their size in bytes."""

    directory: Path
    shards: tuple[int, ...]
    files: int
    size: int


def extract_checkpoint(
    store: Store,
    root: Digest,
    directory: Path,
    shards: Collection[int] | None = None,
    *,
    progress: OnProgress | None = None,
) -> Extracted:
    """Write a checkpoint, or some shards of it, as a directory that needs none of this to be read.

    Every byte is verified when it is read, and each safetensors file is read back. The directory gets its name when it
    is whole and durable; after an error nothing is left. ``progress`` is called with (bytes done, bytes in all).

    Raises:
        RefusedError: ``directory`` is not empty, no directory, or lies in a store.
        CorruptError, NotFoundError, MalformedError: stored bytes are bad.
        NoSpaceError, ReadOnlyError, BackendError: it could not be written.
    """
    target = Path(os.path.realpath(directory))
    require_outside(target)
    _require_free(target)
    closure = store.closure(root, shards, files=False)
    checkpoint = closure.checkpoint
    assert checkpoint is not None
    what = f"writing {target}"
    meter = Meter(sum(entry.nbytes for view in closure.shards.values() for entry in view.tensors()), progress)
    partial_target = temporary_beside(target)
    with storage_errors(what, target, needed=0):
        make_folders(target.parent)
        remove_stale(target.parent)
        partial_target.mkdir()
        try:
            _write_json(partial_target / "checkpoint.json", json.loads(checkpoint.encode()) | {"root": str(root)})
            for index, view in sorted(closure.shards.items()):
                folder = partial_target / f"shard-{index}"
                folder.mkdir()
                _write_shard(store.objects, view, folder, meter)
            if checkpoint.files is not None and shards is None:
                store.get_tree(checkpoint.files, partial_target / "files")
            written = [file for file in partial_target.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in written)
            for folder in partial_target.rglob("*"):
                if folder.is_dir():
                    sync_folder(folder)
            sync_folder(partial_target)
            _give_name(partial_target, target)
        except BaseException:
            shutil.rmtree(partial_target, ignore_errors=True)
            raise
        sync_folder(target.parent)
    return Extracted(target, tuple(sorted(closure.shards)), len(written), size)


def _require_free(target: Path) -> None:
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        why = "is not empty" if target.is_dir() else "is there and no directory"
        raise RefusedError(f"directory {target}", why, "choose an empty or a new directory")


def _give_name(partial_target: Path, target: Path) -> None:
    """Rename; an empty directory of that name is replaced, and one in which something came to lie meanwhile is not."""
    try:
        os.rename(partial_target, target)
    except OSError:
        _require_free(target)
        raise


def _write_shard(objects: Objects, view: ShardView, folder: Path, meter: Meter) -> None:
    source = ChunkSource(objects, view)
    by_role: dict[Role, list[TensorEntry]] = {}
    raw: list[TensorEntry] = []
    for entry in view.tensors():
        if entry.dtype in DTYPES:
            by_role.setdefault(WEIGHT if entry.role == BUFFER else entry.role, []).append(entry)
        else:
            raw.append(entry)
    files: dict[str, Json] = {}
    taken: set[str] = set()
    for role, entries in by_role.items():
        name = MODEL if role == WEIGHT else _file_name(role, taken)
        write_tensor_file(folder / name, [named_tensor(entry, source, meter) for entry in entries], {"format": "pt"})
        files[name] = list(role)
    described = _describe(view)
    described["files"] = files
    described["raw"] = _write_raw(raw, source, folder, meter)
    _write_json(folder / "shard.json", described)


def _write_raw(entries: Sequence[TensorEntry], source: ChunkSource, folder: Path, meter: Meter) -> list[Json]:
    listed: list[Json] = []
    for number, entry in enumerate(entries):
        name = f"raw/{number:04d}.bin"
        write_file_durably(folder / name, meter.passing(source.read_all(entry)))
        listed.append(
            {
                "file": name,
                "path": entry.path,
                "role": list(entry.role),
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "digest": str(entry.digest),
            }
        )
    return listed


def _describe(view: ShardView) -> dict[str, Json]:
    shard = view.shard
    groups: dict[tuple[str, int], list[Json]] = {}
    for entry in view.entries:
        if isinstance(entry, HyperEntry):
            groups.setdefault((entry.role[1], entry.group), []).append(entry.path)
    return {
        "index": shard.index,
        "count": shard.count,
        "digest": str(view.digest),
        "buffers": [entry.path for entry in view.tensors() if entry.role == BUFFER],
        "aliases": {alias.path: alias.owner for alias in shard.aliases},
        "optimizers": [
            {
                "name": optimizer.name,
                "type": optimizer.type,
                "groups": [
                    {
                        "hyper": group.hyper,
                        "selectors": group.selectors,
                        "members": groups.get((optimizer.name, number), []),
                    }
                    for number, group in enumerate(optimizer.groups)
                ],
            }
            for optimizer in shard.optimizers
        ],
        "rng": {entry.name: entry.value for entry in shard.rng},
        "values": [
            {"path": entry.path, "role": list(entry.role), "value": entry.value}
            for entry in view.entries
            if isinstance(entry, ValueEntry)
        ],
    }


def _file_name(role: Role, taken: set[str]) -> str:
    """A file name for a role: its parts escaped and joined; unique also where upper and lower case are the same."""
    base = ".".join(quote(part, safe="").replace(".", "%2E") or "%" for part in role)[:_NAME_LENGTH]
    name, number = f"{base}.safetensors", 1
    while name.casefold() in taken:
        number += 1
        name = f"{base}~{number}.safetensors"
    taken.add(name.casefold())
    return name


def _write_json(path: Path, value: Json) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    write_file_durably(path, [text.encode() + b"\n"])
