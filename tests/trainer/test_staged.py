"""What a host has to have before anything runs on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.errors import RefusedError
from ckptstore.format.tree import Tree
from tests.support.demo import tree_of
from trainer.preparation import planning, prepare, staged

Trees = dict[str, Tree]
TEMPLATE = "inputs/tokenizer/chat_template.jinja"


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trees]:
    """A preparation with kinds of files in its tokenizer directory that no list of names foresaw."""
    directory = tmp_path_factory.mktemp("frozen")
    prepare.prepare(planning.profile("demo"), directory, compute="float32")
    folder = directory / "inputs" / "tokenizer"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").write_text("{{ x }}")
    (folder / "foo.bar").write_text("?")
    (folder / "empty").touch()
    (folder / ".dot").write_text(".")
    return directory, {folder: tree_of(directory / folder) for folder in ("plan", "inputs", "sources")}


@pytest.fixture
def host(frozen: tuple[Path, Trees], tmp_path: Path) -> Path:
    """A host of shard 1 as it should be."""
    source, trees = frozen
    for path in staged.files_for(trees, 1):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, tmp_path / path)
    return tmp_path


def test_a_whole_host_passes_and_its_bytes_are_counted(host: Path, frozen: tuple[Path, Trees]) -> None:
    size = sum(path.stat().st_size for path in host.rglob("*") if path.is_file())
    assert staged.check_staged(host, frozen[1], 1) == size


def test_everything_frozen_is_staged_but_the_weights_of_others(frozen: tuple[Path, Trees]) -> None:
    """B089 (ray-project/ray PR#62121): no allow-list; what is left out is listed with its reason."""
    directory, trees = frozen
    for shard, other in ((0, 1), (1, 0)):
        left = staged.left_out(trees, shard)
        assert [one.path for one in left] == [f"inputs/weights/shard-{other}.safetensors"]
        assert all(one.reason for one in left)
        every = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        assert staged.files_for(trees, shard).keys() | {one.path for one in left} == every


def test_a_host_without_the_chat_template_is_refused_by_name(host: Path, frozen: tuple[Path, Trees]) -> None:
    """B089: the seed's own failure, found before anything runs and not when the first text is rendered."""
    (host / TEMPLATE).unlink()
    with pytest.raises(RefusedError, match=r"chat_template\.jinja \(chat template\) is missing"):
        staged.check_staged(host, frozen[1], 1)
    shutil.copyfile(frozen[0] / TEMPLATE, host / TEMPLATE)
    staged.check_staged(host, frozen[1], 1)


def test_a_role_that_was_never_frozen_is_missed_too(host: Path, frozen: tuple[Path, Trees]) -> None:
    """B089: absent in the source as well, so the copy is faithful, and still nothing may run."""
    trees = dict(frozen[1])
    trees["inputs"] = Tree(tuple(file for file in trees["inputs"].files if "chat_template.jinja" not in file.path))
    (host / TEMPLATE).unlink()
    with pytest.raises(RefusedError, match=r"chat_template\.jinja \(chat template\) not among the frozen files"):
        staged.check_staged(host, trees, 1)


@pytest.mark.parametrize("shard", [0, 1])
def test_each_required_file_is_missed_by_its_role(host: Path, frozen: tuple[Path, Trees], shard: int) -> None:
    own, other = (f"inputs/weights/shard-{i}.safetensors" for i in (shard, 1 - shard))
    shutil.copyfile(frozen[0] / own, host / own)
    (host / other).unlink(missing_ok=True)
    for asset in staged.required_assets(shard):
        kept = (host / asset.path).read_bytes()
        (host / asset.path).unlink()
        (fault,) = staged.faults(host, frozen[1], shard)
        assert (fault.role, fault.path, fault.problem) == (asset.role, asset.path, "is missing")
        (host / asset.path).write_bytes(kept)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_flip, "other bytes: expected b3:"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "bytes, expected"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (_link, "cannot be opened as a regular file"),
        (_fifo, "is not a regular file"),
        (_folder, "is not a regular file"),
    ],
)
def test_a_file_of_other_bytes_or_kind_is_named(
    host: Path, frozen: tuple[Path, Trees], damage: Callable[[Path], object], problem: str
) -> None:
    damage(host / TEMPLATE)
    with pytest.raises(RefusedError, match=rf"chat_template\.jinja \(chat template\).*{problem}"):
        staged.check_staged(host, frozen[1], 1)


def test_everything_wrong_is_listed_at_once(host: Path, frozen: tuple[Path, Trees]) -> None:
    (host / TEMPLATE).unlink()
    _flip(host / "inputs/weights/shard-1.safetensors")
    shutil.copyfile(frozen[0] / "inputs/weights/shard-0.safetensors", host / "inputs/weights/shard-0.safetensors")
    (host / "inputs/data/more.jsonl").touch()
    found = {fault.path: fault for fault in staged.faults(host, frozen[1], 1)}
    assert list(found) == [
        "inputs/data/more.jsonl",
        TEMPLATE,
        "inputs/weights/shard-0.safetensors",
        "inputs/weights/shard-1.safetensors",
    ]
    assert "stay with their owner" in found["inputs/weights/shard-0.safetensors"].problem
