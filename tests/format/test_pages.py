"""Pages: entries in order, each in the one form that its role and size give it."""

from __future__ import annotations

import pytest

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.page import (
    BUFFER,
    ENTRY_BYTES,
    EXTRA,
    PAGE_BYTES,
    PAGE_ENTRIES,
    PATH_BYTES,
    WEIGHT,
    Entry,
    HyperEntry,
    ValueEntry,
    encode_entry,
    encode_page,
    make_tensor_entry,
    paginate,
    parse_entry,
    parse_page,
    sort_key,
)
from ckptstore.format.values import to_json


def value(path: str, content: object = None) -> ValueEntry:
    return ValueEntry(path, EXTRA, to_json(content))


def numbered(count: int, content: object = None) -> list[Entry]:
    return [value(f"{number:06d}", content) for number in range(count)]


def test_a_page_has_1_to_1024_entries() -> None:
    """F-50."""
    for count in (1, PAGE_ENTRIES):
        assert len(parse_page(encode_page(numbered(count)))) == count
    for count in (0, PAGE_ENTRIES + 1):
        with pytest.raises(MalformedError, match="entries"):
            parse_page(encode_page(numbered(count)))


def test_entries_are_sorted_by_role_then_path_in_bytes() -> None:
    """F-51."""
    weight = make_tensor_entry("a", WEIGHT, "u8", (), (), b"a")
    buffer = make_tensor_entry("b", BUFFER, "u8", (), (), b"b")
    assert parse_page(encode_page([buffer, value("z"), weight])) == (buffer, value("z"), weight)
    assert sort_key(WEIGHT, "\uffff") < sort_key(WEIGHT, "\U00010000")
    assert sort_key(("optim", "a", "b"), "") < sort_key(("optim", "a\x00", "b"), "")  # by encoded bytes: '"' < '\\'
    for wrong in ([weight, buffer], [buffer, buffer], [value("b"), value("a")]):
        with pytest.raises(MalformedError, match="sorted"):
            parse_page(encode_page(wrong))


@pytest.mark.parametrize("change", [{"value": {"t": "none"}}, {"group": 0}, {"tensor": {}}])
def test_an_entry_has_one_content(change: dict[str, Json]) -> None:
    """F-52."""
    tensor = make_tensor_entry("w", WEIGHT, "u8", (), (), b"a")
    for entry in (tensor, value("w"), HyperEntry("w", ("hyper", "o"), 0)):
        node = encode_entry(entry)
        assert isinstance(node, dict)
        if not node.keys() >= change.keys():
            with pytest.raises(MalformedError):
                parse_entry({**node, **change})


ROLES = [
    ("weight",),
    ("buffer",),
    ("extra",),
    ("extra", "a"),
    ("optim", "o", "step"),
    ("optim", "o", "a", "b"),
    ("hyper", "o"),
]


@pytest.mark.parametrize("role", ROLES)
def test_each_role_holds_its_kind_of_entry(role: tuple[str, ...]) -> None:
    """F-53."""
    candidates: dict[str, Entry] = {
        "tensor": make_tensor_entry("p", role, "u8", (), (), b"a"),
        "value": ValueEntry("p", role, to_json(1)),
        "group": HyperEntry("p", role, 0),
    }
    fitting = {
        "weight": {"tensor"},
        "buffer": {"tensor"},
        "extra": {"tensor", "value"} if len(role) == 1 else {"tensor"},
        "optim": {"tensor", "value"},
        "hyper": {"group"},
    }[role[0]]
    for name, entry in candidates.items():
        if name in fitting:
            assert parse_entry(encode_entry(entry)) == entry
        else:
            with pytest.raises(MalformedError, match="does not hold"):
                parse_entry(encode_entry(entry))


@pytest.mark.parametrize(
    "role", [(), ("alias",), ("bias",), ("weight", "x"), ("optim",), ("optim", "o"), ("hyper",), ("optim",) * 17]
)
def test_no_other_role_exists(role: tuple[str, ...]) -> None:
    """F-53."""
    for entry in (make_tensor_entry("p", role, "u8", (), (), b"a"), HyperEntry("p", role, 0)):
        with pytest.raises(MalformedError):
            parse_entry(encode_entry(entry))


def test_a_tensor_has_the_digest_that_follows_from_its_chunks() -> None:
    """F-54."""
    entry = make_tensor_entry("w", WEIGHT, "u8", (100,), [Digest.of(b"a")], None)
    node = encode_entry(entry)
    assert isinstance(node, dict)
    assert isinstance(node["tensor"], dict)
    for change in (
        {"chunks": [str(Digest.of(b"b"))]},
        {"shape": [99]},
        {"dtype": "i8"},
        {"digest": str(Digest.of(b""))},
    ):
        with pytest.raises(MalformedError, match="digest"):
            parse_entry({**node, "tensor": {**node["tensor"], **change}})


@pytest.mark.parametrize(
    "path", ["", "x/y", "../../etc/x", "..", "a\nb", "a\x00b", "x" * 5000, "CON", "\u202eabc", "\U0001f600"]
)
def test_any_text_is_a_path(path: str) -> None:
    """F-52 (B044, torchsnapshot PR#31)."""
    assert parse_page(encode_page([value(path)])) == (value(path),)


def test_pages_end_at_1024_entries() -> None:
    """F-55."""
    counts = [len(entries) for entries, _ in paginate(numbered(2 * PAGE_ENTRIES + 5))]
    assert counts == [PAGE_ENTRIES, PAGE_ENTRIES, 5]


def test_pages_end_before_2_mib_of_entries() -> None:
    """F-55."""
    entries = numbered(40, "x" * 200_000)
    cost = len(canonical.encode(encode_entry(entries[0])))
    pages = list(paginate(entries))
    assert [len(found) for found, _ in pages][:-1] == [PAGE_BYTES // cost] * (len(pages) - 1)
    assert [entry for found, _ in pages for entry in found] == entries
    for found, data in pages:
        assert parse_page(data) == found


def test_pages_follow_from_the_entries_alone() -> None:
    """F-55: a page that is full does not depend on what comes later."""
    few, many = list(paginate(numbered(1500))), list(paginate(numbered(3000)))
    assert few[0] == many[0]


def test_an_entry_that_is_too_large_is_refused_by_name() -> None:
    """F-56."""
    list(paginate([value("x" * PATH_BYTES)]))
    with pytest.raises(RefusedError, match="too large"):
        list(paginate([value("x" * (PATH_BYTES + 1))]))
    with pytest.raises(RefusedError, match=r"'big'.*too large"):
        list(paginate([value("big", "x" * ENTRY_BYTES)]))
    with pytest.raises(RefusedError, match="role has more than 16 parts"):
        list(paginate([make_tensor_entry("w", ("optim", "o", *"abcdefghijklmno"), "u8", (), (), b"a")]))
    (page,) = paginate([value("big", "x" * (ENTRY_BYTES - 100))])
    assert len(page[1]) < 4 * 2**20


def test_the_largest_page_is_within_the_limit_of_a_document() -> None:
    """F-17, F-55, F-56."""
    entries = [value(f"{number}", "x" * (PAGE_BYTES // 2 - 100)) for number in range(4)]
    for found, data in paginate(entries):
        assert parse_page(data) == found
