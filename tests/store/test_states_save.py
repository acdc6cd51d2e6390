"""A save takes one moment of the state, the same root everywhere, and no place that a checkpoint cannot hold."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Cursor, TrainingState
from ckptstore.errors import CommitAbortedError, RefusedError, UsageError
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.keys import object_key
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.states import Held, save
from tests.support.training import commit_state


def during_the_next_write(store: Store, work: Callable[[], None]) -> Store:
    """The store, where another thread does ``work`` while the backend is asked to write the next object."""
    faulty = FaultyBackend(store.backend)

    def elsewhere(key: str) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    faulty.before("create", elsewhere, nth=1, prefix="objects/")
    return Store(faulty)


class Two(nn.Module):
    """A weight that is an object of its own, and one that lies in a pack."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(300, 300))
        self.small = nn.Parameter(torch.ones(40))


def rewrite(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def swap(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


@pytest.mark.parametrize("change", [rewrite, swap])
@pytest.mark.parametrize("name", ["large", "small"])
def test_a_tensor_that_changes_while_it_is_saved_stops_the_save(
    store: Store, name: str, change: Callable[[torch.Tensor], None]
) -> None:
    """F-154. B060 (pytorch/torchtitan#930): a save is one moment, or none; the ref does not move."""
    model = Two()
    watched = during_the_next_write(store, lambda: change(model.get_parameter(name)))
    with watched.run("main", model=model) as run:
        run.resume()
        with pytest.raises(RefusedError, match=f"changed while it was saved: weight '{name}'"):
            run.save(1)
        assert store.head("main") is None
        assert run.save(1) == store.head("main")
    assert store.verify("main").ok


def test_moments_that_change_while_they_are_saved_stop_the_save(store: Store) -> None:
    """B060."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (model.large.sum() + model.small.sum()).backward()
    optimizer.step()
    watched = during_the_next_write(store, lambda: rewrite(optimizer.state[model.small]["momentum_buffer"]))
    with pytest.raises(RefusedError, match="optim/optimizer/momentum_buffer 'small'"):
        save(watched, {"model": model, "optimizer": optimizer})


def test_plain_values_are_those_of_the_moment_of_the_save(store: Store) -> None:
    """B060: a rate and a list that change while objects are written."""
    model, seen = Two(), Held([1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def change() -> None:
        seen.state.append(3)
        optimizer.param_groups[0]["lr"] = 9.0

    watched = during_the_next_write(store, change)
    root = save(watched, {"model": model, "optimizer": optimizer, "data": seen})
    assert seen.state == [1, 2, 3]
    fresh = Held([])
    again = torch.optim.SGD(model.parameters(), lr=5.0)
    store.restore(root, TrainingState(model=model, optimizer=again, data=fresh))
    assert fresh.state == [1, 2]
    assert again.param_groups[0]["lr"] == 0.1


def test_what_is_stored_has_its_digest_whatever_happened_to_live_memory(store: Store) -> None:
    """B060, past torch's own counters: memory that NumPy shares is written to between hashing and writing."""
    array = np.ones(100_000, dtype=np.float32)
    model = nn.Module()
    model.register_buffer("shared", torch.from_numpy(array))

    def change() -> None:
        array[:] = 2

    save(during_the_next_write(store, change), {"model": model})
    assert array[0] == 2
    for stat in store.backend.list("objects/"):
        assert object_key(Digest.of(store.backend.get(stat.key))) == stat.key


def test_a_worker_that_fails_in_any_way_tells_the_others(store: Store) -> None:
    """F-131. B054 (autocast#386): not only errors of the store."""

    class Broken(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("in a hook")

    attempt = store.begin("main")
    with pytest.raises(RefusedError, match="ZeroDivisionError: in a hook"):
        store.save_shard(TrainingState(model=Broken(1, 1)), attempt, step=1, index=1, count=2)
    with pytest.raises(CommitAbortedError, match=r"shard 1 of main.*ZeroDivisionError: in a hook"):
        store.commit(attempt, count=2, deadline=30.0)


@pytest.mark.parametrize("step", [-1, True, 2**53, 1.0, "1", np.int64(3), torch.tensor(3)])
def test_a_step_that_no_checkpoint_can_hold_is_refused_before_anything_is_written(store: Store, step: Any) -> None:
    before = [stat.key for stat in store.backend.list("")]
    with store.run("main", model=nn.Linear(2, 2)) as run:
        run.resume()
        with pytest.raises(UsageError, match=r"step: .* is not an int from 0 to"):
            run.save(step)
    assert [stat.key for stat in store.backend.list("")] == before


CURSORS: list[dict[str, Any]] = [
    {"position": -1},
    {"position": True},
    {"position": 1.0},
    {"position": np.int64(3)},
    {"position": 2**53},
    {"position": 3, "per_step": -3},
    {"position": 3, "per_step": True},
    {"position": 3, "unit": ""},
    {"position": 3, "name": ""},
    {"position": 3, "name": 5},
]


@pytest.mark.parametrize("given", CURSORS)
def test_a_cursor_that_no_checkpoint_can_hold_is_refused_before_anything_is_written(
    store: Store, given: dict[str, Any]
) -> None:
    """A checkpoint that no reader takes must not become the head of a ref."""
    name, unit = given.get("name", "data"), given.get("unit", "samples")
    with store.run("main", model=nn.Linear(2, 2)) as run:
        run.resume()
        with pytest.raises(UsageError, match="cursor"):
            run.save(1, cursors={name: Cursor(unit, given["position"], given.get("per_step"))})
        assert store.head("main") is None
        assert store.verify(run.save(1, cursors={"data": Cursor("samples", 3, per_step=3)})).ok


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0), (True, 2)])
def test_a_shard_number_out_of_range_is_refused(store: Store, index: Any, count: int) -> None:
    with pytest.raises(UsageError, match=r"index|count"):
        store.save_shard(TrainingState(model=nn.Linear(2, 2)), store.begin("main"), step=1, index=index, count=count)


@pytest.mark.parametrize("argument", ["model", "optimizer", "scheduler", "generators", "values"])
def test_names_that_are_no_unicode_are_refused_by_argument(argument: str) -> None:
    """B044 (torchsnapshot#31), for names that are not of tensors."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "generators": torch.Generator(),
        "values": Held(1),
    }
    with pytest.raises(RefusedError, match="surrogate"):
        TrainingState(**{argument: {"a\ud800": given[argument]}})


def test_what_decides_bits_is_looked_at_when_it_is_saved(store: Store) -> None:
    """F-88. B032: a switch that is thrown in the middle of a run is a deviation of the next checkpoint."""
    with store.run("main", model=nn.Linear(2, 2)) as run:
        run.resume()
        run.save(1)
        torch.use_deterministic_algorithms(True)
        try:
            root = run.save(2)
            after = run.save(3)
        finally:
            torch.use_deterministic_algorithms(False)
    found = store.checkpoint(root)
    assert values.from_json(found.binding)["deterministic"] is True  # type: ignore[index]
    assert [(d.code, d.expected, d.actual) for d in found.deviations] == [("binding.deterministic", "False", "True")]
    assert store.checkpoint(after).deviations == ()


SCRIPT = """
import locale, os, random, sys
import numpy as np, torch
from torch import nn
import ckptstore
order = sys.argv[2].split(",")
torch.set_num_threads(int(sys.argv[3]))
os.chdir(sys.argv[4])
random.seed(1); np.random.seed(1); torch.manual_seed(1)
weights = {name: torch.full((200, 400), float(ord(name))) for name in "abc"}
model = nn.ParameterDict({name: nn.Parameter(weights[name]) for name in order})
optimizer = torch.optim.AdamW([{"params": [model[name]], "lr": ord(name) / 1000} for name in "abc"])
for parameter in model.values():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
class Held:
    def state_dict(self): return {name: {name: 1, "set": sorted({"x", "y", "z"})} for name in order}
    def load_state_dict(self, state): pass
store = ckptstore.open(sys.argv[1], create=True)
state = ckptstore.TrainingState(model=model, optimizer=optimizer, values={name: Held() for name in order},
    generators={name: np.random.default_rng(ord(name)) for name in order})
attempt = store.begin("main")
receipt = store.save_shard(state, attempt, step=1, binding={name: 1 for name in order},
    cursors={name: ckptstore.Cursor("samples", 8) for name in order})
print(store.commit(attempt, [receipt]))
print(*(stat.key for prefix in ("objects/", "documents/") for stat in store.backend.list(prefix)))
"""


def test_the_same_state_has_the_same_root_and_objects_in_every_process(tmp_path: Path) -> None:
    """B042 (pytorch/pytorch#42163): hash seed, order of insertion, folder, locale, number of threads, name."""
    root = Path(ckptstore.__file__).resolve().parents[1]
    found = []
    for number, (order, threads, language) in enumerate([("a,b,c", "1", "C"), ("c,a,b", "2", "C.UTF-8")]):
        folder = tmp_path / f"cwd{number}"
        folder.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": str(number), "LC_ALL": language}
        arguments = [str(tmp_path / f"store{number}"), order, threads, str(folder)]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, env=environment, check=True
        )
        found.append(done.stdout)
    assert found[0] == found[1]
    assert found[0].count("objects/") >= 3


def test_saving_the_same_state_twice_writes_no_object_twice(store: Store) -> None:
    model = Two()
    first = commit_state(store, "main", [TrainingState(model=model)], 1)
    objects = {stat.key for stat in store.backend.list("objects/")}
    second = commit_state(store, "main", [TrainingState(model=model)], 2)
    assert {stat.key for stat in store.backend.list("objects/")} == objects
    assert store.checkpoint(first).state_root == store.checkpoint(second).state_root


class Noted(nn.Linear):
    """A layer with an extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(40, 40)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def tied(times: int) -> nn.Module:
    """One weight under many long names."""
    module, weight = nn.Linear(40, 40), nn.Parameter(torch.ones(40))
    for number in range(times):
        module.register_parameter(f"{'name' * 60}{number}", weight)
    return module


def deep(levels: int) -> dict[str, Any]:
    """A layer whose optimizer has state nested so deep."""
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: Any = torch.ones(2)
    for _ in range(levels):
        state = {"inner": state}
    optimizer.state[model.weight] = {"outer": state}
    return {"model": model, "optimizer": optimizer}


def named(name: str) -> nn.Module:
    module = nn.Linear(40, 40)
    module.register_buffer(name, torch.ones(3))
    return module


LAYER = nn.Linear(40, 40)

TOO_MUCH: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "binding": ({"model": LAYER, "binding": {"x": np.float32(1)}}, {}, r"binding\['x'\]: a value of type numpy"),
    "metrics": (
        {"model": LAYER},
        {"metrics": {"loss": torch.tensor(1.0)}},
        r"metrics\['loss'\]: a value of type",
    ),
    "large metrics": ({"model": LAYER}, {"metrics": {"log": "x" * 2**20}}, "metrics: they take"),
    "states together": (
        {"model": LAYER, "values": {name: Held(b"x" * 1_500_000) for name in "ab"}},
        {},
        "states, cursors and binding: .* value b 3000020, value a 3000020",
    ),
    "value": ({"model": Noted(list(range(100_000)))}, {}, "'_extra_state': its entry of .* too large"),
    "depth": (deep(14), {}, "optim/optimizer/outer.*its role has more than 16 parts"),
    "name": ({"model": named("x" * 70_000)}, {}, "its entry of .* too large"),
    "names": ({"model": tied(20_000)}, {}, "19999 other names of shared tensors"),
    "files": ({"model": LAYER, "files": "b3:00"}, {}, "files=: 'b3:00' is no digest"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_no_document_can_hold_is_refused_before_anything_is_written(store: Store, name: str) -> None:
    """F-45, F-56: by name, with nothing stored, no lease left, no number drawn, and the run goes on."""
    objects, options, message = TOO_MUCH[name]
    with store.run("main", **objects) as run:
        run.resume()
        before = [stat.key for stat in store.backend.list("")], random.getstate(), torch.get_rng_state()
        with pytest.raises((RefusedError, UsageError), match=message):
            run.save(1, **options)
        assert [stat.key for stat in store.backend.list("")] == before[0]
        assert random.getstate() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
    with store.run("main", model=LAYER) as run:
        run.resume()
        assert store.verify(run.save(1)).ok
