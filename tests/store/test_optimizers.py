"""Optimizer state comes back bit for bit, by name, with its types (faults B023 to B032)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import MismatchError, RefusedError
from ckptstore.store import Store
from tests.support.training import commit_state, make_training, save_steps

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_continues_as_if_never_interrupted(store: Store, name: str) -> None:
    make = OPTIMIZERS[name]
    straight = save_steps(store, "straight", make_training(optimizer=make), 4, every=2)
    save_steps(store, "resumed", make_training(optimizer=make), 2, every=2)
    resumed = save_steps(store, "resumed", make_training(seed=3, optimizer=make), 4, every=2)
    assert resumed[-1] == straight[-1]


def test_lbfgs_state_that_belongs_to_no_parameter_comes_back(store: Store) -> None:
    def training() -> tuple[nn.Module, torch.optim.LBFGS]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step(model: nn.Module, optimizer: torch.optim.LBFGS) -> None:
        x = torch.arange(8.0).reshape(2, 4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    model, optimizer = training()
    step(model, optimizer)
    root = commit_state(store, "a", [ckptstore.TrainingState(model=model, optimizer=optimizer)], 1)
    paths = {(e.path, e.role[:3]) for e in store.closure(root).shards[0].tensors() if e.role[0] == "optim"}
    assert ("", ("optim", "optimizer", "old_dirs")) in paths
    step(model, optimizer)
    straight = commit_state(store, "a", [ckptstore.TrainingState(model=model, optimizer=optimizer)], 2)
    model, optimizer = training()
    store.restore(root, ckptstore.TrainingState(model=model, optimizer=optimizer))
    step(model, optimizer)
    resumed = commit_state(store, "b", [ckptstore.TrainingState(model=model, optimizer=optimizer)], 2)
    assert store.checkpoint(resumed).state_root == store.checkpoint(straight).state_root


def live_root(training: Any) -> ckptstore.Digest:
    scratch = ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)
    return scratch.checkpoint(commit_state(scratch, "x", [training.state()], 1)).state_root


def test_loading_changes_nothing_but_what_was_loaded(store: Store) -> None:
    """B023 (pytorch/pytorch#125708): no dummy step, although weight decay would act on one."""
    training = make_training(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
    training.step()
    root = commit_state(store, "main", [training.state()], 1)
    fresh = make_training(seed=1, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
    store.restore(root, fresh.state())
    assert live_root(fresh) == store.checkpoint(root).state_root


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p), lambda p: torch.optim.Adam(p, weight_decay=0.1)])
def test_looking_at_an_optimizer_that_never_stepped_leaves_it_without_state(store: Store, make: Make) -> None:
    """B024 (pytorch/torchtitan#4382)."""
    seen, unseen = make_training(optimizer=make), make_training(optimizer=make)
    roots = {commit_state(store, f"r{i}", [seen.state()], 0) for i in range(2)}
    assert len({store.checkpoint(root).state_root for root in roots}) == 1
    assert not [e for e in store.closure(next(iter(roots))).shards[0].entries if e.role[0] == "optim"]
    assert not seen.optimizer.state
    torch.manual_seed(0)
    seen.step()
    torch.manual_seed(0)
    unseen.step()
    assert live_root(seen) == live_root(unseen)


def test_moments_of_frozen_parameters_are_kept(store: Store) -> None:
    """B025 (pytorch/pytorch#192202)."""

    def frozen() -> Any:
        training = make_training()
        training.step()
        training.step()
        training.model.get_submodule("0").requires_grad_(False)
        training.optimizer.zero_grad()
        training.step()
        return training

    def thaw(training: Any) -> ckptstore.Digest:
        training.model.get_submodule("0").requires_grad_(True)
        training.step()
        return live_root(training)

    training = frozen()
    root = commit_state(store, "main", [training.state()], 3, tracks_step={"optimizer.optimizer": False})
    expected = thaw(training)
    fresh = make_training(seed=1)
    store.restore(root, fresh.state())
    assert thaw(fresh) == expected


class Pair(nn.Module):
    def __init__(self, order: tuple[str, str]) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("second")(self.get_submodule("first")(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("swap", ["declaration", "groups"])
def test_state_goes_to_the_parameter_of_its_name(store: Store, swap: str) -> None:
    """B028 (pytorch/pytorch#1489): two layers of the same shape, declared the other way round."""

    def build(order: tuple[str, str]) -> tuple[Pair, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Pair(order if swap == "declaration" else ("first", "second"))
        groups = [{"params": list(model.get_submodule(name).parameters())} for name in order]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    model, optimizer = build(("first", "second"))
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    root = commit_state(store, "a", [ckptstore.TrainingState(model=model, optimizer=optimizer)], 1)
    other, other_optimizer = build(("second", "first"))
    store.restore(root, ckptstore.TrainingState(model=other, optimizer=other_optimizer))
    moments = optimizer.state[model.get_submodule("first").weight]["exp_avg"]
    assert torch.equal(other_optimizer.state[other.get_submodule("first").weight]["exp_avg"], moments)


def test_verify_checks_that_moments_have_their_parameters_shape(store: Store) -> None:
    """B028."""
    from dataclasses import replace

    from ckptstore.format.page import Entry, TensorEntry, make_tensor_entry
    from tests.support.documents import rewrite_entries

    training = make_training()
    training.step()
    root = commit_state(store, "main", [training.state()], 1)

    def reshape(entry: Entry) -> Entry:
        if isinstance(entry, TensorEntry) and entry.role[-1] == "exp_avg" and entry.path == "0.weight":
            return make_tensor_entry(entry.path, entry.role, entry.dtype, (8, 80), entry.chunks, entry.inline)
        return replace(entry)

    findings = store.verify(rewrite_entries(store, root, 0, reshape)).findings
    assert any("exp_avg of '0.weight' has shape (8, 80), its parameter (80, 8)" in f.message for f in findings)


@pytest.mark.parametrize(
    "step",
    [
        2**24 + 1,
        float(2**24 + 1),
        torch.tensor(2**24 + 1, dtype=torch.int64),
        torch.tensor(7.0, dtype=torch.float32),
        torch.tensor(2**24 + 1, dtype=torch.float64),
    ],
)
def test_step_counters_keep_type_and_bits(store: Store, step: Any) -> None:
    """B029 (pytorch/pytorch#173901)."""
    training = make_training()
    training.step()
    for state in training.optimizer.state.values():
        state["step"] = step.clone() if isinstance(step, torch.Tensor) else step
    free = {"optimizer.optimizer": False}
    root = commit_state(store, "main", [training.state()], 1, tracks_step=free)
    fresh = make_training(seed=1)
    store.restore(root, fresh.state())
    for state in fresh.optimizer.state.values():
        assert type(state["step"]) is type(step)
        if isinstance(step, torch.Tensor):
            assert (state["step"].dtype, state["step"].device) == (step.dtype, step.device)
            assert torch.equal(state["step"], step)
        else:
            assert state["step"] == step


@pytest.mark.parametrize(("weights", "moments"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_moments_keep_their_own_dtype(store: Store, weights: torch.dtype, moments: torch.dtype) -> None:
    """B030 (pytorch/torchtitan#4615), AMSGrad's maximum included."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, 6, dtype=weights)
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        return model, optimizer

    model, optimizer = build()
    for parameter in model.parameters():
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
        state = {name: torch.randn(parameter.shape, dtype=moments) for name in names}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
    root = commit_state(store, "main", [ckptstore.TrainingState(model=model, optimizer=optimizer)], 1)
    other, other_optimizer = build()
    store.restore(root, ckptstore.TrainingState(model=other, optimizer=other_optimizer))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            loaded = other_optimizer.state[theirs][name]
            assert loaded.dtype == value.dtype
            assert torch.equal(loaded, value)


def test_another_implementation_is_refused(store: Store) -> None:
    """B032 (pytorch/pytorch#103256): fused and foreach give other bits; the group's flags are kept."""
    root = save_steps(store, "main", make_training(optimizer=OPTIMIZERS["adamw-fused"]), 1)[0]
    plain = make_training(seed=1)
    with pytest.raises(MismatchError, match="implementation fused is stored as True and live as None"):
        store.restore(root, plain.state())
    same = make_training(seed=1, optimizer=OPTIMIZERS["adamw-fused"])
    store.restore(root, same.state())
    assert same.optimizer.param_groups[0]["fused"] is True


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {}])
def test_step_counters_return_to_their_device(store: Store, options: dict[str, bool]) -> None:
    """B032 on a real accelerator: the first step after a load succeeds and equals the straight run."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4, device="cuda")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build(0)
    step(model, optimizer)
    root = commit_state(store, "main", [ckptstore.TrainingState(model=model, optimizer=optimizer)], 1)
    step(model, optimizer)
    other, other_optimizer = build(1)
    store.restore(root, ckptstore.TrainingState(model=other, optimizer=other_optimizer))
    step(other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_every_difference_is_listed_and_nothing_is_changed(store: Store) -> None:
    """F-146."""
    root = save_steps(store, "main", make_training(), 1)[0]
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(8, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 3), nn.Linear(3, 3)
    )
    other = make_training(model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=5.0, weight_decay=0.3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    with pytest.raises(MismatchError) as caught:
        store.restore(root, other.state())
    message = str(caught.value)
    for part in (
        "'0.weight' is stored as f32 (80, 8) and live as f32 (40, 8)",
        "weight '5.bias' is live and not stored",
        "hyper-parameter weight_decay is stored as 0.01 and live as 0.3",
        "optimizer optimizer holds '5.bias' live, and not in the checkpoint",
    ):
        assert part in message
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert other.optimizer.param_groups[0]["lr"] == 5.0


def test_a_parameter_of_no_saved_module_is_refused(store: Store) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1)
    with pytest.raises(RefusedError, match=r"parameter 0 of shape \(2, 3\) belongs to no module"):
        ckptstore.TrainingState(model=nn.Linear(1, 1), optimizer=optimizer).capture()


def test_several_optimizers_and_a_scaler_and_an_average_come_back(store: Store) -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
        return {
            "model": {"net": model, "ema": torch.optim.swa_utils.AveragedModel(model)},
            "optimizer": {
                "g": torch.optim.AdamW(model["g"].parameters(), lr=0.1),
                "d": torch.optim.SGD(model["d"].parameters(), lr=0.1, momentum=0.9),
            },
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        }

    parts = build()
    net, ema = parts["model"]["net"], parts["model"]["ema"]
    (net["d"](net["g"](torch.ones(2, 3)))).square().sum().backward()
    for optimizer in parts["optimizer"].values():
        optimizer.step()
    ema.update_parameters(net)
    parts["scaler"].scale(torch.ones(()))
    parts["scaler"].update(4.0)
    root = commit_state(store, "main", [ckptstore.TrainingState(**parts)], 1)
    other = build()
    other["scaler"].scale(torch.ones(()))
    store.restore(root, ckptstore.TrainingState(**other))
    again = commit_state(store, "again", [ckptstore.TrainingState(**other)], 1)
    assert again == root
    assert other["scaler"].get_scale() == 4.0
