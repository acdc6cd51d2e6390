"""A checkpoint as a Hugging Face directory: part by part, and the same weights when it is read again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, Store
from ckptstore.errors import BackendError, MalformedError, RefusedError, UsageError
from tests.support.demo import demo_tokenizer
from tests.support.training import commit_state
from trainer.compute import weights
from trainer.compute.config import DEFAULT_CUTS, PRESETS, param_table, partition
from trainer.compute.model import Shard
from trainer.data import tokenizer
from trainer.export import Exported, export_model, export_part
from trainer.preparation import planning, prepare
from trainer.preparation.plan import Plan
from trainer.preparation.staged import weights_path
from trainer.starting.directory import open_directory

ROOT = Path(__file__).resolve().parents[2]
OWNERS = partition(PRESETS["demo"], DEFAULT_CUTS["demo"])


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Digest]:
    """The demo's starting weights as a checkpoint of its two shards."""
    folder = tmp_path_factory.mktemp("run")
    made = prepare.prepare(planning.profile("demo"), folder, compute="float32")
    store = ckptstore.open(folder / "store", create=True)
    identity = store.put_preparation(*(store.put_tree(d) for d in (made.plan_dir, made.inputs_dir, made.sources_dir)))
    return store, commit(store, made.plan, made.inputs_dir, identity)


def commit(store: Store, plan: Plan, inputs: Path, run: Digest | None) -> Digest:
    attempt = store.begin("lifecycle")
    receipts = []
    for owner in plan.owners:
        shard = Shard(plan.config, owner.first, owner.last, owner.head)
        weights.load(shard, inputs / weights_path(owner.index), owner.tensors)
        state = ckptstore.TrainingState(model=shard)
        receipts.append(store.save_shard(state, attempt, step=1, index=owner.index, count=len(plan.owners), run=run))
    return store.commit(attempt, receipts)


@pytest.fixture(scope="module")
def exported(committed: tuple[Store, Digest], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The checkpoint as a directory, alone in its folder."""
    store, root = committed
    return export_model(store, root, tmp_path_factory.mktemp("export") / "model")


def test_an_exported_checkpoint_is_a_start_with_the_same_weights(exported: Exported) -> None:
    assert exported.parameters == 820_864
    assert [path.name for path in exported.directory.parent.iterdir()] == ["model"]
    assert sorted(exported.files) == sorted(path.name for path in exported.directory.iterdir())
    source = open_directory(exported.directory)
    assert source.config == PRESETS["demo"]
    start = weights.decode((prepare.ASSETS / "demo-start.safetensors").read_bytes(), "start")
    for name, shape in param_table(source.config):
        read = source.read(name)
        assert (read.dtype, read.shape) == ("F32", shape)
        assert read.data[2::4] == start[name].data[0::2]  # BF16 is the upper half of FP32
        assert read.data[3::4] == start[name].data[1::2]
        assert not any(read.data[0::4] + read.data[1::4])
    assert tokenizer.from_files(source.tokenizer()).identity == demo_tokenizer().identity


def test_each_part_holds_one_shard_and_the_index_says_which(exported: Exported) -> None:
    index = json.loads((exported.directory / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": 4 * 820_864, "total_parameters": 820_864}
    for owner in OWNERS:
        name = f"model-0000{owner.index + 1}-of-00002.safetensors"
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == dict(owner.tensors).keys()


def test_a_part_is_written_from_a_store_that_has_its_shard_alone(
    committed: tuple[Store, Digest], tmp_path: Path
) -> None:
    store, root = committed
    host = ckptstore.open(tmp_path / "host", create=True)
    ckptstore.pull(store, host, root, shards=[1], files=False)
    part = export_part(host, root, 1, tmp_path / "parts")
    assert weights.places(part).keys() == dict(OWNERS[1].tensors).keys()
    with pytest.raises(ckptstore.CkptStoreError):
        export_part(host, root, 0, tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [part.name]
    with pytest.raises(UsageError, match="shards 0 to 1"):
        export_part(store, root, 2, tmp_path / "parts")


def test_the_command_says_what_it_wrote_and_imports_no_torch(committed: tuple[Store, Digest], tmp_path: Path) -> None:
    store, root = committed
    script = (
        "import sys; from trainer import commands; code = commands.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "export", "lifecycle", "--store", store.url, "--out", "model"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"820,864 parameters of {root}" in done.stdout
    with pytest.raises(RefusedError, match="not empty"):
        export_model(store, root, tmp_path / "model")


def test_a_checkpoint_of_no_prepared_run_is_refused(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    model = Shard(PRESETS["demo"], 2, 4, False)
    root = commit_state(store, "main", [ckptstore.TrainingState(model=model)], 1)
    with pytest.raises(RefusedError, match="no prepared run"):
        export_model(store, root, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_failed_part_leaves_nothing(committed: tuple[Store, Digest], tmp_path: Path) -> None:
    store, root = committed
    partial = ckptstore.open(tmp_path / "partial", create=True)
    ckptstore.pull(store, partial, root, shards=[0])
    with pytest.raises(BackendError, match="part of shard 1"):
        export_model(partial, root, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


def test_parts_that_are_not_the_model_of_the_plan_are_refused(committed: tuple[Store, Digest], tmp_path: Path) -> None:
    store, root = committed
    checkpoint = store.checkpoint(root)
    assert checkpoint.run is not None
    plan, inputs = prepared(store, checkpoint.run, tmp_path)
    half = ckptstore.open(tmp_path / "half", create=True)
    ckptstore.push(store, half, root)
    attempt = half.begin("one")
    shard = Shard(plan.config, 2, 4, False)
    weights.load(shard, inputs / weights_path(1), plan.owners[1].tensors)
    state = ckptstore.TrainingState(model=shard)
    only = half.commit(attempt, [half.save_shard(state, attempt, step=1, index=0, count=1, run=checkpoint.run)])
    with pytest.raises(MalformedError, match="in none of them"):
        export_model(half, only, tmp_path / "model")


def prepared(store: Store, run: Digest, folder: Path) -> tuple[Plan, Path]:
    preparation = store.preparation(run)
    for name, tree in (("plan", preparation.plan), ("inputs", preparation.inputs)):
        (folder / name).mkdir()
        store.get_tree(tree, folder / name)
    return prepare.read_plan(folder / "plan"), folder / "inputs"
