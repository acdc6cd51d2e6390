"""What modules hold comes back whatever their kind, and what could not is refused by name (faults B020, B037)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from ckptstore import TrainingState
from ckptstore.errors import MismatchError, RefusedError
from ckptstore.store import Store
from tests.support.states import copy_through, resumes_exactly, save, train_step

MODULES: dict[str, Callable[[], nn.Module]] = {
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "spectral-norm-old": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "prune": lambda: nn.utils.prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "batch-norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)),
    "data-parallel": lambda: nn.DataParallel(nn.Linear(4, 4)),
    "compiled": lambda: torch.compile(nn.Linear(4, 4), backend="eager"),  # type: ignore[dict-item, return-value]
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules_of_every_kind_go_on_exactly(name: str) -> None:
    def build() -> dict[str, Any]:
        model = MODULES[name]()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    assert resumes_exactly(build, train_step)


def test_a_recurrent_module_goes_on_exactly() -> None:
    def build() -> dict[str, Any]:
        model = nn.LSTM(4, 4, 2, bidirectional=True, dropout=0.2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    def train(objects: dict[str, Any]) -> None:
        objects["optimizer"].zero_grad()
        objects["model"](torch.randn(3, 4))[0].square().mean().backward()
        objects["optimizer"].step()

    assert resumes_exactly(build, train)


class Three(nn.Module):
    """Three layers, ``ties`` of whose weights are the first one's, or the second one's."""

    def __init__(self, *ties: tuple[str, str]) -> None:
        super().__init__()
        for name in ("a", "b", "c"):
            setattr(self, name, nn.Linear(3, 3, bias=False))
        for name, owner in ties:
            getattr(self, name).weight = getattr(self, owner).weight


@pytest.mark.parametrize("ties", [(), (("b", "a"),), (("c", "b"),), (("c", "a"),)])
def test_three_names_of_one_weight_become_one_again(store: Store, ties: tuple[tuple[str, str], ...]) -> None:
    """B020, with three names, of which some or none are tied already."""
    root = save(store, {"model": Three(("b", "a"), ("c", "a"))})
    fresh = Three(*ties)
    store.restore(root, TrainingState(model=fresh))
    assert fresh.a.weight is fresh.b.weight is fresh.c.weight
    assert isinstance(fresh.c.weight, nn.Parameter)


def test_what_is_tied_live_and_not_in_the_checkpoint_is_refused(store: Store) -> None:
    """B020, the other way round."""
    root = save(store, {"model": Three(("c", "b"))})
    with pytest.raises(MismatchError, match=r"'b\.weight' shares storage with 'a\.weight' live, and not in the"):
        store.restore(root, TrainingState(model=Three(("b", "a"), ("c", "a"))))


def test_one_module_under_two_names_comes_back() -> None:
    def build() -> dict[str, Any]:
        norm = nn.BatchNorm1d(3)
        model = nn.ModuleDict({"x": norm, "y": norm})
        return {"model": {"left": model, "right": norm}, "optimizer": torch.optim.SGD(norm.parameters(), lr=0.1)}

    assert copy_through(build(), build())


def test_a_recurrent_weight_that_is_tied_again_is_the_one_that_computes(store: Store) -> None:
    def build(tied: bool) -> nn.GRU:
        model = nn.GRU(4, 4, 2)
        if tied:
            model.weight_hh_l1 = model.weight_hh_l0
        return model

    saved, fresh = build(True), build(False)
    store.restore(save(store, {"model": saved}), TrainingState(model=fresh))
    batch = torch.randn(3, 4)
    assert torch.equal(saved(batch)[0], fresh(batch)[0])
    assert fresh.weight_hh_l1 is fresh.weight_hh_l0


def with_buffer(name: str, shared: bool) -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer(name, module.weight.detach() if shared else torch.zeros(3, 3))
    return module


def test_a_buffer_that_is_a_parameter_comes_back_as_one_and_stays_a_buffer(store: Store) -> None:
    """B020: the owner is the smaller name, here the parameter's."""
    root = save(store, {"model": with_buffer("zz", True)})
    fresh = with_buffer("zz", False)
    store.restore(root, TrainingState(model=fresh))
    assert fresh.zz.data_ptr() == fresh.weight.data_ptr()
    assert type(fresh.zz) is torch.Tensor
    assert dict(fresh.named_parameters()).keys() == {"weight", "bias"}


def test_a_parameter_is_never_replaced_by_a_buffer(store: Store) -> None:
    root = save(store, {"model": with_buffer("aa", True)})
    assert copy_through({"model": with_buffer("aa", True)}, {"model": with_buffer("aa", True)})
    fresh = with_buffer("aa", False)
    with pytest.raises(MismatchError, match="that one is no parameter, so they cannot be tied again"):
        store.restore(root, TrainingState(model=fresh))
    assert isinstance(fresh.weight, nn.Parameter)
    assert not fresh.aa.any()


class Named(nn.Module):
    """A module with these buffers."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def test_memory_decides_what_is_shared_not_storage_objects() -> None:
    array = np.zeros(100, dtype=np.float32)
    same = Named(x=torch.from_numpy(array), y=torch.from_numpy(array))
    assert [alias.path for alias in TrainingState(model=same).capture().aliases] == ["y"]
    apart = Named(x=torch.from_numpy(array[:50]), y=torch.from_numpy(array[50:]))
    assert TrainingState(model=apart).capture().aliases == []
    overlapping = Named(x=torch.from_numpy(array[:60]), y=torch.from_numpy(array[50:]))
    with pytest.raises(RefusedError, match="'x' and 'y'"):
        TrainingState(model=overlapping).capture()


def overlaps() -> dict[str, dict[str, torch.Tensor]]:
    floats, pairs = torch.zeros(12), torch.zeros(6, dtype=torch.complex64)
    return {
        "whole and part": {"x": floats, "y": floats[:4]},
        "other dtype": {"x": floats, "y": floats.view(torch.int32)},
        "real part": {"x": pairs, "y": pairs.real},
        "transposed": {"x": floats.view(3, 4), "y": floats.view(3, 4).t()},
        "expanded": {"x": floats[:1].expand(3), "y": floats[:2]},
        "interleaved": {"x": floats[::2], "y": floats[3::3]},
    }


@pytest.mark.parametrize("kind", overlaps())
def test_views_that_overlap_are_refused(kind: str) -> None:
    with pytest.raises(RefusedError, match="overlap and are not identical"):
        TrainingState(model=Named(**overlaps()[kind])).capture()


def disjoint() -> dict[str, dict[str, torch.Tensor]]:
    floats, pairs, words = torch.randn(4, 6), torch.randn(6, dtype=torch.complex64), torch.zeros(24, dtype=torch.uint8)
    return {
        "columns": {f"c{column}": floats[:, column] for column in range(6)},
        "real and imaginary": {"x": pairs.real, "y": pairs.imag},
        "dtypes": {"x": words[:8].view(torch.float64), "y": words[8:12].view(torch.float16), "z": words[13:16]},
        "slices": {"x": floats[:2], "y": floats[2:]},
        "flat": {"x": floats.view(-1)[:12].view(3, 4), "y": floats.view(-1)[12:]},
        "self-overlapping": {"x": floats.view(-1).unfold(0, 3, 1)},
    }


@pytest.mark.parametrize("kind", disjoint())
def test_views_of_one_storage_that_share_nothing_come_back_into_it(kind: str) -> None:
    assert copy_through({"model": Named(**disjoint()[kind])}, {"model": Named(**disjoint()[kind])})


def test_many_interleaved_views_cost_little() -> None:
    """B061: one map of the memory for all of them, not one a pair."""
    table = torch.zeros(500, 600)
    TrainingState(model=Named(**{f"c{column}": table[:, column] for column in range(600)})).capture()


def test_a_name_that_ends_in_extra_state_is_a_name() -> None:
    """A kind of omission: a tensor whose name looks like something else."""

    def build() -> nn.Module:
        model = Named(my_extra_state=torch.randn(3), _extra_state=torch.randn(2))
        model.w_extra_state = nn.Parameter(torch.randn(2))
        return model

    assert TrainingState(model=build()).tensors().keys() == {"my_extra_state", "_extra_state", "w_extra_state"}
    assert copy_through({"model": build()}, {"model": build()})


class WithExtra(nn.Linear):
    def __init__(self, extra: Any = None) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS: dict[str, Any] = {
    "none": None,
    "number": 5,
    "bytes": b"x",
    "tensor": torch.arange(3.0),
    "empty": torch.zeros(0),
    "nested": {"a": [torch.ones(2), {"b": (torch.ones(1), None)}]},
    "large": {"t": torch.zeros(100_000)},
    "ordered": OrderedDict(z=torch.ones(2), a=1),
    "counter": Counter(x=2),
    "integer keys": {1: torch.ones(2), 2: torch.zeros(2)},
    "mixed keys": {1: torch.ones(2), "1": torch.zeros(2), (1, "1"): torch.full((2,), 3.0)},
    "empty key": {"": torch.ones(2)},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_extra_state_of_every_kind_comes_back(name: str) -> None:
    saved, fresh = (nn.Sequential(WithExtra(extra), WithExtra("x")) for extra in (EXTRAS[name], "other"))
    assert copy_through({"model": saved}, {"model": fresh})
    assert type(fresh[0].extra) is type(EXTRAS[name])
    if isinstance(EXTRAS[name], dict):
        assert set(fresh[0].extra) == set(EXTRAS[name])


def test_extra_state_that_nobody_takes_back_is_refused() -> None:
    class OneWay(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    with pytest.raises(RefusedError, match=r"extra state '0\._extra_state'.*no set_extra_state"):
        TrainingState(model=nn.Sequential(OneWay(1, 1))).capture()


def test_what_a_state_dict_holds_beside_tensors_is_refused_and_not_left_out() -> None:
    class Counted(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "calls"] = 5

    with pytest.raises(RefusedError, match=r"'0\.calls'.*builtins\.int.*get_extra_state"):
        TrainingState(model=nn.Sequential(Counted(1, 1))).capture()


def test_a_state_dict_that_raises_is_named() -> None:
    class Broken(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("gone")

    with pytest.raises(RefusedError, match=r"state_dict of module 'net'.*KeyError"):
        TrainingState(model={"net": Broken(1, 1)}).capture()


def test_a_state_dict_that_copies_is_found_before_anything_is_overwritten(store: Store) -> None:
    """Decision 0007: into a copy, a restore cannot reach."""

    class Copying(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._register_state_dict_hook(
                lambda module, state, prefix, local: {name: value.detach().clone() for name, value in state.items()}
            )

    root = save(store, {"model": Copying()})
    with pytest.raises(MismatchError, match="'weight' is a copy that a state_dict makes anew each time"):
        store.restore(root, TrainingState(model=Copying()))


def test_names_that_a_hook_changes_cannot_be_tied_again(store: Store) -> None:
    class Renamed(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.inner = Three(*([("b", "a")] if tied else []))
            self._register_state_dict_hook(
                lambda module, state, prefix, local: {k.replace("inner.", ""): v for k, v in state.items()}
            )

    root = save(store, {"model": Renamed(True)})
    assert copy_through({"model": Renamed(True)}, {"model": Renamed(True)})
    with pytest.raises(MismatchError, match="no module holds it live under that name"):
        store.restore(root, TrainingState(model=Renamed(False)))


UNFIT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Linear(2, 3), lambda: nn.LazyLinear(3), "a lazy module that saw no batch"),
    "lazy norm": (lambda: nn.BatchNorm1d(3), lambda: nn.LazyBatchNorm1d(), "a lazy module that saw no batch"),
    "meta": (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3, device="meta"), "a meta tensor"),
    "sparse": (lambda: Named(x=torch.eye(3)), lambda: Named(x=torch.eye(3).to_sparse()), "layout torch.sparse_coo"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_live_tensor_that_cannot_take_its_state_is_named(store: Store, kind: str) -> None:
    """B037, at the other end."""
    saved, fresh, message = UNFIT[kind]
    root = save(store, {"model": saved()})
    with pytest.raises(MismatchError, match=message):
        store.restore(root, TrainingState(model=fresh()))
    with pytest.raises(RefusedError, match=message):
        TrainingState(model=fresh()).capture()


def test_a_tensor_of_more_than_256_gib_is_refused_before_it_is_read() -> None:
    with pytest.raises(RefusedError, match="16384 chunks"):
        TrainingState(model=Named(x=torch.zeros(1, dtype=torch.float64).expand(2**36))).capture()


def test_optional_buffers_and_those_that_are_not_kept(store: Store) -> None:
    def build(value: torch.Tensor | None) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("optional", value)
        model.register_buffer("cache", torch.randn(3), persistent=False)
        return model

    assert copy_through({"model": build(None)}, {"model": build(None)})
    with pytest.raises(MismatchError, match="buffer 'optional' is live and not stored"):
        store.restore(save(store, {"model": build(None)}, 2), TrainingState(model=build(torch.ones(2))))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_a_wrapped_module_is_not_the_bare_one(store: Store, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Names are what parameters are known by; a prefix that comes or goes is said, and never guessed away."""
    root = save(store, {"model": wrap(nn.Linear(2, 2))})
    with pytest.raises(MismatchError, match="weight 'weight' is live and not stored"):
        store.restore(root, TrainingState(model=nn.Linear(2, 2)))
