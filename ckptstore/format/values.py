"""Typed values (F-40 to F-44): Python values with their exact types and bits, as canonical JSON.

Dispatch is on the exact type. What is not in the table is refused by name, never converted: ``1``, ``1.0``, ``True``,
``[1]`` and ``(1,)`` are five different values.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.dtypes import item_size
from ckptstore.format.fields import Fields, as_list

VALUE_TENSOR_LIMIT = 64 * 1024
VALUE_DEPTH = 56
"""Levels of JSON that one typed value may nest; 8 of a document's 64 are left for what stands around it."""

MAX_DIMENSIONS = 64

CROWDED = 256
"""Keys of one mapping that may have the same hash: with more of them, and only planted keys are so, a dict is slow."""

_INT = re.compile(r"-?[1-9][0-9]*|0")
_HEX = re.compile(r"[0-9a-f]*")  # in pairs it would take memory for each of them
_MAX_DECIMAL = 4000
_BEYOND_DECIMAL = 10**_MAX_DECIMAL  # made once: a generator's state has hundreds of integers


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A small tensor inside a value: dtype name, shape, and its logical row-major little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) > VALUE_TENSOR_LIMIT:
            why = f"{len(self.data)} bytes, over the limit of {VALUE_TENSOR_LIMIT}"
            raise RefusedError("tensor inside a value", why, "make it a buffer of a module that is saved")
        if checked_nbytes(self.dtype, self.shape) != len(self.data):
            raise MalformedError("tensor inside a value", "its length does not fit its dtype and shape")


@dataclass(frozen=True, slots=True)
class EntryRef:
    """Stands in a nested optimizer value for a tensor that is an entry of its own, under the role plus ``suffix``."""

    suffix: tuple[str, ...]


Scalar: TypeAlias = "bool | int | float | str | bytes | None"
Value: TypeAlias = "Scalar | TensorValue | EntryRef | tuple[Value, ...] | list[Value] | dict[Value, Value]"


def checked_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Length in bytes of a tensor; MalformedError for a negative dimension or a size beyond 2^53 - 1."""
    if len(shape) > MAX_DIMENSIONS:
        raise MalformedError(f"shape of {len(shape)} dimensions", f"more than {MAX_DIMENSIONS}")
    nbytes = nonzero = item_size(dtype)
    for size in shape:
        if type(size) is not int or size < 0:
            raise MalformedError(f"shape {shape!r:.60}", "dimensions are integers of at least 0")
        nbytes *= size
        # Zeros count as ones here: an empty tensor must not smuggle in strides that no reader can hold.
        nonzero *= size or 1
    if nonzero > canonical.MAX_INT:
        raise MalformedError(f"shape {shape!r:.60}", "too large")
    return nbytes


def to_json(value: object, where: str = "value", depth: int = 0) -> Json:
    """The typed JSON of ``value``. RefusedError naming ``where`` and the type if it cannot be stored exactly.

    ``depth`` is the number of levels of JSON around it within the same value.
    """
    if depth >= VALUE_DEPTH:
        raise RefusedError(f"{where:.200}", "nested too deeply, or part of itself", "store it in a flatter form")
    kind = type(value)
    if value is None:
        return {"t": "none"}
    if kind is bool:
        return {"t": "bool", "v": bool(value)}
    if kind is int:
        if abs(value) >= _BEYOND_DECIMAL:  # type: ignore[arg-type]
            raise RefusedError(where, f"an integer of more than {_MAX_DECIMAL} digits")
        return {"t": "int", "v": str(value)}
    if kind is float:
        return {"t": "f64", "v": struct.pack(">d", value).hex()}
    if kind is str:
        check_text(value, where)  # type: ignore[arg-type]
        return {"t": "str", "v": value}  # type: ignore[dict-item]
    if kind is bytes:
        return {"t": "bytes", "v": value.hex()}  # type: ignore[attr-defined]
    if kind is tuple or kind is list:
        items: list[Json] = [to_json(item, f"{where}[{i}]", depth + 2) for i, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return {"t": kind.__name__, "v": items}
    if kind is dict or kind is Counter or kind is OrderedDict:
        pairs: list[Json] = [
            [to_json(key, f"{where} key", depth + 3), to_json(item, f"{where}[{key!r:.60}]", depth + 3)]
            for key, item in value.items()  # type: ignore[attr-defined]
        ]
        if _crowded(value):  # type: ignore[arg-type]
            raise RefusedError(where, f"more than {CROWDED} of its keys have one hash", "use other keys")
        if kind is not OrderedDict:
            pairs.sort(key=_encoded_key)
            if any(_encoded_key(left) == _encoded_key(right) for left, right in pairwise(pairs)):
                raise RefusedError(where, "two keys are the same bits (NaN)", "use keys that are told apart")
        return {"t": _MAPPINGS[kind], "v": pairs}
    if kind is TensorValue:
        assert isinstance(value, TensorValue)
        return {"t": "tensor", "dtype": value.dtype, "shape": list(value.shape), "v": value.data.hex()}
    if kind is EntryRef:
        assert isinstance(value, EntryRef)
        return {"t": "entry", "v": list(value.suffix)}
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise RefusedError(where, f"a value of type {name} cannot be stored exactly", "convert it to plain Python values")


def from_json(node: Json, where: str = "value", depth: int = 0) -> Value:
    """The value of typed JSON, with the exact types it was made from. MalformedError if it is not typed JSON."""
    if depth >= VALUE_DEPTH:
        raise MalformedError(f"{where:.200}", f"a value nested deeper than {VALUE_DEPTH} levels")
    fields = Fields(node, where)
    tag = fields.text("t")
    value: Value
    if tag == "none":
        value = None
    elif tag == "bool":
        raw = fields.take("v")
        if type(raw) is not bool:
            raise MalformedError(where, "a bool that is not true or false")
        value = raw
    elif tag == "int":
        text = fields.text("v")
        if len(text.removeprefix("-")) > _MAX_DECIMAL or not _INT.fullmatch(text):
            raise MalformedError(where, "an int that is not a plain decimal number")
        value = int(text)
    elif tag == "f64":
        (value,) = struct.unpack(">d", _hex(fields, where, 8))
    elif tag == "str":
        value = fields.text("v", empty=True)
    elif tag == "bytes":
        value = _hex(fields, where)
    elif tag == "tuple":
        value = tuple(from_json(item, where, depth + 2) for item in as_list(fields.take("v"), where))
    elif tag == "list":
        value = [from_json(item, where, depth + 2) for item in as_list(fields.take("v"), where)]
    elif tag in _MAPPING_TYPES:
        value = _mapping(tag, as_list(fields.take("v"), where), where, depth + 3)
    elif tag == "tensor":
        dtype = fields.text("dtype")
        shape = tuple(read_shape(fields.take("shape"), where))
        if checked_nbytes(dtype, shape) > VALUE_TENSOR_LIMIT:
            raise MalformedError(where, f"a tensor inside a value of more than {VALUE_TENSOR_LIMIT} bytes")
        value = TensorValue(dtype, shape, _hex(fields, where))
    elif tag == "entry":
        value = EntryRef(fields.items("v", lambda item: _plain_text(item, where)))
    else:
        raise MalformedError(where, f"unknown type tag {tag!r:.40}")
    fields.end()
    return value


def plain_from_json(node: Json, where: str = "value") -> Value:
    """As :func:`from_json`, where there are no entries that the value could refer to."""
    value = from_json(node, where)
    if next(entry_refs(value), None) is not None:
        raise MalformedError(where, "refers to an entry, and stands where none is")
    return value


def entry_refs(value: object) -> Iterator[EntryRef]:
    """All references to entries inside a value."""
    if type(value) is EntryRef:
        yield value
    elif type(value) is tuple or type(value) is list:
        for item in value:
            yield from entry_refs(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from entry_refs(key)
            yield from entry_refs(item)


def read_shape(node: Json, where: str) -> list[int]:
    """A shape: a list of integers of at least 0."""
    shape: list[int] = []
    for size in as_list(node, where):
        if type(size) is not int or size < 0:
            raise MalformedError(where, "a dimension that is not an integer of at least 0")
        shape.append(size)
    return shape


_MAPPINGS: dict[type, str] = {dict: "dict", Counter: "counter", OrderedDict: "ordered-dict"}
_MAPPING_TYPES: dict[str, type[dict[Any, Any]]] = {"dict": dict, "counter": Counter, "ordered-dict": OrderedDict}


def _mapping(tag: str, pairs: list[Json], where: str, depth: int) -> dict[Value, Value]:
    result = _MAPPING_TYPES[tag]()
    hashes: Counter[int] = Counter()
    last = b""
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2:
            raise MalformedError(where, "a mapping item that is not a pair")
        key = from_json(pair[0], f"{where} key", depth)
        encoded = canonical.encode(pair[0])
        if tag != "ordered-dict" and encoded <= last:
            raise MalformedError(where, "mapping keys are not sorted by their encoding, or repeat")
        last = encoded
        try:
            # Texts have hashes that nobody can foresee; equal ones of integers are easily made (modulo 2^61 - 1).
            if type(key) is not str:
                hashes[hash(key)] += 1
                if hashes[hash(key)] > CROWDED:
                    raise MalformedError(where, f"a mapping of which more than {CROWDED} keys have one hash")
            if key in result:
                raise MalformedError(where, f"mapping keys {key!r:.40} are equal")
        except TypeError:
            raise MalformedError(where, "a mapping key that cannot be one") from None
        result[key] = from_json(pair[1], f"{where}[{key!r:.60}]", depth)
    return result


def _crowded(keys: Iterable[object]) -> bool:
    hashes = Counter(hash(key) for key in keys if type(key) is not str)
    return max(hashes.values(), default=0) > CROWDED


def _encoded_key(pair: Json) -> bytes:
    return canonical.encode(pair[0])  # type: ignore[index]


def _hex(fields: Fields, where: str, size: int | None = None) -> bytes:
    text = fields.text("v", empty=True)
    if not _HEX.fullmatch(text) or len(text) % 2 or (size is not None and len(text) != 2 * size):
        raise MalformedError(where, "not lowercase hex of the right length")
    return bytes.fromhex(text)


def _plain_text(node: Json, where: str) -> str:
    if type(node) is not str:
        raise MalformedError(where, "not a text")
    return node


def check_text(text: str, where: str) -> None:
    """RefusedError if ``text`` has no UTF-8 encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError(where, "the text holds a lone surrogate", "use valid Unicode") from None
