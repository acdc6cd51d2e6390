"""Freezing a run: the same bytes wherever and however it is prepared."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.errors import CorruptError, NotFoundError, RefusedError, UsageError
from ckptstore.format.digest import Digest
from trainer.compute import weights
from trainer.data import bytetokenizer
from trainer.data.cohorts import read
from trainer.preparation import inputs, planning, prepare
from trainer.preparation.prepare import Prepared

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare.prepare(planning.profile("demo"), tmp_path_factory.mktemp("prepared"), compute="float32")


def _files(directory: Path) -> Iterator[tuple[str, bytes, int]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path.relative_to(directory).as_posix(), path.read_bytes(), stat.S_IMODE(path.stat().st_mode)


def test_two_preparations_are_the_same_bytes(prepared: Prepared, tmp_path: Path) -> None:
    """Another folder, working directory, time zone, locale, umask and hash seed change nothing."""
    target = tmp_path / "a b" / "ü"
    script = (
        "import os, sys, pathlib; os.umask(0o077); from trainer.preparation import planning, prepare;"
        "prepare.prepare(planning.profile('demo'), pathlib.Path(sys.argv[1]), compute='float32');"
        "assert 'torch' not in sys.modules"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "77",
        "TZ": "Pacific/Apia",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
    }
    subprocess.run([sys.executable, "-c", script, str(target)], cwd=tmp_path, env=environment, check=True, timeout=120)
    assert list(_files(target)) == list(_files(prepared.plan_dir.parent))


def test_all_that_a_worker_reads_is_there(prepared: Prepared) -> None:
    plan = prepare.read_plan(prepared.plan_dir)
    assert plan == prepared.plan
    loaded = inputs.load(plan, prepared.inputs_dir)
    assert loaded.tokenizer.identity == plan.tokenizer
    assert loaded.documents.keys() == loaded.entries.keys()
    assert loaded.batch(64).denominator == plan.update(64).denominator
    for shard, owner in enumerate(plan.owners):
        places = weights.places(prepared.inputs_dir / f"weights/shard-{shard}.safetensors")
        assert {name: place.shape for name, place in places.items()} == dict(owner.tensors)


def test_the_shards_files_are_the_committed_weights_cut_in_two(prepared: Prepared) -> None:
    start = (prepare.ASSETS / "demo-start.safetensors").read_bytes()
    assert Digest.of(start) == prepared.plan.start
    parts: dict[str, weights.StoredTensor] = {}
    for shard in (0, 1):
        path = prepared.inputs_dir / f"weights/shard-{shard}.safetensors"
        parts |= weights.decode(path.read_bytes(), path.name)
    assert parts == weights.decode(start, "start")


def test_the_numerical_sources_are_all_there(prepared: Prepared) -> None:
    found = {name for name, _, _ in _files(prepared.sources_dir)}
    assert {
        "pyproject.toml",
        "trainer/compute/step.py",
        "trainer/compute/model.py",
        "ckptstore/format/canonical.py",
    } <= found
    for name in found:
        assert (prepared.sources_dir / name).read_bytes() == (ROOT / name).read_bytes()
    expected = {
        p.relative_to(ROOT).as_posix() for room in ("trainer", "ckptstore") for p in (ROOT / room).rglob("*.py")
    }
    assert found == {*expected, "pyproject.toml"}


def test_nothing_is_prepared_over_something(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "inputs").symlink_to("nowhere")
    with pytest.raises(RefusedError, match="inputs"):
        prepare.prepare(planning.profile("demo"), tmp_path, compute="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["inputs"]


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(UsageError, match="nothing"):
        planning.profile("nothing")


def test_starting_weights_of_other_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray((prepare.ASSETS / "demo-start.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "demo-start.safetensors").write_bytes(data)
    (tmp_path / "demo-start.json").write_bytes((prepare.ASSETS / "demo-start.json").read_bytes())
    monkeypatch.setattr(prepare, "ASSETS", tmp_path)
    with pytest.raises(CorruptError, match="starting weights of demo"):
        prepare.prepare(planning.profile("demo"), tmp_path / "run", compute="float32")
    assert not (tmp_path / "run").exists()


def test_a_committed_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ASSETS", tmp_path)
    with pytest.raises(NotFoundError, match=r"asset demo-start\.safetensors"):
        prepare.prepare(planning.profile("demo"), tmp_path / "run", compute="float32")
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"plan\.json"):
        prepare.read_plan(tmp_path)


@pytest.mark.parametrize("damage", ["change", "remove", "repeat"])
def test_other_documents_than_planned_are_refused(prepared: Prepared, tmp_path: Path, damage: str) -> None:
    for name, data, _ in _files(prepared.inputs_dir):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    path = tmp_path / "data" / "test-a.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines = {
        "change": [lines[0].replace(b"value", b"valuE"), *lines[1:]],
        "remove": lines[1:],
        "repeat": [*lines, lines[0]],
    }[damage]
    path.write_bytes(b"".join(lines))
    with pytest.raises(Exception, match="test-a-00"):
        inputs.load(prepared.plan, tmp_path)
    assert len(list(read(path.read_bytes()))) == len(lines)


def test_another_tokenizer_than_planned_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name, data in bytetokenizer.files(prepare.TEMPLATE_ASSET.read_bytes() + b" ").items():
        (tmp_path / "tokenizer" / name).write_bytes(data)
    with pytest.raises(CorruptError, match="identity"):
        inputs.load(prepared.plan, tmp_path)


def test_the_compute_type_is_measured_without_importing_torch_here() -> None:
    """In the environment that the workers get: the portable kernels have no BF16, whatever this CPU has."""
    assert prepare.choose_compute("portable") == "float32"


def test_the_record_beside_the_weights_says_where_they_come_out_again() -> None:
    record = json.loads((prepare.ASSETS / "demo-start.json").read_bytes())
    assert {"digest", "canary", "torch", "compute", "numerics", "updates"} <= record.keys()
