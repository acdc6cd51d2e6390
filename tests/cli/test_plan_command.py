"""ckpt plan: what a push or pull would do and cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore_cli.plan import COMMAND
from tests.cli.conftest import Ckpt, Stores


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def example() -> str:
    """The price table of the help page."""
    (text,) = [part for part in (COMMAND.help or "").split("\b\n") if "currency =" in part]
    return "\n".join(line.strip() for line in text.splitlines())


def test_a_plan_says_what_the_push_then_does(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    (plan,) = ckpt("plan", "push", "main", far, "--create", "--json", "--store", stores.url).records()
    assert not far.exists()
    (done,) = ckpt("push", "main", far, "--create", "--json", "--store", stores.url).records()
    for field in ("root", "sent_keys", "sent_bytes", "present_keys", "present_bytes"):
        assert plan[field] == done[field]
    assert plan["traffic"] == done["traffic"] == {"source": None, "target": None}
    again = ckpt("plan", "push", "main", far, "--store", stores.url)
    assert again.code == 0
    assert "would send 0 keys, 0 bytes" in again.out


def test_a_plan_of_a_pull_looks_root_up_at_its_source(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    ckpt("init", far)
    (plan,) = ckpt("plan", "pull", "wide", stores.url, "--shard", 1, "--json", "--store", far).records()
    assert plan["type"] == "plan-pull"
    (done,) = ckpt("pull", "wide", stores.url, "--shard", 1, "--json", "--store", far).records()
    assert plan["sent_bytes"] == done["sent_bytes"] > 0


def test_prices_give_a_cost_and_say_of_when_they_are(ckpt: Ckpt, stores: Stores, far: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(example(), "utf-8")
    done = ckpt("plan", "push", "main", far, "--create", "--prices", prices, "--store", stores.url)
    assert done.code == 0, done.err
    assert "cost: 0.000000 USD once" in done.out  # a directory is behind no endpoint
    assert "by prices of 2026-01-31 from price list of the provider" in done.out
    (record,) = ckpt(
        "plan", "push", "main", far, "--create", "--prices", prices, "--json", "--store", stores.url
    ).records()
    assert record["cost"]["currency"] == "USD"


def test_a_price_table_that_is_none_is_told(ckpt: Ckpt, stores: Stores, far: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("currency = 'USD'", "utf-8")
    done = ckpt("plan", "push", "main", far, "--create", "--prices", prices, "--store", stores.url)
    assert done.code == 9
    assert "as_of is not a text" in done.err
    prices.write_bytes(b"\xff")
    assert ckpt("plan", "push", "main", far, "--create", "--prices", prices, "--store", stores.url).code == 2


def test_a_plan_to_no_store_needs_to_be_told_so(ckpt: Ckpt, stores: Stores, far: Path) -> None:
    assert ckpt("plan", "push", "main", far, "--store", stores.url).code == 4
