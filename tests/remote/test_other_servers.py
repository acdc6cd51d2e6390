"""The contract, and whole stores, on S3 servers of other makes, which keep fewer promises than the one of the other
tests. The table of docs/remote.md says what each honours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.capabilities import IGNORED, KEPT, Capabilities
from ckptstore.backends.protocol import PruneBackend
from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.s3.backend import S3Backend
from ckptstore.errors import RefusedError
from tests.contract.test_backend_contract import (
    TestCreate,
    TestDelete,
    TestList,
    TestRead,
    TestReplace,
)
from tests.support import s3 as shared
from tests.support.backends import Subject
from tests.support.s3servers import OTHERS, OtherServer, why_missing
from tests.support.training import make_training, save_steps

__all__ = ["TestCreate", "TestDelete", "TestList", "TestRead", "TestReplace"]  # collected here as well

pytestmark = pytest.mark.deep

HONOURED = {
    "rclone": Capabilities(
        conditional_create=False,
        checksums=KEPT,
        ranged_get=True,
        versioning=False,
        object_lock=False,
        list_in_order=False,
    ),
    "juicefs": Capabilities(
        conditional_create=False,
        checksums=IGNORED,
        ranged_get=True,
        versioning=False,
        object_lock=False,
        list_in_order=False,
    ),
}
"""By server, as docs/remote.md has it."""


@pytest.fixture(scope="module", params=sorted(OTHERS))
def server(request: pytest.FixtureRequest) -> Iterator[OtherServer]:
    missing = why_missing(request.param)
    if missing is not None:
        pytest.skip(missing)
    with OTHERS[request.param]() as found:
        found.create_bucket("ckptstore")
        yield found


@pytest.fixture
def url(server: OtherServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in (shared.environment() | dict(server.environment())).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    return f"s3://ckptstore/{shared.fresh_prefix()}?addressing=path"


@pytest.fixture
def subject(request: pytest.FixtureRequest, url: str, server: OtherServer) -> Subject:
    if "one_wins" in request.node.name:
        pytest.skip("this server tells several creators that they were first, so no ref is moved there")
    backend = S3Backend(S3Address.parse(url))
    backend.probe()

    def quarantined(key: str) -> list[bytes]:
        prefix = f"{backend.address.prefix}quarantine/{key.replace('/', '+')}."
        with closing(server.client()) as client:
            listed = client.list_objects_v2(Bucket="ckptstore", Prefix=prefix).get("Contents", [])
            return sorted(client.get_object(Bucket="ckptstore", Key=i["Key"])["Body"].read() for i in listed)

    return Subject(backend, quarantined)


@pytest.fixture
def backend(subject: Subject) -> PruneBackend:
    return subject.backend


def test_what_it_honours_is_what_the_table_says(url: str, server: OtherServer) -> None:
    assert ckptstore.open(url, create=True).capabilities() == HONOURED[server.name]


@pytest.mark.parametrize("checksums", ["required", "supported", "sha256"])
def test_a_store_for_a_single_writer_is_saved_to_verified_pushed_and_pulled(
    url: str, server: OtherServer, tmp_path: Path, checksums: str
) -> None:
    """With each of the checksum settings."""
    url = f"{url}&checksums={checksums}"
    store = ckptstore.open(url, create=True, single_writer=True)
    found = store.capabilities()
    assert found is not None
    assert found.ranged_get == ((server.name, checksums) != ("rclone", "supported"))  # it sends the whole's CRC then
    roots = save_steps(store, "main", make_training(), 2)
    local = ckptstore.open(tmp_path / "local", create=True)
    assert roots == save_steps(local, "main", make_training(), 2)
    assert ckptstore.open(url).verify("main").ok
    ckptstore.pull(store, ckptstore.open(tmp_path / "pulled", create=True), roots[-1], ref="main")
    roots += save_steps(local, "main", make_training(), 3)
    assert ckptstore.push(local, store, roots[-1], ref="main").receipt.method == "server-read"
    assert store.head("main") == roots[-1]


def test_without_that_its_refs_are_not_moved(url: str) -> None:
    with pytest.raises(RefusedError, match="single-writer"):
        save_steps(ckptstore.open(url, create=True), "main", make_training(), 1)


def test_a_crash_of_the_server_loses_nothing_that_was_read_back(url: str, server: OtherServer) -> None:
    store = ckptstore.open(url, create=True, single_writer=True)
    root = save_steps(store, "main", make_training(), 2)[-1]
    server.kill()
    server.start()
    assert ckptstore.open(url).verify(root).ok
