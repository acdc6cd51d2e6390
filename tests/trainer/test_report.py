"""The report: its page from recorded JSON, plots, and the controller's own record of time."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import MalformedError
from ckptstore.format.digest import Digest
from trainer.compute.result import EXACT, UpdateResult
from trainer.lifecycle import plots, replay
from trainer.lifecycle.expect import NotAsPlannedError, require
from trainer.lifecycle.journal import Journal
from trainer.lifecycle.page import render
from trainer.lifecycle.plots import Bar, Node, Series
from trainer.lifecycle.report import plain
from trainer.workers import events
from trainer.workers.events import make
from trainer.workers.reports import check, update_result

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "br", "line", "rect", "polyline"}


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of a real run, with most updates and answers left out."""
    body: dict[str, Any] = json.loads(Path(__file__).with_name("recorded-report.json").read_text())
    return body


class Structure(HTMLParser):
    """Collects attributes that lead somewhere, and tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "action", "xlink:href")]
        if tag not in VOID and not tag.startswith("!"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "polyline"):
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_of_a_recorded_report_is_whole_and_leads_nowhere(report: dict[str, Any]) -> None:
    page = render(report)
    found = Structure()
    found.feed(page)
    assert (found.wrong, found.open, found.links) == ([], [], [])
    assert not re.search(r"https?:|//[a-z]|<script|@import|url\(", page)
    assert page.count("<svg") == 4
    assert "NaN" not in page
    for text in (
        report["prepared_identity"],
        report["roots"]["32"]["recovered"],
        report["roots"]["64"]["root"],
        "chat_template.jinja",
        report["evaluation"]["verdict"]["reasons"][0],
        report["archive"]["sha256"],
        "equal bit for bit",
    ):
        assert text in page


def test_a_page_says_so_if_the_roots_or_the_losses_are_not_equal(report: dict[str, Any]) -> None:
    report["roots"]["32"]["equal"] = False
    assert "equal bit for bit" not in render(report)
    assert "another state than" in render(report)
    report["roots"]["32"]["equal"] = True
    report["replay"]["losses_and_norms_equal"] = False
    assert "equal bit for bit" not in render(report)


def test_what_a_model_says_cannot_become_markup(report: dict[str, Any]) -> None:
    evil = "<script>alert(1)</script>&<b>"
    report["evaluation"]["answers"][0]["stages"][0]["text"] = evil
    report["stagings"][2]["refused"] = evil
    page = render(report)
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;&lt;b&gt;" in page


def test_a_page_can_be_made_before_there_is_an_archive(report: dict[str, Any]) -> None:
    del report["archive"]
    assert "Evidence archive" not in render(report)


def test_plots_take_values_that_are_all_the_same() -> None:
    flat = plots.lines("flat", [Series("a", "reference", [(1, 0.5), (2, 0.5)])], "x", "y", {1: "here"})
    single = plots.columns("one", [(7, 0)], "x", "y")
    times = plots.timeline("times", [Bar("row", 0.0, 0.0, "phase")], {0.0: "start"})
    tree = plots.lineage("one", [Node("a", "b", 0, 0)], [])
    for svg in (flat, single, times, tree):
        assert "nan" not in svg
        assert "inf" not in svg.replace("info", "")
        assert svg.count("<svg") == svg.count("</svg>") == 1


def test_values_become_plain_json() -> None:
    digest = Digest.of(b"x")
    value = {"bars": (Bar("r", 0.5, 1.0, "s"),), 1: digest, "none": None}
    assert plain(value) == {
        "bars": [{"row": "r", "began": 0.5, "ended": 1.0, "style": "s", "label": ""}],
        "1": str(digest),
        "none": None,
    }


def result(update: int, loss: float = 0.5, norm: float = 2.0, *, ms: float = 1.0) -> UpdateResult:
    return UpdateResult(update, loss, norm, 1.0, 10.0, 1e-3, sent_bytes=7, received_bytes=8, ms=ms)


def test_the_first_differing_update_is_named_with_both_numbers() -> None:
    left = {number: result(number) for number in (17, 18, 19)}
    right = {17: result(17, ms=2.0), 18: result(18, norm=2.0 + 2.0**-51), 19: result(19, loss=0.0)}
    assert replay.first_difference(left, {number: result(number, ms=9.0) for number in left}) is None
    expected = "first difference in update 18: norm 0x1.0000000000000p+1 and 0x1.0000000000001p+1"
    assert replay.first_difference(left, right) == expected
    del right[17]
    assert replay.first_difference(left, right) == "first difference in update 17: only one of the two made it"
    assert replay.first_difference(left, {}) is not None


def test_a_result_comes_back_from_its_event_with_every_bit() -> None:
    sent = result(18, loss=0.1 + 0.2, norm=5e-324)
    event = events.Event.parse(make("update", sent.to_plain() | {"state": {}}).encode())
    again = update_result(check(event))
    assert (again.exact, again.sent_bytes, again.received_bytes, again.ms) == (sent.exact, 7, 8, 1.0)


@pytest.mark.parametrize("loss", ["0x1p0", "nan", "inf", "0.5", 0.5, None])
def test_a_result_whose_numbers_are_not_exact_is_refused(loss: object) -> None:
    fields = result(18).to_plain()
    fields["exact"]["loss"] = loss
    with pytest.raises(MalformedError, match="loss of update 18"):
        update_result(make("update", fields))


@pytest.mark.parametrize("missing", EXACT)
def test_a_result_without_one_of_its_numbers_is_refused(missing: str) -> None:
    fields = result(18).to_plain()
    del fields["exact"][missing]
    with pytest.raises(MalformedError, match="update 18: exact numbers"):
        update_result(make("update", fields))


def test_expected_and_seen_are_both_said() -> None:
    require("the sum", 4, 2 + 2)
    with pytest.raises(NotAsPlannedError, match="the sum: expected 5, seen 4") as raised:
        require("the sum", 5, 2 + 2)
    assert raised.value.exit_code == 5


def test_a_phase_is_recorded_with_its_end_also_if_it_fails(tmp_path: Path) -> None:
    shown = io.StringIO()
    journal = Journal(tmp_path / "controller.jsonl", shown)
    with journal.phase("first", "doing something"):
        journal.progress("half", keep=True)
        journal.progress("not shown where lines stay", keep=False)
    with pytest.raises(ValueError, match="no"), journal.phase("second", "failing"):
        raise ValueError("no")
    assert [(span.name, span.ok) for span in journal.spans] == [("first", True), ("second", False)]
    assert ["failed" in line for line in journal.timeline()] == [False, True]
    journal.close()
    assert [event.name for event in events.read(tmp_path / "controller.jsonl")] == ["phase", "phase_ended"] * 2
    lines = shown.getvalue().splitlines()
    assert [line.split("] ")[1] for line in lines] == ["doing something", "half", "failing"]


def test_the_controller_and_the_report_need_no_torch() -> None:
    modules = (
        "trainer.lifecycle.experiment",
        "trainer.lifecycle.phases",
        "trainer.lifecycle.page",
        "trainer.lifecycle.report",
        "trainer.lifecycle.archive",
    )
    script = f"import sys; import {', '.join(modules)}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False False\n"
