"""GGUF files, version 3, little-endian: metadata and places of tensors from the header, then single tensors by range.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, numbers of tensors and of metadata
pairs; the pairs; name, dimensions, type and offset of each tensor; data, aligned. Nothing in a file is believed before
it was checked against the file's own size.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from trainer.compute.config import Shape
from trainer.errors import of_system

MAGIC = b"GGUF"
VERSION = 3
HEADER_LIMIT = 256 * 2**20  # bytes in front of the data: vocabularies and merges are the most of them
STRING_LIMIT = 16 * 2**20  # bytes; a chat template is the longest that there is
_DEPTH = 4  # of arrays in arrays
_DIMENSIONS = 4
_ALIGNMENT_LIMIT = 2**16

_ALIGNMENT = "general.alignment"
_USUAL_ALIGNMENT = 32

Value = bool | int | float | str | tuple["Value", ...]

# Scalars of metadata by the number of their type.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class Encoding:
    """How values are stored: each ``block`` of them takes ``size`` bytes."""

    name: str
    block: int
    size: int


ENCODINGS: Mapping[int, Encoding] = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    3: Encoding("Q4_1", 32, 20),
    8: Encoding("Q8_0", 32, 34),
    30: Encoding("BF16", 1, 2),
}
"""The encodings that are read, by the number of their type in a file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: its encoding, its shape (row-major, rows first), its bytes ``[start, stop)`` in the file."""

    encoding: Encoding
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """The header of a file: metadata by key, and the place of each tensor by name."""

    path: Path
    metadata: Mapping[str, Value]
    places: Mapping[str, Place]

    def read(self, name: str) -> bytes:
        """The bytes of one tensor as they are stored; nothing else of the file is read.

        Raises:
            NotFoundError: there is no such tensor, or the file is gone.
            CorruptError: the file has become shorter.
            BackendError: it cannot be read.
        """
        if name not in self.places:
            raise NotFoundError(f"tensor {name}", f"not in {self.path.name}")
        place = self.places[name]
        try:
            with self.path.open("rb") as file:
                file.seek(place.start)
                data = file.read(place.stop - place.start)
        except FileNotFoundError:
            raise NotFoundError(f"weights {self.path}", "no such file") from None
        except OSError as error:
            raise of_system(error, f"reading {self.path}") from None
        if len(data) != place.stop - place.start:
            raise CorruptError(f"tensor {name} of {self.path.name}", "the file has become shorter")
        return data

    def whole(self, key: str) -> int:
        """The integer under ``key``. MalformedError if there is none."""
        value = self.metadata.get(key)
        if type(value) is not int:
            raise MalformedError(f"weights {self.path.name}", f"{key} is no integer")
        return value

    def number(self, key: str) -> float:
        """The float under ``key``. MalformedError if there is none."""
        value = self.metadata.get(key)
        if type(value) is not float:
            raise MalformedError(f"weights {self.path.name}", f"{key} is no floating-point number")
        return value

    def text(self, key: str) -> str:
        """The text under ``key``. MalformedError if there is none."""
        value = self.metadata.get(key)
        if type(value) is not str:
            raise MalformedError(f"weights {self.path.name}", f"{key} is no text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of texts under ``key``. MalformedError if there is none."""
        value = self.metadata.get(key)
        if type(value) is not tuple or any(type(one) is not str for one in value):
            raise MalformedError(f"weights {self.path.name}", f"{key} is no list of texts")
        return value  # type: ignore[return-value]


def read_header(path: Path) -> Gguf:
    """What a GGUF file holds, by reading its header alone.

    Raises:
        NotFoundError: there is no such file.
        MalformedError: not a GGUF file of this version, one that contradicts itself, or one with an encoding that is
            not read (named, with the tensor).
        CorruptError: the file ends before its data does.
        BackendError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            header = _Header(file, size, path.name)
            return Gguf(path, *header.parse())
    except FileNotFoundError:
        raise NotFoundError(f"weights {path}", "no such file") from None
    except OSError as error:
        raise of_system(error, f"reading {path}") from None


class _Header:
    """The bytes in front of the data, taken one after the other; ``left`` of them may still be taken."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file, self._size, self._name = file, size, name
        self._left = min(size, HEADER_LIMIT)

    def parse(self) -> tuple[dict[str, Value], dict[str, Place]]:
        if self._take(4) != MAGIC:
            raise self._wrong("it does not begin with GGUF")
        version = self._scalar("<I")
        if version != VERSION:
            raise self._wrong(f"version {version}, and only version {VERSION} (little-endian) is read")
        tensors, pairs = self._count("<Q", 24), self._count("<Q", 13)
        metadata: dict[str, Value] = {}
        for _ in range(pairs):
            key = self._string()
            if key in metadata:
                raise self._wrong(f"key {key!r:.120} is there twice")
            metadata[key] = self._value(self._scalar("<I"), 0)
        alignment = metadata.get(_ALIGNMENT, _USUAL_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _ALIGNMENT_LIMIT or alignment % 8:
            raise self._wrong(f"{_ALIGNMENT} {alignment!r:.40} is no multiple of 8 up to {_ALIGNMENT_LIMIT}")
        listed = [self._tensor(alignment) for _ in range(tensors)]
        data = self._file.tell()
        data += -data % alignment
        places: dict[str, Place] = {}
        for name, place in listed:
            if name in places:
                raise self._wrong(f"tensor {name!r:.120} is there twice")
            places[name] = Place(place.encoding, place.shape, data + place.start, data + place.stop)
        self._check_places(places)
        return metadata, places

    def _check_places(self, places: Mapping[str, Place]) -> None:
        end = 0
        for name, place in sorted(places.items(), key=lambda item: item[1].start):
            if place.start < end:
                raise self._wrong(f"tensor {name!r:.120} begins within another")
            end = place.stop
        if end > self._size:
            raise CorruptError(
                f"weights {self._name}", f"{self._size} bytes, its header describes {end}", "fetch the file again"
            )

    def _tensor(self, alignment: int) -> tuple[str, Place]:
        """Name and place of the next tensor, counted from where the data begin."""
        name = self._string()
        dimensions = self._scalar("<I")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise self._wrong(f"tensor {name!r:.120} has {dimensions} dimensions")
        # In the file the dimension that runs fastest comes first.
        shape = tuple(reversed([self._scalar("<Q") for _ in range(dimensions)]))
        number, start = self._scalar("<I"), self._scalar("<Q")
        if number not in ENCODINGS:
            known = ", ".join(one.name for one in ENCODINGS.values())
            raise self._wrong(f"tensor {name!r:.120} has type {number}, and only {known} are read")
        encoding, count = ENCODINGS[number], prod(shape)
        if not 0 < count <= 8 * self._size:  # no encoding has less than four bits a value
            raise self._wrong(f"tensor {name!r:.120} of shape {list(shape)} does not fit into the file")
        if shape[-1] % encoding.block:
            raise self._wrong(f"tensor {name!r:.120} has rows of {shape[-1]}, {encoding.name} blocks {encoding.block}")
        if start % alignment:
            raise self._wrong(f"tensor {name!r:.120} begins at {start}, no multiple of {alignment}")
        return name, Place(encoding, shape, start, start + count // encoding.block * encoding.size)

    def _value(self, number: int, depth: int) -> Value:
        if number == _STRING:
            return self._string()
        if number == _ARRAY:
            return self._array(depth)
        if number not in _SCALARS:
            raise self._wrong(f"a value of type {number}, which does not exist")
        if number == _BOOL:
            return self._take(1) != b"\0"
        value: int | float = self._unpack(_SCALARS[number], 1)[0]
        return value

    def _array(self, depth: int) -> Value:
        if depth >= _DEPTH:
            raise self._wrong(f"arrays nested deeper than {_DEPTH}")
        number = self._scalar("<I")
        if number in _SCALARS:
            return self._unpack(_SCALARS[number], self._count("<Q", struct.calcsize(_SCALARS[number])))
        count = self._count("<Q", 12 if number == _ARRAY else 8)
        return tuple(self._value(number, depth + 1) for _ in range(count))

    def _count(self, code: str, least: int) -> int:
        """A number of things that take at least ``least`` bytes each."""
        count = self._scalar(code)
        if count * least > self._left:
            raise self._wrong(f"{count} entries do not fit into what is left of it")
        return count

    def _string(self) -> str:
        length = self._scalar("<Q")
        if length > STRING_LIMIT:
            raise self._wrong(f"a text of {length} bytes, the limit is {STRING_LIMIT}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._wrong("a text is not UTF-8") from None

    def _scalar(self, code: str) -> int:
        value: int = struct.unpack(code, self._take(struct.calcsize(code)))[0]
        return value

    def _unpack(self, code: str, count: int) -> tuple[int | float, ...]:
        return struct.unpack(f"<{count}{code[1]}", self._take(count * struct.calcsize(code)))

    def _take(self, count: int) -> bytes:
        if count > self._left:
            raise self._wrong(f"its header ends too early, or is longer than {HEADER_LIMIT} bytes")
        data = self._file.read(count)
        if len(data) != count:
            raise self._wrong("it has become shorter while it was read")
        self._left -= count
        return data

    def _wrong(self, why: str) -> MalformedError:
        return MalformedError(f"weights {self._name}", why)
