"""Policies of retention: rules that say which checkpoints of a lineage are kept. What any rule keeps is kept.

A lineage is a line of checkpoints from parent to parent. Rules see it in that order and know nothing of names, of keys
or of when files were made; steps and times only divide it. What survives whatever a policy says is decided in
:mod:`ckptstore.collection.plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from ckptstore.collection.facts import Facts
from ckptstore.collection.lineage import Node
from ckptstore.errors import UsageError
from ckptstore.format.digest import Digest

MODES = ("max", "min")


class Rule(Protocol):
    """What a policy consists of."""

    @property
    def needs_facts(self) -> bool:
        """Whether it looks at the receipts about all checkpoints."""
        ...

    def keep(self, lineage: Sequence[Node], present: Set[Digest], facts: Facts) -> Mapping[Digest, str]:
        """Which checkpoints it keeps, and why.

        Args:
            lineage: from the newest to the oldest, those whose closure is gone included.
            present: those of it whose closure is here.
            facts: what receipts say of them.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest ``count`` checkpoints of each lineage."""

    count: int

    def __post_init__(self) -> None:
        # Heads survive anyway, so that 0 could only mean the same as 1, or be a slip for "all" or for "none".
        _at_least_one("keep last", self.count)

    @property
    def needs_facts(self) -> bool:
        """See :class:`Rule`."""
        return False

    def keep(self, lineage: Sequence[Node], present: Set[Digest], facts: Facts) -> Mapping[Digest, str]:
        """See :class:`Rule`."""
        newest = [node.root for node in lineage if node.root in present][: self.count]
        return dict.fromkeys(newest, f"one of the last {self.count}")


@dataclass(frozen=True, slots=True)
class KeepEverySteps:
    """The first checkpoint at or after each multiple of ``steps``. Where a lineage counts anew, so does this."""

    steps: int

    def __post_init__(self) -> None:
        _at_least_one("keep every number of steps", self.steps)

    @property
    def needs_facts(self) -> bool:
        """See :class:`Rule`."""
        return False

    def keep(self, lineage: Sequence[Node], present: Set[Digest], facts: Facts) -> Mapping[Digest, str]:
        """See :class:`Rule`."""
        kept: dict[Digest, str] = {}
        seen: set[int] = set()
        before = -1
        for node in reversed(lineage):
            if node.step < before:
                seen.clear()
            before = node.step
            multiple = node.step // self.steps
            if node.root in present and multiple not in seen and (multiple or not node.step):
                seen.add(multiple)
                kept[node.root] = f"the first from step {multiple * self.steps} on"
        return kept


@dataclass(frozen=True, slots=True)
class KeepEveryTime:
    """The first checkpoint of a lineage in each span of ``seconds``, counted from 1970 in UTC.

    Its time is that of the oldest receipt about it. One whose time is not known is kept.
    """

    seconds: int

    def __post_init__(self) -> None:
        _at_least_one("keep every number of seconds", self.seconds)

    @property
    def needs_facts(self) -> bool:
        """See :class:`Rule`."""
        return True

    def keep(self, lineage: Sequence[Node], present: Set[Digest], facts: Facts) -> Mapping[Digest, str]:
        """See :class:`Rule`."""
        kept: dict[Digest, str] = {}
        seen: set[int] = set()
        for node in reversed(lineage):
            if node.root not in present:
                continue
            time = facts.time(node.root)
            if time is None:
                kept[node.root] = "no receipt says how old it is"
                continue
            span = int(time.timestamp()) // self.seconds
            if span not in seen:
                seen.add(span)
                begin = datetime.fromtimestamp(span * self.seconds, UTC)
                kept[node.root] = f"the first from {begin:%Y-%m-%dT%H:%M:%SZ} on"
        return kept


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The ``count`` checkpoints of each lineage with the greatest (``mode`` "max") or least ("min") value of a recorded
    metric; of equal ones the older.

    What has no such number, or one that is not finite, never wins. One of which a receipt cannot be read is kept, as
    nobody knows its number. Where nothing of a lineage has one, all of it is: the name may be a slip, or what is
    measured is still to come.
    """

    count: int
    metric: str
    mode: str = "max"

    def __post_init__(self) -> None:
        _at_least_one("keep best", self.count)
        if not self.metric or self.mode not in MODES:
            why = f"metric {self.metric!r:.80} and mode {self.mode!r:.20}; a mode is {' or '.join(MODES)}"
            raise UsageError("keep best", why, "for instance 3:accuracy:max")

    @property
    def needs_facts(self) -> bool:
        """See :class:`Rule`."""
        return True

    def keep(self, lineage: Sequence[Node], present: Set[Digest], facts: Facts) -> Mapping[Digest, str]:
        """See :class:`Rule`."""
        kept: dict[Digest, str] = {}
        found: list[tuple[int | float, Digest]] = []
        for node in reversed(lineage):
            if node.root not in present:
                continue
            if facts.is_doubtful(node.root):
                kept[node.root] = "a receipt about it cannot be read, and may hold a metric"
                continue
            value = facts.metric(node.root, self.metric)
            if type(value) is int or (type(value) is float and math.isfinite(value)):
                found.append((value, node.root))
        if not found:
            reason = f"nobody recorded a number {self.metric!r:.60}"
            return dict.fromkeys((node.root for node in lineage if node.root in present), reason)
        found.sort(key=lambda item: item[0], reverse=self.mode == "max")  # stable: of equal ones the older is first
        what = "greatest" if self.mode == "max" else "least"
        for value, root in found[: self.count]:
            kept[root] = f"one of the {self.count} with the {what} {self.metric} ({value!r:.40})"
        return kept


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of which any keeps. Without a rule nothing is retired."""

    rules: tuple[Rule, ...] = ()

    @property
    def needs_facts(self) -> bool:
        """Whether the receipts about all checkpoints are looked at."""
        return any(rule.needs_facts for rule in self.rules)

    def keep(self, lineage: Sequence[Node], present: Set[Digest], facts: Facts) -> dict[Digest, list[str]]:
        """Reasons by checkpoint that some rule keeps; see :class:`Rule` for the arguments."""
        kept: dict[Digest, list[str]] = {}
        for rule in self.rules:
            for root, reason in rule.keep(lineage, present, facts).items():
                kept.setdefault(root, []).append(reason)
        return kept


def _at_least_one(what: str, number: int) -> None:
    if type(number) is not int or number < 1:
        hint = "heads, what is pinned and the newest verified survive in any case: to keep no more, keep the last 1"
        raise UsageError(what, f"{number!r:.40} is not a number of at least 1", hint)
