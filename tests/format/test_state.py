"""State root and rng root: what was learned, whoever owns it; and whose generator is whose."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import MalformedError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from ckptstore.format.merkle import MerkleTree
from ckptstore.format.page import (
    BUFFER,
    EXTRA,
    WEIGHT,
    Entry,
    HyperEntry,
    Role,
    ValueEntry,
    make_tensor_entry,
    sort_key,
)
from ckptstore.format.shard import Alias, Group, Optimizer, RngEntry
from ckptstore.format.state import LeafKey, Leaves, differences, join_leaves, rng_root, shard_leaves, state_root
from ckptstore.format.values import EntryRef, to_json
from tests.format.strategies import patient

GROUPS = (
    Group(to_json({"lr": 0.1}), to_json({"foreach": None})),
    Group(to_json({"lr": 0.2}), to_json({"foreach": None})),
)

ADAM = Optimizer("adam", "torch.optim.adam.Adam", GROUPS)


def tensor(path: str, role: Role = WEIGHT, content: bytes = b"\0") -> Entry:
    return make_tensor_entry(path, role, "u8", (len(content),), (), content)


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: sort_key(entry.role, entry.path))


STATE: list[Entry] = [
    tensor("embed", content=b"e"),
    tensor("layers.0.w", content=b"0"),
    tensor("layers.1.w", content=b"1"),
    tensor("layers.1.seen", BUFFER, b"s"),
    ValueEntry("layers.0._extra_state", EXTRA, to_json({"n": 1})),
    *(
        HyperEntry(path, ("hyper", "adam"), group)
        for path, group in (("embed", 0), ("layers.0.w", 0), ("layers.1.w", 1))
    ),
    *(tensor(path, ("optim", "adam", "exp_avg"), path.encode()) for path in ("embed", "layers.0.w", "layers.1.w")),
]
TIE = Alias("head", "embed")


def root_of(shards: Sequence[Leaves], ties: Sequence[Alias] = (), replicas: Sequence[LeafKey] = ()) -> Digest:
    leaves, wrong = join_leaves(shards, ties, replicas)
    assert wrong == []
    return state_root(leaves)


def leaves(
    entries: Sequence[Entry], aliases: Sequence[Alias] = (), optimizers: Sequence[Optimizer] = (ADAM,)
) -> Leaves:
    return shard_leaves(in_order(entries), optimizers, aliases)


ONE_OWNER = root_of([leaves(STATE, [TIE])])


@given(st.lists(st.integers(0, 2), min_size=len(STATE), max_size=len(STATE)), st.randoms(use_true_random=False))
@settings(patient, max_examples=60)
def test_one_two_or_three_owners_have_one_state_root(owners: list[int], chance: random.Random) -> None:
    """F-25: wherever entries lie, and however shards are ordered, a tied model has one state root."""
    shards = [[entry for entry, owner in zip(STATE, owners, strict=True) if owner == number] for number in range(3)]
    parts = [leaves(entries) for entries in shards]
    chance.shuffle(parts)
    assert root_of(parts, ties=[TIE]) == ONE_OWNER
    holder = next(number for number, entries in enumerate(shards) if STATE[0] in entries)
    assert root_of([leaves(entries, [TIE] if n == holder else []) for n, entries in enumerate(shards)]) == ONE_OWNER


def test_a_tied_and_an_untied_model_differ() -> None:
    """F-23, F-27 (B020, Automodel#2571): equal bytes are no alias, and an alias is part of the state."""
    untied = root_of([leaves([*STATE, tensor("head", content=b"e")])])
    without = root_of([leaves(STATE)])
    other = root_of([leaves(STATE, [Alias("head", "layers.0.w")])])
    assert len({ONE_OWNER, untied, without, other}) == 4


@pytest.mark.parametrize(
    "change",
    [
        tensor("embed", content=b"f"),
        make_tensor_entry("embed", WEIGHT, "i8", (1,), (), b"e"),
        make_tensor_entry("embed", WEIGHT, "u8", (1, 1), (), b"e"),
        tensor("embed", BUFFER, b"e"),
        tensor("embed2", content=b"e"),
    ],
)
def test_each_property_of_a_tensor_is_part_of_the_state(change: Entry) -> None:
    """F-24."""
    assert root_of([leaves([change, *STATE[1:]])]) != root_of([leaves(STATE)])


def test_hyper_parameters_are_part_of_the_state_and_group_numbers_are_not() -> None:
    """F-23: a shard that holds members of the second group only may describe that group as its first."""
    same = Optimizer("adam", ADAM.type, (GROUPS[1], GROUPS[0]))
    swapped = [HyperEntry(e.path, e.role, 1 - e.group) if isinstance(e, HyperEntry) else e for e in STATE]
    assert root_of([leaves(swapped, optimizers=[same])]) == root_of([leaves(STATE)])
    other = Optimizer("adam", ADAM.type, (Group(to_json({"lr": 0.3}), GROUPS[0].selectors), GROUPS[1]))
    assert root_of([leaves(STATE, optimizers=[other])]) != root_of([leaves(STATE)])


def test_selectors_of_an_implementation_are_no_part_of_the_state() -> None:
    """F-65."""
    other = Optimizer("adam", ADAM.type, tuple(Group(group.hyper, to_json({"foreach": True})) for group in GROUPS))
    assert root_of([leaves(STATE, optimizers=[other])]) == root_of([leaves(STATE)])


def test_leaves_and_their_order_are_those_of_the_rules() -> None:
    """F-23, F-24, F-25."""
    found = leaves([STATE[0], STATE[4], STATE[5], STATE[8]], [TIE])
    digests = {entry.path: str(entry.digest) for entry in STATE if hasattr(entry, "digest") and entry.role == WEIGHT}
    moments = str(STATE[8].digest)  # type: ignore[union-attr]
    statements: list[Json] = [
        {"path": "embed", "role": ["hyper", "adam"], "value": {"value": GROUPS[0].hyper}},
        {"path": "embed", "role": ["optim", "adam", "exp_avg"], "value": {"tensor": moments}},
        {"path": "embed", "role": ["weight"], "value": {"tensor": digests["embed"]}},
        {"path": "head", "role": ["alias"], "value": {"owner": "embed"}},
        {"path": "layers.0._extra_state", "role": ["extra"], "value": {"value": to_json({"n": 1})}},
    ]
    tree = MerkleTree("state")
    assert state_root(found) == tree.root([canonical.encode(statement) for statement in statements], {})


def test_an_empty_state_has_a_root() -> None:
    """F-21, F-25."""
    assert state_root({}) == MerkleTree("state").root([], {})


def test_an_entry_in_two_shards_is_refused_unless_it_is_a_declared_replica() -> None:
    """F-26 (B022, Megatron-Bridge PR#5380): a copy is never picked silently, and counts once."""
    shared: LeafKey = ("layers.1.seen", BUFFER)
    both = [leaves(STATE), leaves([STATE[3]])]
    assert join_leaves(both, [], [])[1] == ["buffer 'layers.1.seen' is in shards 0, 1 and not declared a replica"]
    assert root_of(both, replicas=[shared]) == root_of([leaves(STATE)])
    drifted = [leaves(STATE), leaves([tensor("layers.1.seen", BUFFER, b"t")])]
    (reason,) = join_leaves(drifted, [], [shared])[1]
    assert "differs between shards 0, 1" in reason
    (reason,) = join_leaves([leaves(STATE)], [], [("nowhere", WEIGHT)])[1]
    assert "in no shard" in reason


def test_state_of_no_parameter_lies_in_one_shard() -> None:
    """F-26: two optimizers of one name would both have state under the empty path."""
    lbfgs = tensor("", ("optim", "adam", "d"))
    assert len(join_leaves([leaves([lbfgs]), leaves([lbfgs])], [], [])[1]) == 1


@pytest.mark.parametrize("tie", [Alias("layers.0.w", "embed"), Alias("layers.1.seen", "embed"), Alias("head", "gone")])
def test_a_tie_needs_an_owner_and_must_not_have_an_entry(tie: Alias) -> None:
    """F-27, F-85."""
    assert len(join_leaves([leaves(STATE)], [tie], [])[1]) == 1


def test_an_alias_in_one_shard_that_is_a_tensor_in_another_is_refused() -> None:
    """F-27 (B020)."""
    shards = [leaves(STATE, [TIE]), leaves([tensor("head", content=b"e")])]
    (reason,) = join_leaves(shards, [], [])[1]
    assert "'head' is also a tensor of its own" in reason


def test_an_alias_is_declared_once() -> None:
    """F-27."""
    (reason,) = join_leaves([leaves(STATE, [TIE])], [TIE], [])[1]
    assert "declared twice" in reason
    assert join_leaves([leaves(STATE, [TIE]), leaves([], [TIE])], [], [])[1]


def test_a_path_is_not_a_weight_and_a_buffer() -> None:
    """F-27."""
    for shards in ([leaves([*STATE, tensor("embed", BUFFER)])], [leaves(STATE), leaves([tensor("embed", BUFFER)])]):
        (reason,) = join_leaves(shards, [], [])[1]
        assert "'embed' is a weight and a buffer" in reason


def test_an_alias_of_a_shard_is_no_entry_of_it() -> None:
    """F-27."""
    with pytest.raises(MalformedError, match="also a tensor"):
        leaves(STATE, [Alias("layers.0.w", "embed")])


def test_an_entry_names_an_optimizer_and_a_group_of_its_shard() -> None:
    """F-66."""
    for entry in (
        HyperEntry("w", ("hyper", "sgd"), 0),
        HyperEntry("w", ("hyper", "adam"), 2),
        tensor("w", ("optim", "sgd", "x")),
    ):
        with pytest.raises(MalformedError):
            leaves([entry])


def test_entries_are_sorted_and_told_once_across_pages() -> None:
    """F-51: pages overlap in no way; an entry that came twice would be restored twice and counted once."""
    a, b, c = tensor("a"), tensor("b"), tensor("c")
    for entries in ([a, c, b, c], [a, a], [b, a]):
        with pytest.raises(MalformedError, match="sorted"):
            shard_leaves(entries, [], [])


def test_a_reference_to_an_entry_leads_to_a_tensor_of_its_shard() -> None:
    """F-44."""
    role: Role = ("optim", "adam", "dirs")
    holder = ValueEntry("", role, to_json([EntryRef(("0",))]))
    assert len(leaves([holder, tensor("", (*role, "0"))])) == 2
    others: list[list[Entry]] = [
        [],
        [tensor("w", (*role, "0"))],
        [tensor("", (*role, "1"))],
        [ValueEntry("", (*role, "0"), to_json(1))],
    ]
    for entries in others:
        with pytest.raises(MalformedError, match="no tensor"):
            leaves([holder, *entries])
    with pytest.raises(MalformedError, match="no tensor"):
        leaves([ValueEntry("", role, to_json([EntryRef(())]))])


A, B = to_json(b"stream a"), to_json(b"stream b")


def test_the_rng_root_binds_which_shard_has_which_generator() -> None:
    """F-28 (B005, Megatron-LM PR#6858): streams of two stages are never one, even with equal names and bytes."""
    ab = rng_root([[RngEntry("g", A)], [RngEntry("g", B)]])
    roots = [
        ab,
        rng_root([[RngEntry("g", B)], [RngEntry("g", A)]]),
        rng_root([[RngEntry("g", A)], [RngEntry("g", A)]]),
        rng_root([[RngEntry("g", A)]]),
        rng_root([[RngEntry("g", A)], []]),
        rng_root([[], [RngEntry("g", A)]]),
        rng_root([[RngEntry("g", A), RngEntry("h", B)], []]),
        rng_root([[RngEntry("h", A)], [RngEntry("g", B)]]),
        rng_root([[], []]),
        rng_root([[]]),
    ]
    assert len(set(roots)) == len(roots)
    leaf = canonical.encode({"name": "g", "shard": 1, "value": B})
    first = canonical.encode({"name": "g", "shard": 0, "value": A})
    assert ab == MerkleTree("rng").root([first, leaf], {"shards": 2})


def test_differences_are_listed_one_by_one() -> None:
    """F-29."""
    expected, actual = leaves(STATE), leaves([tensor("embed", content=b"f"), *STATE[2:], tensor("new")])
    lines = differences(expected, actual)
    assert [line.split(":")[0] for line in lines] == [
        "weight 'embed' differs",
        "weight 'layers.0.w' is missing",
        "weight 'new' is unexpected",
    ]
    assert differences(expected, expected) == []
