"""Safetensors files, by the safetensors library: written from verified bytes, read as byte ranges. Needs no torch."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from ckptstore.backends.beside import remove_stale, temporary_beside
from ckptstore.backends.durable import give_new_name, read_range, storage_errors, sync, sync_folder, write_all
from ckptstore.errors import BackendError, CorruptError, MalformedError, NotFoundError, RefusedError
from ckptstore.format.digest import Digest
from ckptstore.format.tensors import CHUNK, tensor_digest
from ckptstore.format.values import checked_nbytes
from ckptstore.outside import require_outside

DTYPES: dict[str, tuple[str, str]] = {
    "bool": ("bool", "BOOL"),
    "u8": ("uint8", "U8"),
    "i8": ("int8", "I8"),
    "u16": ("uint16", "U16"),
    "i16": ("int16", "I16"),
    "u32": ("uint32", "U32"),
    "i32": ("int32", "I32"),
    "u64": ("uint64", "U64"),
    "i64": ("int64", "I64"),
    "f16": ("float16", "F16"),
    "bf16": ("bfloat16", "BF16"),
    "f32": ("float32", "F32"),
    "f64": ("float64", "F64"),
    "f8e4m3fn": ("float8_e4m3fn", "F8_E4M3"),
    "f8e5m2": ("float8_e5m2", "F8_E5M2"),
    "f8e4m3fnuz": ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
    "f8e5m2fnuz": ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    "f8e8m0fnu": ("float8_e8m0fnu", "F8_E8M0"),
    "c64": ("complex64", "C64"),
}
"""By dtype of the format: the library's name for it, and the code in the file. It has no c32 and no c128."""

_CODES = {code: dtype for dtype, (_, code) in DTYPES.items()}
_RESERVED = "__metadata__"
_SYSTEM_ERROR = re.compile(r"os error ([0-9]+)")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor on its way into a file: its name there, and a call that gives its bytes in chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: Digest
    chunks: Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: name, dtype of the format, shape, and a call that reads its bytes in chunks of 16 MiB."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """Length of the tensor in bytes."""
        return checked_nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file: its tensors in the order of their bytes, its metadata, its size in bytes."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    size: int


def write_tensor_file(path: Path, tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> int:
    """Write a new safetensors file, durably and never seen half written; returns its size in bytes.

    The library wants all bytes at hand, so they are first put into an unnamed file beside ``path``: there must be room
    for them twice on the disk, and memory is bounded. The finished file is read back and every tensor's digest
    compared. Its bytes follow from the arguments alone.

    Raises:
        RefusedError: a name or a dtype that such a file cannot hold (all are named), or ``path`` exists or
            lies in a store.
        NotFoundError: there is no folder for it.
        CorruptError: the file does not read back as it was written.
        NoSpaceError, ReadOnlyError, BackendError: it could not be written. Nothing is left behind.
    """
    require_outside(path)
    _check(path, tensors)
    what = f"writing {path}"
    with storage_errors(what, path.parent):
        there = path.parent.is_dir()
    if not there:
        raise NotFoundError(f"folder {path.parent}", "there is no such folder", "make it first")
    remove_stale(path.parent)
    # A folder, because the library puts a temporary of its own beside what it writes.
    folder = temporary_beside(path)
    partial_path = folder / "file"
    size = sum(checked_nbytes(tensor.dtype, tensor.shape) for tensor in tensors)
    with storage_errors(what, path, needed=size):
        try:
            folder.mkdir()
            with _gathered(folder, tensors) as specs, _library_errors(what):
                serialize_file(specs, partial_path, metadata=dict(metadata) or None)
            _order_metadata(partial_path)
            _compare(partial_path, path, tensors)
            if not give_new_name(partial_path, path):
                raise _exists(path)
            sync_folder(path.parent)
            return path.stat().st_size
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_tensor_file(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file that the library accepts; its tensors can be read within the block.

    Raises:
        NotFoundError: there is no such file.
        RefusedError: it is no regular file, holds a dtype that format 1 lacks, or changed while it was open.
        MalformedError: it is no safetensors file.
        BackendError: it cannot be read.
    """
    what = f"file {path}"
    with storage_errors(f"opening {what}", path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFoundError(what, "there is no such file") from None
    try:
        with storage_errors(f"reading {what}", path):
            before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise RefusedError(what, "not a regular file")
        try:
            with safe_open(path, framework="np", backend="pread") as library:
                names = library.offset_keys()
                slices = [library.get_slice(name) for name in names]
                described = [(name, s.get_dtype(), tuple(s.get_shape())) for name, s in zip(names, slices, strict=True)]
                metadata = dict(library.metadata() or {})
        except SafetensorError as error:
            raise MalformedError(what, f"not a safetensors file: {error}") from None
        except OSError as error:
            raise BackendError(what, f"{error}") from None
        unknown = [f"{name!r:.120} ({code})" for name, code, _ in described if code not in _CODES]
        if unknown:
            raise RefusedError(what, f"format 1 has no such dtype: {', '.join(unknown)}")
        with storage_errors(f"reading {what}", path):
            (header,) = _LENGTH.unpack(read_range(fd, 0, _LENGTH.size))
        offset = _LENGTH.size + header
        tensors = []
        for name, code, shape in described:
            length = checked_nbytes(_CODES[code], shape)
            tensors.append(StoredTensor(name, _CODES[code], shape, partial(_chunks, fd, offset, length, path)))
            offset += length
        if offset != before.st_size:
            raise MalformedError(what, f"{before.st_size} bytes, its header describes {offset}")
        yield TensorFile(tuple(tensors), metadata, before.st_size)
        with storage_errors(f"reading {what}", path):
            after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise RefusedError(what, "it changed while it was read", "try again when nobody writes to it")
    finally:
        os.close(fd)


def _chunks(fd: int, offset: int, length: int, path: Path) -> Iterator[memoryview]:
    for start in range(offset, offset + length, CHUNK):
        wanted = min(CHUNK, offset + length - start)
        with storage_errors(f"reading file {path}", path):
            data = read_range(fd, start, start + wanted)
        if len(data) != wanted:
            raise RefusedError(f"file {path}", "it became shorter while it was read")
        yield memoryview(data)


def _check(path: Path, tensors: Sequence[NamedTensor]) -> None:
    if os.path.lexists(path):
        raise _exists(path)
    lacking = [f"{tensor.name!r:.120} ({tensor.dtype})" for tensor in tensors if tensor.dtype not in DTYPES]
    if lacking:
        why = f"safetensors has no such dtype: {', '.join(lacking)}"
        raise RefusedError(f"file {path}", why, "ckpt restore writes these tensors as raw bytes")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name == _RESERVED or tensor.name in seen:
            why = "safetensors keeps this name for itself" if tensor.name == _RESERVED else "two tensors have this name"
            raise RefusedError(f"tensor {tensor.name!r:.120} in {path}", why)
        seen.add(tensor.name)


def _exists(path: Path) -> RefusedError:
    return RefusedError(f"file {path}", "it exists already", "choose another name, or remove it first")


@contextmanager
def _gathered(folder: Path, tensors: Sequence[NamedTensor]) -> Iterator[dict[str, TensorSpec]]:
    """The tensors' bytes in one mapped unnamed file, described as the library wants them."""
    with tempfile.TemporaryFile(dir=folder) as scratch:
        places = []
        at = 0
        for tensor in tensors:
            for chunk in tensor.chunks():
                scratch.write(chunk)
            length = checked_nbytes(tensor.dtype, tensor.shape)
            places.append((tensor, at, length))
            at += length
        scratch.flush()
        # A private mapping counts as writable, which is what ctypes wants to tell its address; nothing writes to it.
        with mmap.mmap(scratch.fileno(), max(1, at), access=mmap.ACCESS_COPY) if at else _nothing() as mapped:
            anchor = ctypes.c_char.from_buffer(mapped)
            start = ctypes.addressof(anchor)
            try:
                yield {
                    tensor.name: TensorSpec(
                        dtype=DTYPES[tensor.dtype][0],
                        shape=tensor.shape,
                        data_ptr=start + at,
                        data_len=length,
                    )
                    for tensor, at, length in places
                }
            finally:
                del anchor


def _nothing() -> mmap.mmap:
    return mmap.mmap(-1, 1)


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        number = _SYSTEM_ERROR.search(str(error))
        if number is not None:  # the library wraps what the system said
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise BackendError(what, f"the safetensors library says: {error}") from None


def _order_metadata(path: Path) -> None:
    """Sort the metadata in the header, which the library writes in an order of chance, and sync the file."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        (length,) = _LENGTH.unpack(read_range(fd, 0, _LENGTH.size))
        header = json.loads(read_range(fd, _LENGTH.size, _LENGTH.size + length))
        if _RESERVED in header:
            header[_RESERVED] = dict(sorted(header[_RESERVED].items()))
            text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
            if len(text) == length:
                os.lseek(fd, _LENGTH.size, os.SEEK_SET)
                write_all(fd, text, _LENGTH.size)
        os.fchmod(fd, 0o644)
        sync(fd)
    finally:
        os.close(fd)


def _compare(path: Path, shown: Path, tensors: Sequence[NamedTensor]) -> None:
    """Read a written file back and compare every tensor's digest."""
    expected = {tensor.name: tensor.digest for tensor in tensors}
    with open_tensor_file(path) as file:
        actual = {
            tensor.name: tensor_digest(tensor.dtype, tensor.shape, [Digest.of(chunk) for chunk in tensor.chunks()])
            for tensor in file.tensors
        }
    wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if wrong:
        listed = ", ".join(f"{name!r:.120}" for name in wrong[:8])
        raise CorruptError(f"file {shown}", f"does not read back as it was written: {listed}", "check the disk")
