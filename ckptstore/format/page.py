"""Pages: up to 1,024 entries of a shard, sorted by (role, path) (F-50 to F-56)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical, values
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.fields import Fields, as_list, close_document, open_document, parse_digest
from ckptstore.format.tensors import (
    CHUNK,
    INLINE,
    MAX_CHUNKS,
    SHORT,
    chunk_count,
    chunk_lengths,
    tensor_digest,
)
from ckptstore.format.values import checked_nbytes, read_shape

PAGE_ENTRIES = 1024
PAGE_BYTES = 2 * 2**20
ENTRY_BYTES = 3 * 2**19
PATH_BYTES = 64 * 2**10
ROLE_PARTS = 16

Role: TypeAlias = "tuple[str, ...]"

WEIGHT: Role = ("weight",)
BUFFER: Role = ("buffer",)
EXTRA: Role = ("extra",)
ALIAS: Role = ("alias",)
OPTIM = "optim"
HYPER = "hyper"


def show_role(role: Role) -> str:
    """A role for messages: its parts with ``/`` between them; what cannot be printed is escaped."""
    return "/".join(part if part.isprintable() else repr(part)[1:-1] for part in role)[:200]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its digest, and either its chunks in order or, up to 64 bytes, its bytes."""

    path: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    digest: Digest
    chunks: tuple[Digest, ...]
    inline: bytes | None

    @property
    def nbytes(self) -> int:
        """Length of the tensor in bytes."""
        return checked_nbytes(self.dtype, self.shape)

    @property
    def tail(self) -> int:
        """Length in bytes of the short last chunk that lies in a pack; 0 if there is none."""
        rest = self.nbytes % CHUNK
        return rest if self.inline is None and rest < SHORT else 0

    def lengths(self) -> list[int]:
        """Lengths in bytes of the stored chunks, in order; empty for an inline tensor."""
        return [] if self.inline is not None else list(chunk_lengths(self.nbytes))


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A typed value, as typed JSON."""

    path: str
    role: Role
    value: Json


@dataclass(frozen=True, slots=True)
class HyperEntry:
    """A parameter's membership in a group of an optimizer: its hyper-parameters are that group's."""

    path: str
    role: Role
    group: int


Entry: TypeAlias = TensorEntry | ValueEntry | HyperEntry


def make_tensor_entry(
    path: str, role: Role, dtype: str, shape: Sequence[int], chunks: Sequence[Digest], inline: bytes | None
) -> TensorEntry:
    """An entry with its tensor digest computed. For an inline tensor ``chunks`` is ignored.

    Raises:
        RefusedError: the tensor has more chunks than format 1 holds (256 GiB).
    """
    if len(chunks) > MAX_CHUNKS:
        what = f"{show_role(role)} {path!r:.120}"
        raise RefusedError(what, f"{len(chunks)} chunks, more than {MAX_CHUNKS} (256 GiB)", "split the tensor")
    if inline is not None:
        chunks = [Digest.of(inline)] if inline else []
    digest = tensor_digest(dtype, shape, chunks)
    return TensorEntry(path, role, dtype, tuple(shape), digest, () if inline is not None else tuple(chunks), inline)


def sort_key(role: Role, path: str) -> tuple[bytes, bytes]:
    """Order of entries: canonical bytes of the role, then UTF-8 bytes of the path."""
    return _role_bytes(role), path.encode()


@lru_cache(maxsize=1024)
def _role_bytes(role: Role) -> bytes:
    """Canonical bytes of a role; most entries have one of a few."""
    return canonical.encode(list(role))


def encode_entry(entry: Entry) -> Json:
    """The JSON of one entry."""
    body: dict[str, Json] = {"path": entry.path, "role": list(entry.role)}
    if isinstance(entry, TensorEntry):
        tensor: dict[str, Json] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "digest": str(entry.digest),
        }
        if entry.inline is not None:
            tensor["inline"] = entry.inline.hex()
        else:
            tensor["chunks"] = [str(chunk) for chunk in entry.chunks]
        body["tensor"] = tensor
    elif isinstance(entry, ValueEntry):
        body["value"] = entry.value
    else:
        body["group"] = entry.group
    return body


def parse_entry(node: Json) -> Entry:
    """One entry, checked in itself: role, sizes, chunk count, tensor digest, typed value."""
    fields = Fields(node, "entry")
    path = fields.text("path", empty=True)
    fields.where = f"entry {path!r:.120}"
    role = parse_role(fields.take("role"), fields.where)
    entry: Entry
    if fields.has("tensor"):
        entry = _parse_tensor(path, role, Fields(fields.take("tensor"), fields.where))
    elif fields.has("value"):
        value = fields.take("value")
        values.from_json(value, fields.where)
        entry = ValueEntry(path, role, value)
    else:
        entry = HyperEntry(path, role, fields.count("group"))
    fields.end()
    _check_role(entry, fields.where)
    return entry


def paginate(entries: Iterable[Entry]) -> Iterator[tuple[tuple[Entry, ...], bytes]]:
    """Cut sorted entries into pages: (entries, document bytes) each.

    A page ends before an entry with which it would have more than 1,024 entries or more than 2 MiB of encoded entries.

    Raises:
        RefusedError: one entry alone is too large (its path, its role, its value or its number of chunks).
    """
    page: list[Entry] = []
    size = 0
    for entry in entries:
        cost = len(canonical.encode(encode_entry(entry)))
        what = f"{show_role(entry.role)} {entry.path!r:.80}"
        if cost > ENTRY_BYTES or len(entry.path.encode()) > PATH_BYTES:
            raise RefusedError(what, f"its entry of {cost} bytes is too large")
        if len(entry.role) > ROLE_PARTS:
            raise RefusedError(what, f"its role has more than {ROLE_PARTS} parts", "nest this state less deeply")
        if page and (len(page) == PAGE_ENTRIES or size + cost > PAGE_BYTES):
            yield tuple(page), encode_page(page)
            page, size = [], 0
        page.append(entry)
        size += cost
    if page:
        yield tuple(page), encode_page(page)


def encode_page(entries: Sequence[Entry]) -> bytes:
    """Document bytes of a page."""
    return close_document("page", {"entries": [encode_entry(entry) for entry in entries]})


def parse_page(data: bytes) -> tuple[Entry, ...]:
    """Entries of a page document: 1 to 1,024, strictly sorted."""
    fields = open_document(data, "page")
    entries = fields.items("entries", parse_entry)
    fields.end()
    if not 1 <= len(entries) <= PAGE_ENTRIES:
        raise MalformedError("page", f"{len(entries)} entries")
    keys = [sort_key(entry.role, entry.path) for entry in entries]
    if any(left >= right for left, right in pairwise(keys)):
        raise MalformedError("page", "entries are not sorted by (role, path), or one repeats")
    return entries


def parse_role(node: Json, where: str) -> Role:
    """A role: 1 to 16 texts."""
    role = []
    for part in as_list(node, where):
        if type(part) is not str:
            raise MalformedError(where, "a role is a list of texts")
        role.append(part)
    if not 1 <= len(role) <= ROLE_PARTS:
        raise MalformedError(where, f"a role has 1 to {ROLE_PARTS} parts")
    return tuple(role)


def _parse_tensor(path: str, role: Role, fields: Fields) -> TensorEntry:
    dtype = fields.text("dtype")
    shape = tuple(read_shape(fields.take("shape"), fields.where))
    digest = fields.digest("digest")
    inline: bytes | None = None
    chunks: tuple[Digest, ...] = ()
    nbytes = checked_nbytes(dtype, shape)
    if nbytes <= INLINE:
        text = fields.text("inline", empty=True)
        try:
            inline = bytes.fromhex(text)
        except ValueError:
            raise MalformedError(fields.where, "inline bytes are not hex") from None
        if len(inline) != nbytes or inline.hex() != text:
            raise MalformedError(fields.where, "inline bytes do not fit dtype and shape")
    else:
        if chunk_count(nbytes) > MAX_CHUNKS:
            raise MalformedError(fields.where, f"more than {MAX_CHUNKS} chunks")
        chunks = fields.items("chunks", lambda node: parse_digest(node, fields.where))
        if len(chunks) != chunk_count(nbytes):
            raise MalformedError(fields.where, f"{len(chunks)} chunks for {nbytes} bytes")
    fields.end()
    entry = make_tensor_entry(path, role, dtype, shape, chunks, inline)
    if entry.digest != digest:
        raise MalformedError(fields.where, f"tensor digest {digest} does not follow from its chunks ({entry.digest})")
    return entry


def _check_role(entry: Entry, where: str) -> None:
    """Each role holds one kind of entry."""
    name, size = entry.role[0], len(entry.role)
    fits = {
        "weight": isinstance(entry, TensorEntry) and size == 1,
        "buffer": isinstance(entry, TensorEntry) and size == 1,
        "extra": isinstance(entry, TensorEntry) or (isinstance(entry, ValueEntry) and size == 1),
        OPTIM: not isinstance(entry, HyperEntry) and size >= 3,
        HYPER: isinstance(entry, HyperEntry) and size == 2,
    }.get(name)
    if not fits:
        raise MalformedError(where, f"role {show_role(entry.role)} does not hold this kind of entry")
