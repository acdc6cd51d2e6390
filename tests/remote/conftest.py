"""What tests against a real S3 server start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.support import s3 as server
from tests.support.faultproxy import FaultProxy

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> server.SharedServer:
    """The shared server; the environment leads every S3 client of the test there, with all rights."""
    server.lead(monkeypatch)
    return server.shared()


@pytest.fixture
def url(s3: server.SharedServer) -> str:
    """A store URL with a prefix that nothing else uses."""
    return s3.url()


@pytest.fixture
def client(s3: server.SharedServer) -> Iterator[S3Client]:
    """A plain boto3 client, to look behind the store."""
    with closing(server.client()) as found:
        yield found


@pytest.fixture
def bare_proxy(s3: server.SharedServer) -> Iterator[FaultProxy]:
    """A fault proxy before the shared server, without rules, by which only those go who name its endpoint."""
    with FaultProxy(s3.server.port, s3.server.admin, s3.server.reader) as found:
        yield found


@pytest.fixture
def proxy(bare_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    """The same; the environment leads S3 clients through it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bare_proxy.endpoint)
    return bare_proxy
