"""What tests of scrubs share: small stores, their notes, and what was read of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Digest, Receipt
from ckptstore.backends.counting import CountingBackend
from ckptstore.findings import Kind
from ckptstore.format.keys import receipt_key
from ckptstore.readbacks import notes as notebook
from ckptstore.readbacks.notes import notes_about, subject_of
from ckptstore.readbacks.scrubbed import Scrub
from ckptstore.store import Store
from tests.support.training import commit_state

DAY = 86400.0
NOTES = "receipts/"


def model(step: int) -> nn.ModuleDict:
    """Two objects, of which one is the same in every step, and a pack."""
    torch.manual_seed(0)
    same = nn.Linear(300, 300, bias=False)
    torch.manual_seed(step)
    return nn.ModuleDict({"own": nn.Linear(300, 300, bias=False), "same": same, "small": nn.Linear(20, 20)})


def steps(store: Store, count: int, ref: str = "main") -> list[Digest]:
    return [commit_state(store, ref, [ckptstore.TrainingState(model=model(n))], n) for n in range(1, count + 1)]


def counted(store: Store) -> tuple[CountingBackend, Store]:
    counting = CountingBackend(store.backend)
    return counting, Store(counting)


def stored(store: Store) -> dict[str, int]:
    """All keys but the notes of scrubs, with their sizes."""
    assert store.id is not None
    mine = f"receipts/{subject_of(store.id).hex}/"
    return {stat.key: stat.size for stat in store.backend.list("") if not stat.key.startswith(mine)}


def notes(store: Store) -> list[notebook.Note]:
    assert store.id is not None
    return list(notes_about(store.backend, store.id, lambda finding: pytest.fail(str(finding))))


def read_by(work: Callable[[Store], object], store: Store) -> dict[str, int]:
    """How often each key is read back by ``work``."""
    counting, reader = counted(store)
    work(reader)
    return {key: tally.calls for key, tally in counting.by_key("readback").items()}


def spoil(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def path_of(store: Store, key: str) -> Path:
    found = store.backend.path  # type: ignore[attr-defined]
    assert isinstance(found, Path)
    return found / key


def set_back(store: Store, by: timedelta) -> None:
    """Let every note be so much older (or, below zero, newer)."""
    for note in notes(store):
        receipt = note.readback.receipt
        at = (note.readback.time - by).strftime("%Y-%m-%dT%H:%M:%SZ")
        store.backend.delete(note.readback.key)
        put(store, replace_time(receipt, at))


def in_child(work: Callable[[], object]) -> int:
    """Do ``work`` in a child, which ends with 0 if it came to its end; returns its process id."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return child


def replace_time(receipt: Receipt, at: str) -> Receipt:
    return replace(receipt, time=at)


def put(store: Store, receipt: Receipt) -> None:
    data = receipt.encode()
    store.backend.create(receipt_key(receipt.subject, Digest.of(data)), data)


def found(done: Scrub) -> dict[str, Kind]:
    return {finding.key: finding.kind for finding in done.findings}
