"""ckptstore: a content-addressed checkpoint and evidence store for PyTorch.

::

    store = ckptstore.open("./ckpts", create=True)
    with store.run("mnist", model=model, optimizer=opt, scheduler=sched, data=loader) as run:
        step = run.resume()
        while step < 1000:
            step = train_one(step)
            if step % 100 == 0:
                root = run.save(step, metrics={"loss": loss})

Importing this package loads neither torch nor NumPy; what needs them loads them when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptstore.backends.capabilities import Capabilities
from ckptstore.backends.deadline import deadline
from ckptstore.backends.traffic import Traffic
from ckptstore.commits.attempts import Attempt
from ckptstore.errors import CkptStoreError
from ckptstore.findings import Finding, Place
from ckptstore.format.checkpoint import Checkpoint, Deviation, Replica
from ckptstore.format.digest import Digest
from ckptstore.format.progress import Cursor
from ckptstore.format.records import Receipt, ShardReceipt
from ckptstore.format.shard import Alias as Tie
from ckptstore.lazy import load
from ckptstore.opening import open_store as open
from ckptstore.store import Store
from ckptstore.transfers.exchange import pull, push, push_shard
from ckptstore.transfers.plan import Plan, plan_pull, plan_push
from ckptstore.transfers.prices import Prices
from ckptstore.transfers.transfer import Transfer
from ckptstore.trees import check_files
from ckptstore.verify import VerifyReport

if TYPE_CHECKING:
    from ckptstore.collection.collect import Collection as Collection
    from ckptstore.collection.collect import collect as collect
    from ckptstore.collection.policy import KeepBest as KeepBest
    from ckptstore.collection.policy import KeepEverySteps as KeepEverySteps
    from ckptstore.collection.policy import KeepEveryTime as KeepEveryTime
    from ckptstore.collection.policy import KeepLast as KeepLast
    from ckptstore.collection.policy import Policy as Policy
    from ckptstore.completeness import inspect_checkpoint as inspect_checkpoint
    from ckptstore.export import export_weights as export_weights
    from ckptstore.export import extract_checkpoint as extract_checkpoint
    from ckptstore.export import gather_evidence as gather_evidence
    from ckptstore.export import import_weights as import_weights
    from ckptstore.export import misnamed_documents as misnamed_documents
    from ckptstore.gaps import Completeness as Completeness
    from ckptstore.gaps import Gap as Gap
    from ckptstore.gaps import Severity as Severity
    from ckptstore.layout.repartition import Repartitioned as Repartitioned
    from ckptstore.layout.repartition import repartition as repartition
    from ckptstore.live.capture import TrainingState as TrainingState
    from ckptstore.live.completeness import inspect_completeness as inspect_completeness
    from ckptstore.live.restore import Restored as Restored
    from ckptstore.live.restore import arm as arm
    from ckptstore.live.snapshot import Snapshot as Snapshot
    from ckptstore.pinning import Pinned as Pinned
    from ckptstore.pinning import list_pins as list_pins
    from ckptstore.pinning import pin as pin
    from ckptstore.pinning import unpin as unpin
    from ckptstore.readbacks.copies import KeyCopies as KeyCopies
    from ckptstore.readbacks.copies import RootCopies as RootCopies
    from ckptstore.readbacks.durability import Ledger as Ledger
    from ckptstore.readbacks.durability import ledger as ledger
    from ckptstore.readbacks.kept import kept_checkpoints as kept_checkpoints
    from ckptstore.readbacks.scrub import scrub as scrub
    from ckptstore.readbacks.scrubbed import Damage as Damage
    from ckptstore.readbacks.scrubbed import Scrub as Scrub
    from ckptstore.readbacks.several import verify_many as verify_many
    from ckptstore.remotes import add_remote as add_remote
    from ckptstore.remotes import known_remotes as known_remotes
    from ckptstore.remotes import open_remote as open_remote
    from ckptstore.remotes import remove_remote as remove_remote
    from ckptstore.repairs.header import HeaderRepair as HeaderRepair
    from ckptstore.repairs.header import repair_header as repair_header
    from ckptstore.repairs.repair import Repair as Repair
    from ckptstore.repairs.repair import repair as repair
    from ckptstore.running.latest import Latest as Latest
    from ckptstore.running.latest import Skipped as Skipped
    from ckptstore.running.latest import latest as latest
    from ckptstore.running.pushes import Push as Push
    from ckptstore.running.run import Run as Run

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "Capabilities",
    "Checkpoint",
    "CkptStoreError",
    "Collection",
    "Completeness",
    "Cursor",
    "Damage",
    "Deviation",
    "Digest",
    "Finding",
    "Gap",
    "HeaderRepair",
    "KeepBest",
    "KeepEverySteps",
    "KeepEveryTime",
    "KeepLast",
    "KeyCopies",
    "Latest",
    "Ledger",
    "Pinned",
    "Place",
    "Plan",
    "Policy",
    "Prices",
    "Push",
    "Receipt",
    "Repair",
    "Repartitioned",
    "Replica",
    "Restored",
    "RootCopies",
    "Run",
    "Scrub",
    "Severity",
    "ShardReceipt",
    "Skipped",
    "Snapshot",
    "Store",
    "Tie",
    "Traffic",
    "TrainingState",
    "Transfer",
    "VerifyReport",
    "add_remote",
    "arm",
    "check_files",
    "collect",
    "deadline",
    "export_weights",
    "extract_checkpoint",
    "gather_evidence",
    "import_weights",
    "inspect_checkpoint",
    "inspect_completeness",
    "kept_checkpoints",
    "known_remotes",
    "latest",
    "ledger",
    "list_pins",
    "misnamed_documents",
    "open",
    "open_remote",
    "pin",
    "plan_pull",
    "plan_push",
    "pull",
    "push",
    "push_shard",
    "remove_remote",
    "repair",
    "repair_header",
    "repartition",
    "scrub",
    "unpin",
    "verify_many",
]

_LAZY = {
    "Collection": "ckptstore.collection.collect",
    "Completeness": "ckptstore.gaps",
    "Gap": "ckptstore.gaps",
    "Severity": "ckptstore.gaps",
    "Damage": "ckptstore.readbacks.scrubbed",
    "HeaderRepair": "ckptstore.repairs.header",
    "KeepBest": "ckptstore.collection.policy",
    "KeepEverySteps": "ckptstore.collection.policy",
    "KeepEveryTime": "ckptstore.collection.policy",
    "KeepLast": "ckptstore.collection.policy",
    "KeyCopies": "ckptstore.readbacks.copies",
    "Latest": "ckptstore.running.latest",
    "Ledger": "ckptstore.readbacks.durability",
    "Pinned": "ckptstore.pinning",
    "Policy": "ckptstore.collection.policy",
    "Push": "ckptstore.running.pushes",
    "Repair": "ckptstore.repairs.repair",
    "Repartitioned": "ckptstore.layout.repartition",
    "Restored": "ckptstore.live.restore",
    "RootCopies": "ckptstore.readbacks.copies",
    "Run": "ckptstore.running.run",
    "Scrub": "ckptstore.readbacks.scrubbed",
    "Skipped": "ckptstore.running.latest",
    "Snapshot": "ckptstore.live.snapshot",
    "TrainingState": "ckptstore.live.capture",
    "add_remote": "ckptstore.remotes",
    "arm": "ckptstore.live.restore",
    "collect": "ckptstore.collection.collect",
    "export_weights": "ckptstore.export",
    "extract_checkpoint": "ckptstore.export",
    "gather_evidence": "ckptstore.export",
    "import_weights": "ckptstore.export",
    "inspect_checkpoint": "ckptstore.completeness",
    "inspect_completeness": "ckptstore.live.completeness",
    "kept_checkpoints": "ckptstore.readbacks.kept",
    "known_remotes": "ckptstore.remotes",
    "latest": "ckptstore.running.latest",
    "ledger": "ckptstore.readbacks.durability",
    "list_pins": "ckptstore.pinning",
    "misnamed_documents": "ckptstore.export",
    "open_remote": "ckptstore.remotes",
    "pin": "ckptstore.pinning",
    "remove_remote": "ckptstore.remotes",
    "repair": "ckptstore.repairs.repair",
    "repair_header": "ckptstore.repairs.header",
    "repartition": "ckptstore.layout.repartition",
    "scrub": "ckptstore.readbacks.scrub",
    "unpin": "ckptstore.pinning",
    "verify_many": "ckptstore.readbacks.several",
}


def __getattr__(name: str) -> Any:
    """Load what needs torch or another library when it is first used."""
    if name in _LAZY:
        return getattr(load(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
