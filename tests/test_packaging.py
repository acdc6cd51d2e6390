"""What an installation puts on a machine: two packages, one command, and no name that belongs to somebody else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ckptstore

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_public_name_is_there() -> None:
    """Also those that are loaded when they are first used."""
    assert [name for name in ckptstore.__all__ if not hasattr(ckptstore, name)] == []


def test_every_package_of_the_tree_is_listed(project: dict[str, object]) -> None:
    listed = project["tool"]["setuptools"]["packages"]  # type: ignore[index]
    there = {
        ".".join(path.parent.relative_to(ROOT).parts).replace("cli", "ckptstore_cli", 1 if top == "cli" else 0)
        for top in ("ckptstore", "cli")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert there == set(listed)


def test_every_pinned_package_is_pinned_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert [pin for pin in pins if pin.count("==") != 1 or "@" in pin or "+" in pin] == []


@pytest.fixture
def wheel(tmp_path: Path) -> zipfile.ZipFile:
    """Built by the declared build backend from a copy of the tree."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "out", "*.egg-info", "__pycache__", "manifests", "benchmarks")
    shutil.copytree(ROOT, tree, ignore=ignored)
    script = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1])


def test_a_wheel_holds_the_library_and_the_command_and_no_other_top_level_name(wheel: zipfile.ZipFile) -> None:
    with wheel:
        names = wheel.namelist()
        top = {name.split("/")[0] for name in names}
        (info,) = (name for name in top if name.endswith(".dist-info"))
        assert top == {"ckptstore", "ckptstore_cli", info}
        assert "ckptstore/py.typed" in names
        assert "ckptstore_cli/main.py" in names
        assert "ckpt = ckptstore_cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
        assert any(name.startswith(f"{info}/licenses/LICENSE") for name in names)
