"""Diff says what is not the same in two checkpoints, bits first, and reads only what differs."""

from __future__ import annotations

import json
import math
import secrets
import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptstore
from ckptstore.backends.counting import CountingBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.diff.difference import Difference, TensorChange
from ckptstore.errors import NotFoundError
from ckptstore.format.checkpoint import Replica
from ckptstore.format.digest import Digest
from ckptstore.format.keys import STORE_KEY, document_key, object_key
from ckptstore.format.records import Store as StoreHeader
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.training import commit_state, make_training, save_steps, seed_everything

MIB = 2**20


class Tensors(nn.Module):
    """A module that holds the given tensors as buffers."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def counted() -> tuple[Store, CountingBackend]:
    backend = CountingBackend(MemoryBackend())
    backend.create(STORE_KEY, StoreHeader(secrets.token_hex(16)).encode())
    return Store(backend), backend


def commit(store: Store, *, step: int = 1, ref: str | None = None, **tensors: Tensor) -> Digest:
    """Commit a checkpoint of these buffers to a ref of its own, with the same generators each time."""
    seed_everything()
    state = ckptstore.TrainingState(model=Tensors(**tensors))
    return commit_state(store, ref or f"x{secrets.token_hex(4)}y", [state], step)


def only(found: Difference) -> TensorChange:
    (change,) = found.tensors
    return change


def figures(found: Difference) -> dict[str, Any]:
    comparison = only(found).comparison
    assert comparison is not None
    return comparison.to_json()


def from_bits(*patterns: int) -> Tensor:
    """Floats of 32 bits with exactly these patterns."""
    return torch.frombuffer(bytearray(struct.pack(f"<{len(patterns)}I", *patterns)), dtype=torch.float32).clone()


def long(value: float = 0.0) -> Tensor:
    """A tensor of one chunk that is an object of its own."""
    return torch.full((70_000,), value)


class TestBitTruth:
    """Fault B041: pytorch/pytorch#137337, #111251; sgl-project/sglang PR#30655."""

    def test_a_checkpoint_with_nans_is_identical_to_itself(self, store: Store) -> None:
        root = commit(store, x=from_bits(0x7FC00000, 0x7F800001, 0xFFC00000))
        found = store.diff(root, root)
        assert (found.relation, found.exit_code, found.tensors) == ("identical", 0, ())

    def test_a_changed_nan_payload_differs_and_is_unordered(self, store: Store) -> None:
        a = commit(store, x=from_bits(0x3F800000, 0x7FC00000))
        b = commit(store, x=from_bits(0x3F800000, 0x7FC00001))
        found = store.diff(a, b)
        assert figures(found) == {
            "elements": 2,
            "skipped": 0,
            "differing": 1,
            "first": 1,
            "equal_values": 0,
            "unordered": 1,
            "max_abs": 0,
            "max_rel": 0,
            "max_ulp": 0,
            "nan_left": 1,
            "nan_right": 1,
        }
        assert found.exit_code == 1
        assert "1 unordered (NaN)" in str(only(found))

    def test_zeros_of_either_sign_differ_in_their_bits_alone(self, store: Store) -> None:
        found = store.diff(commit(store, x=torch.zeros(3)), commit(store, x=torch.tensor([0.0, -0.0, -0.0])))
        row = figures(found)
        assert (row["differing"], row["equal_values"], row["max_abs"], row["max_rel"], row["max_ulp"]) == (
            2,
            2,
            0,
            0,
            0,
        )
        assert "2 in their bits alone, values equal" in str(only(found))

    def test_equal_zeros_nans_and_infinities_are_no_difference(self, store: Store) -> None:
        same = {"z": torch.zeros(40), "n": torch.full((40,), math.nan), "i": torch.full((40,), math.inf)}
        found = store.diff(commit(store, a=torch.zeros(1), **same), commit(store, a=torch.ones(1), **same))
        assert only(found).path == "a"
        assert found.shared_entries + found.equal_tensors == 3

    def test_no_nan_and_no_infinity_is_in_the_json(self, store: Store) -> None:
        a = commit(store, x=torch.tensor([1.0, math.nan, math.inf]), y=torch.tensor([0.0]))
        b = commit(store, x=torch.tensor([math.inf, 1.0, -math.inf]), y=torch.tensor([math.nan]))
        text = json.dumps(store.diff(a, b).to_json(), allow_nan=False)
        body = json.loads(text)
        assert body["tensors"][0]["comparison"]["max_abs"] == "inf"
        assert body["left"] == str(a)
        assert body["tensors"][0]["left"]["digest"].startswith("b3:")
        assert len(body["tensors"][0]["left"]["digest"]) == 67


class TestFigures:
    def test_the_figures_say_how_much_and_where(self, store: Store) -> None:
        left = torch.arange(24.0).reshape(2, 3, 4)
        right = left.clone()
        right[1, 0, 2] += 0.5
        right[1, 2, 3] = torch.nextafter(right[1, 2, 3], torch.tensor(99.0))
        found = store.diff(commit(store, x=left), commit(store, x=right))
        change, row = only(found), figures(found)
        assert (change.status, change.first) == ("values", (1, 0, 2))
        assert (row["elements"], row["differing"], row["max_abs"]) == (24, 2, 0.5)
        assert row["max_rel"] == pytest.approx(0.5 / 14.5)
        assert row["max_ulp"] == 0.5 * 2**20
        assert "2 of 24 elements differ, first at [1, 0, 2]; max abs 0.5" in str(change)

    @pytest.mark.parametrize("elements", [1, 5, 1000, 70_000])
    def test_inline_packed_and_long_tensors_are_compared_alike(self, store: Store, elements: int) -> None:
        left = torch.arange(elements, dtype=torch.float64)
        right = left.clone()
        right[-1] += 3
        found = store.diff(commit(store, x=left, y=left.clone()), commit(store, x=right, y=left))
        assert only(found).first == (elements - 1,)
        assert figures(found)["max_abs"] == 3

    def test_a_scalar_has_an_index_without_numbers(self, store: Store) -> None:
        found = store.diff(commit(store, x=torch.tensor(1.0)), commit(store, x=torch.tensor(2.0)))
        assert only(found).first == ()

    def test_another_dtype_or_shape_is_said_and_nothing_is_read(self) -> None:
        store, backend = counted()
        a = commit(store, x=long(), y=long(1.0))
        b = commit(store, x=long().reshape(7, -1), y=long(1.0).to(torch.bfloat16))
        backend.reset()
        found = store.diff(a, b)
        assert [(t.path, t.status, str(t.left), str(t.right)) for t in found.tensors] == [
            ("x", "kind", "f32 [70000]", "f32 [7, 10000]"),
            ("y", "kind", "f32 [70000]", "bf16 [70000]"),
        ]
        assert backend.total("get", prefix="objects/").calls == 0

    def test_tensors_come_and_go(self) -> None:
        store, backend = counted()
        a = commit(store, x=long(), y=long(1.0))
        b = commit(store, x=long(), z=long(1.0))
        backend.reset()
        found = store.diff(a, b)
        assert [(t.path, t.status) for t in found.tensors] == [("y", "removed"), ("z", "added")]
        assert found.equal_tensors == 1
        assert backend.total("get", prefix="objects/").calls == 0


class TestReadingLittle:
    def test_a_root_with_itself_reads_only_its_document(self) -> None:
        store, backend = counted()
        root = commit(store, x=long())
        backend.reset()
        assert store.diff(root, root).exit_code == 0
        assert set(backend.by_key("get")) == {document_key(root)}

    def test_only_objects_of_tensors_that_differ_are_read(self) -> None:
        store, backend = counted()
        a = commit(store, x=long(), y=long(1.0), s=torch.arange(100.0), t=torch.arange(50.0))
        b = commit(store, x=long(), y=long(2.0), s=torch.arange(100.0), t=torch.arange(50.0))
        backend.reset()
        found = store.diff(a, b)
        read = backend.by_key("get", prefix="objects/")
        expected = {object_key(Digest.of(long(value).numpy().tobytes())) for value in (1.0, 2.0)}
        assert set(read) == expected
        assert (found.objects_read, found.equal_tensors) == (2, 3)
        assert found.bytes_read == backend.total("get").bytes
        assert found.documents_read == backend.total("get", prefix="documents/").calls

    def test_a_pack_is_read_once_for_all_its_tensors(self) -> None:
        store, backend = counted()
        a = commit(store, **{f"t{i}": torch.arange(100.0) + i for i in range(20)})
        b = commit(store, **{f"t{i}": torch.arange(100.0) - i for i in range(20)})
        backend.reset()
        found = store.diff(a, b)
        assert len(found.tensors) == 19
        packs = {d for root in (a, b) for p in store.closure(root).shards[0].shard.packs for d in p.digests}
        assert found.objects_read == len(packs)

    def test_pages_that_both_share_are_not_read(self) -> None:
        store, backend = counted()
        tensors = {f"t{i:04}": torch.tensor(float(i)) for i in range(2500)}
        a = commit(store, **tensors)
        b = commit(store, **{**tensors, "t2499": torch.tensor(-1.0)})
        pages = [[ref.digest for ref in store.closure(root).shards[0].shard.pages] for root in (a, b)]
        shared = set(pages[0]) & set(pages[1])
        assert (len(pages[0]), len(shared)) == (3, 2)
        backend.reset()
        found = store.diff(a, b)
        assert not {document_key(digest) for digest in shared} & set(backend.by_key("get"))
        assert (only(found).path, found.shared_entries) == ("t2499", 2048)
        assert found.documents_read == 6  # two checkpoints, two shards, two pages

    def test_of_a_long_tensor_only_the_chunks_that_differ_are_read(self) -> None:
        store, backend = counted()
        left = torch.zeros(33 * MIB // 4 + 10)  # two chunks, and a third of 1 MiB and 40 bytes
        right = left.clone()
        right[16 * MIB // 4 + 5] = 2.0
        right[16 * MIB // 4 + 7] = -1.0
        a, b = commit(store, x=left), commit(store, x=right)
        backend.reset()
        found = store.diff(a, b)
        row = figures(found)
        assert (row["elements"], row["differing"], row["first"]) == (left.numel(), 2, 16 * MIB // 4 + 5)
        assert row["skipped"] == left.numel() - 4 * MIB
        assert backend.total("get", prefix="objects/").bytes == 2 * 16 * MIB

    def test_the_short_last_chunk_of_a_long_tensor_is_found_in_its_pack(self) -> None:
        store, backend = counted()
        left = torch.zeros(4 * MIB + 100)
        right = left.clone()
        right[-1] = 1.0
        others = {"a": torch.arange(77.0), "z": torch.arange(99.0)}
        a, b = commit(store, x=left, **others), commit(store, x=right, **others)
        backend.reset()
        found = store.diff(a, b)
        assert only(found).first == (left.numel() - 1,)
        assert backend.total("get", prefix="objects/").bytes < MIB


class TestOtherParts:
    def test_a_training_says_what_moved_on(self, store: Store) -> None:
        a, b = save_steps(store, "main", make_training(), 5, every=1)[3:]
        found = store.diff(a, b)
        fields = {change.name: (change.left, change.right) for change in found.fields}
        assert fields["step"] == (4, 5)
        assert fields["parent"][1] == str(a)
        names = {change.name: (change.left, change.right) for change in found.progress}
        assert names["scheduler 'scheduler'.last_epoch"] == ({"t": "int", "v": "4"}, {"t": "int", "v": "5"})
        assert names["data 'data'.position"] == ({"t": "int", "v": "24"}, {"t": "int", "v": "30"})
        assert {change.path for change in found.tensors if change.role == ("weight",)} == {
            path for path, _ in make_training().model.named_parameters()
        }
        assert {change.name for change in found.rng} == {"torch.cpu"}
        assert (
            found.headline()
            == f"different: {len(found.tensors)} tensors differ, {found.equal_tensors} others are equal"
        )

    def test_a_hyper_parameter_is_named_with_its_values_and_parameters(self, store: Store) -> None:
        def state(lr: float, beta: float) -> ckptstore.TrainingState:
            seed_everything()
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            groups = [
                {"params": model[0].parameters(), "betas": (0.9, beta)},
                {"params": model[1].parameters(), "lr": lr},
            ]
            return ckptstore.TrainingState(model=model, optimizer=torch.optim.AdamW(groups, lr=0.5))

        a = commit_state(store, "a", [state(0.1, 0.99)], 1)
        b = commit_state(store, "b", [state(0.2, 0.95)], 1)
        found = store.diff(a, b)
        assert [str(change) for change in found.hyper] == [
            "optimizer betas[1]: 0.99 -> 0.95 (group 0)",
            "optimizer lr: 0.1 -> 0.2 (group 1)",
        ]
        assert found.tensors == ()

    def test_parameters_of_a_group_that_changed_its_members_are_named(self, store: Store) -> None:
        def state(split: int) -> ckptstore.TrainingState:
            seed_everything()
            model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
            parameters = list(model.parameters())
            groups = [{"params": parameters[:split]}, {"params": parameters[split:], "lr": 0.25}]
            return ckptstore.TrainingState(model=model, optimizer=torch.optim.SGD(groups, lr=0.5))

        a, b = commit_state(store, "a", [state(1)], 1), commit_state(store, "b", [state(2)], 1)
        (change,) = store.diff(a, b).hyper
        assert (change.key, change.paths, change.groups) == ("lr", ("1.weight",), ())
        assert str(change) == "optimizer lr: 0.25 -> 0.5 ('1.weight')"

    def test_type_and_implementation_of_an_optimizer_are_no_state(self, store: Store) -> None:
        def state(**options: Any) -> ckptstore.TrainingState:
            seed_everything()
            model = nn.Linear(3, 3)
            return ckptstore.TrainingState(
                model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5, **options)
            )

        a = commit_state(store, "a", [state(foreach=False)], 1)
        b = commit_state(store, "b", [state(foreach=True)], 1)
        found = store.diff(a, b)
        assert [str(change) for change in found.implementation] == [
            "optimizer optimizer group 0.foreach: False -> True"
        ]
        assert (found.relation, found.headline()) == ("same-state", "same state and progress, other implementation")

    def test_aliases_that_appear_are_said(self, store: Store) -> None:
        def state(tied: bool) -> ckptstore.TrainingState:
            seed_everything()
            model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
            model["head"].weight = model["embed"].weight if tied else nn.Parameter(model["embed"].weight.clone())
            return ckptstore.TrainingState(model=model)

        a, b = commit_state(store, "a", [state(False)], 1), commit_state(store, "b", [state(True)], 1)
        found = store.diff(a, b)
        assert [str(change) for change in found.aliases] == ["'head.weight': new, 'embed.weight'"]
        assert [(t.path, t.status) for t in found.tensors] == [("head.weight", "removed")]

    def test_binding_files_and_deviations_are_compared(self, store: Store, tmp_path: Any) -> None:
        roots = []
        for name, text, version in (("a", "one", "1.0"), ("b", "two", "2.0")):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "same.txt").write_text("same")
            (folder / "plan.json").write_text(text)
            (folder / f"{name}.txt").write_text("")
            tree = store.put_tree(folder)
            seed_everything()
            attempt = store.begin(name)
            run = store.put_preparation(tree, tree, tree)
            receipt = store.save_shard(
                ckptstore.TrainingState(model=nn.Linear(2, 2)),
                attempt,
                step=1,
                binding={"torch": version, "threads": 2},
                files=tree,
                run=run,
                cursors={"data": ckptstore.Cursor("samples", 32 * len(text))},
            )
            deviations = [ckptstore.Deviation("fork", "x", "y")] if name == "b" else []
            roots.append(store.commit(attempt, [receipt], deviations=deviations))
        found = store.diff(*roots)
        assert [str(change) for change in found.binding] == ["torch: '1.0' -> '2.0'"]
        assert [change.name for change in found.files if change.name.startswith("files")] == [
            "files 'a.txt'",
            "files 'b.txt'",
            "files 'plan.json'",
        ]
        assert {change.name.split()[0] for change in found.files} == {"files", "plan", "inputs", "sources"}
        assert [change.name for change in found.deviations] == ["fork, expected x, actual y"]
        assert found.objects_read == 0
        assert found.headline().startswith("same state and progress, other run, binding, files, deviations")

    def test_a_cursor_that_moved_is_other_progress(self, store: Store) -> None:
        roots = []
        for name, position in (("a", 32), ("b", 64)):
            seed_everything()
            attempt = store.begin(name)
            state = ckptstore.TrainingState(model=Tensors(x=torch.zeros(3)))
            cursors = {"data": ckptstore.Cursor("samples", position)}
            roots.append(store.commit(attempt, [store.save_shard(state, attempt, step=1, cursors=cursors)]))
        found = store.diff(*roots)
        assert [str(change) for change in found.progress] == ["cursor 'data'.position: 32 -> 64"]
        assert (found.relation, found.headline()) == ("different", "same state, other progress")


class TestSameState:
    def test_other_generators_are_other_rng_and_no_object_is_read(self) -> None:
        store, backend = counted()
        roots = []
        for name, seed in (("a", 1), ("b", 2)):
            model = Tensors(x=long(), s=torch.arange(99.0))
            seed_everything(seed)
            roots.append(commit_state(store, name, [ckptstore.TrainingState(model=model)], 1))
        backend.reset()
        found = store.diff(*roots)
        assert (found.relation, found.headline()) == ("same-state", "same state and progress, other RNG")
        assert {(change.shard, change.name) for change in found.rng} == {(0, "python"), (0, "numpy"), (0, "torch.cpu")}
        assert backend.total("get", prefix="objects/").calls == found.objects_read == 0
        assert found.exit_code == 1

    def test_two_shards_and_one_are_the_same_state_in_another_layout(self) -> None:
        store, backend = counted()
        first = {"a": long(1.0), "b": torch.arange(50.0)}
        second = {"c": long(2.0), "d": torch.arange(60.0)}
        seed_everything()
        one = commit_state(store, "one", [ckptstore.TrainingState(model=Tensors(**first, **second))], 1)
        states = [ckptstore.TrainingState(model=Tensors(**tensors)) for tensors in (first, second)]
        two = commit_state(store, "two", states, 1)
        backend.reset()
        found = store.diff(one, two)
        assert found.relation == "same-state"
        assert found.headline().startswith("same state and progress, other layout")
        assert [(move.path, move.left, move.right) for move in found.layout] == [("c", (0,), (1,)), ("d", (0,), (1,))]
        assert backend.total("get", prefix="objects/").calls == 0
        assert "moved shard 0 -> 1: 2 entries, the first is buffer 'c'" in list(found.lines())

    def test_a_page_that_moved_as_a_whole_is_named_without_being_read(self) -> None:
        store, backend = counted()
        first, second = (
            ckptstore.TrainingState(model=Tensors(a=long())),
            ckptstore.TrainingState(model=Tensors(b=long())),
        )
        seed_everything()
        one, two = commit_state(store, "one", [first, second], 1), commit_state(store, "two", [second, first], 1)
        backend.reset()
        found = store.diff(one, two)
        assert [(move.path, move.left, move.right) for move in found.layout] == [("a", (0,), (1,)), ("b", (1,), (0,))]
        assert (found.relation, found.documents_read) == ("same-state", 6)

    def test_a_hyper_parameter_of_a_page_that_moved_is_that_of_its_own_group(self) -> None:
        store, _ = counted()

        def state(name: str, lr: float) -> ckptstore.TrainingState:
            model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False)})
            nn.init.ones_(model[name].weight)
            return ckptstore.TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr))

        seed_everything()
        one = commit_state(store, "one", [state("a", 0.1), state("b", 0.2)], 1)
        seed_everything()
        two = commit_state(store, "two", [state("b", 0.2), state("a", 0.1)], 1)
        seed_everything()
        three = commit_state(store, "three", [state("b", 0.2), state("a", 0.3)], 1)
        assert (store.diff(one, two).relation, store.diff(one, two).hyper) == ("same-state", ())
        (change,) = store.diff(one, three).hyper
        assert str(change) == "optimizer lr: 0.1 -> 0.3 ('a.weight')"


class TestTwoStores:
    def test_checkpoints_of_two_stores_are_compared(self, store: Store) -> None:
        other, backend = counted()
        a, b = commit(store, x=long(1.0), s=torch.arange(30.0)), commit(other, x=long(2.0), s=torch.arange(30.0))
        backend.reset()
        found = store.diff(a, b, other)
        assert figures(found)["max_abs"] == 1.0
        assert backend.total("get", prefix="objects/").calls == 1

    def test_the_other_store_must_have_the_root_even_if_this_one_has_it(self, store: Store) -> None:
        root = commit(store, x=long())
        with pytest.raises(NotFoundError, match=root.short):
            store.diff(root, root, counted()[0])

    def test_refs_and_prefixes_are_names(self, store: Store) -> None:
        a, b = commit(store, ref="left", x=long(1.0)), commit(store, ref="right", x=long(2.0))
        found = store.diff("left", b.hex[:12])
        assert (found.left, found.right) == (a, b)


class TestDamage:
    @pytest.mark.parametrize("damage", ["missing", "flipped", "truncated"])
    def test_a_bad_object_is_named_and_the_rest_is_compared(self, damage: str) -> None:
        backend = FaultyBackend(MemoryBackend())
        backend.create(STORE_KEY, StoreHeader(secrets.token_hex(16)).encode())
        store = Store(backend)
        a, b = commit(store, x=long(1.0), y=long(3.0)), commit(store, x=long(2.0), y=long(4.0))
        key = object_key(Digest.of(long(2.0).numpy().tobytes()))
        if damage == "missing":
            backend.delete(key)
        elif damage == "flipped":
            backend.flip_bit(key, 77)
        else:
            backend.truncate(key, 100)
        found = store.diff(a, b)
        x, y = found.tensors
        assert (x.path, x.status, y.path, y.status) == ("x", "unreadable", "y", "values")
        assert x.finding is not None
        assert x.finding.key == key
        assert (x.finding.place.path, x.finding.place.checkpoint) == ("x", b)
        assert found.exit_code == (4 if damage == "missing" else 3)
        json.dumps(found.to_json(), allow_nan=False)

    def test_a_bad_pack_is_named_once_for_each_tensor_in_it(self) -> None:
        store, backend = counted()
        a, b = commit(store, s=torch.arange(50.0)), commit(store, s=torch.arange(50.0) + 1)
        (pack,) = store.closure(b).shards[0].shard.packs[0].digests
        backend.delete(object_key(pack))
        change = only(store.diff(a, b))
        assert change.finding is not None
        assert (change.status, change.finding.key) == ("unreadable", object_key(pack))

    def test_what_stands_in_a_missing_document_is_not_called_removed(self) -> None:
        store, backend = counted()
        a, b = commit(store, x=long(1.0)), commit(store, x=long(2.0), y=long(3.0))
        (page,) = store.closure(b).shards[0].shard.pages
        backend.delete(document_key(page.digest))
        found = store.diff(a, b)
        assert found.tensors == ()
        assert [finding.key for finding in found.findings] == [document_key(page.digest)]
        assert found.exit_code == 4

    def test_a_missing_checkpoint_is_an_error(self, store: Store) -> None:
        with pytest.raises(NotFoundError):
            store.diff(commit(store, x=long()), Digest.of(b"none"))


def test_names_are_escaped_for_people_and_whole_for_machines(store: Store) -> None:
    name = "a\x1b[2J\u202e"
    found = store.diff(commit(store, x=long()), commit(store, x=long(), **{name: torch.zeros(1)}))
    assert all(line.isprintable() for line in found.lines())
    assert found.to_json()["tensors"][0]["path"] == name


def test_replicas_that_hide_in_shared_pages_are_found(store: Store) -> None:
    def state(**tensors: Tensor) -> ckptstore.TrainingState:
        return ckptstore.TrainingState(model=Tensors(**tensors))

    seed_everything()
    shared = torch.arange(3.0)
    replicas = [Replica(("buffer",), "x")]
    a = commit_state(store, "a", [state(x=shared), state(x=shared, y=torch.zeros(1))], 1, replicas=replicas)
    b = commit_state(store, "b", [state(x=shared), state(y=torch.zeros(1))], 1)
    found = store.diff(a, b)
    assert found.relation == "same-state"
    assert found.tensors == ()
    assert [(move.path, move.left, move.right) for move in found.layout] == [("x", (0, 1), (0,))]
