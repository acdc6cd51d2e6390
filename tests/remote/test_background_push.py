"""Checkpoints of a directory that are pushed to a bucket while the training goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.errors import BackendError
from tests.support import s3 as server
from tests.support.buckets import interrupted_when, layers, through
from tests.support.faultproxy import FaultProxy
from tests.support.training import make_training


def test_checkpoints_of_a_directory_are_pushed_to_a_bucket_while_it_trains(
    s3: server.SharedServer, url: str, tmp_path: Path
) -> None:
    ckptstore.open(url, create=True)
    store = ckptstore.open(tmp_path / "store", create=True)
    training = make_training()
    chance = None
    roots = []
    with store.run("main", **training.objects()) as run:
        run.resume()
        for step in range(1, 4):
            training.step()
            chance = random.getstate()
            roots.append(run.save(step, push_to=url))
            assert random.getstate() == chance
    assert random.getstate() == chance, "neither readback nor push draws from the generators that are saved"
    far = ckptstore.open(url)
    assert [root for root, _ in far.history(far.resolve("main"))] == roots[::-1]
    assert all(far.verify(root).ok for root in roots)
    assert [push.state.value for push in run.pushes] == ["done"] * 3


def test_a_target_that_is_away_for_a_while_gets_its_checkpoints_when_it_is_back(
    s3: server.SharedServer, bare_proxy: FaultProxy, tmp_path: Path
) -> None:
    prefix = server.fresh_prefix()
    target = through(bare_proxy, s3, prefix)
    store = ckptstore.open(tmp_path / "store", create=True)
    model = layers()
    with store.run("main", model=model) as run:
        run.resume()
        run.save(1, push_to=target)
        run.wait()
        bare_proxy.down(1.5)
        roots = []
        for step in (2, 3):
            with torch.no_grad():
                model[0].add_(1.0)
            roots.append(run.save(step, push_to=target))
    far = ckptstore.open(s3.url(prefix))
    assert far.head("main") == roots[-1]
    assert all(far.verify(root).ok for root in roots)


def test_a_target_that_does_not_come_back_is_told_and_costs_no_checkpoint(
    s3: server.SharedServer, bare_proxy: FaultProxy, tmp_path: Path
) -> None:
    target = through(bare_proxy, s3, server.fresh_prefix(), attempt_seconds="1", operation_seconds="1")
    other = ckptstore.open(tmp_path / "other", create=True)
    store = ckptstore.open(tmp_path / "store", create=True)
    bare_proxy.down()
    run = store.run("main", model=layers())
    run.resume()
    root = run.save(1, push_to=[target, other])
    with pytest.raises(BackendError, match="ckpt push") as told:
        run.close()
    assert root.short in str(told.value)
    assert store.verify("main").ok
    assert other.head("main") == root
    assert [push.state.value for push in run.pushes] == ["failed", "done"]


@pytest.mark.timeout(120)  # one request of the push would be waited for much longer
def test_an_interrupt_gives_up_the_pushes_and_they_can_be_repeated(
    s3: server.SharedServer, bare_proxy: FaultProxy, tmp_path: Path
) -> None:
    prefix = server.fresh_prefix()
    target = through(bare_proxy, s3, prefix)
    store = ckptstore.open(tmp_path / "store", create=True)

    def train() -> None:
        with run:
            run.save(1, push_to=target)
            run.wait()

    run = store.run("main", model=layers())
    run.resume()
    with interrupted_when(bare_proxy, "GET", "/objects/"), pytest.raises(KeyboardInterrupt) as told:
        train()
    root = store.resolve("main")
    assert [push.state.value for push in run.pushes] == ["given up"]
    assert any("ckpt push" in note for note in told.value.__notes__)
    far = ckptstore.open(s3.url(prefix))
    assert far.head("main") is None
    again = ckptstore.push(store, far, root, ref="main")
    assert again.present_keys > 0, "what was sent is used"
    assert far.verify("main").ok
