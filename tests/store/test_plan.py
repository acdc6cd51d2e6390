"""What a transfer will do follows from what is known before; prices are the user's."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, Prices, Traffic
from ckptstore.closure import Closure, Need
from ckptstore.errors import ConflictError, MalformedError, NotFoundError, UsageError
from ckptstore.findings import Place
from ckptstore.format.keys import document_key, object_key, retired_key
from ckptstore.store import Store
from ckptstore.transfers.steps import Past, Way, decide
from tests.support.distant import Distant, made
from tests.support.faulty import FaultyBackend
from tests.support.pairs import states
from tests.support.training import commit_state

TABLE = """
currency = "EUR"
as_of = "2026-11-30"
source = "our contract"
[requests_per_1000]
write = 0.005
list = 0.006
read = 0.0004
[per_gb]
in = 0
out = 0.09
[per_gb_month]
stored = 0.023
"""


def digest(text: str) -> Digest:
    return Digest.of(text.encode())


class TestSteps:
    def closure(self, root: Digest) -> Closure:
        objects = {object_key(digest(name)): Need(digest(name), 7, [Place(part=name)]) for name in ("one", "two")}
        return Closure(root, documents={document_key(root): 100, document_key(digest("page")): 50}, objects=objects)

    def test_each_key_is_sent_read_or_accepted(self) -> None:
        root = digest("root")
        one, two = object_key(digest("one")), object_key(digest("two"))
        steps = decide(self.closure(root), (), {one, two}, accepted={two})
        assert {step.key: step.way for step in steps.objects} == {one: Way.READ, two: Way.ACCEPT}
        assert [[step.way for step in level] for level in steps.documents] == [[Way.SEND], [Way.SEND]]

    def test_the_root_comes_last(self) -> None:
        root = digest("root")
        steps = decide(self.closure(root), (), frozenset())
        assert [step.key for step in steps.closure()][-2:] == [document_key(digest("page")), document_key(root)]

    def test_the_oldest_ancestor_comes_first_and_is_retired_if_its_closure_is_not_there(self) -> None:
        history = [Past(digest(name), 9, (digest(f"shard of {name}"),)) for name in ("newer", "older", "oldest")]
        there = {document_key(digest("shard of newer")), document_key(digest("newer"))}
        steps = decide(self.closure(digest("root")), history, there, {retired_key(digest("oldest"))})
        assert [(step.digest, step.way) for step in steps.history] == [
            (digest("oldest"), Way.SEND),
            (digest("older"), Way.SEND),
            (digest("newer"), Way.READ),
        ]
        assert steps.retire == (digest("older"),)
        assert steps.whole == {document_key(digest("newer")): (digest("shard of newer"),)}


class TestPlans:
    def test_a_plan_has_the_keys_and_bytes_of_the_transfer(self, store: Store, tmp_path: Path) -> None:
        root = commit_state(store, "main", states(), 1)
        far = ckptstore.open(tmp_path / "far", create=True)
        for _ in range(2):
            plan = ckptstore.plan_push(store, far, root, ref="main")
            done = ckptstore.push(store, far, root, ref="main")
            assert (plan.sent_keys, plan.sent_bytes) == (done.sent_keys, done.sent_bytes)
            assert (plan.present_keys, plan.present_bytes) == (done.present_keys, done.present_bytes)
            assert plan.traffic.total == 0  # there is no endpoint

    def test_a_directory_that_is_not_there_has_nothing(self, store: Store, tmp_path: Path) -> None:
        root = commit_state(store, "main", states(), 1)
        plan = ckptstore.plan_push(store, str(tmp_path / "nowhere"), root, ref="main")
        assert plan.sent_keys == len(store.closure(root).sizes())
        assert not (tmp_path / "nowhere").exists()

    def test_nothing_is_written(self, store: Store, tmp_path: Path) -> None:
        root = commit_state(store, "main", states(), 1)
        there = FaultyBackend(made(Distant()))
        for operation in ("create", "replace", "delete"):
            there.fail(operation, AssertionError("written"))
        here = FaultyBackend(store.backend)
        here.fail("create", AssertionError("written"))
        ckptstore.plan_push(Store(here), Store(there), root, ref="main", max_age=60)
        ckptstore.plan_pull(Store(here), Store(there), root, shards=[1])

    def test_it_fails_as_the_transfer_would(self, store: Store, tmp_path: Path) -> None:
        root = commit_state(store, "main", states(), 1)
        other = commit_state(store, "other", states(1.0), 1)
        far = ckptstore.open(tmp_path / "far", create=True)
        ckptstore.push(store, far, root, ref="main")
        with pytest.raises(ConflictError, match="no ancestor"):
            ckptstore.plan_push(store, far, other, ref="main")
        with pytest.raises(UsageError):
            ckptstore.plan_push(store, far, root, ref="main", shards=[0])
        with pytest.raises(NotFoundError):
            ckptstore.plan_push(store, far, digest("nothing"))


class TestPrices:
    def test_requests_and_bytes_have_their_prices(self) -> None:
        prices = Prices.parse(TABLE)
        requests = {"PutObject": 1000, "CopyObject": 1000, "ListObjectsV2": 500, "ListObjectVersions": 500}
        requests |= {"GetObject": 2000, "HeadObject": 500, "DeleteObject": 10**6}
        cost = prices.cost(Traffic(requests, 10**12, 2 * 10**9), 5 * 10**9)
        assert cost.requests == Decimal("0.01") + Decimal("0.006") + Decimal("0.001")
        assert (cost.bytes_in, cost.bytes_out) == (0, Decimal("0.18"))
        assert cost.once == Decimal("0.197")
        assert cost.stored_month == Decimal("0.115")
        assert (prices.currency, prices.as_of, prices.source) == ("EUR", "2026-11-30", "our contract")

    def test_a_day_may_be_a_date(self) -> None:
        assert Prices.parse(TABLE.replace('"2026-11-30"', "2026-11-30")).as_of == "2026-11-30"

    def test_a_gb_is_what_the_table_says(self) -> None:
        binary = Prices.parse(f"bytes_per_gb = {2**30}\n{TABLE}")
        assert binary.cost(Traffic({}, 0, 2**30)).bytes_out == Decimal("0.09")

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('currency = "EUR"', ""),
            ('as_of = "2026-11-30"', "as_of = 2026"),
            ('source = "our contract"', 'source = " "'),
            ("write = 0.005", "write = -1"),
            ("write = 0.005", "write = nan"),
            ("write = 0.005", "write = true"),
            ("write = 0.005", 'write = "0.005"'),
            ("write = 0.005", "put = 0.005"),
            ("[per_gb]", "[per_gigabyte]"),
            ("[per_gb]", "[per_gb"),
            ('currency = "EUR"', 'currency = "EUR"\nbytes_per_gb = 0'),
            ('currency = "EUR"', 'currency = "EUR"\nper_gb_month = 3'),
        ],
    )
    def test_a_table_that_is_none_is_refused(self, old: str, new: str) -> None:
        assert old in TABLE
        with pytest.raises(MalformedError, match="price table"):
            Prices.parse(TABLE.replace(old, new))

    def test_a_request_that_nobody_has_a_price_for_is_not_free(self) -> None:
        with pytest.raises(MalformedError, match="SelectObjectContent"):
            Prices.parse(TABLE).cost(Traffic({"SelectObjectContent": 1}))
