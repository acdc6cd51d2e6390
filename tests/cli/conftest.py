from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest
from ckptstore.store import Store
from ckptstore_cli.main import run
from tests.support.training import make_training, save_steps

BACKWARDS = "back\u202ewards\x1b[31m"
"""A name that would turn around and colour what a terminal shows after it."""


@dataclass(frozen=True)
class Stores:
    """A directory with a store, and what is in it: ref ``main`` at steps 1 and 2, ref ``wide`` with two shards."""

    path: Path
    first: Digest
    second: Digest
    wide: Digest

    @property
    def url(self) -> str:
        return str(self.path)

    def open(self) -> Store:
        return ckptstore.open(self.path)

    def file(self, key: str) -> Path:
        return self.path / key


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    folder = tmp_path_factory.mktemp("cli")
    store = ckptstore.open(folder / "store", create=True)
    first, second = save_steps(store, "main", make_training(), 2)
    (folder / "plan").mkdir()
    (folder / "plan" / "plan.json").write_bytes(b'{"updates":2}')
    (folder / "plan" / "weights.bin").write_bytes(bytes(range(256)) * 20)
    tree = store.put_tree(folder / "plan")
    run_identity = store.put_preparation(tree, tree, tree)
    torch.manual_seed(1)
    left = nn.ModuleDict({"embed": nn.Embedding(40, 400), BACKWARDS: nn.Linear(3, 3)})
    right = nn.ModuleDict({"norm": nn.LayerNorm(400)})
    attempt = store.begin("wide")
    receipts = [
        store.save_shard(
            ckptstore.TrainingState(model=module),
            attempt,
            step=7,
            index=index,
            count=2,
            run=run_identity,
            binding={"threads": 2},
            cursors={"data": ckptstore.Cursor("samples", 70, per_step=10)},
            files=tree,
        )
        for index, module in enumerate((left, right))
    ]
    wide = store.commit(attempt, receipts, ties=[ckptstore.Tie("head.weight", "embed.weight")])
    return Stores(folder / "store", first, second, wide)


@pytest.fixture
def stores(built: Stores, tmp_path: Path) -> Stores:
    """A copy that may be changed."""
    shutil.copytree(built.path, tmp_path / "store")
    return Stores(tmp_path / "store", built.first, built.second, built.wide)


@dataclass(frozen=True)
class Done:
    """What a command ended with."""

    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        return self.out.splitlines()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def error(self) -> dict[str, Any]:
        (line,) = self.err.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found


Ckpt = Callable[..., Done]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ckpt:
    """Run a command in this process, in an empty current directory and without CKPT_STORE."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("CKPT_STORE", raising=False)

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        done = capsys.readouterr()
        return Done(code, done.out, done.err)

    return call


PROGRAM = "import sys; from ckptstore_cli.main import main; main()"


def process(*arguments: object, program: str = PROGRAM, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )
