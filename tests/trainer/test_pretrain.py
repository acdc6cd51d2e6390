"""The committed starting weights: what they were taught, and that they come out again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.demo import demo_cohorts, demo_tokenizer
from trainer import pretrain
from trainer.preparation import planning


def test_the_start_was_taught_nothing_of_either_cohort_or_of_the_evaluation() -> None:
    lesson = pretrain.lesson(planning.profile("demo"), demo_tokenizer())
    taught = {document.digest for documents in lesson.updates for document in documents}
    others = {document.digest for documents in demo_cohorts().sets().values() for document in documents}
    assert lesson.cohorts == demo_cohorts()
    assert not taught & others
    openings = {document.turns[0] for documents in lesson.updates for document in documents}
    assert not openings & {document.turns[0] for document in lesson.cohorts.retention}
    assert {len(documents) for documents in lesson.updates} == {32}
    assert len(lesson.updates) == 300


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_committed_weights_come_out_again_where_the_canary_agrees() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.pretrain", "--check"], capture_output=True, text=True, check=False
    )
    if "canary differs" in done.stderr:
        pytest.skip("this machine's arithmetic is another")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same weights\n")
