"""Many tiny tensors in one shard: time and memory follow their number, for everything that is done with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore.export import export_weights
from tests.support.training import seed_everything

SIZE = 32
"""Elements of each tensor: too long to stand in its entry, so that they fill packs of about 64."""


class Many(nn.Module):
    def __init__(self, number: int, value: float) -> None:
        super().__init__()
        for index in range(number):
            self.register_parameter(f"p{index}", nn.Parameter(torch.full((SIZE,), value + index)))


def everything(folder: Path, number: int) -> None:
    """Save ``number`` tensors, change them all, save them, and do with both whatever can be done."""
    seed_everything()
    store = ckptstore.open(folder / "store", create=True)
    roots = []
    for step, value in enumerate((0.0, 0.25), 1):
        attempt = store.begin("main")
        receipt = store.save_shard(ckptstore.TrainingState(model=Many(number, value)), attempt, step=step)
        roots.append(store.commit(attempt, [receipt]))
    report = store.verify("main")
    assert report.ok
    assert report.objects > number // 100
    changes = store.diff(*roots).tensors
    assert len(changes) == number
    assert {change.status for change in changes} == {"values"}
    live = Many(number, 1.0)
    store.restore(roots[0], ckptstore.TrainingState(model=live))
    assert all(float(parameter.detach()[0]) == index for index, parameter in enumerate(live.parameters()))
    far = ckptstore.open(folder / "far", create=True)
    assert ckptstore.push(store, far, roots[1], ref="main").sent_keys == report.documents + report.objects
    assert export_weights(far, roots[1], folder / "weights.safetensors").tensors == number
    assert ckptstore.extract_checkpoint(far, roots[1], folder / "extracted").size > number * SIZE * 4
    with store.catalogue() as catalogue:
        assert catalogue.rebuild()["tensors"] == 2 * number


@pytest.mark.deep
def test_a_shard_of_thousands_of_tiny_tensors(tmp_path: Path) -> None:
    everything(tmp_path, 2000)


PROGRAM = """
import json, resource, sys
from pathlib import Path
from tests.store.test_scale import everything

everything(Path(sys.argv[1]), int(sys.argv[2]))
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
def test_a_shard_of_two_hundred_thousand_tiny_tensors(tmp_path: Path) -> None:
    """Memory is some kilobytes for each tensor: entries, places, live objects."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    peaks = []
    for number in (20_000, 200_000):
        (tmp_path / f"{number}").mkdir()
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / f"{number}"), str(number)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout))
    assert (peaks[1] - peaks[0]) / 180_000 < 8_000
