"""The golden store of each version is read by every later one, and gives the answers that it gave when it was made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.format.digest import Digest
from ckptstore.format.keys import digest_of_key
from ckptstore.store import Store
from tests.golden import states
from tests.golden.answers import GOLDEN, answers, unpacked
from tests.support.invariants import broken


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ckptstore.open(unpacked(tmp_path))


def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.joinpath("expected.json").read_text())
    return found


def difference(recorded: Any, actual: Any, at: str = "") -> str:
    """The first place where an answer is not what was recorded; an object may have members that are new since."""
    if isinstance(recorded, dict) and isinstance(actual, dict):
        for name, item in recorded.items():
            if name not in actual:
                return f"{at}/{name} is not there any more"
            if told := difference(item, actual[name], f"{at}/{name}"):
                return told
        return ""
    if isinstance(recorded, list) and isinstance(actual, list) and len(recorded) == len(actual):
        each = (difference(item, actual[index], f"{at}/{index}") for index, item in enumerate(recorded))
        return next(filter(None, each), "")
    return "" if recorded == actual and type(recorded) is type(actual) else f"{at} is {actual!r}, recorded {recorded!r}"


def plain(answer: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(answer))


def test_the_golden_store_gives_the_answers_that_it_gave(store: Store, tmp_path: Path) -> None:
    assert difference(expected(), plain(answers(store, tmp_path))) == ""


def test_no_byte_of_the_golden_store_is_other_than_its_name_says(store: Store, tmp_path: Path) -> None:
    for stat in store.backend.list(""):
        digest = digest_of_key(stat.key)
        if digest is not None:
            assert Digest.of(store.backend.get(stat.key)) == digest
    assert broken(tmp_path / "store") == []


@pytest.mark.parametrize("ref", ["main", "best"])
def test_a_state_of_the_golden_store_is_restored(store: Store, ref: str) -> None:
    model, objects = states.whole()
    restored = store.restore(store.resolve(ref), states.state(objects))
    recorded = expected()["tensors"][str(restored.root)]
    stored = {name.split(" ", 1)[1]: item for name, item in recorded.items() if name.split()[0] in ("weight", "buffer")}
    live = {
        name: Digest.of(bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())).hex
        for name, tensor in model.state_dict().items()
        if name in stored
    }
    assert live == {name: digest for name, (_, _, digest) in stored.items()}
    assert objects["data"].taken == restored.checkpoint.step * states.BATCH
    assert objects["values"]["notes"].state["words"] == ["a", ("b", 1, 1.0, True, None)]
    assert model.last.weight is model.first.weight


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_of_the_golden_store_is_restored(store: Store, index: int) -> None:
    model, objects = states.part(index)
    store.restore(store.resolve("wide"), states.state(objects), shard=index)
    assert objects["optimizer"][f"sgd{index}"].state[model.weight]["momentum_buffer"].eq(2.0).all()
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        wanted = torch.zeros_like(tensor)
        states.fill(wanted, 10 * index + number)
        assert wanted.view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), name


def test_a_run_goes_on_from_the_golden_store(store: Store) -> None:
    """With the binding that it had; what is saved then has the golden checkpoint for its parent."""
    _, objects = states.whole()
    binding = {"torch": "2.13.0", "deterministic": True, "threads": 1}
    with store.run("main", **objects, binding=binding) as run:
        step = run.resume()
        parent = run.root
        for group in objects["optimizer"].state.values():
            group["step"] += 1
        objects["scheduler"].last_epoch += 1
        root = run.save(step + 1)
    assert store.checkpoint(root).parent == parent
    assert store.verify("main").ok


def test_the_golden_store_is_never_made_again() -> None:
    assert GOLDEN.exists()
    done = subprocess.run([sys.executable, "-m", "tests.golden.make"], capture_output=True, text=True, cwd=_TOP)
    assert done.returncode == 5
    assert "made once" in done.stderr


_TOP = Path(__file__).parents[2]
