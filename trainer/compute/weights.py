"""Weights in safetensors files: a shard reads the header and the byte ranges of its own tensors, and nothing else.

Reading and splitting work on bytes and need no torch; :func:`load` fills a module. The layout is written here and not
by the safetensors library, because its order of tensors is not promised between releases, and the digests of these
files are frozen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ckptstore.errors import CorruptError, MalformedError, MismatchError, NotFoundError
from trainer.compute.config import Shape, Table

if TYPE_CHECKING:
    from torch.nn import Module

HEADER_LIMIT = 100 * 1000 * 1000  # bytes; the limit of the public format
_DIMENSIONS, _SIZE = 64, 2**53  # of them, and of each; what is multiplied is bounded before
ITEM_BYTES = {"BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored: dtype as safetensors names it (``BF16``, ``F32``), shape, row-major little-endian bytes."""

    dtype: str
    shape: Shape
    data: bytes


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
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            places, done = _header(file, path.name, size)
            tensors = {}
            for name in names:
                if name not in places:
                    raise NotFoundError(f"tensor {name}", f"not in {path.name}", "stage the weights of this shard")
                place = places[name]
                file.seek(place.start)
                data = file.read(place.stop - place.start)
                done += len(data)
                tensors[name] = StoredTensor(place.dtype, place.shape, data)
    except FileNotFoundError:
        raise NotFoundError(f"weights {path.name}", "no such file", "stage the weights of this shard") from None
    return Read(tensors, done)


def places(path: Path) -> dict[str, Place]:
    """Dtype, shape and byte range of every tensor of a file, by reading its header alone. Raises as :func:`read`."""
    with path.open("rb") as file:
        return _header(file, path.name, path.stat().st_size)[0]


def decode(data: bytes, name: str) -> dict[str, StoredTensor]:
    """Every tensor of a whole file, in the order in which they lie. Raises as :func:`read`, calling it ``name``."""
    found, _ = _header(BytesIO(data), name, len(data))
    return {
        tensor: StoredTensor(place.dtype, place.shape, data[place.start : place.stop])
        for tensor, place in found.items()
    }


def encode(tensors: Mapping[str, StoredTensor]) -> bytes:
    """A safetensors file of ``tensors`` in the order given; the same tensors in the same order are the same bytes."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        stop = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight bytes
    return b"".join((len(text).to_bytes(8, "little"), text, *(tensor.data for tensor in tensors.values())))


def load(module: Module, path: Path, table: Table) -> int:
    """Fill the parameters of ``module`` in place with the tensors of ``table``, BF16 widened to FP32 exactly.

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
    found = read(path, (name for name, _ in table))
    wrong = [f"{name} is not owned" for name in parameters.keys() - dict(table).keys()]
    wrong += [f"{name} is not in the module" for name in dict(table).keys() - parameters.keys()]
    for name, shape in table:
        stored = found.tensors[name].shape
        if stored != shape:
            wrong.append(f"{name} has shape {list(stored)} in the file, expected {list(shape)}")
        if name in parameters and tuple(parameters[name].shape) != shape:
            wrong.append(f"{name} has shape {list(parameters[name].shape)} in the module, expected {list(shape)}")
    if wrong:
        raise MismatchError(f"weights {path.name}", "; ".join(sorted(wrong)))
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = found.tensors[name]
            stored_values = torch.frombuffer(bytearray(tensor.data), dtype=dtypes[tensor.dtype])
            parameter.copy_(stored_values.reshape(tensor.shape))
    return found.bytes_read


def rounded(module: Module) -> dict[str, StoredTensor]:
    """The parameters of ``module`` rounded to BF16 (to nearest, ties to even), in the module's order."""
    import torch

    tensors = {}
    for name, parameter in module.named_parameters():
        narrow = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        tensors[name] = StoredTensor("BF16", tuple(narrow.shape), bytes(narrow.view(torch.uint8).flatten().tolist()))
    return tensors


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
