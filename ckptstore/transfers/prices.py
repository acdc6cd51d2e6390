"""What requests and bytes cost, by a table that the user gives: prices differ by provider, region and contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

from ckptstore.backends.traffic import Traffic
from ckptstore.errors import MalformedError
from ckptstore.toml import parse_toml

_CLASSES = {
    "PutObject": "write",
    "CopyObject": "write",
    "ListObjectsV2": "list",
    "ListObjectVersions": "list",
    "GetObject": "read",
    "HeadObject": "read",
    "DeleteObject": "delete",
}
_TABLES = {
    "requests_per_1000": ("write", "list", "read", "delete"),
    "per_gb": ("in", "out"),
    "per_gb_month": ("stored",),
}
_GB = 10**9
_LIMIT = 64 * 2**10
_MOST = 10**15
_LEAST = Decimal("1e-30")


@dataclass(frozen=True, slots=True)
class Cost:
    """What traffic costs once, and what is stored by it costs each month, both in the currency of the table."""

    requests: Decimal
    bytes_in: Decimal
    bytes_out: Decimal
    stored_month: Decimal

    @property
    def once(self) -> Decimal:
        """Requests and bytes together."""
        return self.requests + self.bytes_in + self.bytes_out


@dataclass(frozen=True, slots=True)
class Prices:
    """A price table.

    Args:
        currency: for instance "USD".
        as_of: on which day these were the prices.
        source: where they were found.
        requests: price of one request, by class: write (PutObject, CopyObject), list, read (GetObject, HeadObject),
            delete.
        bytes_in: price of one byte sent to the store.
        bytes_out: price of one byte received from it.
        stored: price of one byte kept for a month.
    """

    currency: str
    as_of: str
    source: str
    requests: Mapping[str, Decimal]
    bytes_in: Decimal
    bytes_out: Decimal
    stored: Decimal

    @staticmethod
    def parse(text: str) -> Prices:
        """The table of a TOML text.

        It has the texts ``currency``, ``as_of`` and ``source``, and the tables ``requests_per_1000`` (write, list,
        read, delete), ``per_gb`` (in, out) and ``per_gb_month`` (stored). A GB has 10^9 bytes unless ``bytes_per_gb``
        says otherwise. What is left out of a table costs nothing.

        Raises:
            MalformedError: it is none; names the field.
        """
        if len(text) > _LIMIT:
            raise MalformedError("price table", f"longer than {_LIMIT:,} characters", _HINT)
        found = parse_toml(text, "price table", _HINT, parse_float=Decimal)
        unknown = set(found) - {"currency", "as_of", "source", "bytes_per_gb", *_TABLES}
        if unknown:
            raise MalformedError("price table", f"{', '.join(sorted(unknown))!r:.80} is not known", _HINT)
        words = {name: _text(found, name) for name in ("currency", "as_of", "source")}
        tables = {name: _table(found, name) for name in _TABLES}
        size = found.get("bytes_per_gb", _GB)
        if type(size) is not int or not 1 <= size <= _MOST:
            raise MalformedError("price table", f"bytes_per_gb is not a whole number from 1 to {_MOST}", _HINT)
        return Prices(
            **words,
            requests={name: price / 1000 for name, price in tables["requests_per_1000"].items()},
            bytes_in=tables["per_gb"]["in"] / size,
            bytes_out=tables["per_gb"]["out"] / size,
            stored=tables["per_gb_month"]["stored"] / size,
        )

    def cost(self, traffic: Traffic, stored_bytes: int = 0) -> Cost:
        """The cost of ``traffic``, and each month of ``stored_bytes``.

        Raises:
            MalformedError: an operation that belongs to no class of the table.
        """
        requests = Decimal(0)
        for operation, count in traffic.requests.items():
            if operation not in _CLASSES:
                raise MalformedError("price table", f"nothing says what {operation} costs")
            requests += self.requests[_CLASSES[operation]] * count
        return Cost(
            requests,
            self.bytes_in * traffic.sent_bytes,
            self.bytes_out * traffic.received_bytes,
            self.stored * stored_bytes,
        )


def _text(found: Mapping[str, Any], name: str) -> str:
    text = found.get(name)
    if isinstance(text, date):
        text = text.isoformat()
    if not isinstance(text, str) or not text.strip():
        # A price without a day and a place is hearsay.
        raise MalformedError("price table", f"{name} is not a text", _HINT)
    return text


def _table(found: Mapping[str, Any], name: str) -> dict[str, Decimal]:
    table = found.get(name, {})
    names = _TABLES[name]
    if not isinstance(table, dict) or set(table) - set(names):
        raise MalformedError("price table", f"[{name}] is no table of {', '.join(names)}", _HINT)
    prices = {}
    for key in names:
        price = table.get(key, 0)
        # Between the two, no sum or product of prices leaves the range of decimals.
        finite = type(price) in (int, Decimal) and Decimal(price).is_finite()
        if not finite or not 0 <= price <= _MOST or 0 < price < _LEAST:
            raise MalformedError("price table", f"{key} in [{name}] is not a number from 0 to {_MOST}", _HINT)
        prices[key] = Decimal(price)
    return prices


_HINT = "ckpt plan --help shows an example"
