"""doctor: what a run that resumes from a checkpoint would not get back, for people and for machines."""

from __future__ import annotations

import torch
from torch import nn

from tests.cli.conftest import Ckpt, Stores
from tests.support.states import save


def test_doctor_lists_what_is_missing_and_says_so_in_its_exit_code(ckpt: Ckpt, stores: Stores) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    root = save(stores.open(), {"model": model, "optimizer": optimizer}, ref="lacking")
    done = ckpt("doctor", "lacking", "--store", stores.url)
    assert done.code == 5
    first, *_, last = done.lines()
    assert first.startswith("severe: checkpoint optimizer optimizer: scheduler: a scheduler was made for it")
    assert "(save with scheduler=)" in first
    assert last == f"checkpoint {root}: 1 severe, 2 warning, 1 note"
    records = ckpt("doctor", "lacking", "--json", "--store", stores.url).records()
    assert [record["type"] for record in records] == ["gap"] * 4 + ["doctor"]
    assert records[0].keys() == {"type", "severity", "part", "what", "why", "hint"}
    counts = {"severe": 1, "warning": 2, "note": 1}
    assert records[-1] == {"type": "doctor", "root": str(root), "complete": False, "exit_code": 5} | counts


def test_doctor_of_a_whole_run_finds_nothing_severe(ckpt: Ckpt, stores: Stores) -> None:
    done = ckpt("doctor", "main", "--store", stores.url)
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.lines()[:-1]] == ["note"]
    assert done.err == ""


def test_doctor_says_which_shard_it_means(ckpt: Ckpt, stores: Stores) -> None:
    whats = [record.get("what") for record in ckpt("doctor", "wide", "--json", "--store", stores.url).records()]
    assert "optimizer" in whats
    assert ckpt("doctor", "wide", "--shard", "1", "--store", stores.url).code == 0
    assert ckpt("doctor", "wide", "--shard", "7", "--store", stores.url).code == 2


def test_doctor_needs_documents_only(ckpt: Ckpt, stores: Stores) -> None:
    for stat in list(stores.open().backend.list("objects/")):
        stores.file(stat.key).unlink()
    assert ckpt("doctor", "main", "--store", stores.url).code == 0
    view = stores.open().closure(stores.second, files=False).shards[0]
    digest = view.digest.hex
    stores.file(f"documents/{digest[:2]}/{digest}").unlink()
    assert ckpt("doctor", "main", "--store", stores.url).code == 4
