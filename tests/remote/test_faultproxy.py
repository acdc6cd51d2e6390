"""Each fault of the proxy, as a client sees it: what tests of the store rely on."""

from __future__ import annotations

import gzip
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, IncompleteRead
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.support import s3 as support
from tests.support.faultactions import (
    Action,
    Blackhole,
    Call,
    Delay,
    Dribble,
    GoDown,
    LostAnswer,
    Overlong,
    Rate,
    ResetRequest,
    ResetResponse,
    Stall,
    Truncate,
    Twice,
)
from tests.support.faultanswers import (
    HeadSaysAbsent,
    HeadSaysPresent,
    HeadSaysSize,
    IgnoreConditional,
    ListingWithout,
    OwnEtags,
    PageSize,
    RefuseConditional,
    RefuseWrites,
    ReverseListing,
    Stale,
    Status,
    StorageClass,
)
from tests.support.faultbytes import (
    ContentEncoding,
    FlipRequest,
    FlipResponse,
    ForgetChecksums,
    OtherBody,
    OtherRange,
    StoreFraming,
    WholeInsteadOfRange,
    WrongContentRange,
)
from tests.support.faultproxy import FaultProxy
from tests.support.faultrules import Rule
from tests.support.http1 import Request
from tests.support.s3 import BUCKET, SharedServer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def named(value: object) -> str | None:
    """Tests are called after the actions alone, not after bodies."""
    return str(value) if isinstance(value, Action) else ""


BODY = random.Random(0).randbytes(60_000)


def once(proxy: FaultProxy, patience: float = 30) -> S3Client:
    """A client that asks once, waits ``patience`` seconds for each byte, and checks nothing."""
    return support.client(
        proxy.endpoint,
        retries={"total_max_attempts": 1},
        read_timeout=patience,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


class Through:
    """One object behind the proxy, and a client that asks once and believes what it is told."""

    def __init__(self, client: S3Client, proxy: FaultProxy) -> None:
        self.client = client
        self.proxy = proxy
        self.prefix = support.fresh_prefix()
        self.key = f"{self.prefix}/object"
        self.put(BODY)
        proxy.log.clear()

    def put(self, body: bytes = BODY, **options: Any) -> int:
        answer = self.client.put_object(Bucket=BUCKET, Key=self.key, Body=body, **options)
        return answer["ResponseMetadata"]["HTTPStatusCode"]

    def get(self, **options: Any) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=self.key, **options)["Body"].read()

    def lose_patience(self) -> None:
        """Wait no longer than it takes to see that nothing comes."""
        self.client.close()
        self.client = once(self.proxy, patience=0.3)

    def stored(self) -> bytes:
        """What really lies there."""
        with closing(support.client()) as client:
            return client.get_object(Bucket=BUCKET, Key=self.key)["Body"].read()

    def names(self) -> list[list[str]]:
        """Last parts of the keys, page by page."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=self.prefix)
        return [[item["Key"].rpartition("/")[2] for item in page.get("Contents", [])] for page in pages]


@pytest.fixture
def through(proxy: FaultProxy) -> Iterator[Through]:
    found = Through(once(proxy), proxy)
    yield found
    found.client.close()


def test_without_rules_it_changes_nothing(through: Through) -> None:
    assert through.put(b"") == 200
    assert through.get() == b""
    through.put()
    assert through.get() == BODY
    assert through.get(Range="bytes=10-19") == BODY[10:20]
    assert through.client.head_object(Bucket=BUCKET, Key=through.key)["ContentLength"] == len(BODY)
    assert through.names() == [["object"]]
    with pytest.raises(ClientError, match="404"):
        through.client.head_object(Bucket=BUCKET, Key=f"{through.key}/none")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        through.put(IfNoneMatch="*")
    delete = {"Objects": [{"Key": through.key}]}
    through.client.delete_objects(Bucket=BUCKET, Delete=delete)  # type: ignore[arg-type]
    assert through.names() == [[]]


def test_it_logs_what_came_and_what_was_answered(through: Through, proxy: FaultProxy) -> None:
    proxy.add(Delay(0.0), method="GET")
    through.put()
    through.get()
    put, get = proxy.log
    assert (put.method, put.status, put.faults, put.request_bytes) == ("PUT", 200, (), len(BODY))
    assert (get.method, get.status, get.faults, get.response_bytes) == ("GET", 200, ("Delay",), len(BODY))
    assert (proxy.count(), proxy.count("PUT"), proxy.count("GET", "/object$")) == (2, 1, 1)
    assert proxy.count("GET", "other") == 0


def test_a_rule_says_which_requests_and_how_many() -> None:
    get = Request((), b"", "GET", "/bucket/a?x=1")
    put = Request((), b"", "PUT", "/bucket/b")

    def taken(rule: Rule, *requests: Request) -> list[bool]:
        return [rule.takes(request) for request in requests]

    assert taken(Rule(Action()), get, put) == [True, True]
    assert taken(Rule(Action(), method="PUT"), get, put) == [False, True]
    assert taken(Rule(Action(), path=r"/a\?"), get, put) == [True, False]
    assert taken(Rule(Action(), when=lambda request: "x" in request.query), get, put) == [True, False]
    assert taken(Rule(Action(), skip=1, times=2), *[get] * 5) == [False, True, True, False, False]
    drawn = taken(Rule(Action(), probability=0.5, seed=7), *[get] * 100)
    assert drawn == taken(Rule(Action(), probability=0.5, seed=7), *[get] * 100)
    assert 20 < sum(drawn) < 80


@pytest.mark.parametrize(
    ("action", "code"),
    [
        (Status(503, "SlowDown", retry_after=1), "SlowDown"),
        (Status(503, "SlowDown", early=True), "SlowDown"),
        (Status(503), "503"),
        (Status(429, "TooManyRequests"), "TooManyRequests"),
        (Status(400, "ExpiredToken"), "ExpiredToken"),
        (Status(403, "RequestTimeTooSkewed"), "RequestTimeTooSkewed"),
        (Status(200, "InternalError"), "InternalError"),  # the success that carries an error
        (RefuseWrites(), "AccessDenied"),
    ],
    ids=named,
)
def test_an_error_is_answered_and_nothing_done(through: Through, proxy: FaultProxy, action: Action, code: str) -> None:
    proxy.add(action)
    with pytest.raises(ClientError) as found:
        through.put(b"other")
    assert found.value.response["Error"]["Code"] == code
    assert through.stored() == BODY


def test_a_read_only_endpoint_reads(through: Through, proxy: FaultProxy) -> None:
    proxy.add(RefuseWrites())
    assert through.get() == BODY
    assert through.names() == [["object"]]
    with pytest.raises(ClientError, match="AccessDenied"):
        through.client.delete_object(Bucket=BUCKET, Key=through.key)


def test_a_conditional_write_is_refused_or_done_all_the_same(through: Through, proxy: FaultProxy) -> None:
    rule = proxy.add(RefuseConditional())
    assert through.put(b"plain") == 200
    with pytest.raises(ClientError, match="NotImplemented"):
        through.put(b"never", IfNoneMatch="*")
    proxy.rules.remove(rule)
    proxy.add(IgnoreConditional())
    assert through.put(b"over", IfNoneMatch="*") == 200
    assert through.stored() == b"over"


@pytest.mark.parametrize(
    ("action", "error", "stored"),
    [
        (ResetRequest(), ConnectionClosedError, BODY),
        (ResetRequest(after=20_000), ConnectionClosedError, BODY),
        (LostAnswer(), ConnectionClosedError, b"other" * 10_000),
        (LostAnswer(hang=True), ReadTimeoutError, b"other" * 10_000),
        (Blackhole(), ReadTimeoutError, BODY),
    ],
    ids=named,
)
def test_an_upload_without_an_answer_may_be_done_or_not(
    through: Through, proxy: FaultProxy, action: Action, error: type[BotoCoreError], stored: bytes
) -> None:
    proxy.add(action, method="PUT")
    if error is ReadTimeoutError:
        through.lose_patience()
    with pytest.raises(error):
        through.put(b"other" * 10_000)
    assert through.stored() == stored


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (ResetResponse(after=1000), ResponseStreamingError),
        (Truncate(after=1000), ResponseStreamingError),
        (Overlong(b"ab", declared="only"), ResponseStreamingError),
        (Stall(after=1000), ReadTimeoutError),
    ],
    ids=named,
)
def test_a_body_that_breaks_off_is_seen(
    through: Through, proxy: FaultProxy, action: Action, error: type[BotoCoreError]
) -> None:
    proxy.add(action)
    if error is ReadTimeoutError:
        through.lose_patience()
    with pytest.raises(error):
        through.get()
    assert through.stored() == BODY


@pytest.mark.parametrize(
    ("action", "body"),
    [
        (Truncate(after=1000, declared=False), BODY[:1000]),
        (Overlong(b"ab"), BODY + b"ab"),
        (Overlong(b"ab", declared="none"), BODY + b"ab"),
        (FlipResponse(at=2, bit=7), BODY[:2] + bytes([BODY[2] ^ 128]) + BODY[3:]),
        (OtherBody(b"other"), b"other"),
        (ContentEncoding(body=False), BODY),
    ],
    ids=named,
)
def test_wrong_bytes_come_without_an_error(through: Through, proxy: FaultProxy, action: Action, body: bytes) -> None:
    proxy.add(action)
    assert through.get() == body
    assert through.stored() == BODY


def test_a_compressed_body_comes_with_or_without_a_word(through: Through, proxy: FaultProxy) -> None:
    rule = proxy.add(ContentEncoding(header=False))
    assert gzip.decompress(through.get()) == BODY
    proxy.rules.remove(rule)
    proxy.add(ContentEncoding())
    answer = through.client.get_object(Bucket=BUCKET, Key=through.key)
    assert answer["ContentEncoding"] == "gzip"
    answer["Body"].close()


def test_a_flipped_bit_of_an_upload_is_stored_where_nothing_is_checked(through: Through, proxy: FaultProxy) -> None:
    wrong = bytes([BODY[0] ^ 1]) + BODY[1:]
    rule = proxy.add(FlipRequest())
    with pytest.raises(ClientError, match="BadDigest"):
        through.put(ChecksumAlgorithm="CRC32")
    proxy.rules.remove(rule)
    proxy.add(FlipRequest(unnoticed=True))
    assert through.put(ChecksumAlgorithm="CRC32") == 200
    assert through.stored() == wrong


def test_a_server_without_checksums_looks_at_none_and_gives_none_back(through: Through, proxy: FaultProxy) -> None:
    through.put(ChecksumAlgorithm="SHA256")
    asked = {"Bucket": BUCKET, "Key": through.key, "ChecksumMode": "ENABLED"}
    assert "ChecksumSHA256" in through.client.head_object(**asked)  # type: ignore[arg-type]
    proxy.add(ForgetChecksums())
    assert "ChecksumSHA256" not in through.client.head_object(**asked)  # type: ignore[arg-type]
    assert through.put(ChecksumSHA256="A" * 43 + "=") == 200


def test_the_framing_of_an_upload_ends_up_in_the_object(through: Through, proxy: FaultProxy) -> None:
    proxy.add(StoreFraming())
    assert through.put(b"payload") == 200
    stored = through.stored()
    assert stored.startswith(b"7\r\npayload\r\n0\r\nx-amz-checksum-crc32:")


def test_a_ranged_read_gets_what_was_not_asked(through: Through, proxy: FaultProxy) -> None:
    def ranged(action: Action) -> tuple[int, str | None, bytes]:
        proxy.rules[:] = [Rule(action)]
        answer = through.client.get_object(Bucket=BUCKET, Key=through.key, Range="bytes=10-19")
        return answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentRange"), answer["Body"].read()

    size = len(BODY)
    assert ranged(OtherRange(shift=3)) == (206, f"bytes 10-19/{size}", BODY[13:23])
    assert ranged(WrongContentRange(shift=3)) == (206, f"bytes 13-22/{size}", BODY[10:20])
    assert ranged(WholeInsteadOfRange()) == (200, None, BODY)


def test_stale_answers_are_those_of_the_first_time(through: Through, proxy: FaultProxy) -> None:
    proxy.add(Stale())
    through.get()
    through.names()
    through.put(b"new")
    through.client.put_object(Bucket=BUCKET, Key=f"{through.prefix}/second", Body=b"2")
    assert through.get() == BODY
    assert through.names() == [["object"]]
    assert through.stored() == b"new"


def test_head_lies(through: Through, proxy: FaultProxy) -> None:
    def head(action: Action, key: str) -> int:
        proxy.rules[:] = [Rule(action)]
        return through.client.head_object(Bucket=BUCKET, Key=key)["ContentLength"]

    assert head(HeadSaysPresent(size=5), f"{through.key}/none") == 5
    assert head(HeadSaysSize(by=-1), through.key) == len(BODY) - 1
    with pytest.raises(ClientError, match="404"):
        head(HeadSaysAbsent(), through.key)
    assert through.get() == BODY


def test_etags_are_what_the_server_likes_and_conditions_go_by_them(through: Through, proxy: FaultProxy) -> None:
    proxy.add(OwnEtags())
    etag = through.client.head_object(Bucket=BUCKET, Key=through.key)["ETag"]
    proxy.rules, rules = [], proxy.rules
    assert through.client.head_object(Bucket=BUCKET, Key=through.key)["ETag"] != etag
    proxy.rules = rules
    assert through.get(IfMatch=etag) == BODY
    through.put(b"other")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        through.get(IfMatch=etag)


def test_an_archived_object_is_there_and_cannot_be_read(through: Through, proxy: FaultProxy) -> None:
    proxy.add(StorageClass("DEEP_ARCHIVE"))
    assert through.client.head_object(Bucket=BUCKET, Key=through.key)["StorageClass"] == "DEEP_ARCHIVE"
    with pytest.raises(ClientError, match="InvalidObjectState"):
        through.get()
    assert through.names() == [["object"]]


def test_listings_come_in_pages_backwards_and_with_gaps(through: Through, proxy: FaultProxy) -> None:
    for name in ("a", "b", "c"):
        through.client.put_object(Bucket=BUCKET, Key=f"{through.prefix}/{name}", Body=b"1")
    for action, names in [
        (PageSize(2), [["a", "b"], ["c", "object"]]),
        (ReverseListing(), [["object", "c", "b", "a"]]),
        (ListingWithout("/b$"), [["a", "c", "object"]]),
    ]:
        proxy.rules[:] = [Rule(action)]
        assert through.names() == names


@pytest.mark.parametrize(
    "action",
    [Delay(0.05), Dribble(piece=6_000, pause=0.005), Dribble(piece=1_000, pause=0.001, head=True), Rate(1_000_000)],
    ids=named,
)
def test_a_slow_answer_is_whole(through: Through, proxy: FaultProxy, action: Action) -> None:
    proxy.add(action)
    through.put()
    assert through.get() == BODY


def test_headers_that_come_byte_by_byte_keep_every_single_read_short(proxy: FaultProxy) -> None:
    proxy.add(Dribble(piece=1, pause=0.001, head=True))
    with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=30)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        pieces = [connection.recv(1000)]
        while b"\r\n" not in b"".join(pieces):
            pieces.append(connection.recv(1000))
    assert b"".join(pieces).startswith(b"HTTP/1.1 403")
    assert len(pieces) > 3


def test_a_request_reaches_the_server_twice(through: Through, proxy: FaultProxy) -> None:
    bucket = support.new_bucket()
    through.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    proxy.add(Twice(), method="PUT", times=1)
    through.client.put_object(Bucket=bucket, Key="k", Body=b"1")
    assert len(through.client.list_object_versions(Bucket=bucket)["Versions"]) == 2


def test_something_happens_between_two_requests(through: Through, proxy: FaultProxy) -> None:
    def overwrite(request: Request) -> None:
        with closing(support.client(proxy.endpoint)) as other:
            other.put_object(Bucket=BUCKET, Key=through.key, Body=b"meanwhile")

    proxy.add(Call(before=overwrite), method="GET", skip=1)
    assert through.get() == BODY
    assert through.get() == b"meanwhile"
    proxy.add(Call(after=overwrite), method="PUT", times=1)
    through.put(b"mine")
    proxy.rules.clear()
    assert through.get() == b"meanwhile"


def test_an_endpoint_goes_away_and_comes_back(through: Through, proxy: FaultProxy) -> None:
    proxy.down()
    with pytest.raises((EndpointConnectionError, ConnectionClosedError)):  # the connection it had, then any
        through.get()
    with pytest.raises(EndpointConnectionError):
        through.get()
    proxy.up()
    assert through.get() == BODY

    proxy.add(GoDown(), times=1)
    with pytest.raises(ConnectionClosedError):
        through.get()
    with pytest.raises(EndpointConnectionError):
        through.get()
    proxy.heal()

    proxy.add(GoDown(seconds=0.05), times=1)
    with pytest.raises(ConnectionClosedError):
        through.get()
    end = time.monotonic() + 30
    while True:
        try:
            assert through.get() == BODY
            break
        except EndpointConnectionError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_server_that_is_down_is_a_broken_connection(s3: SharedServer) -> None:
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with FaultProxy(nobody.getsockname()[1]) as proxy:
            connection = HTTPConnection("127.0.0.1", proxy.port, timeout=30)
            connection.request("GET", "/")
            with closing(connection), pytest.raises(ConnectionResetError):
                connection.getresponse()


def test_a_truncated_body_is_seen_by_a_plain_client_as_well(through: Through, proxy: FaultProxy) -> None:
    proxy.add(OtherBody(b"123456"), method="GET")
    proxy.add(Status(200), method="GET")
    proxy.add(Overlong(b"7890", declared="only"), method="GET")
    connection = HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    connection.request("GET", "/bucket/key")
    with closing(connection), pytest.raises(IncompleteRead):
        connection.getresponse().read()


def test_many_clients_are_served_at_once(through: Through, proxy: FaultProxy) -> None:
    proxy.add(FlipResponse(), probability=0.5, seed=1)
    found: list[bytes] = []

    def read() -> None:
        with closing(support.client(proxy.endpoint, response_checksum_validation="when_required")) as client:
            for _ in range(5):
                found.append(client.get_object(Bucket=BUCKET, Key=through.key)["Body"].read())

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(found) == 20
    assert {body[1:] for body in found} == {BODY[1:]}
    assert {body[0] for body in found} == {BODY[0], BODY[0] ^ 1}


def test_the_end_of_the_proxy_is_the_end_of_hanging_clients(s3: SharedServer) -> None:
    proxy = FaultProxy(s3.server.port).start()
    proxy.add(Blackhole())
    with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=10)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while not proxy.log:
            time.sleep(0.01)
        proxy.stop()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
