"""The closed table of element types of format 1 (F-30): name and item size in bytes, nothing else is stored."""

from __future__ import annotations

from ckptstore.errors import MalformedError

ITEM_SIZES: dict[str, int] = {
    "bool": 1,
    "u8": 1,
    "i8": 1,
    "u16": 2,
    "i16": 2,
    "u32": 4,
    "i32": 4,
    "u64": 8,
    "i64": 8,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f8e4m3fnuz": 1,
    "f8e5m2fnuz": 1,
    "f8e8m0fnu": 1,
    "c32": 4,
    "c64": 8,
    "c128": 16,
}


def item_size(dtype: object) -> int:
    """Bytes of one element of ``dtype``. MalformedError if it is not in the table."""
    size = ITEM_SIZES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise MalformedError(f"dtype {dtype!r:.40}", "not in the closed table of format 1")
    return size
