"""Optimizer state of every kind comes back to the parameter it belongs to (faults B023 to B032)."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptstore import TrainingState
from ckptstore.errors import MismatchError, RefusedError, UsageError
from ckptstore.format import values
from ckptstore.format.shard import Group, Shard
from ckptstore.store import Store
from tests.support.documents import rewrite_shard
from tests.support.states import Objects, copy_through, mlp, resumes_exactly, save, train_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused-amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "adam-foreach-amsgrad": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True, weight_decay=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "sgd-fused-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd-damped": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adam-maximize": lambda p: torch.optim.Adam(p, maximize=True),
    "adam-tensor-betas": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(1e-2), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "adamw-double-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2, dtype=torch.float64)),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "sgd-integer-lr": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9),
    "nadam-decoupled": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
    "two-groups": lambda p: torch.optim.RAdam([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_go_on_exactly(name: str) -> None:
    def build() -> Objects:
        model = mlp()
        return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}

    assert resumes_exactly(build, train_step)


def test_an_optimizer_for_matrices_goes_on_exactly() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def build() -> Objects:
        model = nn.Linear(4, 4, bias=False)
        return {"model": model, "optimizer": torch.optim.Muon(model.parameters())}

    assert resumes_exactly(build, train_step)


def test_an_optimizer_for_sparse_gradients_goes_on_exactly() -> None:
    def build() -> Objects:
        model = nn.Embedding(10, 3, sparse=True)
        return {"model": model, "optimizer": torch.optim.SparseAdam(model.parameters())}

    def train(objects: Objects) -> None:
        objects["optimizer"].zero_grad()
        objects["model"](torch.randint(0, 10, (3,))).sum().backward()
        objects["optimizer"].step()

    assert resumes_exactly(build, train)


def test_optimizers_built_by_name_before_a_cast_go_on_exactly() -> None:
    def build() -> Objects:
        model = mlp()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
        return {"model": model.double(), "optimizer": optimizer}

    def train(objects: Objects) -> None:
        objects["optimizer"].zero_grad()
        objects["model"](torch.randn(4, 4, dtype=torch.float64)).square().sum().backward()
        objects["optimizer"].step()

    assert resumes_exactly(build, train)


def test_one_parameter_in_two_optimizers_keeps_two_states() -> None:
    def build() -> Objects:
        model = mlp()
        slow = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return {"model": model, "optimizer": {"fast": torch.optim.AdamW(model[0].parameters()), "slow": slow}}

    def train(objects: Objects) -> None:
        for optimizer in objects["optimizer"].values():
            optimizer.zero_grad()
            objects["model"](torch.randn(4, 4)).square().sum().backward()
            optimizer.step()

    assert resumes_exactly(build, train)


def test_a_group_added_later_comes_back_and_its_absence_is_refused(store: Store) -> None:
    def build(groups: int) -> Objects:
        model = mlp()
        optimizer = torch.optim.AdamW(model[0].parameters())
        if groups == 2:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
        return {"model": model, "optimizer": optimizer}

    saved = build(1)
    train_step(saved)
    saved["optimizer"].add_param_group({"params": saved["model"][2].parameters(), "lr": 0.25})
    train_step(saved)
    root = save(store, saved, 2)
    with pytest.raises(MismatchError, match=r"held '2\.bias' in the checkpoint, and does not live"):
        store.restore(root, TrainingState(**build(1)))
    fresh = build(2)
    store.restore(root, TrainingState(**fresh))
    assert fresh["optimizer"].param_groups[1]["lr"] == 0.25
    steps = [float(state["step"]) for state in fresh["optimizer"].state.values()]
    assert sorted(steps) == [1.0, 1.0, 2.0, 2.0]


def test_a_group_without_parameters_is_restored_too() -> None:
    def build() -> Objects:
        model = mlp()
        return {"model": model, "optimizer": torch.optim.SGD([{"params": model.parameters()}, {"params": []}], lr=0.2)}

    saved, fresh = build(), build()
    saved["optimizer"].param_groups[1]["lr"] = 0.125
    assert copy_through(saved, fresh)
    assert fresh["optimizer"].param_groups[1]["lr"] == 0.125


def test_another_number_of_empty_groups_is_refused(store: Store) -> None:
    model = mlp()
    two = torch.optim.SGD([{"params": model.parameters()}, {"params": []}], lr=0.2)
    root = save(store, {"model": model, "optimizer": two})
    with pytest.raises(MismatchError, match="has 1 empty groups in the checkpoint, and 0 live"):
        store.restore(root, TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.2)))


class Chain(nn.Module):
    """Two layers of one shape, declared in this order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("b")(self.get_submodule("a")(x))  # type: ignore[no-any-return]


def test_state_that_runs_over_all_parameters_needs_them_in_their_order(store: Store) -> None:
    """F-153. B028 (pytorch/pytorch#1489), where names alone cannot help: LBFGS keeps flat vectors."""

    def build(order: str) -> Objects:
        torch.manual_seed(1)
        model = Chain(order)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), max_iter=3)}

    def train(objects: Objects) -> None:
        def closure() -> torch.Tensor:
            objects["optimizer"].zero_grad()
            loss: torch.Tensor = objects["model"](torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        objects["optimizer"].step(closure)

    saved = build("ab")
    train(saved)
    root = save(store, saved)
    entry = next(e for e in store.closure(root).shards[0].entries if e.role == ("optim", "optimizer", ""))
    assert entry.path == ""
    with pytest.raises(MismatchError, match="state that runs over its parameters, and these have another order live"):
        store.restore(root, TrainingState(**build("ba")))
    same = build("ab")
    store.restore(root, TrainingState(**same))
    assert "" not in same["optimizer"].state
    train(saved)
    train(same)
    assert all(
        torch.equal(left, right)
        for left, right in zip(saved["model"].parameters(), same["model"].parameters(), strict=True)
    )


def named(order: tuple[int, ...]) -> Objects:
    """A model whose optimizer was given names, with its parameters in this order."""
    torch.manual_seed(1)
    model = mlp()
    pairs = list(model.named_parameters())
    return {"model": model, "optimizer": torch.optim.AdamW([pairs[index] for index in order])}


def test_names_of_members_follow_the_parameters_whatever_their_order(store: Store) -> None:
    """F-65. B028: names that torch was given are members as well, and no setting that must agree."""
    saved, fresh = named((0, 1, 2, 3)), named((3, 1, 0, 2))
    train_step(saved)
    root = save(store, saved)
    group = values.from_json(store.closure(root).shards[0].shard.optimizers[0].groups[0].hyper)
    assert isinstance(group, dict)
    assert "param_names" not in group
    store.restore(root, TrainingState(**fresh))
    assert fresh["optimizer"].param_groups[0]["param_names"] == ["2.bias", "0.bias", "0.weight", "2.weight"]
    assert save(store, fresh, ref="again") == root
    bare = mlp()
    store.restore(root, TrainingState(model=bare, optimizer=torch.optim.AdamW(bare.parameters())))


def test_names_that_were_stored_as_a_setting_are_read_over(store: Store) -> None:
    """What earlier writers stored stays readable."""
    saved, fresh = named((0, 1, 2, 3)), named((0, 1, 2, 3))
    train_step(saved)
    root = save(store, saved)

    def with_names(shard: Shard) -> dict[str, Any]:
        (optimizer,) = shard.optimizers
        hyper: Any = values.from_json(optimizer.groups[0].hyper)
        hyper["param_names"] = ["0.weight", "0.bias", "2.weight", "2.bias"]
        return {
            "optimizers": (replace(optimizer, groups=(Group(values.to_json(hyper), optimizer.groups[0].selectors),)),)
        }

    older = rewrite_shard(store, root, 0, with_names)
    assert store.verify(older).ok
    store.restore(older, TrainingState(**fresh))
    assert save(store, fresh, ref="again") == root


class Counting(torch.optim.Optimizer):
    """An optimizer that keeps a counter and an estimate in its groups, as schedule-free and fused ones do."""

    def __init__(self, parameters: Any, lr: float = 0.1, decay: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "k": 0, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update, in which every group moves."""
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.5
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("history", []).append(parameter.grad.clone())
                for gradient in state["history"]:
                    parameter.add_(gradient, alpha=-group["lr"] * group["d"] * group["k"])


def counting(**settings: Any) -> Objects:
    model = mlp()
    return {"model": model, "optimizer": Counting(model.parameters(), **settings)}


def test_what_an_optimizer_keeps_in_its_groups_is_taken_where_it_is_said_to_move(store: Store) -> None:
    """A kind of omission: it changes like state, and looks like a setting of the program."""
    moving = ["d", "k", "step"]
    assert resumes_exactly(lambda: counting() | {"moving": moving}, train_step)
    saved = counting()
    train_step(saved)
    root = save(store, saved)
    fresh = counting(decay=0.25)
    with pytest.raises(MismatchError, match=r"k is stored as 1 and live as 0.*moving=\['d', 'decay', 'k', 'step'\]"):
        store.restore(root, TrainingState(**fresh))
    with pytest.raises(MismatchError, match=r"decay is stored as 0\.5 and live as 0\.25 \(") as refused:
        store.restore(root, TrainingState(**fresh, moving=moving))
    assert "hyper-parameter k" not in str(refused.value)
    assert fresh["optimizer"].param_groups[0]["k"] == 0
    with store.run("main", **counting(), moving=moving) as run:
        assert run.resume(allow_drift=True) == 1


@pytest.mark.parametrize("given", ["k", [1]])
def test_what_moves_is_a_list_of_names(given: Any) -> None:
    with pytest.raises(UsageError, match="moving="):
        TrainingState(moving=given)


def test_an_implementation_never_moves(store: Store) -> None:
    saved, fresh = (
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=foreach)}
        for model, foreach in ((mlp(), True), (mlp(), False))
    )
    with pytest.raises(MismatchError, match="implementation foreach is stored as True and live as False"):
        store.restore(save(store, saved), TrainingState(**fresh, moving=["foreach"]))


def test_tensors_among_settings_come_back_into_those_that_are_there(store: Store) -> None:
    """B032: what holds on to them goes on seeing them, on their device; a pair of them too."""

    def build(number: float) -> Objects:
        model = nn.Linear(2, 2)
        betas = torch.tensor(number), torch.tensor(number / 2)
        rate = torch.tensor(number)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=rate, betas=betas, foreach=False)}

    fresh = build(0.5)
    group = fresh["optimizer"].param_groups[0]
    held = [group["lr"], *group["betas"]]
    store.restore(save(store, build(0.25)), TrainingState(**fresh))
    assert [float(tensor) for tensor in held] == [0.25, 0.25, 0.125]
    assert all(left is right for left, right in zip(held, [group["lr"], *group["betas"]], strict=True))


@pytest.mark.parametrize("argument", ["scheduler", "scaler", "data", "values"])
def test_an_optimizer_is_passed_as_one(argument: str) -> None:
    """B030: its own load_state_dict casts moments to the type of their parameter."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    given: Any = {"o": optimizer} if argument == "values" else optimizer
    with pytest.raises(UsageError, match="pass it as optimizer="):
        TrainingState(**{argument: given})


class Custom(torch.optim.Optimizer):
    """An optimizer of somebody else's."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **settings})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def custom(key: Any = None, state: Any = None) -> Objects:
    """A layer and an optimizer whose state under ``key`` (None: the weight) is ``state``."""
    model = nn.Linear(2, 2)
    optimizer = Custom(model.parameters())
    if state is not None:
        optimizer.state[model.weight if key is None else key] = state
    return {"model": model, "optimizer": optimizer}


def ones(number: float = 1.0) -> torch.Tensor:
    return torch.full((2,), number)


STATES: dict[str, Callable[[], Any]] = {
    "nested": lambda: {"a": [ones(), {"b": (ones(2), None, True, "s", 1, 1.5, b"x")}]},
    "empty containers": lambda: {"a": [], "b": {}, "c": ()},
    "ordered": lambda: {"a": OrderedDict(z=ones(), a=ones(2))},
    "counter": lambda: {"a": Counter(x=1)},
    "integer keys": lambda: {"a": {0: ones(), 1: ones(2)}},
    "tuple keys": lambda: {"a": {("x", 1): ones(), ("x", "1"): ones(2)}},
    "plain integer keys": lambda: {"a": {0: 1}},
    "slashes": lambda: {"a": {"b": ones()}, "a/b": ones(2)},
    "empty key": lambda: {"": ones()},
    "deep": lambda: {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": [ones()]}}}}}}}},
    "strided": lambda: {"a": torch.arange(20.0).view(4, 5).t()},
    "low rank moments": lambda: {"exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(1, 2)},
    "large list": lambda: {"a": [torch.ones(100_000), ones()]},
}


@pytest.mark.parametrize("name", STATES)
def test_custom_state_of_a_parameter_comes_back_with_its_types(name: str) -> None:
    fresh = custom()
    assert copy_through(custom(None, STATES[name]()), fresh)
    found = fresh["optimizer"].state[fresh["model"].weight]
    assert found.keys() == STATES[name]().keys()
    assert all(type(found[key]) is type(value) for key, value in STATES[name]().items())


@pytest.mark.parametrize("name", [*STATES, "integer", "tensor", "list"])
def test_custom_state_under_a_text_comes_back(name: str) -> None:
    extra: dict[str, Callable[[], Any]] = {"integer": lambda: 5, "tensor": ones, "list": lambda: [ones(), 3]}
    make = {**STATES, **extra}[name]
    if name == "empty key":
        with pytest.raises(RefusedError, match="'' is not a text"):
            copy_through(custom("all", make()), custom())
        return
    fresh = custom()
    assert copy_through(custom("all", make()), fresh)
    assert type(fresh["optimizer"].state["all"]) is type(make())


REFUSED: dict[str, Callable[[], Any]] = {
    "default dict": lambda: {"a": defaultdict(int)},
    "numpy number": lambda: {"a": np.float32(1)},
    "numpy array": lambda: {"a": np.ones(2)},
    "set": lambda: {"a": {1}},
    "complex": lambda: {"a": 1j},
    "dtype": lambda: {"a": torch.float32},
    "device": lambda: {"a": torch.device("cpu")},
    "size": lambda: {"a": torch.Size([1])},
    "sparse": lambda: {"a": torch.eye(2).to_sparse()},
    "key": lambda: {"a": {torch.float32: 1}},
    "field": lambda: {0: ones()},
    "list": lambda: [ones()],
}


@pytest.mark.parametrize("name", REFUSED)
def test_custom_state_that_cannot_be_stored_exactly_is_refused_by_name(name: str) -> None:
    with pytest.raises(RefusedError, match="'weight'"):
        TrainingState(**custom(None, REFUSED[name]())).capture()


@pytest.mark.parametrize("key", [3, (1, 2), torch.ones(2)])
def test_state_under_another_key_is_refused(key: Any) -> None:
    with pytest.raises(RefusedError, match=r"under a key of type|for an unknown tensor"):
        TrainingState(**custom(key, {"a": 1})).capture()


def test_state_tensors_that_are_one_are_refused(store: Store) -> None:
    """Restored they would be two, and a counter that all parameters share would stop counting for most of them."""
    objects = custom()
    step = torch.tensor(3.0)
    for parameter in objects["model"].parameters():
        objects["optimizer"].state[parameter] = {"step": step}
    with pytest.raises(RefusedError, match=r"optim/optimizer/step.*'weight'.*one tensor with.*'bias'"):
        TrainingState(**objects).capture()
    root = save(store, custom())
    with pytest.raises(MismatchError, match="one tensor with"):
        store.restore(root, TrainingState(**objects))


def test_state_that_is_a_weight_is_refused() -> None:
    objects = custom()
    objects["optimizer"].state[objects["model"].weight] = {"slow": objects["model"].weight.detach()}
    with pytest.raises(RefusedError, match=r"one tensor with .*optim/optimizer/slow"):
        TrainingState(**objects).capture()


def test_state_in_one_flat_memory_comes_back_into_it(store: Store) -> None:
    """Live state is overwritten in place: an optimizer may hold on to the whole of it."""

    def build() -> tuple[Objects, torch.Tensor]:
        objects, flat = custom(), torch.randn(6)
        model, optimizer = objects["model"], objects["optimizer"]
        optimizer.state[model.weight] = {"m": flat[:4].view(2, 2)}
        optimizer.state[model.bias] = {"m": flat[4:]}
        return objects, flat

    (saved, flat), (fresh, fresh_flat) = build(), build()
    held = fresh["optimizer"].state[fresh["model"].bias]["m"]
    store.restore(save(store, saved), TrainingState(**fresh))
    assert torch.equal(flat, fresh_flat)
    assert fresh["optimizer"].state[fresh["model"].bias]["m"] is held


def test_what_an_optimizer_keeps_elsewhere_is_refused_and_not_left_out() -> None:
    """A kind of omission: the state is in ``state_dict``, and not where torch keeps it."""

    class Counting(torch.optim.SGD):
        count = 5

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": self.count}

    class Hidden(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "state": {0: {"hidden": 1}}}

    model = nn.Linear(2, 2)
    with pytest.raises(RefusedError, match="state_dict of optimizer optimizer: holds count beside"):
        TrainingState(model=model, optimizer=Counting(model.parameters())).capture()
    with pytest.raises(RefusedError, match=r"holds state that is not in the optimizer's \.state"):
        TrainingState(model=model, optimizer=Hidden(model.parameters())).capture()
    hooked = torch.optim.SGD(model.parameters())
    hooked.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 1})
    with pytest.raises(RefusedError, match="holds mine beside"):
        TrainingState(model=model, optimizer=hooked).capture()


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lets another one do the work."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})


def test_an_optimizer_inside_another_must_be_saved_as_well() -> None:
    def build() -> tuple[nn.Module, Wrapper]:
        model = nn.Linear(4, 4)
        return model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    model, outer = build()
    with pytest.raises(RefusedError, match="it wraps another optimizer, base, which is not saved"):
        TrainingState(model=model, optimizer=outer).capture()

    def both() -> Objects:
        model, outer = build()
        return {"model": model, "optimizer": {"outer": outer, "inner": outer.base}}

    saved = both()
    saved["model"](torch.ones(1, 4)).sum().backward()
    saved["optimizer"]["inner"].step()
    assert copy_through(saved, both())


def test_a_wrapper_that_shows_the_state_of_another_optimizer_says_which_one_to_pass() -> None:
    """As trainers that prepare an optimizer do: to name both would be to save one state twice."""
    model = nn.Linear(4, 4)
    outer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    outer.state = outer.base.state
    for given in (outer, {"outer": outer, "inner": outer.base}):
        with pytest.raises(RefusedError, match="has the state of that one") as caught:
            TrainingState(model=model, optimizer=given).capture()
        assert "optimizer=….base" in caught.value.hint
    TrainingState(model=model, optimizer=outer.base).capture()


def two_parameters_of_one_memory() -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
    model["b"].weight = nn.Parameter(model["a"].weight.data)  # type: ignore[assignment]
    return model


def test_state_goes_to_the_parameter_that_the_optimizer_holds(store: Store) -> None:
    """Two parameters may share their memory, of which the optimizer holds the one that does not give the name."""

    def build() -> tuple[nn.Parameter, Objects]:
        model = two_parameters_of_one_memory()
        held: Any = model["b"].weight  # type: ignore[index]
        return held, {"model": model, "optimizer": torch.optim.SGD([held], lr=0.1, momentum=0.9)}

    (held, saved), (fresh_held, fresh) = build(), build()
    held.grad = torch.ones(3, 3)
    saved["optimizer"].step()
    store.restore(save(store, saved), TrainingState(**fresh))
    assert list(fresh["optimizer"].state) == [fresh_held]


def test_two_parameters_of_one_memory_in_one_optimizer_are_refused() -> None:
    model = two_parameters_of_one_memory()
    with pytest.raises(RefusedError, match=r"'a\.weight' is in the optimizer twice"):
        TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).capture()


def test_moments_are_laid_out_like_their_parameter(store: Store) -> None:
    """What is computed from them, a norm or a product, may depend on it to the last bit."""

    def build() -> Objects:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    saved, fresh = build(), build()
    saved["model"](torch.randn(1, 3, 5, 5)).sum().backward()
    saved["optimizer"].step()
    store.restore(save(store, saved), TrainingState(**fresh))
    left, right = (o["optimizer"].state[o["model"].weight]["exp_avg"] for o in (saved, fresh))
    assert left.stride() == right.stride() != torch.empty(left.shape).stride()
    assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (torch.tensor(0.1), torch.tensor(0.5, dtype=torch.float64)),
        (torch.tensor(0.1), 0.5),
        (0.1, torch.tensor(0.5)),
        (1, 1.0),
    ],
)
def test_a_rate_comes_back_with_its_type(store: Store, stored: Any, live: Any) -> None:
    """B029, for rates."""

    def build(rate: Any) -> Objects:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=rate)}

    fresh = build(live)
    store.restore(save(store, build(stored)), TrainingState(**fresh))
    rate = fresh["optimizer"].param_groups[0]["lr"]
    assert type(rate) is type(stored)
    assert rate == stored
    if isinstance(stored, torch.Tensor):
        assert rate.dtype == stored.dtype


def test_numbers_of_numpy_are_refused_by_the_name_of_the_setting(store: Store) -> None:
    model = nn.Linear(2, 2)
    rate = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
    with pytest.raises(RefusedError, match=r"group 0\['lr'\]: a value of type numpy\.float64"):
        TrainingState(model=model, optimizer=rate).capture()


def test_a_large_tensor_among_settings_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    masked = torch.optim.SGD([{"params": model.parameters(), "mask": torch.zeros(100_000)}], lr=0.1)
    with pytest.raises(RefusedError, match="group 0 mask: a tensor of 400000 bytes inside a value"):
        TrainingState(model=model, optimizer=masked).capture()


@pytest.mark.parametrize("path", ["ghost", ""])
def test_forged_state_of_nothing_is_refused_before_anything_is_overwritten(store: Store, path: str) -> None:
    """F-146."""
    from ckptstore.format.page import Entry, ValueEntry
    from tests.support.documents import rewrite_entries

    root = save(store, custom(None, {"a": 7}))

    def forge(entry: Entry) -> Entry:
        if isinstance(entry, ValueEntry):
            return replace(entry, path=path, role=entry.role if path else (*entry.role, "b", "c"))
        return entry

    fresh = custom()
    before = fresh["model"].weight.clone()
    with pytest.raises(MismatchError, match=r"not live|nothing refers to"):
        store.restore(rewrite_entries(store, root, 0, forge), TrainingState(**fresh))
    assert torch.equal(fresh["model"].weight, before)
