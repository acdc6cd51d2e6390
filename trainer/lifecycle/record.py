"""What a run is told and what it comes to know: plain values that the report is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore import Digest
from trainer.compute.numerics import Plain
from trainer.compute.result import UpdateResult
from trainer.lifecycle.commits import OPERATOR, Committed
from trainer.lifecycle.drill import Loss
from trainer.lifecycle.pulling import Pulled
from trainer.lifecycle.requests import Requests
from trainer.lifecycle.staging import Staging
from trainer.preparation.plan import Plan
from trainer.preparation.planning import Profile
from trainer.scoring.evaluation import Result
from trainer.workers.hosts import Cleared, Shut, View
from trainer.workers.launch import Ending


@dataclass(frozen=True, slots=True)
class Settings:
    """What the caller decides.

    ``operator`` is the URL of a store, or ``s3`` for one in an S3 server that the run starts; without one, it is a
    folder of the run. ``drift`` allows hosts to compute otherwise than those that made a checkpoint. ``start`` is a
    model to train in place of the profile's own. ``hosts`` is the kind of hosts (None: the best that there is),
    ``machines`` the file of those that ssh reaches, ``fresh`` whether each worker is a new interpreter.
    """

    out: Path
    profile: Profile
    operator: str | None = None
    mode: str = "kill"
    compute: str | None = None
    kernels: str = "native"
    sabotage: bool = False
    drift: bool = False
    start: Path | None = None
    hosts: str | None = None
    machines: Path | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One launched group; times in seconds since the run began, ``update_seconds`` the sum over its updates."""

    generation: int
    purpose: str
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    forked: tuple[bool, ...]
    began: float
    joined: float
    ended: float
    update_seconds: float
    updates: tuple[int, ...]
    sent_bytes: int
    peak_rss: tuple[int, ...]


@dataclass(slots=True)
class Record:
    """Everything that a run did, as it comes to be known: what the report is made of."""

    plan: Plan
    identity: Digest
    trees: Mapping[str, Digest]
    ref: str
    operator_url: str
    operator_kind: str
    requests: list[Requests]
    committed: list[Committed] = field(default_factory=list)
    stagings: list[Staging] = field(default_factory=list)
    pulled: list[Pulled] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    ownership: list[dict[str, Any]] = field(default_factory=list)
    binding: Mapping[str, Plain] = field(default_factory=dict)
    empty_listing: list[str] | None = None
    refused_write: str = ""
    loss: Loss | None = None
    reference: dict[int, UpdateResult] = field(default_factory=dict)
    replay: dict[int, UpdateResult] = field(default_factory=dict)
    continued: dict[int, UpdateResult] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    sabotaged: dict[str, Any] | None = None
    endings: list[Ending] = field(default_factory=list)
    shut: list[Shut] = field(default_factory=list)
    cleared: list[Cleared] = field(default_factory=list)
    views: dict[str, View] = field(default_factory=dict)
    hosts_kind: str = ""
    hosts_claim: str = ""
    torch_imported: bool = False

    def root(self, step: int, store: str = OPERATOR) -> Committed:
        """The checkpoint committed after ``step`` updates in a store."""
        return next(one for one in self.committed if (one.step, one.store) == (step, store))
