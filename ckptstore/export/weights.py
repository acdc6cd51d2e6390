"""Export and import of weights as safetensors files. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.chunks import ChunkSource
from ckptstore.closure import Closure
from ckptstore.errors import MalformedError, RefusedError, UsageError
from ckptstore.export.tensorfile import NamedTensor, StoredTensor, TensorFile, open_tensor_file, write_tensor_file
from ckptstore.format import canonical, values
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.fields import Fields
from ckptstore.format.keys import check_ref_name
from ckptstore.format.page import BUFFER, WEIGHT, TensorEntry
from ckptstore.format.progress import Progress
from ckptstore.format.records import ShardReceipt
from ckptstore.format.shard import Alias
from ckptstore.meter import Meter, OnProgress
from ckptstore.write import Contents, TensorBytes, write_contents

if TYPE_CHECKING:
    from ckptstore.store import Store

METADATA = "ckptstore"
"""Key in a file's metadata of canonical JSON: aliases (name to owner), names of buffers, root, step."""

_METADATA_LIMIT = 100 * 10**6  # the library's own limit of a header


@dataclass(frozen=True, slots=True)
class Exported:
    """A written safetensors file: where, its size in bytes, number of tensors, and the other names of shared ones."""

    path: Path
    size: int
    tensors: int
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint made from a safetensors file: its root, number of tensors, their length in bytes."""

    root: Digest
    tensors: int
    nbytes: int


def export_weights(
    store: Store,
    root: Digest,
    path: Path,
    *,
    shards: Collection[int] | None = None,
    progress: OnProgress | None = None,
) -> Exported:
    """Write the weights and buffers of a checkpoint, of all its shards or of some, as one new safetensors file.

    Every byte is verified when it is read from the store, and the finished file is read back. ``progress`` is called
    with (bytes done, bytes in all). A tensor with several
    names is written once, under the owner's; the other names stand in the metadata, under :data:`METADATA`, with the
    root, the step and the names of the buffers. Two exports of a root have the same bytes.

    Raises:
        RefusedError: a dtype or a name that safetensors lacks (named), no weights, or ``path`` exists.
        CorruptError, NotFoundError, MalformedError: stored bytes are bad; nothing was written.
    """
    closure = store.closure(root, shards, files=False)
    assert closure.checkpoint is not None
    found: dict[str, tuple[TensorEntry, ChunkSource]] = {}
    for index in sorted(closure.shards):
        source = ChunkSource(store.objects, closure.shards[index])
        for entry in closure.shards[index].tensors():
            if entry.role in (WEIGHT, BUFFER):
                found.setdefault(entry.path, (entry, source))  # a replica counts once
    if not found:
        raise RefusedError(f"checkpoint {root.short}", "it has no weights and no buffers to export")
    aliases = alias_names(closure)
    stated: dict[str, Json] = {
        "aliases": dict(aliases),
        "buffers": [*sorted(path for path, (entry, _) in found.items() if entry.role == BUFFER)],
        "root": str(root),
        "step": closure.checkpoint.step,
    }
    metadata = {"format": "pt", METADATA: canonical.encode(stated).decode()}
    meter = Meter(sum(entry.nbytes for entry, _ in found.values()), progress)
    tensors = [named_tensor(entry, source, meter) for entry, source in found.values()]
    return Exported(path, write_tensor_file(path, tensors, metadata), len(tensors), aliases)


def import_weights(
    store: Store, path: Path, ref: str, *, step: int = 0, progress: OnProgress | None = None
) -> Imported:
    """Make a checkpoint of a safetensors file's tensors, and let the new ref ``ref`` name it.

    Each tensor becomes an entry of role weight, streamed. Of a file that :func:`export_weights` wrote, buffers become
    buffers and the other names of shared tensors aliases again; metadata of other tools is passed over. The checkpoint
    has no parent, no generators and no optimizer.

    Raises:
        RefusedError: ``ref`` names something already, the file has no tensors or a dtype that format 1 lacks, or it
            changed meanwhile; the ref was not moved.
        NotFoundError, MalformedError: the file is not there, or no safetensors file.
    """
    if step < 0:
        raise UsageError(f"step {step}", "a step is at least 0")
    attempt = store.begin(check_ref_name(ref))
    if attempt.parent is not None:
        why = f"it names {attempt.parent} already, and an import continues nothing"
        raise RefusedError(f"ref {ref}", why, "import to a new ref")
    with store.lease(), open_tensor_file(path) as file:
        if not file.tensors:
            raise RefusedError(f"file {path}", "it holds no tensors")
        meter = Meter(sum(tensor.nbytes for tensor in file.tensors), progress)
        contents = _contents(path, file, meter)
        written = write_contents(contents, 0, 1, store.objects)
    receipt = ShardReceipt(
        attempt=attempt.nonce,
        index=0,
        count=1,
        step=step,
        parent=None,
        run=None,
        binding=values.to_json({}),
        progress=Progress(),
        files=None,
        shard=written.digest,
    )
    root = store.commit(attempt, [receipt])
    return Imported(root, len(file.tensors), sum(tensor.nbytes for tensor in file.tensors))


def named_tensor(entry: TensorEntry, source: ChunkSource, meter: Meter) -> NamedTensor:
    """An entry on its way into a file, under its path."""

    def chunks() -> Iterator[bytes]:
        return meter.passing(source.read_all(entry))

    return NamedTensor(entry.path, entry.dtype, entry.shape, entry.digest, chunks)


def alias_names(closure: Closure) -> dict[str, str]:
    """Owner by every other name of a tensor, within shards and across them, sorted."""
    checkpoint = closure.checkpoint
    ties: Iterable[Alias] = checkpoint.ties if checkpoint else ()
    aliases = [*ties, *(alias for view in closure.shards.values() for alias in view.shard.aliases)]
    return {alias.path: alias.owner for alias in sorted(aliases, key=lambda alias: alias.path.encode())}


def _contents(path: Path, file: TensorFile, meter: Meter) -> Contents:
    aliases, buffers = _stated(path, file)
    names = {tensor.name for tensor in file.tensors}
    for alias in aliases:
        if alias.path in names or alias.owner not in names:
            why = f"its metadata calls {alias.path!r:.120} another name of {alias.owner!r:.120}, and its tensors do not"
            raise MalformedError(f"file {path}", why)

    def entry(tensor: StoredTensor) -> TensorBytes:
        role = BUFFER if tensor.name in buffers else WEIGHT
        return TensorBytes(tensor.name, role, tensor.dtype, tensor.shape, lambda: meter.passing(tensor.chunks()))

    return Contents(tensors=[entry(tensor) for tensor in file.tensors], aliases=aliases)


def _stated(path: Path, file: TensorFile) -> tuple[list[Alias], frozenset[str]]:
    """Aliases and names of buffers, as the metadata of our own exports has them."""
    text = file.metadata.get(METADATA)
    if text is None:
        return [], frozenset()
    what = f"metadata {METADATA!r} of file {path}"
    fields = Fields(canonical.decode(text.encode(), _METADATA_LIMIT), what)
    owners, buffers = fields.take("aliases"), fields.take("buffers")
    fields.digest("root")
    fields.count("step")
    fields.end()
    if type(owners) is not dict or type(buffers) is not list or any(type(name) is not str for name in buffers):
        raise MalformedError(what, "its aliases are no object or its buffers no list of names")
    aliases = []
    for name, owner in owners.items():
        if type(owner) is not str or owner.encode() >= name.encode():
            raise MalformedError(what, f"the owner of {name!r:.120} is not the bytewise smallest name")
        aliases.append(Alias(name, owner))
    return aliases, frozenset(name for name in buffers if type(name) is str)
