"""Repartition: the same learned state under other shards; long chunks stay as they lie, and the state root stays."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckptstore
from ckptstore import Deviation, Digest, Replica, TrainingState
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.errors import ConflictError, CorruptError, NotFoundError, RefusedError, UsageError
from ckptstore.export import import_weights
from ckptstore.format.shard import Alias
from ckptstore.store import Store
from tests.support.invariants import broken, inodes
from tests.support.states import memory_store
from tests.support.training import commit_state, make_training, save_steps, seed_everything

LAYERS = 6


def layer(width: int = 260) -> nn.Module:
    """Its matrix has one chunk of more than 256 KiB; its vector is short."""
    return nn.Linear(width, width)


def parts(cuts: Sequence[int], width: int = 260) -> list[TrainingState]:
    """Six layers on ``len(cuts) + 1`` workers, each after one update with AdamW; the same whatever the cuts."""
    edges = (0, *cuts, LAYERS)
    states = []
    for first, last in pairwise(edges):
        layers = {}
        for number in range(first, last):
            torch.manual_seed(number)
            layers[f"layer{number}"] = layer(width)
        model = nn.ModuleDict(layers)
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            ]
        )
        for number, parameter in enumerate(model.parameters(), 2 * first):
            parameter.grad = torch.full_like(parameter, 0.5 + number)
        optimizer.step()
        states.append(TrainingState(model=model, optimizer=optimizer))
    return states


def paths(cuts: Sequence[int]) -> list[set[str]]:
    """What each worker owns."""
    edges = (0, *cuts, LAYERS)
    return [
        {f"layer{number}.{name}" for number in range(first, last) for name in ("weight", "bias")}
        for first, last in pairwise(edges)
    ]


def saved(store: Store, cuts: Sequence[int], width: int = 260) -> Digest:
    seed_everything()
    return commit_state(store, "main", parts(cuts, width), 1)


def objects_of(path: Path) -> dict[str, int]:
    return {key: inode for key, inode in inodes(path).items() if key.startswith("objects/")}


def test_the_same_state_under_other_shards_has_the_same_state_root_and_its_chunks_as_they_lay(tmp_path: Path) -> None:
    """F-173."""
    store = ckptstore.open(tmp_path / "store", create=True)
    old = saved(store, [3])
    before = objects_of(tmp_path / "store")
    sizes = {stat.key: stat.size for stat in store.backend.list("")}

    fresh = ckptstore.open(tmp_path / "store")
    done = ckptstore.repartition(fresh, old, paths([1, 4]), ref="main")

    assert (done.parent, done.shards, done.generators) == (old, 3, (0, 1, 0))
    assert done.root == store.head("main") != old
    one, two = store.checkpoint(old), store.checkpoint(done.root)
    assert done.state_root == one.state_root == two.state_root
    for name in ("step", "progress", "binding", "run", "files"):
        assert getattr(one, name) == getattr(two, name)
    assert two.parent == old
    assert two.deviations == done.deviations
    assert two.deviations == (Deviation("generators", "each shard's own", "those of the parent's shards 0, 1, 0"),)

    # What was written is packs and documents, and as much as it says; what was there is there, untouched.
    after = objects_of(tmp_path / "store")
    assert before.items() <= after.items()
    new = {s.key: s.size for s in store.backend.list("") if s.key not in sizes}
    assert all(size < 256 * 1024 for key, size in new.items() if key.startswith("objects/"))
    written = sum(size for key, size in new.items() if key.startswith(("objects/", "documents/")))
    assert (done.rewritten, done.written_bytes) == (0, written)
    assert (done.chunks, done.chunk_bytes) == (3 * LAYERS, 3 * LAYERS * 4 * 260 * 260)
    assert done.read_bytes == sum(size for key, size in sizes.items() if key.startswith("objects/"))

    assert fresh.verify("main").ok
    assert broken(tmp_path / "store") == []
    difference = fresh.diff(old, done.root)
    assert (difference.same_state, difference.same_progress, difference.objects_read) == (True, True, 0)
    assert difference.relation == "same-state"
    assert difference.headline() == "same state and progress, other layout, RNG, parent, deviations"


def test_through_three_and_one_back_to_two_is_the_same_state_in_the_same_pages_and_packs() -> None:
    store = memory_store()
    first = saved(store, [3])
    roots = [first]
    for cuts in ([2, 4], [], [3]):
        roots.append(ckptstore.repartition(store, roots[-1], paths(cuts), ref="main").root)
    assert len({store.checkpoint(root).state_root for root in roots}) == 1
    assert [len(store.checkpoint(root).shards) for root in roots] == [2, 3, 1, 2]
    there, back = (store.closure(root).shards for root in (first, roots[-1]))
    for index in range(2):
        assert there[index].shard.pages == back[index].shard.pages
        assert there[index].shard.packs == back[index].shard.packs
        assert there[index].shard.optimizers == back[index].shard.optimizers
    assert there[0].digest == back[0].digest
    assert there[1].shard.rng != () != back[1].shard.rng


def test_a_checkpoint_that_has_these_shards_already_is_left_as_it_is() -> None:
    store = memory_store()
    root = saved(store, [3], 20)
    keys = {stat.key for stat in store.backend.list("")}
    done = ckptstore.repartition(store, root, paths([3]), ref="main")
    assert (done.root, done.parent, done.written_bytes, done.deviations) == (root, root, 0, ())
    assert {stat.key for stat in store.backend.list("")} == keys


def test_it_restores_onto_as_many_workers_as_it_has_shards() -> None:
    store = memory_store()
    root = saved(store, [3], 20)
    expected = {name: p.detach().clone() for part in parts([3], 20) for name, (_, p) in part.tensors().items()}
    for cuts in ([], [1, 3, 5], [2]):
        root = ckptstore.repartition(store, root, paths(cuts), ref="main").root
        for index, state in enumerate(parts(cuts, 20)):
            for _, tensor in state.tensors().values():
                tensor.detach().zero_()
            ckptstore.open(store.url).restore(root, state, shard=index)
            for name, (_, tensor) in state.tensors().items():
                assert torch.equal(tensor, expected[name])


def test_what_this_process_wrote_itself_is_not_read_again() -> None:
    store = memory_store()
    root = saved(store, [3])
    packed = sum(n.length for n in store.closure(root).objects.values() if n.slots)
    done = ckptstore.repartition(store, root, paths([]), ref="main")
    assert done.read_bytes == packed


def test_a_chunk_that_is_damaged_or_gone_is_named_and_the_ref_stays(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    root = saved(store, [3])
    need = next(n for n in store.closure(root).objects.values() if n.length >= 256 * 1024)
    file = tmp_path / "store" / "objects" / need.digest.hex[:2] / need.digest.hex
    good = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(b"\xff" + good[1:])
    for error in (CorruptError, NotFoundError):
        reader = ckptstore.open(tmp_path / "store")
        with pytest.raises(error, match=r"layer\d\.weight"):
            ckptstore.repartition(reader, root, paths([]), ref="main")
        assert reader.head("main") == root
        file.unlink(missing_ok=True)
    file.write_bytes(good)
    file.chmod(0o444)
    assert ckptstore.repartition(ckptstore.open(tmp_path / "store"), root, paths([]), ref="main").root != root


def test_a_ref_that_names_something_else_is_not_moved_and_a_new_one_names_the_parent_first() -> None:
    store = memory_store()
    first = saved(store, [3], 20)
    second = ckptstore.repartition(store, first, paths([]), ref="main").root
    with pytest.raises(ConflictError, match="ref main"):
        ckptstore.repartition(store, first, paths([2]), ref="main")
    assert store.head("main") == second
    third = ckptstore.repartition(store, first, paths([2]), ref="wide").root
    assert [record.root for record in store.refs.log("wide")] == [third, first]
    same = ckptstore.repartition(store, first, paths([3]), ref="as-it-is").root
    assert [record.root for record in store.refs.log("as-it-is")] == [same] == [first]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ([{"layer0.weight"}], "would be in none of the 1 new shards"),
        ([*paths([]), set()], "new shard 1: it gets no path"),
        ([*paths([]), {"layer9.weight"}], "'layer9.weight' is not in the checkpoint"),
        (["layer0.weight"], "new shard 0: it gets no path"),
        ([], "would be in none of the 0 new shards"),
        ([{"layer0.weight", 3}], "new shard 0: 3 is no path"),
    ],
)
def test_an_assignment_that_leaves_something_out_or_makes_something_up_is_refused(wanted: Any, says: str) -> None:
    store = memory_store()
    root = saved(store, [3], 4)
    keys = {stat.key for stat in store.backend.list("")}
    with pytest.raises(UsageError, match=says):
        ckptstore.repartition(store, root, wanted, ref="main")
    assert {stat.key for stat in store.backend.list("")} == keys


class Tied(nn.Module):
    """Two names of one matrix, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.arange(32.0).reshape(4, 8))
        self.head = self.embedding
        self.norm = nn.Parameter(torch.ones(8))


def test_two_names_of_one_tensor_stay_so_within_a_shard_and_across() -> None:
    store = memory_store()
    root = commit_state(store, "main", [TrainingState(model=Tied())], 1)
    alias = Alias("head", "embedding")

    def where(root: Digest) -> tuple[list[tuple[Alias, ...]], tuple[Alias, ...]]:
        views = store.closure(root).shards
        return [views[index].shard.aliases for index in sorted(views)], store.checkpoint(root).ties

    assert where(root) == ([(alias,)], ())
    expected = {
        "follows its owner": ([{"norm"}, {"embedding"}], ([(), (alias,)], ())),
        "across": ([{"norm", "head"}, {"embedding"}], ([(), ()], (alias,))),
        "stays across": ([{"embedding"}, {"norm"}], ([(), ()], (alias,))),
        "together again": ([{"norm", "embedding", "head"}], ([(alias,)], ())),
    }
    for wanted, there in expected.values():
        root = ckptstore.repartition(store, root, wanted, ref="main").root
        assert where(root) == there
        assert store.verify(root).ok
    live = Tied()
    store.restore(root, TrainingState(model=live))
    assert live.head is live.embedding


def test_a_path_in_several_shards_is_a_replica_and_counts_once() -> None:
    store = memory_store()
    root = saved(store, [3], 4)
    left, right = paths([3])
    doubled = ckptstore.repartition(store, root, [left, right | {"layer0.weight"}], ref="main").root
    checkpoint = store.checkpoint(doubled)
    assert Replica(("weight",), "layer0.weight") in checkpoint.replicas
    assert checkpoint.state_root == store.checkpoint(root).state_root
    assert store.verify(doubled).ok
    single = ckptstore.repartition(store, doubled, [left, right], ref="main").root
    assert store.checkpoint(single).replicas == ()
    assert store.closure(single).shards[1].shard.pages == store.closure(root).shards[1].shard.pages


def lbfgs(names: Sequence[str]) -> TrainingState:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = torch.stack([m(torch.ones(3)).square().sum() for m in model.values()]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return TrainingState(model=model, optimizer=optimizer)


def test_what_an_optimizer_keeps_over_all_of_its_parameters_moves_whole_or_not_at_all() -> None:
    store = memory_store()
    others = TrainingState(model=nn.ModuleDict({"z": nn.Linear(3, 3)}))
    root = commit_state(store, "main", [lbfgs("ab"), others], 1)
    a, b, z = ({f"{name}.weight", f"{name}.bias"} for name in "abz")
    for torn in ([a, b | z], [a | z, b], [a | b, b | z]):
        with pytest.raises(RefusedError, match=r"optimizer optimizer of .* torn apart"):
            ckptstore.repartition(store, root, torn, ref="main")
    whole = ckptstore.repartition(store, root, [z, a | b], ref="main").root
    assert store.checkpoint(whole).state_root == store.checkpoint(root).state_root
    assert store.closure(whole).shards[0].shard.optimizers == ()
    store.restore(whole, lbfgs("ab"), shard=1)


def test_groups_of_one_optimizer_that_workers_had_apart_are_joined_by_what_they_say() -> None:
    def part(name: str, *rates: float) -> TrainingState:
        torch.manual_seed(0)
        model = nn.ModuleDict({f"{name}{number}": nn.Linear(2, 2) for number in range(len(rates))})
        groups = [{"params": m.parameters(), "lr": rate} for m, rate in zip(model.values(), rates, strict=True)]
        return TrainingState(model=model, optimizer=torch.optim.SGD(groups, lr=1.0))

    store = memory_store()
    root = commit_state(store, "main", [part("a", 0.1, 0.2), part("b", 0.2, 0.3)], 1)
    names = [f"{m}.{p}" for m in ("a0", "a1", "b0", "b1") for p in ("weight", "bias")]
    one = ckptstore.repartition(store, root, [names], ref="main").root
    assert store.checkpoint(one).state_root == store.checkpoint(root).state_root
    (optimizer,) = store.closure(one).shards[0].shard.optimizers
    assert len(optimizer.groups) == 3
    assert store.verify(one).ok


def test_two_kinds_of_optimizer_under_one_name_stay_apart() -> None:
    def part(name: str, kind: type[torch.optim.Optimizer]) -> TrainingState:
        model = nn.ModuleDict({name: nn.Linear(2, 2)})
        return TrainingState(model=model, optimizer=kind(model.parameters()))  # type: ignore[call-arg]

    store = memory_store()
    root = commit_state(store, "main", [part("a", torch.optim.SGD), part("b", torch.optim.RMSprop)], 1)
    names = [{f"{m}.weight", f"{m}.bias"} for m in "ab"]
    with pytest.raises(RefusedError, match=r"shard 0 has a torch\.optim\.sgd\.SGD"):
        ckptstore.repartition(store, root, [names[0] | names[1]], ref="main")
    assert ckptstore.repartition(store, root, names[::-1], ref="main").root != root


def test_schedulers_cursors_and_what_tracks_the_step_are_carried_over() -> None:
    store = memory_store()
    training = make_training()
    (root,) = save_steps(store, "main", training, 1)
    untracked = commit_state(store, "other", [training.state()], 1, tracks_step={"optimizer.optimizer": False})
    for ref, old in (("main", root), ("other", untracked)):
        names = sorted({entry.path for entry in store.closure(old).shards[0].entries})
        new = ckptstore.repartition(store, old, [names[:3], names[3:]], ref=ref).root
        assert store.checkpoint(new).progress == store.checkpoint(old).progress
        assert store.verify(new).ok


def test_a_checkpoint_without_generators_deviates_in_nothing(tmp_path: Path) -> None:
    store = memory_store()
    root = saved(store, [3], 8)
    ckptstore.export_weights(store, root, tmp_path / "w.safetensors")
    imported = import_weights(store, tmp_path / "w.safetensors", "plain").root
    done = ckptstore.repartition(store, imported, paths([2]), ref="plain")
    assert done.deviations == store.checkpoint(done.root).deviations == ()


def test_one_new_shard_is_pulled_alone_and_a_collection_keeps_all_that_it_needs(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    root = saved(store, [3])
    new = ckptstore.repartition(store, root, paths([1, 4]), ref="main").root
    far = ckptstore.open(tmp_path / "far", create=True)
    ckptstore.pull(store, far, new, shards=[2])
    state = parts([1, 4])[2]
    far.restore(new, state, shard=2)
    assert far.verify(new, [2]).ok
    store.add_receipt(store.verify("main").receipt(store.url))
    ckptstore.collect(store, Policy((KeepLast(1),)), delete=True)
    assert broken(tmp_path / "store") == []
    report = ckptstore.open(tmp_path / "store").verify("main")
    assert report.ok
    assert [ancestor.root for ancestor in report.ancestors] == [root]


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_no_division_changes_the_state_root(data: st.DataObject) -> None:
    store = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    root = saved(store, data.draw(st.sampled_from([(), (3,), (1, 5)])), 2)
    names = sorted(set().union(*paths([])))
    states = {store.checkpoint(root).state_root}
    for _ in range(2):
        count = data.draw(st.integers(1, 4))
        places = [data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)) for _ in names]
        wanted = [{name for name, at in zip(names, places, strict=True) if index in at} for index in range(count)]
        wanted = [one for one in wanted if one]
        root = ckptstore.repartition(store, root, wanted, ref="main").root
        states.add(store.checkpoint(root).state_root)
        assert store.verify(root).ok
        for index, view in store.closure(root).shards.items():
            assert {entry.path for entry in view.entries} == wanted[index]
    assert len(states) == 1
