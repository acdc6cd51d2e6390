"""A checkpoint of a run as a Hugging Face directory: each shard's part by a process of its own, the rest beside them.

The part of a shard can be written wherever that shard is, also from the store of a host that holds no other. What
writes the index knows names, shapes and sizes, and no weights.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import ckptstore
from ckptstore import Checkpoint, Digest, Store
from ckptstore.errors import BackendError, CorruptError, MalformedError, RefusedError, UsageError
from ckptstore.format.tree import Preparation
from trainer.compute import weights
from trainer.compute.config import param_table
from trainer.data import tokenizer
from trainer.errors import of_system
from trainer.preparation.inputs import TOKENIZER
from trainer.preparation.plan import Plan
from trainer.preparation.prepare import read_plan
from trainer.preparation.staged import PLAN_FILE
from trainer.starting.directory import CONFIG, INDEX, describe

_UNKNOWN_LENGTH = 2048  # tokens, where the tokenizer does not say how long a text may be
_ROLES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "pad_token_id"}


@dataclass(frozen=True, slots=True)
class Exported:
    """A directory that was written: its files with their sizes in bytes, and the parameters of the model."""

    directory: Path
    files: dict[str, int]
    parameters: int


def part_name(shard: int, count: int) -> str:
    """The file of a shard, as sharded safetensors are called."""
    return f"model-{shard + 1:05d}-of-{count:05d}.safetensors"


def export_part(store: Store, root: Digest, shard: int, directory: Path) -> Path:
    """Write the weights of one shard, FP32 as they are stored, verified and read back; returns the path.

    Raises:
        UsageError: the checkpoint has no such shard.
        RefusedError: the file is there already.
        CkptStoreError: stored bytes are bad or absent, or the file cannot be written. Nothing is left then.
    """
    count = len(store.checkpoint(root).shards)
    if not 0 <= shard < count:
        raise UsageError(f"shard {shard}", f"checkpoint {root.short} has shards 0 to {count - 1}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise of_system(error, f"making {directory}") from None
    return ckptstore.export_weights(store, root, directory / part_name(shard, count), shards=[shard]).path


def export_model(store: Store, root: Digest, directory: Path) -> Exported:
    """Write a checkpoint as a directory that the transformers library opens; the parts are written side by side.

    The directory gets its name when all of it is there.

    Raises:
        RefusedError: ``directory`` is not empty, or the checkpoint is of no prepared run.
        CkptStoreError: as :func:`export_part`; what a part's process said is told.
    """
    target = Path(os.path.abspath(directory))
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise RefusedError(f"directory {target}", "is there and not empty", "choose a new one")
    checkpoint = store.checkpoint(root)
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            made.chmod(0o755)
            plan = _write_described(store, root, checkpoint, made)
            _write_parts(store, root, len(checkpoint.shards), made)
            parameters = _write_index(plan, len(checkpoint.shards), made)
            files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
            with suppress(FileNotFoundError):
                target.rmdir()
            made.rename(target)
        except OSError as error:
            raise of_system(error, f"writing {target}") from None
    return Exported(target, files, parameters)


def _write_described(store: Store, root: Digest, checkpoint: Checkpoint, directory: Path) -> Plan:
    """The tokenizer's files and config.json, as the run's preparation has them; returns its plan."""
    if checkpoint.run is None:
        why = "it is of no prepared run, so nothing says which model and tokenizer it has"
        raise RefusedError(f"checkpoint {root.short}", why, "ckpt export writes its weights as one file")
    preparation: Preparation = store.preparation(checkpoint.run)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        store.get_tree(preparation.plan, scratch, [PLAN_FILE])
        plan = read_plan(Path(scratch))
        prefix = f"{TOKENIZER}/"
        paths = [file.path for file in store.tree(preparation.inputs).files if file.path.startswith(prefix)]
        store.get_tree(preparation.inputs, scratch, paths)
        contents = {path.removeprefix(prefix): (Path(scratch) / path).read_bytes() for path in paths}
    if tokenizer.identity(contents) != plan.tokenizer:
        raise CorruptError(f"tokenizer of run {checkpoint.run.short}", f"is not {plan.tokenizer}, as the plan says")
    for name, data in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    described = json.loads(contents["tokenizer_config.json"])
    longest = described.get("model_max_length")
    positions = longest if type(longest) is int and 0 < longest < 2**31 else _UNKNOWN_LENGTH
    loaded = tokenizer.from_files(contents)
    named = {key: loaded.special(role) for role, key in _ROLES.items()}
    config = describe(plan.config, positions, {key: token for key, token in named.items() if token is not None})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return plan


def _write_parts(store: Store, root: Digest, count: int, directory: Path) -> None:
    """Let a process for each shard write its part; all run at a time."""
    search = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search}
    command = [sys.executable, "-m", "trainer", "export", str(root), "--store", store.url, "--out", str(directory)]
    with ExitStack() as stack:
        running = []
        for shard in range(count):
            process = subprocess.Popen(
                [*command, "--shard", str(shard)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
            running.append(process)
        for shard, process in enumerate(running):
            said = process.communicate()[1].strip().splitlines()
            if process.returncode:
                why = said[-1].removeprefix("trainer: ") if said else f"its process ended with {process.returncode}"
                raise BackendError(f"part of shard {shard}", why, "nothing was written")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


def _write_index(plan: Plan, count: int, directory: Path) -> int:
    """The index of the parts, from their headers; returns the number of parameters.

    Raises:
        MalformedError: the parts together are not the plan's model, each tensor once.
    """
    where: dict[str, str] = {}
    table = dict(param_table(plan.config))
    size = 0
    for name in (part_name(shard, count) for shard in range(count)):
        for tensor, place in weights.places(directory / name).items():
            if tensor in where or table.get(tensor) != place.shape:
                why = f"{tensor} of shape {list(place.shape)} has no place in the model of the plan"
                raise MalformedError(f"part {name}", why)
            where[tensor] = name
            size += place.stop - place.start
    if where.keys() != table.keys():
        raise MalformedError("parts", f"{min(table.keys() - where.keys())} is in none of them")
    parameters = size // weights.ITEM_BYTES["F32"]
    metadata = {"total_size": size, "total_parameters": parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(where.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return parameters
