"""The replay itself: workers in fresh processes, with the sources that the root names, make its updates again.

Everything is made in a folder of its own, with stores of its own; of the store under test only documents, frozen files
and the first checkpoint are read, and nothing is written to it but the receipt. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ckptstore
from ckptstore import Digest, Receipt, Store
from ckptstore.errors import RefusedError
from ckptstore.format import values
from ckptstore.format.tensors import CHUNK
from trainer.compute import numerics
from trainer.compute.numerics import Difference as BindingDifference
from trainer.errors import NumericsError
from trainer.lifecycle import admission, fingerprints
from trainer.lifecycle.commits import commit_by_way_of_hosts
from trainer.lifecycle.expect import require
from trainer.lifecycle.journal import Journal
from trainer.lifecycle.staging import stage
from trainer.preparation import staged
from trainer.preparation.plan import Plan
from trainer.preparation.prepare import read_plan, source_files
from trainer.replay.lineage import Leg, Lineage
from trainer.replay.verdict import Difference, compare_root, compare_update
from trainer.workers.events import utc_now
from trainer.workers.group import LaunchedGroup
from trainer.workers.hosts import STORE, Host
from trainer.workers.launch import Launch
from trainer.workers.orders import Arm, Restore, Start, Train

REF = "replayed"
OPERATION = "replay"
_NAMED = 4  # files in one line


@dataclass(slots=True)
class Replay:
    """One replay of ``lineage`` out of ``store``, in the folder ``area``, which has to be empty.

    ``anyway`` goes on where this machine computes otherwise than the one that made the checkpoints.
    """

    store: Store
    lineage: Lineage
    area: Path
    journal: Journal
    anyway: bool = False
    binding: tuple[BindingDifference, ...] = field(default=(), init=False)

    def run(self) -> Difference | None:
        """Make all updates again; returns the first difference, or None if all are equal, the last root too.

        Raises:
            NumericsError: this machine computes otherwise, and ``anyway`` is not set; names all that differs.
            RefusedError: the plan is not one for these checkpoints.
            CorruptError, NotFoundError: the store does not give the bytes.
            NotAsPlannedError, GroupLostError: workers are not as they should be, or one ended.
        """
        lineage, journal = self.lineage, self.journal
        end, begin = lineage.end, lineage.begin
        from_where = "the starting weights" if begin is None else f"{begin.short} (step {lineage.legs[0].first - 1})"
        to = f"{end.root.short} (step {end.last})"
        journal.say(f"replay of updates {lineage.legs[0].first} to {end.last}, from {from_where} to {to}")
        preparation = self.store.preparation(lineage.run)
        trees = {
            staged.PLAN: preparation.plan,
            staged.INPUTS: preparation.inputs,
            staged.SOURCES: preparation.sources,
        }
        scratch = self._scratch(trees)
        plan = read_plan(self.area / "prepared" / staged.PLAN)
        self._check_plan(plan)
        journal.say(f"prepared identity {lineage.run.short}; {self._sources(trees[staged.SOURCES])}")
        hosts = [self._host(index, trees, scratch) for index in range(len(plan.owners))]
        launch = Launch(plan, lineage.run, self.area)
        with LaunchedGroup(launch, 1, "replay", hosts, listen=lambda group, said: None) as group:
            joined = group.join()
            admission.check_ownership(plan, joined)
            measured = admission.check_bindings(joined, None)
            self._expect(measured)
            if begin is None:
                group.tell(Start())
            else:
                # Whether it may compute otherwise was decided above, by what the checkpoints to come say.
                group.tell(Restore(begin, STORE, drift=True))
                group.tell(Arm())
            for leg in lineage.legs:
                difference = self._leg(group, leg, scratch)
                if difference is not None:
                    return difference
            group.close()
        return None

    def receipt(self) -> Receipt:
        """What to keep of a replay that ended equal. It tells of computing: it is no readback of anything."""
        lineage = self.lineage
        begin = lineage.begin
        details: dict[str, object] = {
            "from": None if begin is None else str(begin),
            "first": lineage.legs[0].first,
            "last": lineage.end.last,
            "roots": [str(leg.root) for leg in lineage.legs],
            "run": str(lineage.run),
            "binding_differences": [str(one) for one in self.binding],
            "trainer": ckptstore.__version__,
        }
        return Receipt(
            operation=OPERATION,
            subject=lineage.end.root,
            closure=None,
            documents=0,
            objects=0,
            bytes_read=0,
            method="none",
            time=utc_now()[:19] + "Z",
            where=self.store.url,
            details=values.to_json(details, "details"),
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def _scratch(self, trees: Mapping[str, Digest]) -> Store:
        """A store with the preparation and the first checkpoint, and the frozen files beside it."""
        scratch = ckptstore.open(self.area / "replayed", create=True)
        for name, digest in trees.items():
            folder = self.area / "prepared" / name
            folder.mkdir(parents=True)
            self.store.get_tree(digest, folder)
        if self.lineage.begin is None:
            again = [scratch.put_tree(self.area / "prepared" / name) for name in trees]
            require("prepared identity", self.lineage.run, scratch.put_preparation(*again))
        else:
            ckptstore.pull(self.store, scratch, self.lineage.begin, ref=REF)
        return scratch

    def _check_plan(self, plan: Plan) -> None:
        for leg in self.lineage.legs:
            shards = len(leg.checkpoint.shards)
            if shards != len(plan.owners) or leg.last > len(plan.updates):
                why = f"it has {shards} shards after {leg.last} updates, its plan {len(plan.owners)} and at most "
                raise RefusedError(f"checkpoint {leg.root.short}", why + str(len(plan.updates)))

    def _sources(self, tree: Digest) -> str:
        """Whether the code that is about to run is the code of this checkout, for people."""
        ours = {path: _chunks(data) for path, data in source_files().items()}
        theirs = {file.path: file.chunks for file in self.store.tree(tree).files}
        other = sorted(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
        if not other:
            return "its sources are those of this checkout"
        named = ", ".join(other[:_NAMED]) + (f" and {len(other) - _NAMED} more" if len(other) > _NAMED else "")
        return f"its sources run, and are not those of this checkout: {named}"

    def _host(self, index: int, trees: Mapping[str, Digest], scratch: Store) -> Host:
        host = Host(self.area, f"host-{index}")
        done = stage(self.store, trees, host, index)
        if done.refused:
            raise RefusedError(f"staging of {host.name}", done.refused)
        own = ckptstore.open(host.store, create=True)
        if self.lineage.begin is not None:
            ckptstore.pull(scratch, own, self.lineage.begin, shards=[index], files=False)
        return host

    def _expect(self, measured: Mapping[str, numerics.Plain]) -> None:
        """Say beforehand whether equality is to be expected here."""
        found: dict[str, BindingDifference] = {}
        for leg in self.lineage.legs:
            made = numerics.stored_binding(leg.checkpoint.binding)
            found |= {one.field: one for one in numerics.compare(made, measured)}
        self.binding = tuple(found.values())
        refused = [one for one in self.binding if one.refuse]
        texts = "; ".join(map(str, self.binding))
        if not self.binding:
            self.journal.say("equality is to be expected: the canary and all of the numerical binding agree")
        elif not refused:
            self.journal.say(f"equality is to be expected: the canary agrees; what only describes differs: {texts}")
        elif self.anyway:
            self.journal.say(f"equality is NOT to be expected: {texts}")
        else:
            hint = "replay on a machine like that one, or with --anyway, to see how far it is equal"
            why = f"this machine does not compute as the one that made the checkpoints: {texts}"
            raise NumericsError("replay", f"{why}; equality is not to be expected", hint)

    def _leg(self, group: LaunchedGroup, leg: Leg, scratch: Store) -> Difference | None:
        recorded = fingerprints.recorded(self.store, leg.checkpoint)
        if recorded is None:
            self.journal.say(f"{leg.root.short} has no fingerprints: only its root is compared")
        elif [one.update for one in recorded] != list(range(leg.first, leg.last + 1)):
            numbers = f"{recorded[0].update} to {recorded[-1].update}" if recorded else "none"
            return Difference(leg.first, None, f"the record of {leg.root.short} has other updates: {numbers}")
        for update in range(leg.first, leg.last + 1):
            group.tell(Train(update, update))
            (made,) = fingerprints.taken(group, update, update)
            if recorded is not None:
                difference = compare_update(recorded[update - leg.first], made)
                if difference is not None:
                    return difference
                text = f"update {update} equal: loss {made.loss:.5f}, norm {made.norm:.5f}, {len(made.state)} tensors"
                self.journal.progress(text, keep=True)
        claimed = leg.checkpoint.binding if self.binding else None
        done = commit_by_way_of_hosts(group, scratch, REF, leg.last, leg.parent, binding=claimed)
        difference = compare_root(self.store, leg.root, scratch, done.root, leg.last)
        if difference is not None and recorded is None:
            text = f"{difference.text}; without fingerprints nobody can tell in which update since {leg.first} it began"
            return Difference(leg.last, difference.tensor, text)
        if difference is None:
            self.journal.say(f"root at {leg.last} equal: {done.root}")
        return difference


def _chunks(data: bytes) -> tuple[Digest, ...]:
    return tuple(Digest.of(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK))
