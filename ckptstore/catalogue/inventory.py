"""Inventory: what a store's keys say, as plain rows.

They follow from the stored bytes alone, so that whoever makes them, and whenever, makes the same ones. Documents, refs
and receipts are read for it; never an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ckptstore.backends.protocol import ReadBackend
from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from ckptstore.findings import Finding, Kind, Place
from ckptstore.format import canonical
from ckptstore.format.canonical import encode
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.keys import document_key, object_key, parse_ref_key, receipt_key
from ckptstore.format.packs import PackLayout
from ckptstore.format.page import Entry, Role, TensorEntry, parse_page, show_role
from ckptstore.format.records import RECEIPT_LIMIT, RECORD_LIMIT, Receipt, RefRecord, ShardReceipt, attempt_subject
from ckptstore.format.shard import Shard
from ckptstore.format.tree import Preparation, Tree
from ckptstore.objects import Objects

Row: TypeAlias = "tuple[str, dict[str, int | str | None]]"
"""A table's name, and a row of it by column."""


def ref_rows(backend: ReadBackend, key: str) -> Iterator[Row]:
    """The row of one generation of a ref; of a damaged record a row of ``unreadable``; none if ``key`` is no record."""
    parsed = parse_ref_key(key)
    if parsed is None:
        return
    try:
        record = RefRecord.parse(backend.get(key, 0, RECORD_LIMIT + 1))
        if record.generation != parsed[1]:
            raise MalformedError(f"ref {parsed[0]}", f"the record says generation {record.generation}")
    except NotFoundError:
        return
    except (CorruptError, MalformedError) as error:
        yield _unreadable(key, error.code)
        return
    yield (
        "refs",
        {
            "name": parsed[0],
            "generation": record.generation,
            "root": _text(record.root),
            "previous": _text(record.previous),
            "nonce": record.nonce,
        },
    )


def receipt_rows(backend: ReadBackend, key: str) -> Iterator[Row]:
    """The row of one receipt, also of a worker's about its shard; of a damaged one a row of ``unreadable``."""
    try:
        data = backend.get(key, 0, RECEIPT_LIMIT + 1)
    except NotFoundError:
        return
    except CorruptError as error:
        yield _unreadable(key, error.code)
        return
    _, subject, name = key.split("/")
    if Digest.of(data).hex != name:
        yield _unreadable(key, CorruptError.code)
        return
    try:
        receipt = Receipt.parse(data)
        if receipt_key(receipt.subject, Digest.of(data)) != key:
            raise MalformedError("receipt", "it is about another subject than its key")
    except MalformedError as error:
        try:
            shard = ShardReceipt.parse(data)
            if attempt_subject(shard.attempt).hex != subject:
                raise MalformedError("shard receipt", "it is of another attempt than its key")
        except MalformedError:
            yield _unreadable(key, error.code)
            return
        receipt = Receipt(SHARD, Digest.parse(subject), shard.shard, 0, 0, 0, "none", "", "")
    yield receipt_row(receipt, Digest.parse(name))


SHARD = "shard"
"""Operation under which a worker's receipt about its shard is listed."""


def receipt_row(receipt: Receipt, digest: Digest) -> Row:
    """The row of a receipt whose digest is known."""
    return (
        "receipts",
        {
            "digest": str(digest),
            "subject": str(receipt.subject),
            "operation": receipt.operation,
            "closure": _text(receipt.closure),
            "documents": receipt.documents,
            "objects": receipt.objects,
            "bytes_read": receipt.bytes_read,
            "method": receipt.method,
            "time": receipt.time,
            "location": receipt.where,
            "exceptions": encode(list(receipt.exceptions)).decode(),
            "details": encode(receipt.details).decode(),
        },
    )


def document_rows(objects: Objects, digest: Digest) -> list[Row]:
    """The rows of a checkpoint, shard (with its pages), tree or preparation; none for another kind or an absent one.

    Of a document that is damaged, or a shard with a page that is not whole, there are only rows of ``unreadable``: each
    is asked for again until all is well.
    """
    found: list[Finding] = []
    data = objects.document(digest, Place(), found.append)
    if data is None:
        damaged = [finding for finding in found if finding.kind is not Kind.MISSING]
        return [_unreadable(finding.key, finding.kind.value) for finding in damaged]
    try:
        node = canonical.decode(data, DOCUMENT_LIMIT)
        kind = node.get("kind") if type(node) is dict else None
        if kind == "checkpoint":
            return list(_checkpoint_rows(str(digest), Checkpoint.parse(data)))
        if kind == "shard":
            return list(_shard_rows(objects, str(digest), Shard.parse(data)))
        if kind == "tree":
            return list(_tree_rows(str(digest), Tree.parse(data)))
        if kind == "preparation":
            parts = Preparation.parse(data)
            names = {name: str(getattr(parts, name)) for name in ("plan", "inputs", "sources")}
            return [("preparations", {"digest": str(digest), **names})]
    except MalformedError as error:
        return [_unreadable(document_key(digest), error.code)]
    return []


def _checkpoint_rows(root: str, checkpoint: Checkpoint) -> Iterator[Row]:
    yield (
        "checkpoints",
        {
            "root": root,
            "step": checkpoint.step,
            "parent": _text(checkpoint.parent),
            "run": _text(checkpoint.run),
            "state_root": str(checkpoint.state_root),
            "rng_root": str(checkpoint.rng_root),
            "files": _text(checkpoint.files),
            "shards": len(checkpoint.shards),
        },
    )
    for index, shard in enumerate(checkpoint.shards):
        yield "checkpoint_shards", {"root": root, "index": index, "shard": str(shard)}


def _shard_rows(objects: Objects, digest: str, shard: Shard) -> Iterator[Row]:
    found: list[Finding] = []
    pages: list[tuple[Digest, tuple[Entry, ...]]] = []
    for ref in shard.pages:
        data = objects.document(ref.digest, Place(), found.append)
        if data is None:
            continue
        try:
            entries = parse_page(data)
        except MalformedError:
            found.append(Finding(Kind.MALFORMED, Place(), document_key(ref.digest), "no page"))
            continue
        if (len(entries), entries[0].role, entries[0].path) != (ref.count, ref.role, ref.path):
            # Not read further: a forged shard could name one page a thousand times.
            raise MalformedError("shard", "one of its pages is not the one that it describes")
        pages.append((ref.digest, entries))
    if found:
        yield from (_unreadable(finding.key, finding.kind.value) for finding in found)
        return
    layouts: dict[Role, PackLayout] = {}
    for position, (page, entries) in enumerate(pages):
        yield "shard_pages", {"shard": digest, "position": position, "page": str(page)}
        yield from _page_rows(str(page), entries)
        for entry in entries:
            if isinstance(entry, TensorEntry) and entry.tail:
                layouts.setdefault(entry.role, PackLayout()).place(entry.path, entry.chunks[-1], entry.tail)
    for packs in shard.packs:
        lengths = layouts[packs.role].lengths() if packs.role in layouts else []
        if len(lengths) != len(packs.digests):
            raise MalformedError("shard", f"packs of {show_role(packs.role)} do not follow from its entries")
        yield from _use_rows(digest, packs.digests, lengths)
    yield (
        "shards",
        {
            "digest": digest,
            "index": shard.index,
            "count": shard.count,
            "entries": sum(len(entries) for _, entries in pages),
            "optimizers": encode([[o.name, o.type] for o in shard.optimizers]).decode(),
        },
    )


def _page_rows(page: str, entries: Sequence[Entry]) -> Iterator[Row]:
    yield "pages", {"digest": page, "entries": len(entries)}
    for position, entry in enumerate(entries):
        if not isinstance(entry, TensorEntry):
            continue
        yield (
            "tensors",
            {
                "page": page,
                "position": position,
                "path": entry.path,
                "role": encode(list(entry.role)).decode(),
                "dtype": entry.dtype,
                "shape": encode(list(entry.shape)).decode(),
                "digest": str(entry.digest),
                "bytes": entry.nbytes,
            },
        )
        lengths = entry.lengths()
        whole = len(lengths) - 1 if entry.tail else len(lengths)
        yield from _use_rows(page, entry.chunks[:whole], lengths[:whole])


def _tree_rows(digest: str, tree: Tree) -> Iterator[Row]:
    for file in tree.files:
        yield from _use_rows(digest, file.chunks, file.lengths())
    size = sum(file.size for file in tree.files)
    yield "trees", {"digest": digest, "files": len(tree.files), "bytes": size}


def _use_rows(holder: str, digests: Sequence[Digest], lengths: Sequence[int]) -> Iterator[Row]:
    for digest, length in zip(digests, lengths, strict=True):
        yield "objects", {"key": object_key(digest), "size": length}
        yield "object_uses", {"holder": holder, "key": object_key(digest)}


def _unreadable(key: str, why: str) -> Row:
    return "unreadable", {"key": key, "why": why}


def _text(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)
