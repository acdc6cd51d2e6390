"""Repair: find what is damaged or missing of a checkpoint, and put it back from wherever good bytes are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptstore.closure import Closure, Need, read_closure
from ckptstore.errors import CkptStoreError, CorruptError, MalformedError, NotFoundError
from ckptstore.findings import REPAIRABLE, Finding, Kind, Place
from ckptstore.format.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key, is_ref_name, retired_key
from ckptstore.lazy import load
from ckptstore.meter import OnProgress
from ckptstore.pins import pinned_shards
from ckptstore.readbacks.readbacks import Part
from ckptstore.repairs.donors import Donors
from ckptstore.repairs.healing import Giver, Healed, Healer
from ckptstore.repairs.outcome import Repair as Repair
from ckptstore.repairs.outcome import make_receipt
from ckptstore.repairs.packs import Pieces, gather, put_together
from ckptstore.repairs.records import Ward, heal_pins, heal_receipts, heal_retirements
from ckptstore.repairs.reflog import heal_log
from ckptstore.store import Store
from ckptstore.threads import in_threads
from ckptstore.verify import check_object

if TYPE_CHECKING:
    from ckptstore.live.capture import TrainingState

LIVE = "live state"

_PACKS_AT_A_TIME = 8  # that are put together from chunks: 128 MiB


def repair(
    store: Store,
    root: Digest | str,
    sources: Sequence[Store] = (),
    state: TrainingState | None = None,
    *,
    remotes: bool = True,
    shards: Collection[int] | None = None,
    files: bool = True,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> Repair:
    """Read all of a checkpoint, and put back what is damaged or missing: bytes of the digest that they must have.

    Documents are read first, as they say what else is needed, and put back last. For each key the ``sources`` are asked
    in their order, then the remotes that the store knows, then the live state; a pack that nobody has whole is put
    together from chunks. What is good is neither replaced nor transferred. Bad bytes go to the quarantine. What was
    written is read back. An interrupted repair is continued by the next one.

    Args:
        store: the store to be repaired.
        root: the checkpoint; a ref means its head, and its log is repaired as well.
        sources: other stores, which may be damaged, partial or read-only; nothing that they say is believed.
        state: a live state that may have tensors of the checkpoint; it is captured as for a save, and not changed.
            Needs torch.
        remotes: whether the remotes that the store knows are asked.
        shards: only these; default: what the store's pins say, else all.
        files: whether the trees of files and of the preparation belong to what must be here.
        dry_run: change nothing; the result says what would be done.
        progress: called with (bytes done, bytes in all) of the objects.

    Raises:
        NotFoundError, CorruptError: ``root`` names nothing, or a ref whose newest record nobody has.
        RefusedError: something of ``state`` cannot be stored exactly.
        ConflictError: a collection is running.
        ReadOnlyError, NoSpaceError, BackendError: the store cannot be written.
    """
    donors = Donors(store, sources, remotes=remotes)
    live = None if state is None else load("ckptstore.live.donor").StateDonor(state)
    with nullcontext() if dry_run else store.lease():
        return _Repairing(store, donors, live, dry_run, progress).repair(root, shards, files)


class _Repairing:
    """One repair of one checkpoint."""

    def __init__(self, store: Store, donors: Donors, live: Any, dry: bool, progress: OnProgress | None) -> None:
        self.store = store
        self.donors = donors
        self.live = live
        self.dry = dry
        self.progress = progress
        givers: list[Giver] = [donors.find, *([] if live is None else [self._from_live_documents])]
        self.healer = Healer(store.backend, givers, dry=dry)
        self.findings: list[Finding] = []
        self.ward = Ward(store.backend, donors, dry, self.healer.healed, self.findings)
        self.checkpoint: Checkpoint | None = None
        self.bytes_read = 0

    def repair(self, name: Digest | str, shards: Collection[int] | None, files: bool) -> Repair:
        root = self._root(name)
        first: list[Finding] = []
        data = self.healer.document(root, Place(checkpoint=root, part="checkpoint document"), first.append)
        checkpoint = self.checkpoint = _parsed(data)
        heal_pins(self.ward, root, checkpoint)
        scope = tuple(sorted(set(shards))) if shards is not None else self._scope(root)
        if checkpoint is None and first:
            self.findings += first
            closure = Closure(root)
        else:
            closure = read_closure(self.healer, root, scope, self.findings.append, files=files)
        self._objects(root, closure)
        if scope is None:
            self._history(closure)
        self.healer.settle(self.findings.append)
        heal_receipts(self.ward, root)
        for finding in self.findings:  # a save through this very store object must not take it for good
            if finding.key:
                self.store.objects.forget(finding.key)
        part = Part(scope, files)
        receipt = None
        if not self.dry:
            receipt = make_receipt(self.store, root, closure, self.healer, self.findings, self.bytes_read, part)
            self.store.add_receipt(receipt)
            if data is not None:
                self.store.note_in_catalogue(root)
        return Repair(
            root=root,
            healed=tuple(_placed(item, closure) for item in self.healer.healed),
            findings=tuple(self.findings),
            documents=len(closure.documents),
            objects=len(closure.objects),
            bytes_read=self.bytes_read,
            method=self.healer.method,
            receipt=receipt,
            notes=self.donors.told(),
            dry_run=self.dry,
        )

    def _root(self, name: Digest | str) -> Digest:
        """The root that is meant; the log of a ref is repaired first, or nobody would know."""
        if isinstance(name, Digest):
            return name
        if is_ref_name(name):
            heal_log(self.ward, self.store.refs, name)
            try:
                return self.store.resolve(name)
            except CorruptError as error:
                hint = f"name the root itself to repair the checkpoint{self._elsewhere(name)}"
                raise CorruptError(error.what, error.why, hint) from None
        try:
            return self.store.resolve(name)
        except NotFoundError:
            for _, other in self.donors.stores():  # the document that is missing here may begin so there
                try:
                    return other.resolve(name)
                except CkptStoreError:
                    continue
            raise

    def _elsewhere(self, ref: str) -> str:
        heads = []
        for donor, other in self.donors.stores():
            try:
                head = other.head(ref)
            except CkptStoreError:
                continue
            if head is not None:
                heads.append(f"{donor.name} has {head} as its {ref}")
        return f": {'; '.join(heads)}" if heads else ""

    def _scope(self, root: Digest) -> tuple[int, ...] | None:
        try:
            return self.store.scope(root)
        except CorruptError as error:  # a damaged pin stays a finding; a damaged log is that of another ref
            self.donors.notes.append(f"{error}: pins alone say which shards belong here")
            try:
                return pinned_shards(self.store.backend, root)
            except CorruptError:
                return None

    # -- objects ------------------------------------------------------------------------------------------------------

    def _objects(self, root: Digest, closure: Closure) -> None:
        self.bytes_read += sum(closure.documents.values())
        total = sum(need.length for need in closure.objects.values())
        done = 0
        bad: dict[str, tuple[Need, list[Finding]]] = {}
        checked = in_threads(
            lambda item: check_object(self.healer, *item), closure.objects.items(), self.healer.threads
        )
        for key, (need, findings, size) in zip(closure.objects, checked, strict=True):
            if findings and all(finding.key == key for finding in findings) and self._may_heal(findings[0]):
                bad[key] = need, findings
            else:
                self.findings.extend(findings)
            self.bytes_read += size
            done += need.length
            if self.progress is not None:
                self.progress(done, total)
        for group in _groups(bad, _PACKS_AT_A_TIME):
            self._from_pieces(root, closure, group)

    def _may_heal(self, finding: Finding) -> bool:
        return finding.kind in REPAIRABLE or self.healer.is_lost(finding)

    def _from_pieces(self, root: Digest, closure: Closure, bad: dict[str, tuple[Need, list[Finding]]]) -> None:
        """Heal objects that no store has whole: from the live state, and packs chunk by chunk."""
        packs = {key: need for key, (need, _) in bad.items() if need.slots}
        by_digest = {need.digest: key for key, (need, _) in bad.items()}
        pieces = Pieces()
        if self.live is not None:
            for digest, data in self.live.chunks({*by_digest, *pieces.lacking(packs.values())}):
                pieces.take(LIVE, digest, data)
                if digest in by_digest:
                    self._put_back(bad.pop(by_digest[digest]), LIVE, data)
        packs = {key: need for key, need in packs.items() if key in bad}
        if pieces.lacking(packs.values()):
            gather(self.store, root, closure, packs, self.donors, pieces)
        for key, need in packs.items():
            made = put_together(need, pieces)
            if made is not None:
                self._put_back(bad.pop(key), *made)
        for _, findings in bad.values():
            self.findings.extend(findings)

    def _put_back(self, item: tuple[Need, list[Finding]], giver: str, data: bytes) -> None:
        need, findings = item
        again = self.healer.put_back(findings[0], need.digest, need.length, giver, data)
        if again is None:
            self.bytes_read += need.length
        else:
            self.findings.append(again)

    def _from_live_documents(
        self, digest: Digest, length: int | None, place: Place, *, document: bool
    ) -> tuple[str, bytes] | None:
        """A page or a shard that the live state would be stored as."""
        if not document or self.checkpoint is None:
            return None
        shards = self.checkpoint.shards
        index = shards.index(digest) if digest in shards else 0  # a page does not say of which shard it is
        found = self.live.document(digest, index, len(shards))
        return None if found is None else (LIVE, found)

    # -- history ------------------------------------------------------------------------------------------------------

    def _history(self, closure: Closure) -> None:
        """Heal the documents of all ancestors; the closure of one is its own affair, and missed if it was not given
        up."""
        parents: dict[Digest, Checkpoint] = {}
        parent = closure.checkpoint.parent if closure.checkpoint else None
        while parent is not None and parent not in parents:
            place = Place(checkpoint=closure.root, part=f"ancestor {parent.short}")
            found: list[Finding] = []
            checkpoint = _parsed(self.healer.document(parent, place, found.append))
            if checkpoint is None:
                self.findings += [_of_history(finding) for finding in found] or [
                    Finding(Kind.MALFORMED, place, document_key(parent), "no document of a checkpoint")
                ]
                break
            parents[parent] = checkpoint
            parent = checkpoint.parent
        heal_retirements(self.ward, parents)
        backend = self.store.backend
        shards = {document_key(shard) for checkpoint in parents.values() for shard in checkpoint.shards}
        there = backend.present(shards) if shards else set()
        for root, checkpoint in parents.items():
            place = Place(checkpoint=closure.root, part=f"ancestor {root.short}")
            gone = [shard for shard in checkpoint.shards if document_key(shard) not in there]
            if gone and not backend.present({retired_key(root)}):
                why = f"its closure is gone and it was not retired; ckpt repair {root} gets it back"
                self.findings.append(Finding(Kind.ANCESTOR, place, document_key(root), why))


def _placed(item: Healed, closure: Closure) -> Healed:
    """With a place: what is read in advance is healed before it is known who needs it."""
    if str(item.place):
        return item
    need = closure.objects.get(item.key)
    part = f"document {item.key.rpartition('/')[2][:12]}"
    return replace(item, place=need.places[0] if need is not None else Place(checkpoint=closure.root, part=part))


def _of_history(finding: Finding) -> Finding:
    return replace(finding, kind=Kind.ANCESTOR) if finding.kind is Kind.MISSING else finding


def _parsed(data: bytes | None) -> Checkpoint | None:
    if data is None:
        return None
    try:
        return Checkpoint.parse(data)
    except MalformedError:
        return None


def _groups(bad: dict[str, tuple[Need, list[Finding]]], size: int) -> Iterator[dict[str, tuple[Need, list[Finding]]]]:
    """A few at a time, so that the bytes that packs are made of take a bounded room."""
    items = iter(bad.items())
    while group := dict(islice(items, size)):
        yield group
