"""How much two tensors of one dtype differ, in numbers, from their stored bytes alone.

Bits come first: elements with equal bits are equal, NaNs included. Only elements whose bits differ are decoded, here
and without torch, also for the types that numpy does not have (bf16, fp8, complex half). Every figure is a maximum, a
count or a first place, so that figures of consecutive parts merge into those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UsageError
from ckptstore.format.dtypes import item_size

PIECE = 2**20

_Bits: TypeAlias = npt.NDArray[np.uint64]
_Reals: TypeAlias = npt.NDArray[np.float64]
_Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two equally long rows of elements.

    Attributes:
        elements: how many elements each side has.
        skipped: how many of them were known to be equal and not read.
        differing: how many differ in their bits.
        first: index of the first of those, counted from 0 in row-major order; None if there is none.
        equal_values: how many differ in their bits and have one value (-0.0 and +0.0; two encodings of true).
        unordered: how many differ in their bits and are NaN on at least one side, for instance in a NaN's payload. They
            have no part in the three maxima.
        max_abs: largest absolute difference; exact for integers, the modulus for complex numbers; inf for an infinity
            against anything else, and where it is beyond what a 64-bit float holds.
        max_rel: largest absolute difference divided by the larger of the two magnitudes, so at most 2 for finite
            values; 0 for equal values (also 0/0), inf for an infinity against anything else.
        max_ulp: largest number of steps from one value to the other through the values of the dtype; -0.0 and +0.0 are
            one value, an infinity is the step after the largest number; for complex numbers the larger of both parts.
        nan_left, nan_right: how many elements that were read are NaN on each side.
    """

    elements: int = 0
    skipped: int = 0
    differing: int = 0
    first: int | None = None
    equal_values: int = 0
    unordered: int = 0
    max_abs: int | float = 0
    max_rel: float = 0.0
    max_ulp: int = 0
    nan_left: int = 0
    nan_right: int = 0

    @property
    def same(self) -> bool:
        """Whether every bit is equal."""
        return self.differing == 0

    @staticmethod
    def unread(elements: int) -> Comparison:
        """For a part whose digests agree: equal, and nothing was read."""
        return Comparison(elements=elements, skipped=elements)

    def merge(self, following: Comparison) -> Comparison:
        """The comparison of this part and of the part that directly follows it, as one."""
        first = self.first
        if first is None and following.first is not None:
            first = self.elements + following.first
        return Comparison(
            elements=self.elements + following.elements,
            skipped=self.skipped + following.skipped,
            differing=self.differing + following.differing,
            first=first,
            equal_values=self.equal_values + following.equal_values,
            unordered=self.unordered + following.unordered,
            max_abs=max(self.max_abs, following.max_abs),
            max_rel=max(self.max_rel, following.max_rel),
            max_ulp=max(self.max_ulp, following.max_ulp),
            nan_left=self.nan_left + following.nan_left,
            nan_right=self.nan_right + following.nan_right,
        )

    def to_json(self) -> dict[str, int | float | str | None]:
        """All attributes by name. An infinity is the text ``"inf"``; there is never a NaN."""
        return {
            "elements": self.elements,
            "skipped": self.skipped,
            "differing": self.differing,
            "first": self.first,
            "equal_values": self.equal_values,
            "unordered": self.unordered,
            "max_abs": _finite(self.max_abs),
            "max_rel": _finite(self.max_rel),
            "max_ulp": self.max_ulp,
            "nan_left": self.nan_left,
            "nan_right": self.nan_right,
        }


def fold(parts: Iterable[Comparison]) -> Comparison:
    """The comparison of consecutive parts as one; of no part: of no elements."""
    whole = Comparison()
    for part in parts:
        whole = whole.merge(part)
    return whole


def compare(left: Any, right: Any, dtype: str) -> Comparison:
    """Compare two equally long buffers of elements of ``dtype``.

    Args:
        left, right: contiguous bytes-like objects: row-major, little-endian. Any alignment, never changed.
        dtype: a name of the format's table (ckptstore/format/dtypes.py).

    Memory beyond the buffers is bounded by a small multiple of 1 MiB.

    Raises:
        MalformedError: unknown dtype.
        UsageError: the lengths differ or are no multiple of the item size.
    """
    size = item_size(dtype)
    a, b = memoryview(left).cast("B"), memoryview(right).cast("B")
    if a.nbytes != b.nbytes or a.nbytes % size:
        why = f"{a.nbytes} and {b.nbytes} bytes, with {size} bytes an element"
        raise UsageError(f"comparison as {dtype}", why, "compare equally many whole elements")
    pieces = range(0, a.nbytes, PIECE)
    return fold(_compare_piece(a[at : at + PIECE], b[at : at + PIECE], dtype) for at in pieces)


def _finite(number: int | float) -> int | float | str:
    return number if math.isfinite(number) else "inf"


def _compare_piece(a: memoryview, b: memoryview, dtype: str) -> Comparison:
    elements = a.nbytes // item_size(dtype)
    equal = bytes(a) == bytes(b)  # copies, and still far faster than comparing the views
    if dtype in _INTEGERS:
        return Comparison(elements) if equal else _compare_integers(a, b, _INTEGERS[dtype])
    layout = _FLOATS[dtype]
    if equal:
        nans = int(np.count_nonzero(layout.nan(layout.bits(a))))
        return Comparison(elements, nan_left=nans, nan_right=nans)
    return _compare_floats(layout.bits(a), layout.bits(b), layout)


def _compare_integers(a: memoryview, b: memoryview, code: str) -> Comparison:
    """Exact in 64 bits: differences are taken modulo 2^64, larger minus smaller, and never as floats."""
    stored = "u1" if code == "?" else code
    left, right = np.frombuffer(a, stored), np.frombuffer(b, stored)
    at = np.flatnonzero(left != right)
    elements = len(left)
    left, right = left[at], right[at]
    if code == "?":
        left, right = (left != 0).astype("u1"), (right != 0).astype("u1")
    wide = "<i8" if left.dtype.kind == "i" else "<u8"
    x, y = left.astype(wide), right.astype(wide)
    x_bits, y_bits = x.view("<u8"), y.view("<u8")
    distance = np.where(x > y, x_bits - y_bits, y_bits - x_bits)
    # Negation modulo 2^64 is the magnitude, also of the most negative number.
    magnitude = np.maximum(np.where(x < 0, 0 - x_bits, x_bits), np.where(y < 0, 0 - y_bits, y_bits))
    relative = distance.astype("f8") / np.where(magnitude == 0, 1, magnitude).astype("f8")
    return Comparison(
        elements=elements,
        differing=len(at),
        first=int(at[0]) if len(at) else None,
        equal_values=int(np.count_nonzero(distance == 0)),
        max_abs=int(distance.max(initial=0)),
        max_rel=float(relative.max(initial=0.0)),
        max_ulp=int(distance.max(initial=0)),
    )


def _compare_floats(a: _Bits, b: _Bits, layout: _Float) -> Comparison:
    nan_a, nan_b = layout.nan(a), layout.nan(b)
    at = np.flatnonzero((a != b).any(axis=0))
    unordered = (nan_a | nan_b)[at]
    ordered = at[~unordered]
    x, y = a[:, ordered], b[:, ordered]
    ulp = _steps(x, y, layout)
    equal = (ulp == 0).all(axis=0)
    x_value, y_value = layout.values(x), layout.values(y)
    infinite = (np.isinf(x_value) | np.isinf(y_value)).any(axis=0)
    with np.errstate(all="ignore"):  # what overflows or is undefined here is replaced below
        absolute = _modulus(x_value - y_value)
        if layout.code == "<u8":
            # One power of two for both sides is exact, and lets nothing overflow or vanish.
            exponent = np.frexp(np.maximum(np.abs(x_value), np.abs(y_value)).max(axis=0))[1]
            x_value, y_value = np.ldexp(x_value, -exponent), np.ldexp(y_value, -exponent)
        relative = _modulus(x_value - y_value) / np.maximum(_modulus(x_value), _modulus(y_value))
    for figure in (absolute, relative):
        figure[infinite] = np.inf
        # Equal values are no difference, whatever the arithmetic made of them: 0/0, infinities beside a zero.
        figure[equal] = 0.0
    return Comparison(
        elements=a.shape[1],
        differing=len(at),
        first=int(at[0]) if len(at) else None,
        equal_values=int(np.count_nonzero(equal)),
        unordered=int(np.count_nonzero(unordered)),
        max_abs=float(absolute.max(initial=0.0)),
        max_rel=float(relative.max(initial=0.0)),
        max_ulp=int(ulp.max(initial=0)),
        nan_left=int(np.count_nonzero(nan_a)),
        nan_right=int(np.count_nonzero(nan_b)),
    )


def _steps(a: _Bits, b: _Bits, layout: _Float) -> _Bits:
    """Steps between values: with the sign taken off, patterns of one sign count up from zero."""
    if not layout.signed:
        return np.where(a > b, a - b, b - a)
    x, y = a & layout.magnitude, b & layout.magnitude
    return np.where((a ^ b) > layout.magnitude, x + y, np.where(x > y, x - y, y - x))


def _modulus(values: _Reals) -> _Reals:
    return np.asarray(np.abs(values[0]) if len(values) == 1 else np.hypot(values[0], values[1]))


@dataclass(frozen=True, slots=True)
class _Float:
    """How the bits of one float type (or of both parts of a complex one) are read.

    ``code`` is numpy's unsigned type of one part; ``parts`` 1 or 2; ``magnitude`` masks the sign off; patterns above
    ``infinity`` (the largest pattern that is not NaN), sign off, are NaN.
    ``table`` has the values of all patterns of a one-byte type.
    """

    code: str
    parts: int
    magnitude: int
    infinity: int
    decoded_as: str = ""
    table: _Reals | None = None
    signed: bool = True

    def bits(self, data: memoryview) -> npt.NDArray[Any]:
        """Patterns as an array of shape (parts, elements), not copied."""
        return np.frombuffer(data, self.code).reshape(-1, self.parts).T

    def nan(self, bits: npt.NDArray[Any]) -> _Mask:
        """Which elements are NaN, in any part."""
        if self.table is not None:
            return np.asarray(np.isnan(self.table)[bits[0]])
        return np.asarray(((bits & self.magnitude) > self.infinity).any(axis=0))

    def values(self, bits: npt.NDArray[Any]) -> _Reals:
        """Values as 64-bit floats, which hold every narrower type exactly."""
        if self.table is not None:
            return np.asarray(self.table[bits])
        stored = np.ascontiguousarray(bits)
        narrow = (stored.astype("<u4") << 16).view("<f4") if self.decoded_as == "bf16" else stored.view(self.decoded_as)
        with np.errstate(invalid="ignore"):  # a signalling NaN makes the conversion complain
            return np.asarray(narrow, "f8")


def _fp8(mantissa_bits: int, bias: int, special: str) -> _Float:
    """An 8-bit float: sign, exponent, mantissa.

    ``special`` says what is not a number of the usual kind: ``ieee`` (the highest exponent has infinity and NaNs),
    ``fn`` (only the pattern of all ones, with either sign, is NaN) or ``fnuz`` (only the pattern of a negative zero
    is NaN).
    """
    values = []
    for pattern in range(256):
        exponent, mantissa = (pattern & 0x7F) >> mantissa_bits, pattern & (2**mantissa_bits - 1)
        number = math.ldexp(mantissa + (2**mantissa_bits if exponent else 0), max(exponent, 1) - bias - mantissa_bits)
        if special == "ieee" and exponent == 2 ** (7 - mantissa_bits) - 1:
            number = math.nan if mantissa else math.inf
        if (special == "fn" and pattern & 0x7F == 0x7F) or (special == "fnuz" and pattern == 0x80):
            number = math.nan
        values.append(-number if pattern & 0x80 else number)
    return _Float("u1", 1, 0x7F, 0x7F, table=np.array(values))


_INTEGERS = {
    "bool": "?",
    "u8": "u1",
    "i8": "i1",
    "u16": "<u2",
    "i16": "<i2",
    "u32": "<u4",
    "i32": "<i4",
    "u64": "<u8",
    "i64": "<i8",
}

_FLOATS = {
    "f16": _Float("<u2", 1, 0x7FFF, 0x7C00, "<f2"),
    "bf16": _Float("<u2", 1, 0x7FFF, 0x7F80, "bf16"),
    "f32": _Float("<u4", 1, 0x7FFF_FFFF, 0x7F80_0000, "<f4"),
    "f64": _Float("<u8", 1, 2**63 - 1, 0x7FF << 52, "<f8"),
    "c32": _Float("<u2", 2, 0x7FFF, 0x7C00, "<f2"),
    "c64": _Float("<u4", 2, 0x7FFF_FFFF, 0x7F80_0000, "<f4"),
    "c128": _Float("<u8", 2, 2**63 - 1, 0x7FF << 52, "<f8"),
    "f8e4m3fn": _fp8(3, 7, "fn"),
    "f8e5m2": _fp8(2, 15, "ieee"),
    "f8e4m3fnuz": _fp8(3, 8, "fnuz"),
    "f8e5m2fnuz": _fp8(2, 16, "fnuz"),
    # Powers of two and one NaN: no sign, no zero, no infinity.
    "f8e8m0fnu": _Float(
        "u1", 1, 0xFF, 0xFE, table=np.array([*(math.ldexp(1, e - 127) for e in range(255)), math.nan]), signed=False
    ),
}
