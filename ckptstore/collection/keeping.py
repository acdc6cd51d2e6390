"""What is kept of a store, and why: decided from refs, pins, parents and receipts, and then walked down from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime

from ckptstore.backends.protocol import ReadBackend
from ckptstore.collection.condition import Condition
from ckptstore.collection.facts import Facts
from ckptstore.collection.inventory import Inventory, take_inventory
from ckptstore.collection.lineage import History, Lineage, Node, Origin, Problem, lineages, read_names
from ckptstore.collection.policy import Policy
from ckptstore.collection.reach import Reach, kind_of
from ckptstore.errors import CkptStoreError, UsageError
from ckptstore.findings import Place
from ckptstore.format.digest import Digest
from ckptstore.format.keys import document_key
from ckptstore.objects import Objects
from ckptstore.pins import HoldingBackend
from ckptstore.readbacks.actors import store_id
from ckptstore.retirements import BY_NAME
from ckptstore.threads import in_threads

BY_POLICY = "no rule of the policy keeps it"


class Keeping:
    """A decision while it is made: first all reasons to keep something are gathered, then what is kept is walked.

    Args:
        backend: the store.
        policy: see :func:`ckptstore.collection.plan.plan`.
        retire: what somebody named to be retired.
        problem: takes each reason for which nothing may be deleted.
    """

    def __init__(self, backend: ReadBackend, policy: Policy, retire: frozenset[Digest], problem: Problem) -> None:
        self.objects = Objects(backend)
        self.inventory: Inventory = take_inventory(backend)
        for text in self.inventory.problems:
            problem(text)
        self.subjects = frozenset(self.inventory.receipts)
        self.documented = frozenset(subject for subject in self.subjects if self.inventory.has_document(subject))
        self.facts = Facts(backend, store_id(backend), self.subjects)
        self.reach = Reach(self.objects, self.inventory)
        self.kept: dict[Digest, list[str]] = {}
        self.problem = problem
        self.retire = retire
        self._policy = policy
        self._named = read_names(self.objects, self.inventory, problem)
        self._condition = Condition(self.objects, self.inventory, self._named, self.facts, self.reach, retire)
        self._history = History(self.objects, self._condition.was_let_go, problem)
        self._whole: set[Digest] = set()
        self._others = {root for root in self._named.pins if self._is_other(root)}
        pinned = [root for root in self._named.pins if root not in self._others]
        self._lines: list[Lineage] = lineages(self._history, self._named, pinned)
        self._let_go = self._checked_retire()

    # -- deciding -----------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Gather what refs, pins and the policy keep."""
        for root, names in self._named.heads.items():
            self._keep_named(root, f"head of {' and '.join(names)}", whole=True)
        for root, pins in self._named.pins.items():
            for pin in pins:
                self._keep_named(root, f"pinned: {pin.reason}", whole=self._named.pinned_shards(root) is None)
        for line in self._lines:
            here = [node for node in line.nodes if self._is_here(node)]
            if self._policy.rules:
                self._keep_by_policy(line, here)
            else:
                for node in here:
                    self._keep_node(line, node, _led(line, node))

    def keep_held(self, holder: HoldingBackend | None) -> None:
        """Keep checkpoints whose documents the endpoint holds against deletion."""
        if holder is None:
            return
        now = datetime.now(UTC)

        def ask(node: Node) -> tuple[Node, datetime | None]:
            return node, holder.held_until(document_key(node.root))

        candidates = [node for node in self._candidates() if node.root not in self._let_go]
        for node, until in in_threads(ask, candidates, self.objects.threads):
            if until is not None and until > now:
                self._keep(node.root, f"held by the endpoint until {until:%Y-%m-%dT%H:%M:%SZ}", whole=True)

    def keep_wanting(
        self, ledger: Callable[[Collection[Digest]], Mapping[Digest, int]] | None, copies: int
    ) -> set[Digest]:
        """Keep checkpoints of which fewer than ``copies`` other stores hold verified copies; returns them.

        Raises:
            UsageError: copies are asked for, and there is no ledger to count them.
        """
        if type(copies) is not int or copies < 0:
            raise UsageError("min verified copies", f"{copies!r:.40} is not a number of at least 0")
        if not copies:
            return set()
        if ledger is None:
            raise UsageError("min verified copies", "there is no ledger to count them")
        candidates = [node.root for node in self._candidates()]
        found = ledger(candidates) if candidates else {}
        wanting = set()
        for root in candidates:
            number = found.get(root, 0)
            if number < copies:
                told = f"only {number} of {copies} verified copies are known to be elsewhere"
                if root in self._let_go:
                    self.problem(f"checkpoint {root} is not retired by name: {told}")
                self._keep(root, told, whole=True)
                wanting.add(root)
        return wanting

    def reach_all(self) -> None:
        """Walk down from everything that is kept; what cannot be read of it is a problem."""
        for root in self._history.known():
            self.reach.keep_document(root)
        for root in list(self.kept):
            self._reach(root)

    def keep_arrived(self, root: Digest) -> None:
        """Keep a checkpoint that nothing names, because a push or pull brought all of it here."""
        self._keep(root, "a push or pull brought it here whole, and nothing names it", whole=True)
        for node in self._history.walk(root, "a push or pull brought it here"):
            self.reach.keep_document(node.root)
        self._reach(root)

    def keep_other(self, digest: Digest, reason: str) -> None:
        """Keep a document of another kind than a checkpoint, with all that it needs."""
        self._others.add(digest)
        self._keep(digest, reason, whole=True)
        self._reach(digest)

    # -- asking -------------------------------------------------------------------------------------------------------

    def step(self, root: Digest) -> int | None:
        """The step of a checkpoint, None if it is none, or cannot be read."""
        node = None if root in self._others else self._history.peek(root)
        return None if node is None else node.step

    def runs(self) -> set[Digest | None]:
        """The preparations that checkpoints name to which something leads, retired ones too."""
        nodes = map(self._history.peek, self._history.known())
        return {node.run for node in nodes if node is not None}

    def shards(self, root: Digest) -> tuple[int, ...] | None:
        """Which shards are kept of a root that is kept; None for all."""
        return None if root in self._whole or root in self._others else self._named.pinned_shards(root)

    def knows(self, root: Digest) -> bool:
        """Whether refs, pins or parents lead to a digest."""
        return self._history.has_met(root) or root in self._named.pins

    def was_let_go(self, root: Digest) -> bool:
        """Whether somebody named it to be retired, now or, where something leads to it, in a collection before."""
        return root in self.retire or (self.knows(root) and self._condition.was_let_go(root))

    def retired(self) -> Iterator[tuple[Digest, int | None, str]]:
        """Root, step and reason of each checkpoint whose closure goes, the newest first."""
        reasons: dict[Digest, tuple[int | None, str]] = {}
        for line in self._lines:
            for node in line.nodes:
                if node.root in self.kept:
                    is_part = self.shards(node.root) is not None and (line.origin, node) != (Origin.PIN, line.nodes[0])
                    if is_part and node.root not in self.inventory.retired:
                        reasons[node.root] = node.step, "only some of its shards are pinned"
                elif self._is_here(node, named=True):
                    reasons[node.root] = node.step, BY_NAME if node.root in self._let_go else BY_POLICY
        for root in self._let_go:
            if self.knows(root):
                reasons.setdefault(root, (self.step(root), BY_NAME))
        for root, (step, reason) in sorted(reasons.items(), key=lambda item: (-(item[1][0] or 0), item[0])):
            yield root, step, reason

    # -- how ----------------------------------------------------------------------------------------------------------

    def _keep_by_policy(self, line: Lineage, here: list[Node]) -> None:
        if self._policy.needs_facts:
            self.facts.load(node.root for node in here)
        by_root = {node.root: node for node in here}
        for root, reasons in self._policy.keep(line.nodes, by_root.keys(), self.facts).items():
            for reason in reasons:
                self._keep_node(line, by_root[root], f"{reason} of {line.name}")
        # What would go has to have a successor that was read back; it is not deleted on the word of a save alone.
        newest = next((i for i, node in enumerate(here) if self._condition.is_verified(node)), None)
        if newest is None:
            for node in here:
                self._keep_node(line, node, f"nothing of {line.name} is verified")
        else:
            self._keep_node(line, here[newest], f"the newest verified of {line.name}")
            for node in here[:newest]:
                self._keep_node(line, node, f"newer than the newest verified of {line.name}")
        if here and line.origin is Origin.RECORD:
            self._keep_node(line, here[0], f"the newest of what {line.name} named before")

    def _keep_named(self, root: Digest, reason: str, *, whole: bool) -> None:
        if root in self._others:
            self._keep(root, reason, whole=True)
            return
        node = self._history.node(root, reason)
        if node is not None and root not in self._let_go and not self._condition.is_gone(node):
            self._keep(root, reason, whole=whole)

    def _keep_node(self, line: Lineage, node: Node, reason: str) -> None:
        """Keep all of a checkpoint, or only its pinned shards if just the pin leads to it, or others are not here."""
        is_part = node.root in self._named.pins and self._named.pinned_shards(node.root) is not None
        is_alone = line.origin is Origin.PIN and node == line.nodes[0]
        self._keep(node.root, reason, whole=not is_part or (not is_alone and self._condition.has_all_shards(node)))

    def _keep(self, root: Digest, reason: str, *, whole: bool) -> None:
        self.kept.setdefault(root, [])
        if reason not in self.kept[root]:
            self.kept[root].append(reason)
        if whole:
            self._whole.add(root)

    def _reach(self, root: Digest) -> None:
        why = self.kept[root][0]
        try:
            if root in self._others:
                self.reach.keep_below(root)
                return
            node = self._history.node(root, why)
            if node is not None:  # else it has been told
                self.reach.keep_checkpoint(node, self.shards(root), files=not self.facts.without_files(root))
        except CkptStoreError as error:
            self.problem(f"{'document' if root in self._others else 'checkpoint'} {root} ({why}): {error}")

    def _candidates(self) -> list[Node]:
        """Checkpoints that are to be retired as things stand, each once."""
        found = {
            node.root: node
            for line in self._lines
            for node in line.nodes
            if node.root not in self.kept and self._is_here(node, named=True)
        }
        return list(found.values())

    def _is_here(self, node: Node, *, named: bool = False) -> bool:
        """Whether a closure is here, or should be; ``named``: even if somebody named it to be retired."""
        return not self._condition.is_gone(node) and (named or node.root not in self._let_go)

    def _is_other(self, root: Digest) -> bool:
        """Whether what is pinned is a document of another kind than a checkpoint."""
        try:
            data = self.objects.document(root, Place(part="pinned document"))
            return data is not None and kind_of(data) != "checkpoint"
        except CkptStoreError:
            return False

    def _checked_retire(self) -> frozenset[Digest]:
        """What somebody named to be retired, as far as it may be."""
        refused: set[Digest] = set()
        for root in self.retire:
            node = self._history.peek(root)
            if root in self._others:
                reason = "pinned"
            elif node is None or not self._condition.is_readable(node):
                continue
            elif root in self._named.heads:
                reason = f"head of {' and '.join(self._named.heads[root])}"
            elif root in self._named.pins:
                reason = "pinned"
            else:
                heads = (line for line in self._lines if line.origin is Origin.HEAD)
                names = [line.name for line in heads if self._newest(line) == root]
                reason = f"the newest verified of {names[0]}" if names else ""
            if reason:
                self.problem(f"checkpoint {root} is not retired by name: it can be read, and is {reason}")
                refused.add(root)
        return self.retire - refused

    def _newest(self, line: Lineage) -> Digest | None:
        """The newest verified checkpoint of a lineage."""
        here = (node for node in line.nodes if not self._condition.is_gone(node))
        return next((node.root for node in here if self._condition.is_verified(node)), None)


def decide(backend: ReadBackend, policy: Policy, retire: frozenset[Digest], problem: Problem) -> Keeping:
    """What refs, pins and the policy keep."""
    keeping = Keeping(backend, policy, retire, problem)
    keeping.decide()
    return keeping


def _led(line: Lineage, node: Node) -> str:
    match line.origin:
        case Origin.HEAD:
            return f"{line.name} leads to it"
        case Origin.RECORD:
            return f"{line.name} named it before, or leads to it from there"
        case Origin.PIN:
            return "pinned, or an ancestor of what is"
