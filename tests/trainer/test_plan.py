"""The frozen plan: one encoding, no contradictions, and exactly the documents that it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import fsum
from typing import Any

import pytest

from ckptstore.errors import MalformedError, NotFoundError
from ckptstore.format import canonical
from ckptstore.format.digest import Digest
from tests.support.demo import demo_cohorts, demo_inputs, demo_plan, demo_tokenizer
from trainer.data import cohorts, conversations
from trainer.data.bytetokenizer import PAD
from trainer.preparation import planning
from trainer.preparation.plan import Numerics, Plan, Update


def test_a_plan_comes_back_from_its_bytes() -> None:
    data = demo_plan().encode()
    assert Plan.parse(data) == demo_plan()
    assert Plan.parse(data).encode() == data


def test_every_phase_trains_exactly_its_documents_once() -> None:
    plan, drawn = demo_plan(), demo_cohorts()
    for number, groups in enumerate(
        [
            (drawn.phase_one_tasks, drawn.conversations),
            (drawn.phase_two_tasks, drawn.replayed, drawn.conversations),
        ]
    ):
        span = range(32 * number + 1, 32 * number + 33)
        used = Counter(name for update in span for name in plan.update(update).documents)
        assert used == Counter(one.name for group in groups for one in group)
        assert sum(used.values()) == 1024


def test_what_is_replayed_was_really_trained_in_phase_one() -> None:
    plan, drawn = demo_plan(), demo_cohorts()
    assert plan.replayed == {one.name for one in (*drawn.replayed, *drawn.conversations)}
    assert plan.replayed <= plan.trained("phase-one")


def test_every_update_has_32_documents_of_which_8_are_conversations() -> None:
    for update in demo_plan().updates:
        assert [len(micro.documents) for micro in update.microbatches] == [8, 8, 8, 8]
        assert sum(name.startswith("talk-") for name in update.documents) == 8


def test_the_profile_of_the_real_model_is_a_quarter_of_the_demo() -> None:
    """Rendered as bytes: which documents there are and where they stand depends on no vocabulary."""
    profile, digest = planning.profile("smollm2-135m"), Digest.of(b"any")
    eligible = planning.short_enough(conversations.load().conversations, demo_tokenizer(), profile.conversation_tokens)
    drawn = cohorts.draw(profile.seed, profile.counts, eligible)
    plan = planning.make_plan(
        profile, drawn, demo_tokenizer(), digest, digest, Numerics("bfloat16", "native"), planning.KILL
    )
    assert plan.commits == (16, 32, 64)
    assert {tuple(len(micro.documents) for micro in update.microbatches) for update in plan.updates} == {(4, 4)}
    assert Counter(name[0] for name in plan.trained("phase-one")) == {"a": 192, "t": 64}
    assert Counter(name[0] for name in plan.trained("phase-two")) == {"b": 128, "a": 64, "t": 64}
    assert plan.replayed == plan.trained("phase-one") & plan.trained("phase-two")
    sets = [(one.name, len(one.documents), one.generate) for one in plan.evaluation.sets]
    assert sets == [("test-a", 16, 16), ("test-b", 16, 16), ("retention", 16, 0)]


def test_what_is_evaluated_is_never_trained() -> None:
    groups = demo_plan().memberships()
    trained = {*groups["phase-one"].values(), *groups["phase-two"].values()}
    held_out = [digest for name in ("test-a", "test-b", "retention") for digest in groups[name].values()]
    assert len(set(held_out)) == 192
    assert not trained & set(held_out)
    assert len(trained) == 768 + 512 + 256


def test_a_batch_is_what_the_plan_says() -> None:
    inputs = demo_inputs()
    for number, batch in inputs.batches(31, 34):
        update = inputs.plan.update(number)
        assert [micro.shape for micro in batch.microbatches] == [(8, micro.length) for micro in update.microbatches]
        assert batch.denominator == update.denominator
        for planned, micro in zip(update.microbatches, batch.microbatches, strict=True):
            for name, ids, weights in zip(planned.documents, micro.ids, micro.weights, strict=True):
                turns = inputs.documents[name].turns
                encoded = demo_tokenizer().document(turns)
                padding = planned.length - len(encoded.ids)
                worth = 0.5 if inputs.documents[name].family == "conversation" else 1.0
                assert ids == encoded.ids + (PAD,) * padding
                assert weights == tuple(worth * one for one in encoded.learned) + (0.0,) * padding
                answers = sum(len(turn.encode()) + 1 for turn in turns[1::2])
                assert fsum(weights) == worth * answers


def test_the_learning_rate_is_a_function_of_the_update_alone() -> None:
    recipe = Plan.parse(demo_plan().encode()).recipe
    assert [recipe.rate_at(update) for update in (1, 2, 4, 5, 64)] == [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]


def _change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        node: Any = body
        for part in parents:
            node = node[int(part) if part.isdigit() else part]
        node[int(last) if last.isdigit() else last] = value

    return change


def _train_a_held_out_document(body: dict[str, Any]) -> None:
    body["updates"][0]["microbatches"][0]["documents"][0] = body["evaluation"]["sets"][0]["documents"][0]


def _repeat_words(body: dict[str, Any]) -> None:
    body["documents"][1]["digest"] = body["documents"][0]["digest"]


def _train_twice(body: dict[str, Any]) -> None:
    first = body["updates"][0]["microbatches"][0]["documents"]
    first[1] = first[0]


def _drop_update(body: dict[str, Any]) -> None:
    del body["updates"][7]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_train_a_held_out_document, "is trained too"),
        (_repeat_words, "same words"),
        (_train_twice, "appears twice in phase-one"),
        (_drop_update, "not numbered"),
        (_change("updates.3.microbatches.1.length", 500), "update 4"),
        (_change("updates.3.microbatches.1.documents.0", "nobody"), "nobody"),
        (_change("phases.0.last", 31), "phases"),
        (_change("numerics.compute", "float16"), "float16"),
        (_change("numerics.kernels", "fast"), "fast"),
        (_change("numerics.threads", True), "threads"),
        (_change("drill.update", 16), "drill"),
        (_change("drill.update", 65), "drill"),
        (_change("drill.shard", 2), "drill"),
        (_change("drill.microbatch", 4), "microbatch 4"),
        (_change("drill.mode", "explode"), "explode"),
        (_change("commits", [16, 32]), "commits"),
        (_change("evaluation.criteria.kept", ["nothing"]), "nothing"),
        (_change("evaluation.after", [0, 65]), "65"),
        (_change("cuts", [9]), "cuts"),
        (_change("recipe.rate", "0.001"), "hexadecimal"),
        (_change("recipe.rate", "inf"), "hexadecimal"),
        (_change("recipe.rate", "-0x1.0p+0"), "rate"),
        (_change("config.heads", 5), "heads"),
        (_change("config.more", 5), "more"),
        (_change("start", "b3:0"), "digest"),
    ],
)
def test_a_plan_that_contradicts_itself_is_not_one(change: Callable[[dict[str, Any]], None], why: str) -> None:
    body = json.loads(demo_plan().encode())
    change(body)
    with pytest.raises(MalformedError, match=why):
        Plan.parse(canonical.encode(body))


def test_a_batch_of_other_weights_than_planned_is_refused() -> None:
    inputs = demo_inputs()
    first = inputs.plan.updates[0]
    updates: tuple[Update, ...] = (replace(first, denominator=first.denominator + 1), *inputs.plan.updates[1:])
    with pytest.raises(Exception, match="update 1"):
        replace(inputs, plan=replace(inputs.plan, updates=updates)).batch(1)


@pytest.mark.parametrize("number", [0, 65])
def test_an_update_outside_the_plan_is_named(number: int) -> None:
    with pytest.raises(NotFoundError, match=f"update {number}"):
        demo_plan().update(number)


def test_the_controller_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from trainer.preparation import inputs, prepare, staged\n"
        "from trainer.scoring import evaluation, statistics\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
