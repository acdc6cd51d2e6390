"""Live states as the format has them: bytes, keys, generators, groups, and the same root everywhere."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.errors import RefusedError
from ckptstore.format import values
from ckptstore.format.digest import Digest
from ckptstore.format.page import TensorEntry
from ckptstore.store import Store


class Bag(nn.Module):
    """A module that is its buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def new_store() -> Store:
    return ckptstore.open(f"memory:{secrets.token_hex(8)}", create=True)


def save(store: Store, step: int = 1, **state: Any) -> Digest:
    with store.run("main", **state) as run:
        return run.save(step)


def entries(store: Store, root: Digest) -> dict[str, TensorEntry]:
    return {entry.path: entry for entry in store.closure(root).shards[0].tensors()}


def test_bytes_are_row_major_and_little_endian_whatever_memory_looks_like() -> None:
    """F-31 (B037, safetensors PR#17)."""
    plain = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    column = plain.t().contiguous().t()
    step = torch.arange(12, dtype=torch.int32)[::2].reshape(2, 3)
    spread = torch.tensor([7], dtype=torch.int16).expand(2, 2)
    conj = torch.tensor([1 + 2j]).conj()
    flags = torch.tensor([2, 0, 1], dtype=torch.uint8).view(torch.bool)
    store = new_store()
    found = entries(
        store, save(store, model=Bag(plain=plain, column=column, step=step, spread=spread, conj=conj, flags=flags))
    )
    assert found["plain"].inline == b"".join(n.to_bytes(4, "little") for n in range(6))
    assert found["column"].digest == found["plain"].digest
    assert found["step"].inline == b"".join(n.to_bytes(4, "little") for n in range(0, 12, 2))
    assert found["spread"].inline == b"\x07\0" * 4
    assert found["conj"].inline == b"\0\0\x80\x3f\0\0\0\xc0"
    assert found["flags"].inline == b"\x02\0\x01"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("kind", ["meta", "sparse", "subclass", "quantised"])
def test_kinds_that_are_not_stored_are_refused_before_anything_is_written(kind: str) -> None:
    """F-36."""
    tensor = {
        "meta": lambda: torch.empty(2, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "subclass": lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }[kind]()
    store = new_store()
    with pytest.raises(RefusedError, match="'odd'"):
        save(store, model=Bag(fine=torch.ones(100), odd=tensor))
    assert [stat.key for stat in store.backend.list("")] == ["ckptstore.json"]


def test_no_key_is_made_of_a_name(tmp_path: Path) -> None:
    """F-08 (B044, torchsnapshot PR#31)."""
    store = ckptstore.open(tmp_path / "store", create=True)
    evil = "../../etc/passwd"
    model = nn.Module()
    model.register_parameter(evil.replace(".", "\u2024"), nn.Parameter(torch.ones(100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = save(
        store,
        model={evil: model},
        optimizer={evil: optimizer},
        generators={evil: torch.Generator()},
        binding={evil: evil},
    )
    digest = r"[0-9a-f]{2}/[0-9a-f]{64}"
    allowed = rf"ckptstore\.json|(objects|documents)/{digest}|refs/main/\d{{16}}|receipts/[0-9a-f]{{64}}/[0-9a-f]{{64}}"
    keys = [stat.key for stat in store.backend.list("")]
    assert [key for key in keys if not re.fullmatch(allowed, key)] == []
    assert store.verify(root).findings == ()


def test_the_same_state_has_the_same_root_in_every_store(tmp_path: Path) -> None:
    """F-81 (B042): another place, another time, another nonce."""
    state = {"model": Bag(w=torch.ones(100)), "generators": {"g": torch.Generator().manual_seed(1)}}
    stores = [new_store(), ckptstore.open(tmp_path / "a", create=True), ckptstore.open(tmp_path / "b", create=True)]
    assert len({save(store, **state) for store in stores}) == 1


def test_a_shard_has_every_generator_sorted_by_name() -> None:
    """F-63."""
    store = new_store()
    root = save(store, generators={"z": torch.Generator(), "a": torch.Generator()})
    rng = store.closure(root).shards[0].shard.rng
    assert [entry.name for entry in rng] == ["generator.a", "generator.z", "numpy", "python", "torch.cpu"]


def test_groups_keep_hyper_parameters_and_selectors_apart() -> None:
    """F-64, F-65."""
    model = nn.Linear(2, 2)
    optimizers = {
        "second": torch.optim.AdamW([model.weight], lr=0.5, foreach=True),
        "first": torch.optim.SGD([model.bias], lr=0.1),
    }
    store = new_store()
    found = store.closure(save(store, model=model, optimizer=optimizers)).shards[0].shard.optimizers
    assert [(item.name, item.type) for item in found] == [
        ("first", "torch.optim.sgd.SGD"),
        ("second", "torch.optim.adamw.AdamW"),
    ]
    for item in found:
        (group,) = item.groups
        hyper, selectors = values.from_json(group.hyper), values.from_json(group.selectors)
        assert isinstance(hyper, dict)
        assert isinstance(selectors, dict)
        assert selectors.keys() <= {"foreach", "fused", "capturable", "differentiable"}
        assert not hyper.keys() & selectors.keys()
        live = {key for key in optimizers[item.name].param_groups[0] if key != "params"}
        assert hyper.keys() | selectors.keys() == live


def test_binding_holds_no_name_of_a_machine() -> None:
    """F-87."""
    import getpass
    import socket

    store = new_store()
    binding = values.from_json(store.checkpoint(save(store, model=Bag(w=torch.ones(1)))).binding)
    assert isinstance(binding, dict)
    assert binding.keys() >= {"torch", "threads"}
    words = {socket.gethostname(), getpass.getuser(), str(Path.cwd())}
    assert not words & {str(value) for value in binding.values()}


def test_a_continuation_under_another_binding_says_so() -> None:
    """F-88."""
    store, model = new_store(), Bag(w=torch.ones(1))
    save(store, model=model, binding={"threads": 1})
    with store.run("main", model=model, binding={"threads": 2}) as run:
        step = run.resume(allow_drift=True)
        root = run.save(step + 1)
    (deviation,) = store.checkpoint(root).deviations
    assert (deviation.code, deviation.expected, deviation.actual) == ("binding.threads", "1", "2")
    assert store.checkpoint(root).parent is not None


def test_extra_state_with_tensors_is_stored_as_entries_of_its_own() -> None:
    """F-44, F-53: what comes back has the same nesting, types and bits."""

    class Scaled(nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    store = new_store()
    extra = {"amax": torch.arange(100), "names": ["a", (1, 1.0, True)], "nested": {"t": torch.ones(1)}}
    root = save(store, model=Scaled(extra))
    assert store.verify(root).findings == ()
    assert {entry.role for entry in store.closure(root).shards[0].entries} == {
        ("extra",),
        ("extra", "amax"),
        ("extra", "nested", "t"),
    }
    other = Scaled({"amax": torch.zeros(100, dtype=torch.int64), "names": [], "nested": {"t": torch.zeros(1)}})
    with store.run("main", model=other) as run:
        assert run.resume() == 1
    assert other.extra["names"] == extra["names"]
    assert type(other.extra["names"][1][2]) is bool
    assert torch.equal(other.extra["amax"], extra["amax"])
    assert torch.equal(other.extra["nested"]["t"], extra["nested"]["t"])


def test_a_run_goes_forward() -> None:
    """F-132."""
    store, model = new_store(), Bag(w=torch.ones(1))
    with store.run("main", model=model) as run:
        run.save(3)
        for step in (3, 2):
            with pytest.raises(RefusedError, match="after its parent's step 3"):
                run.save(step)
        run.save(4)
    with store.run("main", model=model) as run:
        assert run.resume() == 4
        with pytest.raises(RefusedError, match="after its parent's step 4"):
            run.save(4)
