"""How a tensor becomes chunks, and its digest (F-31 to F-36)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptstore.errors import MalformedError
from ckptstore.format.digest import Digest
from ckptstore.format.merkle import MerkleTree
from ckptstore.format.values import checked_nbytes

CHUNK = 16 * 2**20
"""Bytes of a chunk: a tensor is cut from its start every 16 MiB."""

SHORT = 256 * 2**10
"""Chunks shorter than this many bytes go to packs; others are objects of their own."""

INLINE = 64
"""Tensors of at most this many bytes stand in their page entry."""

MAX_CHUNKS = 16384
"""Chunks of one tensor (256 GiB); longer tensors need chunk pages, which format 1 reserves."""

_TREE = MerkleTree("tensor")


def chunk_lengths(nbytes: int) -> Iterator[int]:
    """Lengths in bytes of the chunks of ``nbytes`` bytes: full ones, then the rest; none for 0 bytes."""
    for offset in range(0, nbytes, CHUNK):
        yield min(CHUNK, nbytes - offset)


def chunk_count(nbytes: int) -> int:
    """Number of chunks of ``nbytes`` bytes."""
    return -(-nbytes // CHUNK)


def tensor_digest(dtype: str, shape: Sequence[int], chunks: Sequence[Digest]) -> Digest:
    """Merkle root over the digests of a tensor's chunks, binding dtype, shape, length, chunk size and count.

    Raises:
        MalformedError: the number of chunks does not fit dtype and shape.
    """
    length = checked_nbytes(dtype, tuple(shape))
    if len(chunks) != chunk_count(length):
        raise MalformedError("tensor", f"{len(chunks)} chunks for {length} bytes")
    head = _TREE.head([_TREE.leaf(chunk.raw) for chunk in chunks])
    # Canonical JSON of F-22 for this subject, spelled out: it is made for every tensor that is written or read.
    dimensions = ",".join(map(str, shape))
    statement = (
        f'{{"chunk":{CHUNK},"count":{len(chunks)},"dtype":"{dtype}","length":{length},'
        f'"shape":[{dimensions}],"tree":"{head.hex()}"}}'
    )
    return _TREE.seal(statement.encode())
