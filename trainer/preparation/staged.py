"""What a host has to have before anything runs on it: the frozen files by role, checked byte for byte.

A host of shard ``i`` gets every frozen file except the weights of other shards. So a kind of file that nobody thought
of is staged as well, and what is left out is left out by name and for a reason.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import RefusedError
from ckptstore.format.digest import Digest
from ckptstore.format.tree import Excluded, File, Tree
from trainer.data.template import TEMPLATE

PLAN, INPUTS, SOURCES = "plan", "inputs", "sources"
PLAN_FILE = "plan.json"


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that a host needs, by its role and its path under the host's folder."""

    role: str
    path: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that is not as frozen: its role, its path, and what is wrong with expected and actual values."""

    role: str
    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} ({self.role}) {self.problem}"


def weights_path(shard: int) -> str:
    """Where the starting weights of a shard are among the inputs."""
    return f"weights/shard-{shard}.safetensors"


def required_assets(shard: int | None) -> tuple[Asset, ...]:
    """One file for each role without which shard ``shard`` cannot run; None: a shard that is restored, not started."""
    weights = () if shard is None else (Asset(f"weights of shard {shard}", f"{INPUTS}/{weights_path(shard)}"),)
    return (
        Asset("plan", f"{PLAN}/{PLAN_FILE}"),
        Asset("tokenizer", f"{INPUTS}/tokenizer/tokenizer.json"),
        Asset("tokenizer", f"{INPUTS}/tokenizer/tokenizer_config.json"),
        Asset("tokenizer", f"{INPUTS}/tokenizer/special_tokens_map.json"),
        Asset("chat template", f"{INPUTS}/tokenizer/{TEMPLATE}"),
        *(Asset("data", f"{INPUTS}/data/{name}.jsonl") for name in DATA_FILES),
        *weights,
    )


DATA_FILES = ("phase-one-tasks", "phase-two-tasks", "conversations", "test-a", "test-b", "retention")


def role(path: str) -> str:
    """The role of a staged path, ``source`` for one of the numerical sources."""
    top, _, below = path.partition("/")
    if top != INPUTS:
        return "source" if top == SOURCES else top
    if below == f"tokenizer/{TEMPLATE}":
        return "chat template"
    if below.startswith("weights/shard-"):
        return f"weights of shard {below.removeprefix('weights/shard-').partition('.')[0]}"
    return below.partition("/")[0]


def left_out(trees: Mapping[str, Tree], shard: int | None) -> tuple[Excluded, ...]:
    """The frozen files that a host of ``shard`` does not get, each with the reason."""
    return tuple(
        Excluded(path, f"{role(path)} stay with their owner")
        for path, _ in _files(trees)
        if role(path).startswith("weights of shard") and role(path) != f"weights of shard {shard}"
    )


def files_for(trees: Mapping[str, Tree], shard: int | None) -> dict[str, File]:
    """The frozen files that a host of ``shard`` gets, by path under its folder (``inputs/data/test-a.jsonl``)."""
    without = {excluded.path for excluded in left_out(trees, shard)}
    return {path: file for path, file in _files(trees) if path not in without}


def faults(directory: Path, trees: Mapping[str, Tree], shard: int | None) -> tuple[Fault, ...]:
    """Everything that is wrong with the files under ``directory``, sorted by path; nothing if they are as frozen.

    Args:
        directory: the host's folder, with the folders ``plan/``, ``inputs/`` and so on under it.
        trees: the frozen trees by the name of their folder.
        shard: the shard that the host starts; None: one of other shards than the plan's, which restores a checkpoint
            and gets no starting weights.
    """
    expected = files_for(trees, shard)
    found = {asset.path: "not among the frozen files" for asset in required_assets(shard) if asset.path not in expected}
    for path, file in expected.items():
        problem = _problem(directory / path, file)
        if problem:
            found[path] = problem
    others = {excluded.path: excluded.reason for excluded in left_out(trees, shard)}
    for path in _present(directory, trees):
        if path not in expected:
            found[path] = f"has no place here: {others.get(path, 'not among the frozen files')}"
    return tuple(Fault(role(path), path, problem) for path, problem in sorted(found.items()))


def check_staged(directory: Path, trees: Mapping[str, Tree], shard: int | None) -> int:
    """Bytes read, if ``directory`` has exactly the frozen files of ``shard``; arguments as in :func:`faults`.

    Raises:
        RefusedError: a file is missing, wrong or has no place there; all are named with their roles.
    """
    wrong = faults(directory, trees, shard)
    if wrong:
        hint = "copy them from the prepared inputs and stage again; nothing has run"
        what = "staging without weights" if shard is None else f"staging of shard {shard}"
        raise RefusedError(what, "; ".join(map(str, wrong)), hint)
    return sum(file.size for file in files_for(trees, shard).values())


def _files(trees: Mapping[str, Tree]) -> Iterator[tuple[str, File]]:
    for folder, tree in trees.items():
        for file in tree.files:
            yield f"{folder}/{file.path}", file


def _present(directory: Path, trees: Mapping[str, Tree]) -> Iterator[str]:
    for folder in trees:
        for path in sorted((directory / folder).rglob("*")):
            if path.is_symlink() or not path.is_dir():
                yield path.relative_to(directory).as_posix()


def _problem(path: Path, file: File) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be opened as a regular file ({error.strerror})"
    try:
        return _difference(descriptor, file)
    finally:
        os.close(descriptor)


def _difference(descriptor: int, file: File) -> str | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != file.size:
        return f"has {status.st_size} bytes, expected {file.size}"
    with os.fdopen(descriptor, "rb", closefd=False) as opened:
        for expected, length in zip(file.chunks, file.lengths(), strict=True):
            actual = Digest.of(opened.read(length))
            if actual != expected:
                return f"has other bytes: expected {expected}, found {actual}"
    return None
