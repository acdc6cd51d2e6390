"""Tensors: the closed table of types, shapes, chunks, and the digest that binds all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format.digest import Digest
from ckptstore.format.dtypes import ITEM_SIZES, item_size
from ckptstore.format.page import (
    WEIGHT,
    TensorEntry,
    encode_page,
    make_tensor_entry,
    parse_page,
)
from ckptstore.format.tensors import CHUNK, INLINE, MAX_CHUNKS, chunk_count, chunk_lengths, tensor_digest
from ckptstore.format.values import checked_nbytes
from tests.format.strategies import patient

SPECIAL_SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (0, 3), (3, 0), (1, 1), (0, 0), (3,), (1, 3), (3, 1)]


def test_the_table_of_types_is_closed() -> None:
    """F-30."""
    by_size = {
        1: "bool u8 i8 f8e4m3fn f8e5m2 f8e4m3fnuz f8e5m2fnuz f8e8m0fnu",
        2: "u16 i16 f16 bf16",
        4: "u32 i32 f32 c32",
        8: "u64 i64 f64 c64",
        16: "c128",
    }
    assert {name: size for size, names in by_size.items() for name in names.split()} == ITEM_SIZES
    for name in ("", "u4", "F32", "f4e2m1fn_x2", "qint8", "bits8", None, 4, ["f32"]):
        with pytest.raises(MalformedError, match="closed table"):
            item_size(name)


def test_special_shapes_of_every_type_have_digests_of_their_own() -> None:
    """F-35 (B038, pytorch#131976): (0,), (0, 3) and (3, 0) differ from each other and by type, and none has a byte."""
    digests = set()
    for dtype, size in ITEM_SIZES.items():
        for shape in SPECIAL_SHAPES:
            nbytes = checked_nbytes(dtype, shape)
            entry = make_tensor_entry("t", WEIGHT, dtype, shape, (), bytes(nbytes))
            assert parse_page(encode_page([entry])) == (entry,)
            assert nbytes % size == 0
            digests.add(entry.digest)
    assert len(digests) == len(ITEM_SIZES) * len(SPECIAL_SHAPES)


@pytest.mark.parametrize(
    "shape", [(-1,), (2, -1), (True,), (2**53,), (2**27, 2**27), (0, 2**53), (0, 2**40, 2**40), (1,) * 65, (1.0,)]
)
def test_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    """F-32."""
    with pytest.raises(MalformedError):
        checked_nbytes("u8", shape)


def test_sizes_end_at_2_to_the_53_minus_1() -> None:
    """F-32."""
    assert checked_nbytes("u8", (2**53 - 1,)) == 2**53 - 1
    assert checked_nbytes("u8", (1,) * 64) == 1
    for dtype, count in (("u8", 2**53), ("u16", 2**52), ("c128", 2**49)):
        with pytest.raises(MalformedError, match="too large"):
            checked_nbytes(dtype, (count,))


@given(st.integers(0, 2**40))
@settings(patient)
def test_chunks_cover_a_tensor_from_its_start(nbytes: int) -> None:
    """F-33."""
    count = chunk_count(nbytes)
    assert (count - 1) * CHUNK < nbytes <= count * CHUNK
    if count < 100:
        lengths = list(chunk_lengths(nbytes))
        assert sum(lengths) == nbytes
        assert all(length == CHUNK for length in lengths[:-1])
        assert len(lengths) == count


def test_the_constants_are_those_of_the_format() -> None:
    """F-33, F-34, F-36."""
    assert (CHUNK, INLINE, MAX_CHUNKS) == (16 * 2**20, 64, 16384)


@pytest.mark.parametrize(
    ("nbytes", "inline", "tail", "objects"),
    [
        (0, True, 0, 0),
        (64, True, 0, 0),
        (65, False, 65, 0),
        (262_143, False, 262_143, 0),
        (262_144, False, 0, 1),
        (CHUNK, False, 0, 1),
        (CHUNK + 1, False, 1, 1),
        (CHUNK + 262_143, False, 262_143, 1),
        (CHUNK + 262_144, False, 0, 2),
        (2 * CHUNK, False, 0, 2),
    ],
)
def test_bytes_lie_inline_in_a_pack_or_in_objects_by_their_length(
    nbytes: int, inline: bool, tail: int, objects: int
) -> None:
    """F-34, F-37."""
    chunks = [Digest.of(bytes([number])) for number in range(chunk_count(nbytes))]
    entry = make_tensor_entry("t", WEIGHT, "u8", (nbytes,), chunks, bytes(nbytes) if inline else None)
    (parsed,) = parse_page(encode_page([entry]))
    assert isinstance(parsed, TensorEntry)
    assert (parsed.inline is not None) == inline
    assert parsed.tail == tail
    assert len(parsed.lengths()) - bool(tail) == objects


def test_the_digest_binds_type_shape_and_every_chunk() -> None:
    """F-35."""
    a, b = Digest.of(b"a"), Digest.of(b"b")
    digests = [
        tensor_digest("u8", (2 * CHUNK,), [a, b]),
        tensor_digest("u8", (2 * CHUNK,), [b, a]),
        tensor_digest("u8", (2 * CHUNK,), [a, a]),
        tensor_digest("i8", (2 * CHUNK,), [a, b]),
        tensor_digest("u8", (2, CHUNK), [a, b]),
        tensor_digest("u8", (CHUNK, 2), [a, b]),
        tensor_digest("u8", (CHUNK + 1,), [a, b]),
        tensor_digest("u16", (CHUNK,), [a, b]),
        tensor_digest("u8", (CHUNK,), [a]),
    ]
    assert len(set(digests)) == len(digests)
    for count in (0, 1, 3):
        with pytest.raises(MalformedError, match="chunks"):
            tensor_digest("u8", (2 * CHUNK,), [a] * count)


def test_inline_bytes_count_as_one_chunk() -> None:
    """F-35."""
    entry = make_tensor_entry("t", WEIGHT, "f32", (), (), b"\0\0\x80\x3f")
    assert entry.digest == tensor_digest("f32", (), [Digest.of(b"\0\0\x80\x3f")])
    assert make_tensor_entry("t", WEIGHT, "f32", (0,), (), b"").digest == tensor_digest("f32", (0,), [])


def test_a_tensor_beyond_256_gib_is_refused_by_name() -> None:
    """F-36."""
    chunk = Digest.of(b"")
    edge = make_tensor_entry("edge", WEIGHT, "u8", (MAX_CHUNKS * CHUNK,), [chunk] * MAX_CHUNKS, None)
    assert parse_page(encode_page([edge])) == (edge,)
    with pytest.raises(RefusedError, match=r"'beyond'.*256 GiB"):
        make_tensor_entry("beyond", WEIGHT, "u8", (MAX_CHUNKS * CHUNK + 1,), [chunk] * (MAX_CHUNKS + 1), None)
    text = encode_page([edge]).replace(b"[%d]" % (MAX_CHUNKS * CHUNK), b"[%d]" % (MAX_CHUNKS * CHUNK + 1))
    with pytest.raises(MalformedError, match="more than 16384 chunks"):
        parse_page(text)


def test_a_list_of_chunks_that_does_not_fit_is_malformed_however_long() -> None:
    """F-33, F-54."""
    chunk = Digest.of(b"")
    entry = make_tensor_entry("t", WEIGHT, "u8", (CHUNK,), [chunk], None)
    for count in (0, 2, MAX_CHUNKS + 1):
        listed = ",".join([f'"{chunk}"'] * count)
        with pytest.raises(MalformedError):
            parse_page(encode_page([entry]).replace(f'["{chunk}"]'.encode(), f"[{listed}]".encode()))
