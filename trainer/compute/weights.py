"""Weights in safetensors files: a shard reads the header and the byte ranges of its own tensors, and nothing else.

Reading and splitting work on bytes and need no torch; :func:`load` fills a module. The layout is written here and not
by the safetensors library, because its order of tensors is not promised between releases, and the digests of these
files are frozen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from ckptstore.errors import CorruptError, MalformedError, MismatchError, NotFoundError
from trainer.compute.config import Shape, Table
from trainer.errors import of_system

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

HEADER_LIMIT = 100 * 1000 * 1000  # bytes; the limit of the public format
_DIMENSIONS, _SIZE = 64, 2**53  # of them, and of each; what is multiplied is bounded before
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored: dtype as safetensors names it (a key of :data:`ITEM_BYTES`), shape, row-major little-endian
    bytes."""

    dtype: str
    shape: Shape
    data: bytes


Tensors: TypeAlias = Iterator[StoredTensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a file: dtype, shape, and its bytes ``[start, stop)``, counted from the file's start."""

    dtype: str
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Read:
    """Tensors by name, and how many bytes of the file were read for them, its header included."""

    tensors: Mapping[str, StoredTensor]
    bytes_read: int


def read(path: Path, names: Iterable[str]) -> Read:
    """The named tensors of a safetensors file.

    Raises:
        NotFoundError: the file, or a named tensor in it, is absent.
        MalformedError: not a safetensors file, or one that contradicts itself.
        CorruptError: the file ends before its data does.
    """
    with _opened(path) as (file, found, header):
        tensors = {name: _stored(file, path, name, _known(found, name, path)) for name in names}
    return Read(tensors, header + sum(len(tensor.data) for tensor in tensors.values()))


def places(path: Path) -> dict[str, Place]:
    """Dtype, shape and byte range of every tensor of a file, by reading its header alone. Raises as :func:`read`."""
    with _opened(path) as (_, found, _):
        return found


def decode(data: bytes, name: str) -> dict[str, StoredTensor]:
    """Every tensor of a whole file, in the order in which they lie. Raises as :func:`read`, calling it ``name``."""
    found, _ = _header(BytesIO(data), name, len(data))
    return {
        tensor: StoredTensor(place.dtype, place.shape, data[place.start : place.stop])
        for tensor, place in found.items()
    }


def encode(tensors: Mapping[str, StoredTensor]) -> bytes:
    """A safetensors file of ``tensors`` in the order given; the same tensors in the same order are the same bytes."""
    header = _encode_header([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])
    return b"".join((header, *(tensor.data for tensor in tensors.values())))


def write(path: Path, table: Sequence[tuple[str, str, Shape]], tensors: Iterable[StoredTensor]) -> None:
    """Write a new safetensors file, the bytes of :func:`encode`, holding no more than one tensor.

    Args:
        path: of the file; its folder is there.
        table: name, dtype and shape of each tensor.
        tensors: the same tensors in the same order, each asked for when it is its turn.

    Raises:
        MismatchError: a tensor is not as the table says.
        BackendError: the file is there already or cannot be written.
    """
    try:
        with path.open("xb") as file:
            file.write(_encode_header(table))
            for (name, dtype, shape), tensor in zip(table, tensors, strict=True):
                if (tensor.dtype, tensor.shape, len(tensor.data)) != (dtype, shape, prod(shape) * ITEM_BYTES[dtype]):
                    why = f"{tensor.dtype} {list(tensor.shape)} came, {dtype} {list(shape)} was announced"
                    raise MismatchError(f"tensor {name}", why)
                file.write(tensor.data)
    except OSError as error:
        raise of_system(error, f"writing {path}") from None


def load(module: Module, path: Path, table: Table) -> int:
    """Fill the parameters of ``module`` in place with the tensors of ``table``, BF16 and FP16 widened to FP32 exactly.

    Args:
        module: its parameters are FP32 and have exactly the names and shapes of ``table``.
        path: a file that has at least these tensors.
        table: (name, shape) of every tensor that the shard owns.

    Returns:
        Bytes read from the file.

    Raises:
        MismatchError: module, table and file do not agree; nothing was changed then.
    """
    import torch

    parameters = dict(module.named_parameters())
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    with _opened(path) as (file, found, header), torch.no_grad():
        _require_fit(parameters, found, path, table)
        for name, parameter in parameters.items():
            tensor = _stored(file, path, name, found[name])  # one at a time, so that no shard is held twice
            stored_values = torch.frombuffer(bytearray(tensor.data), dtype=dtypes[tensor.dtype])
            parameter.copy_(stored_values.reshape(tensor.shape))
    return header + sum(found[name].stop - found[name].start for name in parameters)


def _require_fit(parameters: Mapping[str, Parameter], found: Mapping[str, Place], path: Path, table: Table) -> None:
    """MismatchError unless parameters, file and table agree; NotFoundError if the file lacks a tensor of the table."""
    wrong = [f"{name} is not owned" for name in parameters.keys() - dict(table).keys()]
    wrong += [f"{name} is not in the module" for name in dict(table).keys() - parameters.keys()]
    for name, shape in table:
        stored = _known(found, name, path).shape
        if stored != shape:
            wrong.append(f"{name} has shape {list(stored)} in the file, expected {list(shape)}")
        if name in parameters and tuple(parameters[name].shape) != shape:
            wrong.append(f"{name} has shape {list(parameters[name].shape)} in the module, expected {list(shape)}")
    if wrong:
        raise MismatchError(f"weights {path.name}", "; ".join(sorted(wrong)))


def rounded(module: Module) -> dict[str, StoredTensor]:
    """The parameters of ``module`` rounded to BF16 (to nearest, ties to even), in the module's order."""
    import torch

    tensors = {}
    for name, parameter in module.named_parameters():
        narrow = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        tensors[name] = StoredTensor("BF16", tuple(narrow.shape), bytes(narrow.view(torch.uint8).flatten().tolist()))
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, dict[str, Place], int]]:
    """An open file, the place of each of its tensors, and the bytes that were read to know them."""
    try:
        with path.open("rb") as file:
            yield (file, *_header(file, path.name, path.stat().st_size))
    except FileNotFoundError:
        raise NotFoundError(f"weights {path.name}", "no such file", "stage the weights of this shard") from None
    except OSError as error:
        raise of_system(error, f"reading {path}") from None


def _known(found: Mapping[str, Place], name: str, path: Path) -> Place:
    if name not in found:
        raise NotFoundError(f"tensor {name}", f"not in {path.name}", "stage the weights of this shard")
    return found[name]


def _stored(file: BinaryIO, path: Path, name: str, place: Place) -> StoredTensor:
    file.seek(place.start)
    data = file.read(place.stop - place.start)
    if len(data) != place.stop - place.start:
        raise CorruptError(f"tensor {name} of {path.name}", "the file has become shorter", "fetch the file again")
    return StoredTensor(place.dtype, place.shape, data)


def _encode_header(table: Iterable[tuple[str, str, Shape]]) -> bytes:
    header, offset = {}, 0
    for name, dtype, shape in table:
        stop = offset + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _header(file: BinaryIO, name: str, size: int) -> tuple[dict[str, Place], int]:
    """Every tensor's place, and the bytes that were read to know them."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(HEADER_LIMIT, size - 8):
        raise MalformedError(f"weights {name}", f"a header of {length} bytes does not fit a file of {size} bytes")
    try:
        header = json.loads(file.read(length))
        found = {
            tensor: _place(tensor, entry, 8 + length) for tensor, entry in header.items() if tensor != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedError(f"weights {name}", f"its header is not one of safetensors ({error!s:.300})") from None
    end = 8 + length
    found = dict(sorted(found.items(), key=lambda item: item[1].start))
    for tensor, place in found.items():
        if place.start != end:
            raise MalformedError(f"tensor {tensor} of {name}", f"starts at byte {place.start}, expected {end}")
        end = place.stop
    if end != size:
        raise CorruptError(f"weights {name}", f"{size} bytes, its header describes {end}", "fetch the file again")
    return found, 8 + length


def _place(name: str, entry: Mapping[str, object], base: int) -> Place:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            if len(shape) > _DIMENSIONS or any(type(size) is not int or not 0 <= size < _SIZE for size in shape):
                raise ValueError(f"tensor {name:.120} has no shape that a tensor can have")
            wanted = prod(shape) * ITEM_BYTES[dtype]
            if stop - start != wanted:
                raise ValueError(f"tensor {name} of shape {shape} has {stop - start} bytes, expected {wanted}")
            return Place(dtype, tuple(shape), base + start, base + stop)
        case _:
            raise ValueError(f"tensor {name} has no dtype, shape and offsets")
