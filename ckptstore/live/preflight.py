"""Preflight: what no document could hold is refused before the first byte of a state is written."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical, values
from ckptstore.format.digest import Digest
from ckptstore.format.fields import DOCUMENT_LIMIT
from ckptstore.format.page import Entry, TensorEntry, paginate
from ckptstore.format.records import RECEIPT_LIMIT, ShardReceipt
from ckptstore.format.shard import Shard
from ckptstore.format.tensors import CHUNK
from ckptstore.live.capture import Captured
from ckptstore.live.tensors import DTYPES, TensorSource

_ORDINARY = 8192
"""Characters of a name, and chunks of a tensor, up to which an entry surely fits."""

_SMALL = frozenset(("none", "bool", "int", "f64"))

_ANY = Digest.of(b"")

_REST = 4096
"""Bytes of a receipt for all that is not its details."""


def check_fits(captured: Captured) -> None:
    """RefusedError if an entry, or what a shard says beside its entries, is larger than documents may be."""
    for source in captured.tensors:
        entry = _unusual(source)
        if entry is not None:
            list(paginate([entry]))
    for value in captured.values:
        if len(value.role) > 3 or len(value.path) > _ORDINARY or _tag(value.value) not in _SMALL:
            list(paginate([value]))
    described = Shard(0, 1, (), (), tuple(captured.rng), tuple(captured.optimizers), tuple(captured.aliases))
    try:
        described.encode()
    except MalformedError as error:
        why = (
            f"{len(captured.aliases)} other names of shared tensors, {len(captured.optimizers)} optimizers: {error.why}"
        )
        hint = "shorten the names, or the settings of the optimizers"
        raise RefusedError("what the shard says beside its tensors", why, hint) from error


def check_receipt(receipt: ShardReceipt) -> None:
    """RefusedError if states, cursors and binding are together larger than documents may be."""
    try:
        receipt.encode()
    except MalformedError as error:
        sizes = [
            (len(canonical.encode(state.value)), f"{state.kind} {state.name}") for state in receipt.progress.states
        ]
        listed = ", ".join(f"{name} {size}" for size, name in sorted(sizes, reverse=True)[:3])
        why = f"they take more than the {DOCUMENT_LIMIT} bytes of a document; the largest, in bytes: {listed or 'none'}"
        hint = "make what is large in them a buffer of a module that is saved"
        raise RefusedError("states, cursors and binding", why, hint) from error


def check_metrics(metrics: Mapping[str, object]) -> None:
    """RefusedError if metrics are no plain values, or larger than a receipt may be."""
    size = len(canonical.encode(values.to_json(dict(metrics), "metrics")))
    if size > RECEIPT_LIMIT - _REST:
        why = f"they take {size} bytes, and a receipt holds {RECEIPT_LIMIT}"
        raise RefusedError("metrics", why, "keep what is large in a file of its own")


def _unusual(source: TensorSource) -> Entry | None:
    """The entry of a tensor, with any digests, if its names or its number of chunks are worth a look."""
    shape = tuple(source.tensor.shape)
    count = -(-prod(shape) * source.tensor.element_size() // CHUNK)
    names = len(source.path) + sum(len(part) for part in source.role)
    if names <= _ORDINARY and count <= _ORDINARY and len(source.role) <= 3:
        return None
    return TensorEntry(source.path, source.role, DTYPES[source.tensor.dtype], shape, _ANY, (_ANY,) * count, None)


def _tag(value: object) -> object:
    return value.get("t") if isinstance(value, dict) else None
