"""Schedules, scalers and data sources go on exactly, and know the groups that they knew (faults B014, B015)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from ckptstore import TrainingState
from ckptstore.errors import CommitAbortedError, MismatchError, NotArmedError, RefusedError
from ckptstore.store import Store
from tests.support.states import Held, Objects, copy_through, mlp, resumes_exactly, save, train_step


class Decay:
    """A rate that is an object with a state."""

    def __init__(self) -> None:
        self.factor = 3.0

    def __call__(self, epoch: int) -> float:
        self.factor *= 0.9
        return self.factor


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cycle-of-momenta": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20, three_phase=True, cycle_momentum=True),
    "callable-in-a-sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.LambdaLR(o, Decay())], [2]
    ),
    "cyclic-callable": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2, 2, scale_fn=Decay(), cycle_momentum=False),
    "callable": lambda o: schedules.LambdaLR(o, Decay()),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.95),
    "step": lambda o: schedules.StepLR(o, 2),
    "multi-step": lambda o: schedules.MultiStepLR(o, [2, 3]),
    "constant": lambda o: schedules.ConstantLR(o),
    "linear": lambda o: schedules.LinearLR(o),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, total_iters=2), schedules.ExponentialLR(o, 0.9)], [2]
    ),
    "polynomial": lambda o: schedules.PolynomialLR(o, 10),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2, 2),
    "cyclic-own": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2, 2, scale_fn=lambda x: 0.5),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "one-cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("rate", ["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning", "ignore:Detected call of:UserWarning")
def test_every_schedule_of_torch_goes_on_exactly(name: str, rate: str) -> None:
    """B014: a schedule that lags, or forgets, shows in the weights."""

    def build() -> Objects:
        model = nn.Linear(4, 4)
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if rate == "float"
            else torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        )
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULES[name](optimizer)}

    assert resumes_exactly(build, train_step, 3)


def grouped(order: tuple[int, ...], join: bool = False) -> Objects:
    """Two layers whose groups stand in this order, or are one, under a schedule that multiplies each group's rate."""
    model = mlp()
    groups: list[dict[str, Any]] = [{"params": list(model[i].parameters()), "lr": 0.1 / (i + 1)} for i in order]
    if join:
        groups = [{"params": list(model.parameters()), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": schedules.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    }


@pytest.mark.parametrize(
    ("before", "after"), [(((0, 2),), ((2, 0),)), (((0, 2), True), ((0, 2),)), (((0, 2),), ((0, 2), True))]
)
def test_groups_that_a_schedule_knows_by_number_keep_their_numbers(store: Store, before: Any, after: Any) -> None:
    """B028, where it is silent: base rates are kept by the number of the group, so they would go to the wrong one."""
    saved, live = grouped(*before), grouped(*after)
    train_step(saved)
    root = save(store, saved)
    rates = [group["lr"] for group in live["optimizer"].param_groups]
    with pytest.raises(MismatchError, match="schedulers know groups by their number"):
        store.restore(root, TrainingState(**live))
    assert [group["lr"] for group in live["optimizer"].param_groups] == rates


ARGUMENTS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], Callable[[torch.optim.Optimizer], Any], str]] = {
    "horizon": (
        lambda o: schedules.CosineAnnealingLR(o, 10),
        lambda o: schedules.CosineAnnealingLR(o, 20, eta_min=0.1),
        r"scheduler scheduler T_max is stored as 10 and live as 20; scheduler scheduler eta_min is stored as 0\.0",
    ),
    "milestones": (
        lambda o: schedules.MultiStepLR(o, [2, 3]),
        lambda o: schedules.MultiStepLR(o, [2, 4]),
        r"scheduler scheduler milestones is stored as Counter",
    ),
    "inner": (
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, total_iters=2), schedules.StepLR(o, 5)], [2]),
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, total_iters=2), schedules.StepLR(o, 6)], [2]),
        r"scheduler scheduler\[1\] step_size is stored as 5 and live as 6",
    ),
    "fewer inside": (
        lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.StepLR(o, 5)]),
        lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 5)]),
        r"scheduler scheduler has other schedulers inside",
    ),
    "kind": (
        lambda o: schedules.StepLR(o, 5),
        lambda o: schedules.ExponentialLR(o, 0.1),
        r"scheduler scheduler step_size is stored and not live",
    ),
    "patience": (
        lambda o: schedules.ReduceLROnPlateau(o, patience=1),
        lambda o: schedules.ReduceLROnPlateau(o, patience=2),
        r"scheduler scheduler patience is stored as 1 and live as 2",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_arguments_of_a_schedule_must_agree_before_anything_is_overwritten(store: Store, name: str) -> None:
    """B014: a state dict would put the stored ones in their place without a word."""

    def build(make: Callable[[torch.optim.Optimizer], Any], rate: float) -> Objects:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}

    stored, other, message = ARGUMENTS[name]
    saved, fresh = build(stored, 0.1), build(other, 0.1)
    train_step(saved)
    root = save(store, saved)
    before = fresh["model"].weight.clone(), repr(fresh["scheduler"].state_dict())
    with pytest.raises(MismatchError, match=message):
        store.restore(root, TrainingState(**fresh))
    assert torch.equal(fresh["model"].weight, before[0])
    assert repr(fresh["scheduler"].state_dict()) == before[1]
    same = build(stored, 0.7)  # rates are the checkpoint's, and base rates follow them
    store.restore(root, TrainingState(**same))
    assert save(store, same, ref="again") == root


def test_a_horizon_may_be_said_to_move(store: Store) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = save(store, {"model": model, "scheduler": schedules.CosineAnnealingLR(optimizer, 10)}, 0)
    fresh = schedules.CosineAnnealingLR(torch.optim.SGD(model.parameters(), lr=0.1), 20)
    store.restore(root, TrainingState(model=model, scheduler=fresh, moving=["T_max"]))
    assert fresh.T_max == 10


def test_arguments_of_a_scaler_must_agree(store: Store) -> None:
    root = save(store, {"scaler": torch.amp.GradScaler("cpu", growth_interval=5)})
    with pytest.raises(MismatchError, match="scaler scaler growth_interval is stored as 5 and live as 2000"):
        store.restore(root, TrainingState(scaler=torch.amp.GradScaler("cpu")))
    store.restore(root, TrainingState(scaler=torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=5)))


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_a_schedule_of_epochs_may_be_saved_at_step_zero(store: Store) -> None:
    """F-128: at step 0 every counter is 0, which says nothing about what it counts."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    objects = {"model": model, "optimizer": optimizer, "scheduler": schedules.StepLR(optimizer, 1)}
    with store.run("main", **objects) as run:
        run.resume()
        assert [c.tracks_step for c in store.checkpoint(run.save(0)).progress.counters] == [False]
        for _ in range(10):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        objects["scheduler"].step()
        counters = store.checkpoint(run.save(10)).progress.counters
    assert [(c.name, c.tracks_step) for c in counters] == [
        ("optimizer.optimizer", True),
        ("scheduler.scheduler", False),
    ]


def test_a_counter_that_is_not_there_cannot_be_declared(store: Store) -> None:
    objects = grouped((0, 2))
    with pytest.raises(
        CommitAbortedError, match=r"tracks_step 'optimizer'.*optimizer\.optimizer, scheduler\.scheduler"
    ):
        save(store, objects, 1, tracks_step={"optimizer": False})


def test_a_layer_frozen_in_mid_run_says_how_to_declare_it(store: Store) -> None:
    """B025: some counters stop, which is what an update of half the parameters looks like too."""
    model = mlp()
    objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with store.run("main", **objects) as run:
        run.resume()
        train_step(objects)
        run.save(1)
        model[0].requires_grad_(False)
        train_step(objects)
        with pytest.raises(CommitAbortedError, match=r"declared by tracks_step=\{'optimizer\.optimizer': False\}"):
            run.save(2)
    with store.run("main", tracks_step={"optimizer.optimizer": False}, **objects) as run:
        assert run.resume() == 1


def test_a_scaler_that_cannot_take_its_state_stops_the_run(store: Store) -> None:
    """B006: what the object says is passed on with its name, and nothing can be saved after it."""
    model = nn.Linear(2, 2)
    with store.run("main", model=model, scaler=torch.amp.GradScaler("cpu", enabled=False)) as run:
        run.resume()
        run.save(1)
    with store.run("main", model=model, scaler=torch.amp.GradScaler("cpu")) as run:
        with pytest.raises(NotArmedError, match=r"scaler scaler: it did not take its stored state: RuntimeError"):
            run.resume()
        with pytest.raises(RefusedError, match="last restore was torn"):
            run.save(2)


class LazyLoader:
    """A data source that draws a seed from the global generator when it begins, at the latest when asked for its
    state; so do data loaders that have worker processes."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.position = 0
        self.pending: dict[str, Any] | None = None

    def begin(self) -> None:
        if self.seed is None:
            self.seed = int(torch.randint(0, 2**31, ()))
        if self.pending is not None:
            self.seed, self.position = self.pending["seed"], self.pending["position"]
            self.pending = None

    def next(self) -> int:
        self.begin()
        assert self.seed is not None
        self.position += 1
        return self.seed + self.position

    def state_dict(self) -> dict[str, Any]:
        self.begin()
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.pending = None, state


def test_a_source_that_draws_when_it_is_asked_for_its_state_goes_on_exactly() -> None:
    """F-149: generators are put back last, after every object has been asked once."""

    def build() -> Objects:
        return {"model": nn.Linear(1, 1), "data": LazyLoader()}

    def train(objects: Objects) -> None:
        with torch.no_grad():
            objects["model"].weight += objects["data"].next() + torch.rand(())

    assert resumes_exactly(build, train)
    assert copy_through(build(), build())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_stateful_loader_of_torchdata_goes_on_exactly(workers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about modules of torch's that it loads
        loaders = pytest.importorskip("torchdata.stateful_dataloader")
    begun: dict[int, Any] = {}

    def build() -> Objects:
        model = nn.Linear(4, 4)
        samples = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4))
        loader = loaders.StatefulDataLoader(samples, batch_size=2, shuffle=True, num_workers=workers)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data": loader}

    def train(objects: Objects) -> None:
        loader = objects["data"]
        if id(loader) not in begun:
            begun[id(loader)] = iter(loader)
        (batch,) = next(begun[id(loader)])
        objects["optimizer"].zero_grad()
        (objects["model"](batch) * torch.rand(4)).square().mean().backward()
        objects["optimizer"].step()

    assert resumes_exactly(build, train, 3)


def test_generator_states_and_small_tensors_in_a_source_come_back() -> None:
    state = {"generator": torch.Generator().manual_seed(5).get_state(), "order": torch.randperm(500), "flag": (1, None)}
    fresh = Held({})
    assert copy_through({"data": Held(state)}, {"data": fresh})
    assert torch.equal(fresh.state["order"], state["order"])
    assert fresh.state["flag"] == (1, None)


def test_a_large_tensor_in_a_state_is_refused_by_its_place() -> None:
    with pytest.raises(RefusedError, match=r"data data\['a'\]\[0\]: a tensor of 400000 bytes inside a value"):
        TrainingState(data=Held({"a": [torch.zeros(100_000)]})).capture()


def test_a_state_too_large_for_a_checkpoint_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"data data: its state takes 6000020 bytes, and all states"):
        TrainingState(data=Held(b"x" * 3_000_000)).capture()


def test_a_state_dict_that_raises_is_named() -> None:
    class Broken(Held):
        def state_dict(self) -> Any:
            raise OSError("disk on fire")

    with pytest.raises(RefusedError, match=r"state_dict of data data: it raised OSError: disk on fire"):
        TrainingState(data=Broken({})).capture()
