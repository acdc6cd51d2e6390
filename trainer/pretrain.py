"""Makes the committed starting weights of the demo again: ``python -m trainer.pretrain`` (about two minutes).

300 updates of the whole model in one process on easy tasks and on conversations that neither cohort and no evaluation
has, then rounding to BF16. The bits come out the same where the canary digests recorded beside the weights agree;
elsewhere the script says so. With ``--check`` nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

from ckptstore.errors import CkptStoreError, MismatchError
from ckptstore.format import canonical
from ckptstore.format.canonical import Json
from ckptstore.format.digest import Digest
from trainer.compute import numerics, weights
from trainer.compute.batch import Batch
from trainer.compute.config import Decoding, Recipe, partition
from trainer.data import bytetokenizer, cohorts, conversations, families, tokenizer
from trainer.data.cohorts import CONVERSATION, Cohorts, Document
from trainer.data.draws import Draws
from trainer.data.tokenizer import Tokenizer
from trainer.preparation import planning, prepare
from trainer.preparation.inputs import padded
from trainer.preparation.planning import Profile

if TYPE_CHECKING:
    from trainer.compute.model import Shard
    from trainer.compute.transport import Group

SEED = "demo start 1"
NUMERICS = "portable"  # the kernels that most CPUs have in common
COMPUTE = "float32"
UPDATES = 300
TASKS, CONVERSATIONS, MICROBATCHES = 24, 8, 4  # in each update
RECIPE = Recipe(rate=3e-3, warmup=20)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Documents for ``UPDATES`` updates, and the cohorts that they have nothing in common with."""

    updates: tuple[tuple[Document, ...], ...]
    cohorts: Cohorts


def lesson(profile: Profile, rendered: Tokenizer) -> Lesson:
    """The documents of pretraining: fresh easy tasks, and the conversations that the cohorts left over, repeatedly.

    Raises:
        RefusedError: a document has the words of one in the cohorts or in the evaluation.
    """
    corpus = conversations.load().conversations
    eligible = planning.short_enough(corpus, rendered, profile.conversation_tokens)
    drawn = cohorts.draw(profile.seed, profile.counts, eligible)
    _, _, spare = cohorts.split(profile.seed, profile.counts, eligible)
    taken = {document.digest for documents in drawn.sets().values() for document in documents}
    tasks = cohorts.tasks(SEED, "start", TASKS * UPDATES, families.EASY, taken)
    talks = [Document(f"spare-{i}", CONVERSATION, one.turns) for i, one in enumerate(spare)]
    cohorts.require_disjoint({**drawn.sets(), "start": tasks, "spare": tuple(talks)})
    talk = _endless(talks)
    updates = tuple(
        (*tasks[number * TASKS : (number + 1) * TASKS], *(next(talk) for _ in range(CONVERSATIONS)))
        for number in range(UPDATES)
    )
    return Lesson(updates, drawn)


def batch(documents: Sequence[Document], rendered: Tokenizer, conversation_weight: float) -> Batch:
    """The documents of one update in microbatches, weighted as in the phases of a run."""
    rows = {one.name: (rendered.document(one.turns), 1.0 if one.is_task else conversation_weight) for one in documents}
    lengths = {name: len(encoded.ids) for name, (encoded, _) in rows.items()}
    groups = planning.group(list(rows), MICROBATCHES, lengths)
    return Batch(
        tuple(padded([rows[name] for name in group.documents], group.length, rendered.pad) for group in groups)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or that of the error that is printed in one line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.pretrain", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed weights and write nothing")
    options = parser.parse_args(arguments)
    environment = numerics.env_for(NUMERICS)
    if any(os.environ.get(name) != value for name, value in environment.items()):
        # torch reads them once, when it is imported, so this process starts over with them.
        command = [sys.executable, "-m", "trainer.pretrain", *(["--check"] if options.check else [])]
        os.execve(sys.executable, command, {**os.environ, **environment})
    try:
        data, record = pretrain()
        return _compare(data, record) if options.check else _save(data, record)
    except CkptStoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def pretrain() -> tuple[bytes, dict[str, Json]]:
    """(bytes of the weights file, what is recorded beside it). Takes minutes; progress goes to stderr."""
    import torch

    from trainer.compute.model import Shard, initialise
    from trainer.compute.step import Step, build_optimizer
    from trainer.compute.transport import local_groups

    numerics.apply(threads=1, profile=NUMERICS)
    profile = planning.profile("demo")
    rendered = _tokenizer()
    learned = lesson(profile, rendered)
    shard = Shard(profile.config, 0, profile.config.layers, True, COMPUTE)
    initialise(shard, seed=1)
    group = local_groups(1)[0]
    step = Step(shard, build_optimizer(shard, RECIPE), group, partition(profile.config, ()), RECIPE, recompute=False)
    losses: list[float] = []
    for number, documents in enumerate(learned.updates, start=1):
        losses.append(step.run(number, batch(documents, rendered, profile.conversation_weight)).loss)
        if number % 20 == 0:
            print(f"update {number}/{UPDATES}: mean loss {fsum(losses[-20:]) / 20:.4f}", file=sys.stderr, flush=True)

    data = weights.encode(weights.rounded(shard))
    with torch.no_grad():
        for parameter in shard.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    measured: dict[str, Json] = {
        name: _measure(shard, group, rendered, documents, profile)
        for name, documents in learned.cohorts.sets().items()
        if name in ("test-a", "test-b", "retention")
    }
    return data, {
        "digest": str(Digest.of(data)),
        "updates": UPDATES,
        "torch": str(torch.__version__),
        "compute": COMPUTE,
        "numerics": NUMERICS,
        "canary": {**numerics.canary()},
        "measured": measured,
    }


def _measure(
    shard: Shard, group: Group, rendered: Tokenizer, documents: Sequence[Document], profile: Profile
) -> dict[str, Json]:
    """Mean loss in nats a document, and for tasks the right answers among those that are generated."""
    from trainer.compute import generate

    scored = [
        generate.Document(rendered.document(one.turns).ids, len(rendered.prompt(one.turns[:-1]))) for one in documents
    ]
    losses = generate.response_losses(shard, group, scored, UPDATES)
    result: dict[str, Json] = {"documents": len(losses), "loss": f"{fsum(losses) / len(losses):.5f}"}
    asked = [one for one in documents if one.is_task][: profile.generate]
    if asked:
        prompts = [rendered.prompt(one.turns[:1]) for one in asked]
        cap = profile.token_cap
        shape = Decoding.fitting(max(map(len, prompts)), cap, block=planning.BLOCK, slots=planning.SLOTS)
        answers = generate.greedy(shard, group, prompts, decoding=shape, cap=cap, end=rendered.end, step=UPDATES)
        right = [
            families.check(one.turns[0], rendered.decode(answer.ids)) and answer.ended
            for one, answer in zip(asked, answers, strict=True)
        ]
        result |= {"generated": len(right), "correct": sum(right)}
    return result


def _save(data: bytes, record: dict[str, Json]) -> int:
    prepare.ASSETS.mkdir(exist_ok=True)
    (prepare.ASSETS / "demo-start.safetensors").write_bytes(data)
    (prepare.ASSETS / "demo-start.json").write_bytes(canonical.encode(record) + b"\n")
    print(json.dumps(record, indent=2))
    return 0


def _compare(data: bytes, record: dict[str, Json]) -> int:
    """0 if the committed weights came out again. MismatchError says whether that was to be expected."""
    committed = json.loads((prepare.ASSETS / "demo-start.json").read_bytes())
    print(json.dumps(record, indent=2))
    if record["digest"] == committed["digest"]:
        print("the same weights")
        return 0
    if record["canary"] != committed["canary"]:
        why = "the canary differs as well: this machine's arithmetic is another, so other weights were to be expected"
    else:
        why = f"the canary agrees, so {committed['digest']} was to be expected, and not {Digest.of(data)}"
    raise MismatchError("starting weights", why)


def _tokenizer() -> Tokenizer:
    return tokenizer.from_files(bytetokenizer.files(prepare.TEMPLATE_ASSET.read_bytes()))


def _endless(documents: Sequence[Document]) -> Iterator[Document]:
    """All of ``documents`` in a drawn order, then again in another."""
    draws = Draws(f"{SEED}/conversations")
    while True:
        yield from draws.shuffled(documents)


if __name__ == "__main__":
    sys.exit(main())
