"""A restore goes into live objects as they are, whatever mode torch is in, or says that they are unusable (F-147)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import TrainingState
from ckptstore.errors import MismatchError, NotArmedError, RefusedError
from ckptstore.store import Store
from tests.support.states import Held, Objects, memory_store, save
from tests.support.training import commit_state, make_training, save_steps


def test_objects_flags_gradients_and_hooks_are_left_as_they_are(store: Store) -> None:
    saved = make_training()
    saved.step()
    root = commit_state(store, "main", [saved.state()], 1)
    live = make_training(seed=1)
    live.step()
    model, optimizer = live.model, live.optimizer
    model.get_parameter("4.bias").requires_grad_(False)
    weight = model.get_parameter("0.weight")
    called: list[str] = []
    weight.register_hook(lambda gradient: called.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    assert weight.grad is not None
    gradient = weight.grad.clone()

    def identities() -> list[int]:
        parameters = [(id(p), p.data_ptr()) for p in model.parameters()]
        moments = [(id(s["exp_avg"]), s["exp_avg"].data_ptr()) for s in optimizer.state.values()]
        return [number for pair in (*parameters, *moments) for number in pair]

    before = identities()
    store.restore(root, live.state())
    assert identities() == before
    assert torch.equal(weight.grad, gradient)
    assert not model.get_parameter("4.bias").requires_grad
    live.step()
    assert called == ["gradient", "accumulated"]


def test_a_backward_pass_over_what_a_restore_replaced_fails(store: Store) -> None:
    """Gradients of the old weights would update the new ones."""
    training = make_training()
    root = commit_state(store, "main", [training.state()], 0)
    loss = training.model(torch.randn(4, 8)).sum()
    store.restore(root, training.state())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_difference_is_listed_also_where_something_live_could_not_be_saved(store: Store) -> None:
    """F-146: parameters of no module, and settings without an exact form, beside shapes and other settings."""

    def build(width: int, rate: Any) -> Objects:
        model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), weight_decay=rate)}

    root = save(store, build(3, 0.1))
    fresh = build(4, 0.2)
    fresh["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))], "eps": np.float32(1)})
    before = fresh["model"][0].weight.clone()
    with pytest.raises(MismatchError) as caught:
        store.restore(root, TrainingState(**fresh, values={"new": Held({})}))
    for part in (
        "optimizer optimizer group 1['eps']: a value of type numpy.float32",
        "'0.weight' is stored as f32 (3, 2) and live as f32 (4, 2)",
        "'1.weight' is stored as f32 (2, 3)",
        "weight_decay is stored as 0.1 and live as 0.2",
        "value new is live and not stored",
    ):
        assert part in str(caught.value), part
    assert torch.equal(fresh["model"][0].weight, before)


@pytest.mark.parametrize("kind", ["meta", "freed"])
def test_all_live_tensors_that_cannot_take_their_state_are_named(store: Store, kind: str) -> None:
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2, device="meta" if kind == "meta" else None)
    if kind == "freed":
        for parameter in fresh.parameters():
            parameter.detach().untyped_storage().resize_(0)
    with pytest.raises(MismatchError, match=r"weight 'weight': a .*weight 'bias': a "):
        store.restore(save(store, {"model": saved}), TrainingState(model=fresh))


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no-grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "default-device": default_device,
    "default-dtype": default_dtype,
    "deterministic": deterministic,
}


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_that_torch_is_in_makes_no_difference(store: Store, mode: str) -> None:
    def build(seed: int) -> Any:
        training = make_training(seed=seed)
        table = torch.randn(4, 6)
        extra = nn.Module()
        extra.register_buffer("even", table[:, ::2])
        extra.register_buffer("odd", table[:, 1::2])
        extra.register_buffer("turned", torch.randn(3, 4).t())
        extra.register_buffer("empty", torch.zeros(0))
        training.model.add_module("extra", extra)
        return training

    def stepped(training: Any) -> Any:
        extra = training.model._modules.pop("extra")
        training.step()
        training.model.add_module("extra", extra)
        return training

    fresh = build(1)
    saved = stepped(build(0))
    root = commit_state(store, "main", [saved.state()], 1)
    reader = ckptstore.open(store.url)
    with MODES[mode]():
        assert commit_state(reader, "same", [saved.state()], 1) == root
    straight = commit_state(memory_store(), "end", [stepped(saved).state()], 2)
    with MODES[mode]():
        reader.restore(root, fresh.state())
    assert commit_state(memory_store(), "end", [stepped(fresh).state()], 2) == straight


def test_parameters_that_were_made_in_inference_mode_take_their_state(store: Store) -> None:
    def build() -> nn.Module:
        with torch.inference_mode():
            return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    saved, fresh = build(), build()
    store.restore(save(store, {"model": saved}), TrainingState(model=fresh))
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), fresh.parameters(), strict=True))


class Stubborn(Held):
    """Takes no state, and says nothing."""

    def load_state_dict(self, state: Any) -> None:
        pass


class Failing(Held):
    """Takes no state, and says so."""

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("position")


@pytest.mark.parametrize(
    ("kind", "message"), [(Stubborn, "data data is not in its stored state"), (Failing, "data data: it did not take")]
)
def test_a_run_whose_restore_failed_half_way_saves_nothing(store: Store, kind: type[Held], message: str) -> None:
    """F-147, also where every byte was good: the weights are those of the checkpoint, and the position is not."""
    with store.run("main", model=nn.Linear(2, 2), data=Held(1)) as run:
        run.resume()
        root = run.save(1)
    with store.run("main", model=nn.Linear(2, 2), data=kind(9)) as run:
        with pytest.raises(NotArmedError, match=message):
            run.resume()
        with pytest.raises(RefusedError, match="the last restore was torn"):
            run.save(2)
    assert store.head("main") == root


def test_an_interrupted_restore_leaves_the_run_unable_to_save(store: Store) -> None:
    class Interrupted(Held):
        def load_state_dict(self, state: Any) -> None:
            raise KeyboardInterrupt

    with store.run("main", model=nn.Linear(2, 2), data=Held(1)) as run:
        run.resume()
        run.save(1)
    with store.run("main", model=nn.Linear(2, 2), data=Interrupted(1)) as run:
        with pytest.raises(KeyboardInterrupt):
            run.resume()
        with pytest.raises(RefusedError, match="the last restore was torn"):
            run.save(2)


def test_a_refusal_before_anything_was_changed_stops_nothing(store: Store) -> None:
    with store.run("main", model=nn.Linear(2, 2)) as run:
        run.resume()
        run.save(1)
    other = nn.Linear(2, 2, bias=False)
    with store.run("main", model=other, binding={}) as run, pytest.raises(MismatchError, match="binding"):
        run.resume()
    with store.run("main", model=other) as run:
        with pytest.raises(MismatchError, match="'bias' is stored and not live"):
            run.resume()
        with pytest.raises(RefusedError, match="did not resume from it"):
            run.save(2)
    with store.run("main", model=nn.Linear(2, 2), binding={}) as run:
        run.resume(allow_drift=True)
        with pytest.raises(MismatchError, match="binding"):
            run.resume()
        assert run.save(2), "what was resumed before is as it was"


def test_what_failed_the_arm_check_is_not_saved_until_it_is_as_it_was(store: Store) -> None:
    """F-149. B003 (modelscope/ms-swift#9935)."""
    save_steps(store, "main", make_training(), 2)
    training = make_training(seed=1)
    with store.run("main", **training.objects()) as run:
        run.resume()
        state = torch.get_rng_state()
        torch.manual_seed(0)
        with pytest.raises(NotArmedError, match=r"generator torch\.cpu"):
            run.arm()
        with pytest.raises(RefusedError, match="or its state changed since"):
            run.save(3)
        torch.set_rng_state(state)
        run.arm()
        training.step()
        run.save(3)


def test_a_run_may_go_on_from_an_older_root(store: Store) -> None:
    roots = save_steps(store, "main", make_training(), 4)
    store.move_ref("main", roots[1], roots[3])
    training = make_training(seed=9)
    with store.run("main", **training.objects()) as run:
        assert run.resume() == 2
        training.step()
        assert run.save(3) == roots[2]
        with pytest.raises(RefusedError, match="step 3 does not come after its parent's step 3"):
            run.save(3)


def test_resuming_again_and_again_in_one_process_ends_in_the_same_root(store: Store) -> None:
    """In-process rollback: live state is there already, and is overwritten in place."""
    straight = save_steps(store, "straight", make_training(), 6, every=2)
    save_steps(store, "main", make_training(), 2, every=2)
    training = make_training(seed=3)
    with store.run("main", **training.objects()) as run:
        for _ in range(3):
            assert run.resume() == 2
            for _ in range(3):
                training.step()  # work that is thrown away
        assert run.resume() == 2
        for step in (4, 6):
            training.step()
            training.step()
            assert run.save(step) == straight[step // 2 - 1]


class Viewed(nn.Module):
    """One buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.first = nn.Buffer(torch.zeros(3))
        self.view = nn.Buffer(tensor)


SELF_OVERLAPPING: list[Callable[[], torch.Tensor]] = [
    lambda: torch.tensor([1.0]).expand(6),
    lambda: torch.ones(4).as_strided((3, 2), (1, 1)),
    lambda: torch.ones(2, dtype=torch.complex64).conj()[:, None].expand(2, 3),
]


@pytest.mark.parametrize("view", SELF_OVERLAPPING)
def test_a_view_that_cannot_hold_what_is_stored_is_named_before_anything_changes(
    store: Store, view: Callable[[], torch.Tensor]
) -> None:
    saved = Viewed(torch.arange(6).to(view().dtype).reshape(view().shape))
    saved.first.fill_(7)
    root = commit_state(store, "main", [TrainingState(model=saved)], 1)
    live = Viewed(view())
    with pytest.raises(MismatchError, match=r"share memory live are stored with different values: .*view"):
        store.restore(root, TrainingState(model=live))
    assert torch.equal(live.first, torch.zeros(3))
    assert torch.equal(live.view, view())


@pytest.mark.parametrize("view", SELF_OVERLAPPING)
def test_a_view_that_overlaps_itself_takes_values_that_agree(store: Store, view: Callable[[], torch.Tensor]) -> None:
    root = commit_state(store, "main", [TrainingState(model=Viewed(torch.full_like(view(), 5).contiguous()))], 1)
    live = Viewed(view())
    store.restore(root, TrainingState(model=live))
    assert torch.equal(live.view, torch.full_like(view(), 5))
