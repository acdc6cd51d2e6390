"""The frozen plan: everything that decides a run, as one value with one encoding. No torch here.

A plan is valid or it is not constructed: no two documents have the same words, what is evaluated is in no update,
and every microbatch is exactly as long as its longest document.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptstore.errors import MalformedError, NotFoundError
from ckptstore.format.digest import Digest
from trainer.compute.config import Config, Decoding, Ownership, Recipe, partition
from trainer.compute.dropout import Dropout
from trainer.compute.numerics import PROFILES
from trainer.preparation import records

PLAN_LIMIT = 4 * 2**20  # bytes

KILL = "kill"  # SIGKILL of the host's processes
SILENT = "silent"  # the host is cut off the network, and killed where nobody can see it
STOP = "stop"  # SIGSTOP: the host falls silent, and is killed once its heartbeats are missed
COMPUTE = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Numerics:
    """How workers compute: ``compute`` is ``bfloat16`` or ``float32``, ``kernels`` a numerics profile."""

    compute: str
    kernels: str
    threads: int = 1
    recompute: bool = True

    def __post_init__(self) -> None:
        if self.compute not in COMPUTE:
            raise MalformedError("plan", f"compute {self.compute!r:.20} is not one of {', '.join(COMPUTE)}")
        if self.kernels not in PROFILES:
            raise MalformedError("plan", f"kernels {self.kernels!r:.20} are not one of {', '.join(PROFILES)}")


@dataclass(frozen=True, slots=True)
class Drill:
    """The planned loss of a host: in ``update``, after the forward of ``microbatch`` (from 0) on ``shard``."""

    update: int
    microbatch: int
    after: str
    shard: int
    mode: str

    def __post_init__(self) -> None:
        if self.after != "forward" or self.mode not in (KILL, STOP, SILENT):
            raise MalformedError("drill", f"{self.mode!r} after {self.after!r} is not one that exists")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long anybody waits, in seconds; a host that misses ``heartbeats_missed`` heartbeats in a row is lost."""

    group: int
    hold: int
    heartbeat: int
    heartbeats_missed: int
    commit: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A cohort's updates, both ends included, counted from 1."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A document of the run: its name and family, digest of its words, tokens, and the weight of a learned token."""

    name: str
    family: str
    digest: Digest
    tokens: int
    weight: float


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Documents by name, padded to ``length`` tokens."""

    documents: tuple[str, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update: its microbatches in order, and the sum of all token weights that its loss is divided by."""

    number: int
    microbatches: tuple[Microbatch, ...]
    denominator: float

    @property
    def documents(self) -> tuple[str, ...]:
        """Names of all its documents, in order."""
        return tuple(name for microbatch in self.microbatches for name in microbatch.documents)


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Documents that are only ever scored; of the first ``generate`` the answers are generated and checked as well."""

    name: str
    documents: tuple[str, ...]
    generate: int

    def __post_init__(self) -> None:
        if not 0 <= self.generate <= len(self.documents):
            why = f"{self.generate} answers of {len(self.documents)} documents"
            raise MalformedError(f"evaluation set {self.name!r:.40}", why)


@dataclass(frozen=True, slots=True)
class Criteria:
    """What the last weights must show, against the start, to be called an improvement; frozen before training.

    Loss on every set of ``better`` must fall with its upper bound below 0, on every set of ``kept`` its upper bound
    must stay within ``margin`` nats a document, and no set may have fewer correct answers. ``confidence`` is that of
    the one-sided normal bound.
    """

    better: tuple[str, ...]
    kept: tuple[str, ...]
    margin: float
    confidence: float

    def __post_init__(self) -> None:
        if not (self.better or self.kept):
            raise MalformedError("criteria", "they name no set, so anything would be promoted")
        if not (0.5 <= self.confidence < 1 and self.margin >= 0):
            raise MalformedError("criteria", f"confidence {self.confidence} or margin {self.margin} is none")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is scored after which updates (0 is the start), and how many tokens an answer may have.

    Answers are decoded in the shapes of ``decoding``; the first ``recomputed`` of each set a second time, without a
    cache.
    """

    sets: tuple[EvaluationSet, ...]
    after: tuple[int, ...]
    token_cap: int
    criteria: Criteria
    decoding: Decoding
    recomputed: int

    def __post_init__(self) -> None:
        if self.token_cap < 1 or self.recomputed < 0:
            raise MalformedError("evaluation", f"answers of {self.token_cap} tokens, {self.recomputed} a second time")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides a run.

    ``cuts`` are the layers at which the second and each further shard begins, ``fingerprints`` says after each how many
    updates the whole state is fingerprinted (it always is after updates that are planned to be committed).
    """

    profile: str
    seed: str
    config: Config
    cuts: tuple[int, ...]
    numerics: Numerics
    tokenizer: Digest
    corpus: Digest
    start: Digest
    phases: tuple[Phase, ...]
    documents: tuple[Entry, ...]
    updates: tuple[Update, ...]
    recipe: Recipe
    dropout: Dropout | None
    commits: tuple[int, ...]
    fingerprints: int
    drill: Drill
    timeouts: Timeouts
    evaluation: Evaluation

    def __post_init__(self) -> None:
        if [update.number for update in self.updates] != list(range(1, len(self.updates) + 1)):
            raise MalformedError("plan", "its updates are not numbered from 1 on")
        if any(not 1 <= phase.first <= phase.last <= len(self.updates) for phase in self.phases):
            raise MalformedError("plan", "a phase begins or ends outside of its updates")
        if [number for phase in self.phases for number in range(phase.first, phase.last + 1)] != [
            update.number for update in self.updates
        ]:
            raise MalformedError("plan", "its phases do not cover its updates in order")
        self._check_documents()
        self._check_updates()
        self._check_events()

    @property
    def digest(self) -> Digest:
        """BLAKE3 of :meth:`encode`."""
        return Digest.of(self.encode())

    @property
    def owners(self) -> tuple[Ownership, ...]:
        """What each shard owns, in order."""
        return partition(self.config, self.cuts)

    @property
    def replayed(self) -> frozenset[str]:
        """Names of the documents of a later phase that an earlier one trained too."""
        seen: set[str] = set()
        again: set[str] = set()
        for phase in self.phases:
            again |= seen & self.trained(phase.name)
            seen |= self.trained(phase.name)
        return frozenset(again)

    def update(self, number: int) -> Update:
        """Update ``number``, counted from 1. NotFoundError beyond the plan."""
        if not 1 <= number <= len(self.updates):
            raise NotFoundError(f"update {number}", f"the plan of profile {self.profile} has 1 to {len(self.updates)}")
        return self.updates[number - 1]

    def fingerprinted(self, update: int) -> bool:
        """Whether the fingerprint of an update has the state that it leaves, beside its numbers."""
        return update % self.fingerprints == 0 or update in self.commits

    def trained(self, phase: str) -> frozenset[str]:
        """Names of the documents in the updates of ``phase``: what was really trained, not what was meant to be."""
        return frozenset(
            name
            for span in self.phases
            if span.name == phase
            for number in range(span.first, span.last + 1)
            for name in self.update(number).documents
        )

    def memberships(self) -> dict[str, dict[str, str]]:
        """For each phase and each evaluation set, the names of its documents and the digests of their words."""
        digests = {entry.name: str(entry.digest) for entry in self.documents}
        groups: dict[str, Iterable[str]] = {phase.name: sorted(self.trained(phase.name)) for phase in self.phases}
        groups |= {one.name: one.documents for one in self.evaluation.sets}
        return {group: {name: digests[name] for name in names} for group, names in groups.items()}

    def encode(self) -> bytes:
        """Canonical bytes; the same plan has the same bytes everywhere."""
        return records.encode(self)

    @staticmethod
    def parse(data: bytes) -> Plan:
        """The plan of canonical bytes. MalformedError if they are not one, or describe one that contradicts itself."""
        return records.parse(Plan, data, PLAN_LIMIT, "plan")

    def _check_documents(self) -> None:
        names = [entry.name for entry in self.documents]
        if len(set(names)) != len(names):
            raise MalformedError("plan", "a document name appears twice")
        digests = {entry.name: entry.digest for entry in self.documents}
        if len(set(digests.values())) != len(names):
            raise MalformedError("plan", "two documents have the same words")
        unknown = {name for update in self.updates for name in update.documents} - digests.keys()
        unknown |= {name for one in self.evaluation.sets for name in one.documents} - digests.keys()
        if unknown:
            raise MalformedError("plan", f"document {min(unknown)} is used and not listed")
        trained = {digests[name] for update in self.updates for name in update.documents}
        for one in self.evaluation.sets:
            for name in one.documents:
                if digests[name] in trained:
                    raise MalformedError("plan", f"document {name} of {one.name} is trained too")
        for phase in self.phases:
            used = [name for number in range(phase.first, phase.last + 1) for name in self.update(number).documents]
            if len(set(used)) != len(used):
                raise MalformedError("plan", f"a document appears twice in {phase.name}")

    def _check_updates(self) -> None:
        tokens = {entry.name: entry.tokens for entry in self.documents}
        for update in self.updates:
            for microbatch in update.microbatches:
                longest = max((tokens[name] for name in microbatch.documents), default=0)
                if not microbatch.documents:
                    raise MalformedError(f"plan, update {update.number}", "a microbatch without documents")
                if microbatch.length != longest:
                    why = f"a microbatch of length {microbatch.length}, its longest document has {longest}"
                    raise MalformedError(f"plan, update {update.number}", why)

    def _check_events(self) -> None:
        last, drill, evaluation = len(self.updates), self.drill, self.evaluation
        if list(self.commits) != sorted(set(self.commits)) or not self.commits or self.commits[-1] != last:
            raise MalformedError("plan", f"commits {self.commits} do not rise to the last update, {last}")
        if self.fingerprints < 1:
            raise MalformedError("plan", f"fingerprints of the state after each {self.fingerprints} updates")
        if not self.commits[0] < drill.update <= last or drill.shard >= len(self.owners):
            why = f"update {drill.update} on shard {drill.shard} is not after the first commit and in the run"
            raise MalformedError("drill", why)
        if drill.microbatch >= len(self.update(drill.update).microbatches):
            raise MalformedError("drill", f"update {drill.update} has no microbatch {drill.microbatch}")
        names = [one.name for one in evaluation.sets]
        unknown = {*evaluation.criteria.better, *evaluation.criteria.kept} - set(names)
        if len(set(names)) != len(names) or unknown:
            raise MalformedError("plan", f"evaluation sets {names} repeat, or lack {sorted(unknown)}")
        if not all(0 <= after <= last for after in evaluation.after):
            raise MalformedError("plan", f"evaluations after {evaluation.after} are not all in the run")
