"""What is asked of the operator's server, by phase and by who asked; and how the report shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from tests.support import s3 as shared
from trainer.lifecycle.page import render
from trainer.lifecycle.report import with_requests
from trainer.lifecycle.requests import Ledger, Requests


def test_each_request_is_in_one_phase_and_of_one_party(s3: shared.SharedServer) -> None:
    store = ckptstore.open(s3.url(), create=True)
    ledger = Ledger()
    ledger.close("prepare", store)
    store.head("main")
    ledger.fetched({"GetObject": 3, "ListObjectsV2": 1}, 0, 1000)
    ledger.fetched({"GetObject": 2}, 7, 10)
    ledger.close("drill", store)
    ledger.close("nothing was asked", store)
    first, second, hosts = ledger.entries
    assert [(one.phase, one.party) for one in ledger.entries] == [
        ("prepare", "controller"),
        ("drill", "controller"),
        ("drill", "hosts"),
    ]
    assert dict(hosts.operations) == {"GetObject": 5, "ListObjectsV2": 1}
    assert (hosts.sent_bytes, hosts.received_bytes) == (7, 1010)
    assert store.traffic is not None
    assert sum(first.operations.values()) + sum(second.operations.values()) == store.traffic.total
    assert first.sent_bytes + second.sent_bytes == store.traffic.sent_bytes
    assert first.operations["PutObject"] >= 1
    assert "PutObject" not in second.operations


def test_nothing_is_asked_of_a_directory(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.close("prepare", ckptstore.open(tmp_path / "store", create=True))
    assert ledger.entries == []


@pytest.fixture
def report() -> dict[str, Any]:
    body: dict[str, Any] = json.loads(Path(__file__).with_name("recorded-report.json").read_text())
    return body


def test_the_page_shows_requests_by_operation_and_their_sums(report: dict[str, Any]) -> None:
    report["operator"] = {"store": "bucket", "refused_write": "<script>", "requests": []}
    assert "Requests to" not in render(report)
    asked = [
        Requests("prepare", "controller", {"PutObject": 1200, "GetObject": 2}, 5000, 60),
        Requests("drill", "hosts", {"GetObject": 8}, 0, 1234567),
    ]
    page = render(with_requests(report, asked))
    for text in ("GetObject 2, PutObject 1,200", "1,202", "1,210", "1,234,627", "&lt;script&gt;"):
        assert text in page
    assert "<script" not in page


def test_a_report_of_an_older_release_has_a_page(report: dict[str, Any]) -> None:
    assert "operator" not in report
    assert "Requests to" not in render(report)
