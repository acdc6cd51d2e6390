"""A resumed run ends in the uninterrupted run's root (faults B001 to B022)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Cursor
from ckptstore.errors import CommitAbortedError, CorruptError, MismatchError, NotFoundError, RefusedError
from ckptstore.format import values
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.shard import Shard
from ckptstore.store import Store
from tests.support.documents import rewrite_checkpoint, rewrite_shard
from tests.support.training import Training, commit_state, make_model, make_training, save_steps, seed_everything


def test_a_resumed_run_ends_in_the_root_of_the_uninterrupted_one(store: Store) -> None:
    """B001 (vllm-project/speculators#1027): generators are state."""
    straight = save_steps(store, "straight", make_training(), 6, every=3)
    save_steps(store, "resumed", make_training(), 3, every=3)
    torch.manual_seed(99)
    random.seed(99)
    resumed = save_steps(store, "resumed", make_training(seed=5), 6, every=3)
    assert resumed[-1] == straight[-1]


def test_without_its_generators_a_resumed_run_ends_elsewhere(store: Store) -> None:
    """B001: the generators are load-bearing here, or the test above shows nothing."""
    straight = save_steps(store, "straight", make_training(), 6, every=3)
    save_steps(store, "resumed", make_training(), 3, every=3)
    training = make_training(seed=5)
    with store.run("resumed", **training.objects()) as run:
        step = run.resume()
        torch.manual_seed(99)
        while step < 6:
            training.step()
            step += 1
        root = run.save(step)
    assert store.checkpoint(root).state_root != store.checkpoint(straight[-1]).state_root


@pytest.mark.parametrize("name", ["python", "numpy", "torch.cpu", "generator.noise"])
def test_a_checkpoint_that_lacks_a_required_generator_is_refused_by_name(store: Store, name: str) -> None:
    """B001, variant: a generator deleted by hand, all digests recomputed."""
    noise = torch.Generator().manual_seed(3)

    def state(training: Training) -> ckptstore.TrainingState:
        return ckptstore.TrainingState(**training.objects(), generators={"noise": noise})

    root = commit_state(store, "main", [state(make_training())], 0)

    def drop(shard: Shard) -> dict[str, Any]:
        return {"rng": tuple(entry for entry in shard.rng if entry.name != name)}

    forged = rewrite_shard(store, root, 0, drop)
    fresh = make_training(seed=1)
    before = fresh.model.state_dict()["0.weight"].clone()
    with pytest.raises(MismatchError, match=f"generator {name} is live and not stored"):
        store.restore(forged, state(fresh))
    assert torch.equal(before, fresh.model.state_dict()["0.weight"])


def test_seeding_after_the_restore_is_found_at_the_arm_point(store: Store) -> None:
    """F-149. B003 (modelscope/ms-swift#9935)."""
    save_steps(store, "main", make_training(), 2)
    training = make_training()
    with store.run("main", **training.objects()) as run:
        run.resume()
        run.arm()
        torch.manual_seed(0)  # what a constructor with a seeding side effect does
        with pytest.raises(MismatchError, match=r"generator torch\.cpu is not in its stored state"):
            run.arm()


def test_each_shard_gets_its_own_generators_back(store: Store) -> None:
    """B005 (NVIDIA/Megatron-LM#6858): also when two shards hold equal bytes they are two entries."""
    streams = [torch.Generator().manual_seed(index) for index in range(2)]
    states = [ckptstore.TrainingState(generators={"stream": stream}) for stream in streams]
    saved = [stream.get_state() for stream in streams]
    root = commit_state(store, "main", states, 1)
    for stream in streams:
        stream.manual_seed(77)
    for index, state in enumerate(states):
        store.restore(root, state, shard=index)
        assert torch.equal(streams[index].get_state(), saved[index])
    equal = [ckptstore.TrainingState(generators={"stream": torch.Generator().manual_seed(1)}) for _ in range(2)]
    twin = commit_state(store, "twin", equal, 1)
    shards = store.closure(twin).shards
    assert all("generator.stream" in {e.name for e in shards[i].shard.rng} for i in (0, 1))


def test_a_declared_replica_that_differs_fails_the_commit_naming_entry_and_shards(store: Store) -> None:
    """B005, B022 (NVIDIA-NeMo/Megatron-Bridge#5380): copies are compared, never picked."""
    copies = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    copies[1].load_state_dict(copies[0].state_dict())
    replica = ckptstore.Replica(("weight",), "weight")
    states = [ckptstore.TrainingState(model=copy) for copy in copies]
    assert store.verify(commit_state(store, "equal", states, 1, replicas=[replica])).ok
    with torch.no_grad():
        copies[1].weight.view(torch.int32)[0, 0] ^= 1
    with pytest.raises(CommitAbortedError, match="'weight' is declared a replica but differs between shards 0, 1"):
        commit_state(store, "other", states, 1, replicas=[replica])
    with pytest.raises(CommitAbortedError, match="'weight' is in shards 0, 1 and not declared a replica"):
        commit_state(store, "third", states, 1)
    assert store.head("other") is None
    assert store.head("third") is None


def test_a_damaged_or_unknown_generator_stops_the_restore_with_nothing_changed(store: Store) -> None:
    """B006 (redai-studio/Relax#317)."""
    root = commit_state(store, "main", [make_training().state()], 0)

    def unknown(shard: Shard) -> dict[str, Any]:
        from ckptstore.format.shard import RngEntry

        entries = (*shard.rng, RngEntry("torch.tpu", values.to_json(b"state")))
        return {"rng": tuple(sorted(entries, key=lambda entry: entry.name))}

    forged = rewrite_shard(store, root, 0, unknown)
    fresh = make_training(seed=1)
    rng = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in fresh.model.state_dict().items()}
    with pytest.raises(MismatchError, match=r"generator torch\.tpu is stored and not live"):
        store.restore(forged, fresh.state())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(before[name], tensor) for name, tensor in fresh.model.state_dict().items())


def test_an_epoch_interrupted_three_times_sees_every_sample_once_and_in_order(store: Store) -> None:
    """B008 (KempnerInstitute/KempnerForge#57)."""
    straight = make_training()
    save_steps(store, "straight", straight, 12)
    seen: list[int] = []
    for until in (1, 2, 7, 12):
        training = make_training(seed=until - 1)
        save_steps(store, "resumed", training, until)
        seen += training.seen
    assert seen == straight.seen
    assert store.head("resumed") == store.head("straight")


def test_the_cursor_is_kept_in_samples_and_must_agree_with_the_step(store: Store) -> None:
    """B010 (EleutherAI/gpt-neox#308): accumulation 4, batch 2: eight samples a step."""
    model = nn.Linear(2, 2)
    with store.run("main", model=model) as run:
        run.resume()
        root = run.save(3, cursors={"data": Cursor("samples", 24, per_step=8)})
        assert dict(store.checkpoint(root).progress.cursors)["data"] == Cursor("samples", 24, 8)
        with pytest.raises(CommitAbortedError, match="cursor data is at 28 samples, step 4 means 32"):
            run.save(4, cursors={"data": Cursor("samples", 28, per_step=8)})


def test_commits_are_at_update_boundaries_and_say_so(store: Store) -> None:
    """B011 (huggingface/transformers#22143): the declared policy is micro_index 0; anything else is refused."""
    root = commit_state(store, "main", [ckptstore.TrainingState(model=nn.Linear(2, 2))], 1)
    assert store.checkpoint(root).progress.micro_index == 0

    def in_the_middle(checkpoint: Checkpoint) -> dict[str, Any]:
        from dataclasses import replace

        return {"progress": replace(checkpoint.progress, micro_index=2)}

    forged = rewrite_checkpoint(store, root, in_the_middle)
    assert [finding.kind.value for finding in store.verify(forged).findings] == ["progress"]
    with pytest.raises(RefusedError, match="micro_index is 2"):
        store.restore(forged, ckptstore.TrainingState(model=nn.Linear(2, 2)))


def test_a_schedule_resumes_at_the_very_rate(store: Store) -> None:
    """B014 (Lightning-AI/pytorch-lightning#1772): the drop is at step 4, the save at 3."""

    def rates(training: Training, steps: int) -> list[str]:
        found = []
        for _ in range(steps):
            training.step()
            found.append(training.optimizer.param_groups[0]["lr"].hex())
        return found

    straight = rates(make_training(), 6)
    training = make_training()
    first = rates(training, 3)
    with store.run("main", **training.objects()) as run:
        run.resume()
        run.save(3)
    resumed = make_training(seed=4)
    with store.run("main", **resumed.objects()) as run:
        assert run.resume() == 3
    assert first + rates(resumed, 3) == straight


def test_a_save_on_the_wrong_side_of_the_scheduler_is_refused(store: Store) -> None:
    """B014: counters inside one checkpoint disagree by one."""
    training = make_training()
    training.step()
    training.optimizer.step()  # the optimizer is one ahead of the scheduler
    with store.run("main", **training.objects()) as run:
        run.resume()
        with pytest.raises(CommitAbortedError, match="off by one"):
            run.save(2)
        with pytest.raises(CommitAbortedError, match="off by one"):
            run.save(1)
    assert store.head("main") is None


def test_a_counter_that_tracked_the_step_still_must(store: Store) -> None:
    """F-128. B014: also when it is off by more than one."""
    training = make_training()
    with store.run("main", **training.objects()) as run:
        run.resume()
        training.step()
        run.save(1)
        training.step()
        with pytest.raises(CommitAbortedError, match="tracks the step, which is 7"):
            run.save(7)
    with store.run(
        "free", tracks_step={"optimizer.optimizer": False, "scheduler.scheduler": False}, **training.objects()
    ) as run:
        run.resume()
        assert store.verify(run.save(7)).ok


def test_a_snapshot_holds_the_present_rate_not_a_cached_one(store: Store) -> None:
    """B015 (pytorch/torchtitan#4598)."""
    training = make_training()
    roots = []
    with store.run("main", **training.objects()) as run:
        run.resume()
        for step in range(1, 6):
            training.step()
            roots.append(run.save(step))
    hypers = [store.closure(root).shards[0].shard.optimizers[0].groups[0].hyper for root in roots]
    assert hypers[3] != hypers[2]
    fresh = make_training(seed=3)
    with store.run("main", **fresh.objects()) as run:
        run.resume()
    assert fresh.optimizer.param_groups[0]["lr"].hex() == training.optimizer.param_groups[0]["lr"].hex()
    assert fresh.scheduler.get_last_lr()[0].hex() == training.scheduler.get_last_lr()[0].hex()


class Tied(nn.Module):
    """An embedding and a head, tied or not, and a flag that says something."""

    def __init__(self, tied: bool, flag: bool) -> None:
        super().__init__()
        self.flag = flag
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_sharing_comes_from_storage_and_not_from_a_flag(store: Store) -> None:
    """B020 (NVIDIA-NeMo/Automodel#2571), both ways."""
    apart = commit_state(store, "apart", [ckptstore.TrainingState(model=Tied(tied=False, flag=True))], 1)
    view = store.closure(apart).shards[0]
    assert [entry.path for entry in view.tensors()] == ["embed.weight", "head.weight"]
    assert view.shard.aliases == ()

    model = Tied(tied=True, flag=False)
    together = commit_state(store, "together", [ckptstore.TrainingState(model=model)], 1)
    aliases = store.closure(together).shards[0].shard.aliases
    assert [(alias.path, alias.owner) for alias in aliases] == [("head.weight", "embed.weight")]
    fresh = Tied(tied=False, flag=False)
    store.restore(together, ckptstore.TrainingState(model=fresh))
    with torch.no_grad():
        fresh.embed.weight[0, 0] = 42.0
    assert fresh.head.weight[0, 0] == 42.0
    with pytest.raises(MismatchError, match=r"shares storage with 'embed\.weight' live, and not in the checkpoint"):
        store.restore(apart, ckptstore.TrainingState(model=model))
    assert store.checkpoint(apart).state_root != store.checkpoint(together).state_root


def test_equal_bytes_never_become_shared(store: Store) -> None:
    model = Tied(tied=False, flag=False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    root = commit_state(store, "main", [ckptstore.TrainingState(model=model)], 1)
    assert store.closure(root).shards[0].shard.aliases == ()


def test_resume_falls_back_to_a_parent_only_where_the_closure_fails(store: Store) -> None:
    """F-150."""
    training = make_training()
    roots = save_steps(store, "main", training, 3)
    broken = store.closure(roots[2], files=False)
    only = broken.objects.keys() - store.closure(roots[1], files=False).objects.keys()
    store.backend.delete(sorted(only)[0])
    fresh = make_training(seed=2)
    fresh_store = ckptstore.open(store.url)
    with fresh_store.run("main", **fresh.objects()) as run:
        assert run.resume() == 2
        assert [(skipped.root, skipped.step) for skipped in run.skipped] == [(roots[2], 3)]
        assert "missing" in run.skipped[0].reason or "not in the store" in run.skipped[0].reason
        fresh.step()
        again = run.save(3)
    assert again == roots[2], "the replayed step ends in the very root, and heals it"
    assert store.verify(again).ok


def test_naming_a_broken_checkpoint_is_an_error(store: Store) -> None:
    roots = save_steps(store, "main", make_training(), 2)
    key = next(iter(store.closure(roots[1], files=False).objects))
    store.backend.delete(key)
    with pytest.raises(NotFoundError):
        ckptstore.open(store.url).restore(roots[1], make_training().state())


def test_a_run_that_did_not_resume_may_not_build_on_a_ref(store: Store) -> None:
    save_steps(store, "main", make_training(), 1)
    training = make_training()
    with store.run("main", **training.objects()) as run:
        training.step()
        with pytest.raises(RefusedError, match="call resume"):
            run.save(2)


def test_another_binding_is_refused_or_said(store: Store) -> None:
    model = make_model()
    with store.run("main", model=model, binding={"threads": 1}) as run:
        run.resume()
        run.save(1)
    with store.run("main", model=model, binding={"threads": 2}) as run:
        with pytest.raises(MismatchError, match="threads"):
            run.resume()
        assert run.resume(allow_drift=True) == 1
        root = run.save(2)
    deviations = store.checkpoint(root).deviations
    assert [(d.code, d.expected, d.actual) for d in deviations] == [("binding.threads", "1", "2")]


def test_the_same_state_has_the_same_root_whatever_the_order_of_declaration(store: Store) -> None:
    """B042 (pytorch/pytorch#42163)."""

    def model(names: list[str]) -> nn.Module:
        seed_everything()
        weights = {name: torch.full((3, 3), float(index)) for index, name in enumerate(sorted(names))}
        return nn.ParameterDict({name: nn.Parameter(weights[name]) for name in names})

    roots = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        net = model(order)
        values = {"settings": Plain(dict.fromkeys(order, 1))}
        roots.append(commit_state(store, f"r{len(roots)}", [ckptstore.TrainingState(model=net, values=values)], 1))
    assert roots[0] == roots[1]


class Plain:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_plain_nested_values_come_back_with_their_types(store: Store) -> None:
    state = {"a": [1, 1.0, True, None, (1,), [b"x"]], 2: {"nan": float("nan"), "zero": -0.0}, (1, 2): "pair"}
    root = commit_state(store, "main", [ckptstore.TrainingState(values={"v": Plain(state)})], 1)
    fresh = Plain({})
    store.restore(root, ckptstore.TrainingState(values={"v": fresh}))
    assert repr(fresh.state["a"]) == repr(state["a"])
    assert str(fresh.state[2]["zero"]) == "-0.0"
    assert fresh.state[(1, 2)] == "pair"


@pytest.mark.parametrize("value", [object(), {1, 2}, 1 + 2j, torch.float32, Plain({})])
def test_values_that_cannot_be_stored_exactly_are_refused_by_name_before_anything_is_written(
    store: Store, value: object
) -> None:
    before = [stat.key for stat in store.backend.list("")]
    state = ckptstore.TrainingState(model=nn.Linear(2, 2), values={"odd": Plain({"here": value})})
    with pytest.raises(RefusedError, match=r"value odd.*here.*cannot be stored exactly"):
        store.save_shard(state, store.begin("main"), step=1)
    assert [stat.key for stat in store.backend.list("")] == before


def test_a_bit_of_a_generator_flipped_at_rest_is_found(store: Store) -> None:
    """B006: the generators are in the shard document."""
    root = commit_state(store, "main", [make_training().state()], 0)
    from ckptstore.format.keys import document_key

    key = document_key(store.checkpoint(root).shards[0])
    data = bytearray(store.backend.get(key))
    data[data.index(b'"rng"') + 200] ^= 1
    store.backend.replace(key, bytes(data))
    with pytest.raises(CorruptError):
        ckptstore.open(store.url).restore(root, make_training().state())


def test_a_state_that_contains_itself_is_refused(store: Store) -> None:
    state: dict[str, Any] = {"here": []}
    state["here"].append(state)
    with pytest.raises(RefusedError, match="contains itself"):
        ckptstore.TrainingState(values={"loop": Plain(state)}).capture()
