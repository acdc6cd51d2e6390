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
    from ckptstore.export import export_weights as export_weights
    from ckptstore.export import extract_checkpoint as extract_checkpoint
    from ckptstore.export import gather_evidence as gather_evidence
    from ckptstore.export import import_weights as import_weights
    from ckptstore.export import misnamed_documents as misnamed_documents
    from ckptstore.live.capture import TrainingState as TrainingState
    from ckptstore.live.restore import Restored as Restored
    from ckptstore.live.restore import arm as arm
    from ckptstore.readbacks.copies import KeyCopies as KeyCopies
    from ckptstore.readbacks.copies import RootCopies as RootCopies
    from ckptstore.readbacks.durability import Ledger as Ledger
    from ckptstore.readbacks.durability import ledger as ledger
    from ckptstore.remotes import add_remote as add_remote
    from ckptstore.remotes import known_remotes as known_remotes
    from ckptstore.remotes import open_remote as open_remote
    from ckptstore.remotes import remove_remote as remove_remote
    from ckptstore.running.pushes import Push as Push
    from ckptstore.running.run import Run as Run

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "Capabilities",
    "Checkpoint",
    "CkptStoreError",
    "Cursor",
    "Deviation",
    "Digest",
    "KeyCopies",
    "Ledger",
    "Plan",
    "Prices",
    "Push",
    "Receipt",
    "Replica",
    "Restored",
    "RootCopies",
    "Run",
    "ShardReceipt",
    "Store",
    "Tie",
    "Traffic",
    "TrainingState",
    "Transfer",
    "VerifyReport",
    "add_remote",
    "arm",
    "check_files",
    "deadline",
    "export_weights",
    "extract_checkpoint",
    "gather_evidence",
    "import_weights",
    "known_remotes",
    "ledger",
    "misnamed_documents",
    "open",
    "open_remote",
    "plan_pull",
    "plan_push",
    "pull",
    "push",
    "push_shard",
    "remove_remote",
]

_LAZY = {
    "KeyCopies": "ckptstore.readbacks.copies",
    "Ledger": "ckptstore.readbacks.durability",
    "RootCopies": "ckptstore.readbacks.copies",
    "add_remote": "ckptstore.remotes",
    "known_remotes": "ckptstore.remotes",
    "ledger": "ckptstore.readbacks.durability",
    "open_remote": "ckptstore.remotes",
    "remove_remote": "ckptstore.remotes",
    "Restored": "ckptstore.live.restore",
    "Run": "ckptstore.running.run",
    "TrainingState": "ckptstore.live.capture",
    "arm": "ckptstore.live.restore",
    "export_weights": "ckptstore.export",
    "extract_checkpoint": "ckptstore.export",
    "gather_evidence": "ckptstore.export",
    "import_weights": "ckptstore.export",
    "misnamed_documents": "ckptstore.export",
}


def __getattr__(name: str) -> Any:
    """Load what needs torch or another library when it is first used."""
    if name in _LAZY:
        return getattr(load(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
