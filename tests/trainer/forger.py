"""A forger with the whole trainer at hand: makes updates, bends the state, and gives the result a root of its own.

Every digest is made by the library as in an honest run, so nothing contradicts itself; only making the updates again
can find it. As a script it runs as a worker does, with the numerics of the plan.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ckptstore
from ckptstore import Digest, ShardReceipt, Store
from trainer.compute import numerics
from trainer.lifecycle.admission import drift
from trainer.lifecycle.commits import push_shards
from trainer.lifecycle.fingerprints import put
from trainer.preparation import staged
from trainer.preparation.prepare import Prepared, read_plan
from trainer.workers.fingerprints import TensorFingerprint
from trainer.workers.hosts import STORE
from trainer.workers.orders import Arm, Restore, Save

if TYPE_CHECKING:
    from tests.trainer.pair import Pair

ROOT = Path(__file__).resolve().parents[2]
TENSOR = "model.layers.3.mlp.up_proj.weight"


@dataclass(frozen=True)
class Forgery:
    """What is bent: ``role`` of TENSOR after update ``bent``, and whether its record is made after it (``recorded``) or
    is the honest one; and the FP32 canary that the checkpoint claims, if another than its parent's."""

    role: str
    bent: int
    recorded: bool = True
    canary: str = ""


def forge(area: Path, prepared: Prepared, store: Store, begin: Digest, ref: str, forgery: Forgery) -> Digest:
    """The checkpoint that the next commit of the plan after ``begin`` would be, bent; ``ref``, which is new, names it.

    Returns:
        Its root. Its parent is ``begin``, and its binding says that it was made where ``begin`` was.
    """
    from tests.trainer.conftest import in_threads
    from tests.trainer.pair import Pair

    parent = store.checkpoint(begin)
    assert parent.run is not None
    store.move_ref(ref, begin, None)
    pair = Pair(area, prepared, parent.run, in_threads)
    generators = [_restored(pair, index, store, begin) for index in range(2)]
    record = []
    last = next(step for step in prepared.plan.commits if step > parent.step)
    for update in range(parent.step + 1, last + 1):
        pair.train(update, update)
        one = pair.fingerprint(update)
        if update == forgery.bent:
            _bend(pair, forgery.role)
            one = replace(one, state=_state(pair)) if forgery.recorded else one
        record.append(one)
    binding = numerics.stored_binding(parent.binding)
    if forgery.canary:
        binding["canary.float32"] = forgery.canary
    attempt = store.begin(ref)
    order = Save(str(attempt), last, STORE, put(store, record))
    receipts = []
    for session, own in zip(pair.sessions, generators, strict=True):
        _set_generators(own)
        session.binding = binding
        session.carry_out(order)
        said = pair.said(len(receipts))[-1]
        receipts.append(ShardReceipt.parse(said["receipt"].encode()))
    push_shards(pair.hosts, receipts, store, "operator")
    return store.commit(attempt, receipts, deviations=drift(parent, receipts[0].binding))


def _restored(pair: Pair, index: int, store: Store, root: Digest) -> tuple[Any, ...]:
    """Restore one shard; returns the generators of its worker, which two workers of one process cannot both keep."""
    import numpy as np
    import torch

    ckptstore.pull(store, ckptstore.open(pair.hosts[index].store), root, shards=[index], files=False)
    pair.sessions[index].carry_out(Restore(root, STORE, drift=True))
    pair.sessions[index].carry_out(Arm())
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, ...]) -> None:
    import numpy as np
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _bend(pair: Pair, role: str) -> None:
    """Flip one bit of TENSOR."""
    import torch

    for session in pair.sessions:
        parameter = dict(session.shard.named_parameters()).get(TENSOR)
        if parameter is not None:
            tensor = parameter.detach() if role == "weight" else session.optimizer.state[parameter][role]
            tensor.view(torch.int32).view(-1)[1000].bitwise_xor_(1 << 20)


def _state(pair: Pair) -> tuple[TensorFingerprint, ...]:
    from trainer.compute import fingerprint

    parts = [fingerprint.live_state(session.shard, session.optimizer) for session in pair.sessions]
    return tuple(TensorFingerprint(name, digest) for part in parts for name, digest in part.items())


def frozen(folder: Path) -> Prepared:
    """What was prepared in a folder."""
    plan = read_plan(folder / staged.PLAN)
    return Prepared(folder / staged.PLAN, folder / staged.INPUTS, folder / staged.SOURCES, plan)


def forged_elsewhere(area: Path, folder: Path, store: Path, begin: str, ref: str, forgery: Forgery) -> str:
    """As :func:`forge`, in a process that computes as workers do; returns the root."""
    kernels = frozen(folder).plan.numerics.kernels
    given = [area, folder, store, begin, ref, forgery.role, forgery.bent, int(forgery.recorded), forgery.canary]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, given)],
        env={**os.environ, **numerics.env_for(kernels), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def main() -> None:
    area, folder, url, begin, ref, role, bent, recorded, canary = sys.argv[1:]
    store = ckptstore.open(url)
    forgery = Forgery(role, int(bent), bool(int(recorded)), canary)
    print(forge(Path(area), frozen(Path(folder)), store, store.resolve(begin), ref, forgery))


if __name__ == "__main__":
    main()
