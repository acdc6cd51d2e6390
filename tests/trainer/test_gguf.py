"""GGUF files: what is in the header, single tensors by their bytes, and nothing believed that does not fit."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ckptstore.errors import CkptStoreError, CorruptError, MalformedError, NotFoundError
from tests.support.tinymodel import gguf_file, pair, stored, text, tiny_gguf, tiny_metadata, tiny_tensors
from trainer.starting.dequantise import dequantise
from trainer.starting.gguf import Gguf, read_header


def parse(tmp_path: Path, data: bytes) -> Gguf:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return read_header(path)


def header(tensors: int, pairs: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def test_metadata_and_tensors_come_back(tmp_path: Path) -> None:
    file = parse(tmp_path, tiny_gguf())
    for key, value in tiny_metadata().items():
        found = file.metadata[key]
        if isinstance(value, float):
            assert found == struct.unpack("<f", struct.pack("<f", value))[0]
        else:
            assert found == (tuple(value) if isinstance(value, list) else value)
    for name, encoding, shape, data in tiny_tensors():
        assert file.places[name].encoding.name == encoding
        assert file.places[name].shape == shape
        assert file.read(name) == data


def test_one_tensor_is_read_and_nothing_else(tmp_path: Path) -> None:
    file = parse(tmp_path, tiny_gguf())
    name = "blk.1.ffn_up.weight"
    place = file.places[name]
    data = bytearray(len(tiny_gguf()))
    data[place.start : place.stop] = tiny_gguf()[place.start : place.stop]
    file.path.write_bytes(data)  # all else is gone
    assert file.read(name) == tiny_gguf()[place.start : place.stop]


def test_blocks_become_the_values_that_their_formulas_say() -> None:
    eight = struct.pack("<e", 0.5) + struct.pack("<32b", *range(-16, 16))
    assert dequantise("t", "Q8_0", eight, (32,)).tolist() == [q / 2 for q in range(-16, 16)]
    four = struct.pack("<ee", 0.25, -1.0) + bytes(low | (15 - low) << 4 for low in range(16))
    expected = [low / 4 - 1 for low in range(16)] + [(15 - low) / 4 - 1 for low in range(16)]
    assert dequantise("t", "Q4_1", four, (1, 32)).tolist() == [expected]
    assert dequantise("t", "F32", struct.pack("<2f", 1.5, -0.0), (2,)).tobytes() == struct.pack("<2f", 1.5, -0.0)
    assert dequantise("t", "F16", struct.pack("<2e", 1.5, 6e-8), (2,)).tolist() == [1.5, 2**-24]
    assert dequantise("t", "BF16", b"\xc0\x3f\x01\x00", (2,)).tolist() == [1.5, 2**-133]


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_1", "F32"])
def test_what_is_no_number_is_refused(encoding: str) -> None:
    data = bytearray(stored(Random(1), encoding, (64,)))
    data[0:4] = b"\x00\x7e\x00\x7e" if encoding != "F32" else struct.pack("<f", float("nan"))
    with pytest.raises(CorruptError, match="no number"):
        dequantise("t", encoding, bytes(data), (64,))


def test_the_gguf_package_reads_the_same_values(tmp_path: Path) -> None:
    theirs = pytest.importorskip("gguf", reason="the gguf package is not installed")
    draw = Random(3)
    tensors = [(f"t{i}", e, (3, 64), stored(draw, e, (3, 64))) for i, e in enumerate(("F32", "F16", "Q4_1", "Q8_0"))]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file({"general.architecture": "llama", "general.alignment": 64}, tensors, 64))
    ours = read_header(path)
    for read in theirs.GGUFReader(path).tensors:
        place = ours.places[read.name]
        values = dequantise(read.name, place.encoding.name, ours.read(read.name), place.shape)
        expected = theirs.dequantize(np.array(read.data), read.tensor_type)
        assert values.tobytes() == expected.astype(np.float32).tobytes()


A = tensor("a", (32,), 0, 0)
NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9
LIES = {
    "another magic": (b"GGML" + bytes(60), MalformedError, "does not begin"),
    "version 2": (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), MalformedError, "version 2"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), MalformedError, "version 50331648"),
    "more tensors than bytes": (header(2**60, 0, b""), MalformedError, "do not fit"),
    "more pairs than bytes": (header(0, 2**60, b""), MalformedError, "do not fit"),
    "a text longer than the file": (header(0, 1, struct.pack("<Q", 2**40) + bytes(9)), MalformedError, "limit"),
    "an array longer than the file": (
        header(0, 1, text("k") + struct.pack("<IIQ", 9, 12, 2**61)),
        MalformedError,
        "do not fit",
    ),
    "arrays in arrays": (header(0, 1, text("k") + NESTED), MalformedError, "nested"),
    "a type that does not exist": (header(0, 1, text("k") + b"\r" + bytes(11)), MalformedError, "type 13"),
    "a text that is not UTF-8": (header(0, 1, text(b"\xff") + bytes(8)), MalformedError, "UTF-8"),
    "a key twice": (header(0, 2, pair("k", 1) * 2), MalformedError, "twice"),
    "no alignment": (header(0, 1, pair("general.alignment", 0)), MalformedError, "alignment"),
    "a tensor twice": (header(2, 0, A + tensor("a", (32,), 0, 128)) + bytes(400), MalformedError, "twice"),
    "tensors in each other": (header(2, 0, A + tensor("b", (32,), 0, 64)) + bytes(400), MalformedError, "within"),
    "a tensor beyond the end": (header(1, 0, A), CorruptError, "its header describes"),
    "an offset beyond the end": (header(1, 0, tensor("a", (1,), 0, 2**62)) + bytes(64), CorruptError, "describes"),
    "a shape beyond all": (header(1, 0, tensor("a", (2**62, 2**62), 0, 0)) + bytes(64), MalformedError, "does not fit"),
    "a shape of nothing": (header(1, 0, tensor("a", (0, 5), 0, 0)) + bytes(64), MalformedError, "does not fit"),
    "five dimensions": (header(1, 0, tensor("a", (1,) * 5, 0, 0)) + bytes(64), MalformedError, "5 dimensions"),
    "an encoding that is not read": (header(1, 0, tensor("a", (256,), 14, 0)) + bytes(300), MalformedError, "type 14"),
    "half a block": (header(1, 0, tensor("a", (33,), 8, 0)) + bytes(300), MalformedError, "blocks 32"),
    "an offset that is not aligned": (header(1, 0, tensor("a", (1,), 0, 4)) + bytes(300), MalformedError, "multiple"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path: Path, lie: str) -> None:
    data, error, words = LIES[lie]
    with pytest.raises(error, match=words):
        parse(tmp_path, data)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = tiny_gguf()
    end = read_header(_written(tmp_path, data)).places["token_embd.weight"].start
    for size in [*range(0, end, max(1, end // 150)), len(data) - 1]:
        with pytest.raises(CkptStoreError):
            read_header(_written(tmp_path, data[:size]))


def _written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    return path


def test_an_absent_file_or_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"absent\.gguf"):
        read_header(tmp_path / "absent.gguf")
    file = parse(tmp_path, tiny_gguf())
    with pytest.raises(NotFoundError, match="tensor t"):
        file.read("t")
    file.path.write_bytes(b"")
    with pytest.raises(CorruptError, match="shorter"):
        file.read("token_embd.weight")


def test_metadata_of_another_type_are_named(tmp_path: Path) -> None:
    file = parse(tmp_path, tiny_gguf())
    for read, key in (
        (file.whole, "general.architecture"),
        (file.number, "llama.block_count"),
        (file.text, "llama.block_count"),
        (file.texts, "tokenizer.ggml.token_type"),
    ):
        with pytest.raises(MalformedError, match=key):
            read(key)
