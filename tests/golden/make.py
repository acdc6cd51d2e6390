"""Makes the golden store: ``python -m tests.golden.make`` (from the top of the tree).

It was run once. It refuses to write where a golden store is: what is in it was made by an earlier release, and that is
the point of it. A release that adds to the format makes a golden store of its own beside it, under another name.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.backends.directory import DirectoryBackend
from ckptstore.collection.collect import collect
from ckptstore.collection.policy import KeepLast, Policy
from ckptstore.format.digest import Digest
from ckptstore.pinning import pin
from ckptstore.repairs.repair import repair
from ckptstore.store import Store
from tests.golden import states
from tests.golden.answers import GOLDEN, answers, is_constant


def made(folder: Path) -> None:
    """Make the store in ``folder/store``."""
    random.setstate((3, (*[1] * 624, 624), None))  # a state that takes few digits: every shard has one
    store = ckptstore.open(folder / "store", create=True, single_writer=True)
    roots = train(store)
    store.move_ref("best", roots[2], None)
    store.move_ref("best", roots[1], roots[2])
    store.move_ref("gone", roots[2], None)
    store.move_ref("gone", None, roots[2])
    wide = shard_and_commit(store, folder)
    spare = ckptstore.open(folder / "spare", create=True)
    ckptstore.push(store, spare, roots[-1], ref="main")
    ckptstore.push(store, spare, wide, ref="wide")
    for root in (roots[-1], wide):
        store.add_receipt(store.verify(root).receipt(store.url))
    damage_and_repair(store, spare, roots[-1])
    pin(store, roots[1], reason="the best one, for comparison")
    pin(store, wide, shards=[0], reason="one of two shards")
    attempt = store.begin("main")
    store.give_up(attempt, index=1, count=2, step=9, reason="out of memory")
    collect(store, Policy((KeepLast(3),)), delete=True, retire=[roots[0]])


def train(store: Store) -> list[Digest]:
    """Three steps of the whole model, each a checkpoint of ``main``."""
    model, objects = states.whole()
    roots = []
    with store.run("main", **objects, binding={"torch": "2.13.0", "deterministic": True, "threads": 1}) as run:
        run.resume()
        for step in range(1, 4):
            batch = objects["data"].next().float()[:, None] * torch.linspace(0.0, 1.0, 8)
            output = model.norm(model.first(batch)) + model.last(batch)
            noise = torch.from_numpy(objects["generators"]["noise"].standard_normal(output.shape, dtype="float32"))
            objects["optimizer"].zero_grad()
            objects["scaler"].scale((output - noise).square().mean()).backward()
            objects["scaler"].step(objects["optimizer"])
            objects["scaler"].update()
            objects["scheduler"].step()
            cursors = {states.CURSOR: ckptstore.Cursor("samples", step * states.BATCH, per_step=states.BATCH)}
            roots.append(run.save(step, metrics={"loss": 1 / step, "step": step}, cursors=cursors))
    return roots


def shard_and_commit(store: Store, folder: Path) -> Digest:
    """A checkpoint of two shards, with a prepared identity and files, by way of an attempt that both worked at."""
    trees = []
    for name in ("plan", "inputs", "sources", "files"):
        there = folder / name
        there.mkdir()
        (there / f"{name}.json").write_text(json.dumps({"name": name}))
        (there / "run.sh").write_bytes(b"#!/bin/sh\nexit 0\n")
        (there / "run.sh").chmod(0o755)
        (there / "link.json").symlink_to(f"{name}.json")
        (there / "cache").write_bytes(b"not stored")
        trees.append(store.put_tree(there, {"cache": "made anew each time"}))
    run = store.put_preparation(*trees[:3])
    attempt = store.begin("wide")
    receipts = []
    for index in range(2):
        model, objects = states.part(index)
        for number, tensor in enumerate(model.state_dict().values()):
            states.fill(tensor, 10 * index + number)
        objects["optimizer"][f"sgd{index}"].state[model.weight]["momentum_buffer"] = torch.full_like(model.weight, 2.0)
        receipts.append(
            store.save_shard(
                states.state(objects),
                attempt,
                step=7,
                index=index,
                count=2,
                run=run,
                binding={"cuda": None},
                files=trees[3],
                cursors={states.CURSOR: ckptstore.Cursor("tokens", 70, per_step=10)},
            )
        )
    ties = [ckptstore.Tie("part1.tied", "part0.weight")]
    deviations = [ckptstore.Deviation("horizon", "100", "200")]
    return store.commit(attempt, receipts, ties=ties, deviations=deviations, metrics={"loss": 0.25})


def damage_and_repair(store: Store, spare: Store, root: Digest) -> None:
    """So that there is a receipt of a repair."""
    key = next(key for key in sorted(store.closure(root).objects))
    assert isinstance(store.backend, DirectoryBackend)
    path = store.backend.path / key
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    assert repair(ckptstore.open(store.url), root, [spare]).ok


def record(found: dict[str, Any]) -> None:
    """Write answers down, a line for each."""
    lines = []
    for name, answer in sorted(found.items()):
        inner = answer if isinstance(answer, dict) else None
        if inner is None:
            lines.append(f" {json.dumps(name)}: {json.dumps(answer)}")
            continue
        items = [f"  {json.dumps(key)}: {json.dumps(inner[key], sort_keys=True)}" for key in sorted(inner)]
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(items) + "\n }")
    GOLDEN.joinpath("expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Make it, and record the answers that it gives."""
    if GOLDEN.exists():
        print(f"{GOLDEN} is there; a golden store is made once and never again", file=sys.stderr)
        return 5
    # Nothing of the machine that makes it is to be in it; the user is whoever has this number there.
    socket.gethostname = lambda: "host.example"
    folder = Path(tempfile.gettempdir()) / f"golden-{GOLDEN.name}"  # receipts say where they were made
    folder.mkdir()
    try:
        made(folder)
        shutil.rmtree(folder / "store" / "tmp", ignore_errors=True)
        constants = {}
        for path in sorted((folder / "store").rglob("*")):
            key = path.relative_to(folder / "store").as_posix()
            if not path.is_file() or key.startswith(("catalogue", "quarantine/", "lock")):
                continue
            data = path.read_bytes()
            if is_constant(data):
                constants[key] = [data[0], len(data)]
                continue
            target = GOLDEN / "store" / key
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        GOLDEN.joinpath("constants.json").write_text(json.dumps(constants, indent=1, sort_keys=True) + "\n")
        found = answers(ckptstore.open(folder / "store"), folder)
        record(found)
    finally:
        shutil.rmtree(folder)
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"{GOLDEN}: {size:,} bytes, made with torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
