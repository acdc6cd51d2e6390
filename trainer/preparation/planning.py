"""From a profile to its plan: which document stands in which microbatch of which update. Pure, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from types import MappingProxyType

from ckptstore.errors import UsageError
from ckptstore.format.digest import Digest
from trainer.compute.config import DEFAULT_CUTS, PRESETS, Config, Decoding, Recipe, halves
from trainer.compute.dropout import Dropout
from trainer.data.cohorts import Cohorts, Counts, Document
from trainer.data.conversation import Encoded
from trainer.data.conversations import Conversation
from trainer.data.draws import Draws
from trainer.data.tokenizer import Tokenizer
from trainer.preparation.plan import (
    KILL,
    Criteria,
    Drill,
    Entry,
    Evaluation,
    EvaluationSet,
    Microbatch,
    Numerics,
    Phase,
    Plan,
    Timeouts,
    Update,
)

PHASE_ONE, PHASE_TWO = "phase-one", "phase-two"
BLOCK, SLOTS = 4, 16  # positions in a block and blocks in a pass, where answers are decoded (decision 0061)
RECOMPUTED = 1  # answer of each set that is decoded a second time, without a cache

COMMITTED, INSTALLED = "committed", "installed"
"""Where a profile's starting weights are from: the trainer's own assets, or an installed package."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a plan is made from, beside the data. No conversation of more than ``conversation_tokens`` is drawn.

    ``start`` says where the starting weights are from, ``committed`` or ``installed``.
    """

    name: str
    start: str
    seed: str
    config: Config
    cuts: tuple[int, ...]
    counts: Counts
    updates_per_phase: int
    microbatches: int
    conversation_tokens: int
    conversation_weight: float
    recipe: Recipe
    drill: Drill
    timeouts: Timeouts
    generate: int
    token_cap: int
    retention_margin: float
    fingerprints: int = 1
    dropout: Dropout | None = None


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "demo": Profile(
            name="demo",
            start=COMMITTED,
            seed="demo 1",
            config=PRESETS["demo"],
            cuts=DEFAULT_CUTS["demo"],
            counts=Counts(),
            updates_per_phase=32,
            microbatches=4,
            conversation_tokens=96,
            conversation_weight=0.5,
            recipe=Recipe(rate=1e-3, warmup=4),
            drill=Drill(update=20, microbatch=0, after="forward", shard=1, mode=KILL),
            timeouts=Timeouts(group=60, hold=60, heartbeat=1, heartbeats_missed=3, commit=60),
            generate=16,
            token_cap=64,
            retention_margin=0.02,
        ),
        # A quarter of the demo's documents, because each takes a hundred times the arithmetic.
        "smollm2-135m": Profile(
            name="smollm2-135m",
            start=INSTALLED,
            seed="smollm2-135m 1",
            config=PRESETS["smollm2-135m"],
            cuts=DEFAULT_CUTS["smollm2-135m"],
            counts=Counts(192, 128, 64, 64, test_a=16, test_b=16, retention=16),
            updates_per_phase=32,
            microbatches=2,
            conversation_tokens=96,
            conversation_weight=0.5,
            recipe=Recipe(rate=1e-4, warmup=2),
            drill=Drill(update=20, microbatch=0, after="forward", shard=1, mode=KILL),
            timeouts=Timeouts(group=240, hold=240, heartbeat=1, heartbeats_missed=5, commit=300),
            generate=16,
            token_cap=32,
            retention_margin=0.02,
            fingerprints=4,
        ),
    }
)


def profile(name: str) -> Profile:
    """The profile called ``name``. UsageError if there is none."""
    if name not in PROFILES:
        raise UsageError(f"profile {name!r:.40}", f"there is none of that name; there is {', '.join(PROFILES)}")
    return PROFILES[name]


def with_dropout(profile: Profile, masks: str | None) -> Profile:
    """The profile with a tenth of what each block adds dropped in training, by ``masks`` (None: as it is)."""
    return profile if masks is None else replace(profile, dropout=Dropout(0.1, masks, profile.seed))


def fitted(profile: Profile, config: Config) -> Profile:
    """``profile`` for a model of another shape, cut in two where its parameters are halved.

    Raises:
        UsageError: it has one layer only.
    """
    return profile if config == profile.config else replace(profile, config=config, cuts=halves(config))


def short_enough(conversations: Sequence[Conversation], tokenizer: Tokenizer, limit: int) -> list[Conversation]:
    """The conversations that end with an answer and have at most ``limit`` tokens."""
    complete = (one for one in conversations if len(one.turns) % 2 == 0)
    return [one for one in complete if len(tokenizer.document(one.turns).ids) <= limit]


def arrange(
    stream: str, strata: Sequence[Sequence[Document]], updates: int, microbatches: int, lengths: Mapping[str, int]
) -> list[tuple[Microbatch, ...]]:
    """Microbatches of ``updates`` updates.

    Each update gets an equal share of each stratum, drawn without repetition, so that tasks and conversations are mixed
    alike in all of them. Within an update documents are sorted by length, so that little is padded.

    Raises:
        UsageError: a stratum does not divide evenly.
    """
    for stratum in strata:
        if len(stratum) % updates:
            raise UsageError("plan", f"{len(stratum)} documents cannot be shared evenly by {updates} updates")
    orders = [Draws(f"{stream}/{i}").shuffled(stratum) for i, stratum in enumerate(strata)]
    return [group(_share(orders, number, updates), microbatches, lengths) for number in range(updates)]


def group(names: Sequence[str], microbatches: int, lengths: Mapping[str, int]) -> tuple[Microbatch, ...]:
    """``names`` in microbatches of equal size, the shortest documents first; ``lengths`` are in tokens.

    Raises:
        UsageError: they do not divide evenly.
    """
    if len(names) % microbatches:
        raise UsageError("plan", f"{len(names)} documents cannot be shared evenly by {microbatches} microbatches")
    rows = len(names) // microbatches
    ordered = sorted(names, key=lambda name: (lengths[name], name))
    parts = [tuple(ordered[start : start + rows]) for start in range(0, len(ordered), rows)]
    return tuple(Microbatch(part, max(lengths[name] for name in part)) for part in parts)


def _share(orders: Sequence[Sequence[Document]], number: int, updates: int) -> list[str]:
    shares = [(order, len(order) // updates) for order in orders]
    return [document.name for order, share in shares for document in order[number * share : (number + 1) * share]]


def make_plan(
    profile: Profile,
    cohorts: Cohorts,
    tokenizer: Tokenizer,
    corpus: Digest,
    start: Digest,
    numerics: Numerics,
    mode: str,
) -> Plan:
    """The plan of a profile.

    Args:
        profile: counts, shapes and hyper-parameters.
        cohorts: the drawn documents.
        tokenizer: renders them.
        corpus: digest of the conversations they were drawn from.
        start: digest of the file of starting weights.
        numerics: what the CPUs of the run have kernels for.
        mode: how the drill loses its host, ``kill`` or ``stop``.
    """
    documents = [document for group in cohorts.sets().values() for document in group]
    encoded = {document.name: tokenizer.document(document.turns) for document in documents}
    weights = {document.name: 1.0 if document.is_task else profile.conversation_weight for document in documents}
    lengths = {name: len(one.ids) for name, one in encoded.items()}
    per_phase = profile.updates_per_phase

    strata = {
        PHASE_ONE: (cohorts.phase_one_tasks, cohorts.conversations),
        PHASE_TWO: (cohorts.phase_two_tasks, cohorts.replayed, cohorts.conversations),
    }
    phases: list[Phase] = []
    updates: list[Update] = []
    for name, groups in strata.items():
        phases.append(Phase(name, len(updates) + 1, len(updates) + per_phase))
        for microbatches in arrange(f"{profile.seed}/{name}", groups, per_phase, profile.microbatches, lengths):
            updates.append(Update(len(updates) + 1, microbatches, _denominator(microbatches, encoded, weights)))

    drill = profile.drill
    return Plan(
        profile=profile.name,
        seed=profile.seed,
        config=profile.config,
        cuts=profile.cuts,
        numerics=numerics,
        tokenizer=tokenizer.identity,
        corpus=corpus,
        start=start,
        phases=tuple(phases),
        documents=tuple(
            Entry(one.name, one.family, one.digest, lengths[one.name], weights[one.name]) for one in documents
        ),
        updates=tuple(updates),
        recipe=profile.recipe,
        dropout=profile.dropout,
        commits=(per_phase // 2, per_phase, 2 * per_phase),
        fingerprints=profile.fingerprints,
        drill=Drill(drill.update, drill.microbatch, drill.after, drill.shard, mode),
        timeouts=profile.timeouts,
        evaluation=_evaluation(profile, cohorts, tokenizer),
    )


def _denominator(
    microbatches: Sequence[Microbatch], encoded: Mapping[str, Encoded], weights: Mapping[str, float]
) -> float:
    names = [name for microbatch in microbatches for name in microbatch.documents]
    return fsum(weights[name] for name in names for learned in encoded[name].learned if learned)


def _evaluation(profile: Profile, cohorts: Cohorts, tokenizer: Tokenizer) -> Evaluation:
    per_phase = profile.updates_per_phase
    sets = (("test-a", cohorts.test_a, profile.generate), ("test-b", cohorts.test_b, profile.generate))
    asked = [document for _, documents, generate in sets for document in documents[:generate]]
    longest = max((len(tokenizer.prompt(document.turns[:-1])) for document in asked), default=0)
    return Evaluation(
        sets=tuple(
            EvaluationSet(name, tuple(document.name for document in documents), generate)
            for name, documents, generate in (*sets, ("retention", cohorts.retention, 0))
        ),
        after=(0, per_phase, 2 * per_phase),
        token_cap=profile.token_cap,
        criteria=Criteria(("test-a", "test-b"), ("retention",), profile.retention_margin, 0.99),
        decoding=Decoding.fitting(longest, profile.token_cap, block=BLOCK, slots=SLOTS),
        recomputed=RECOMPUTED,
    )
