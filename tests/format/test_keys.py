"""Keys: the same in a directory and in a bucket, and made of digests, numbers and nonces only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.backends.protocol import check_key
from ckptstore.errors import MalformedError, UsageError
from ckptstore.format import keys
from ckptstore.format.digest import Digest
from tests.format.strategies import digests, nonces, patient

D = Digest.parse("af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262")
"""The digest of nothing, as BLAKE3's authors publish it."""


def test_keys_are_those_of_the_table() -> None:
    """F-03, F-04, F-05, F-06, F-07."""
    assert Digest.of(b"") == D
    nonce = "0123456789abcdef0123456789abcdef"
    assert keys.object_key(D) == f"objects/af/{D.hex}"
    assert keys.document_key(D) == f"documents/af/{D.hex}"
    assert keys.ref_key("main", 12) == "refs/main/0000000000000012"
    assert keys.receipt_key(D, Digest.of(b"x")) == f"receipts/{D.hex}/{Digest.of(b'x').hex}"
    assert keys.pin_key(D, nonce) == f"pins/{D.hex}/{nonce}"
    assert keys.retired_key(D) == f"retired/{D.hex}"
    assert keys.lease_key(nonce) == f"leases/{nonce}"
    assert keys.collection_key(7) == "gc/0000000000000007"
    assert keys.parse_collection_key("gc/0000000000000007") == 7
    for name in ("gc/0000000000000000", "gc/7", "gc/now", "leases/0000000000000007"):
        assert keys.parse_collection_key(name) is None


@given(digests, digests, nonces, st.integers(1, 10**16 - 1))
@settings(patient)
def test_every_key_is_legal(digest: Digest, other: Digest, nonce: str, generation: int) -> None:
    """F-01."""
    for key in (
        keys.STORE_KEY,
        keys.object_key(digest),
        keys.document_key(digest),
        keys.ref_key("a" + "-" * 63, generation),
        keys.receipt_key(digest, other),
        keys.pin_key(digest, nonce),
        keys.retired_key(digest),
        keys.lease_key(nonce),
    ):
        assert check_key(key) == key
        assert key.split("/")[0] in (*keys.PREFIXES, keys.STORE_KEY)


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.b", "a b", "a\\b", "a\n", "é", "a\0", "x" * 513, "C:"]
)
def test_other_names_are_no_keys(key: str) -> None:
    """F-01."""
    with pytest.raises(UsageError):
        check_key(key)


@given(digests)
@settings(patient)
def test_the_digest_of_a_key_comes_back(digest: Digest) -> None:
    """F-03, F-04."""
    assert keys.digest_of_key(keys.object_key(digest)) == digest
    assert keys.digest_of_key(keys.document_key(digest)) == digest
    other = "00" if digest.hex[:2] != "00" else "01"
    assert keys.digest_of_key(f"objects/{other}/{digest.hex}") is None
    assert keys.digest_of_key(f"encoded/{digest.hex[:2]}/{digest.hex}") is None
    assert keys.digest_of_key(keys.retired_key(digest)) is None


@pytest.mark.parametrize("name", ["a", "0", "main", "run-1.b_c", "abc", "deadbeef-", "g000", "x" * 64])
def test_a_ref_name_is_accepted(name: str) -> None:
    """F-05."""
    assert keys.parse_ref_key(keys.ref_key(name, 7)) == (name, 7)


@pytest.mark.parametrize(
    "name", ["", "A", "-a", ".a", "_a", "a/b", "a b", "é", "a\n", "x" * 65, "abcd", "0123", "deadbeef", "f" * 64]
)
def test_a_ref_name_that_could_be_a_digest_or_a_path_is_refused(name: str) -> None:
    """F-05."""
    with pytest.raises(UsageError):
        keys.ref_key(name, 1)
    assert keys.parse_ref_key(f"refs/{name}/{1:016d}") is None


@pytest.mark.parametrize(
    "key",
    [
        "refs/main/0000000000000000",
        "refs/main/1",
        "refs/main/000000000000000a",
        "refs/main/0000000000000001/x",
        "pins/main/0000000000000001",
        "refs/main/٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠١",
    ],
)
def test_what_is_no_generation_is_not_read_as_one(key: str) -> None:
    """F-05."""
    assert keys.parse_ref_key(key) is None


def test_a_digest_has_one_text() -> None:
    """F-10."""
    assert str(D) == f"b3:{D.hex}"
    assert Digest.parse(str(D)) == Digest.parse(D.hex) == D
    for text in (
        D.hex.upper(),
        f"B3:{D.hex}",
        D.hex[:-1],
        D.hex + "0",
        f" {D.hex}",
        f"{D.hex}\n",
        "b3:",
        "",
        None,
        1,
        D.raw,
    ):
        with pytest.raises(MalformedError):
            Digest.parse(text)
    for raw in (b"", D.raw[:-1], D.raw + b"\0", bytearray(D.raw)):
        with pytest.raises(MalformedError):
            Digest(raw)  # type: ignore[arg-type]
