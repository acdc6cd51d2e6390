"""Where a store in a bucket is: its URL, and what may not stand in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore.backends.s3.address import S3Address
from ckptstore.errors import CkptStoreError, RefusedError, UsageError

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b", "bucket", "a/b/"),
        ("s3://bucket/a/b/", "bucket", "a/b/"),
        ("s3://my.bucket-1/a_b.c?threads=3", "my.bucket-1", "a_b.c/"),
    ],
)
def test_a_url_is_a_bucket_and_a_prefix(url: str, bucket: str, prefix: str) -> None:
    address = S3Address.parse(url)
    assert (address.bucket, address.prefix) == (bucket, prefix)
    assert S3Address.parse(address.url) == address


def test_every_option_comes_back_in_the_url() -> None:
    given = S3Address(
        "bucket",
        "a/",
        endpoint_url="http://127.0.0.1:8333",
        region="eu-central-1",
        profile="team a&b",
        ca_bundle="/etc/ca bundle.pem",
        addressing="path",
        checksums="sha256",
        sse="aws:kms",
        sse_kms_key_id="arn:aws:kms:eu:1:key/x",
        bucket_owner="123456789012",
        storage_class="STANDARD_IA",
        threads=3,
        attempt_seconds=0.5,
        operation_seconds=2.0,
    )
    assert S3Address.parse(given.url) == given
    assert "endpoint_url=http://127.0.0.1:8333" in given.url


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///key",
        "s3://B",
        "s3://a",
        "s3://bucket//a",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/.a",
        "s3://bucket/a b",
        "s3://bucket/ä",
        "s3://bucket/a#b",
        "s3://bucket/a?threads",
        "s3://bucket/a?threads=",
        "s3://bucket/a?threads=0",
        "s3://bucket/a?threads=x",
        "s3://bucket/a?threads=1&threads=2",
        "s3://bucket/a?attempt_seconds=nan",
        "s3://bucket/a?attempt_seconds=inf",
        "s3://bucket/a?attempt_seconds=9&operation_seconds=3",
        "s3://bucket/a?checksums=off",
        "s3://bucket/a?endpoint_url=ftp://x",
        "s3://bucket/a?endpoint_url=127.0.0.1",
        "s3://bucket/a?endpoint_url=http://h:port",
        "s3://bucket/" + "x" * 401,
        "s3://[",
    ],
)
def test_what_is_no_such_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        ckptstore.open(url)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA:{SECRET}@bucket/prefix",
        f"s3://{SECRET}@bucket",
        f"s3://bucket/prefix?secret_access_key={SECRET}",
        f"s3://bucket/prefix?endpoint_url=http://user:{SECRET}@host",
        f"s3://bucket/prefix?endpoint_url=http://host?token={SECRET}",
    ],
)
def test_a_credential_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        ckptstore.open(url)
    assert SECRET not in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize("storage_class", ["GLACIER", "DEEP_ARCHIVE"])
def test_an_archive_that_cannot_be_read_back_is_no_place_for_a_store(storage_class: str) -> None:
    with pytest.raises(RefusedError, match="read back"):
        ckptstore.open(f"s3://bucket/a?storage_class={storage_class}")


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_refused_with_our_error(text: str) -> None:
    try:
        address = S3Address.parse(f"s3://{text}")
    except CkptStoreError:
        return
    assert S3Address.parse(address.url) == address
