"""The demo profile's tokenizer, documents and plan, made once and in memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ckptstore.format.digest import Digest
from ckptstore.format.tensors import chunk_lengths
from ckptstore.format.tree import File, Tree
from trainer.data import bytetokenizer, cohorts, conversations, tokenizer
from trainer.data.cohorts import Cohorts
from trainer.data.tokenizer import Tokenizer
from trainer.preparation import planning, prepare
from trainer.preparation.inputs import Inputs
from trainer.preparation.plan import Numerics, Plan


@cache
def demo_tokenizer() -> Tokenizer:
    return tokenizer.from_files(bytetokenizer.files(prepare.TEMPLATE_ASSET.read_bytes()))


@cache
def demo_cohorts() -> Cohorts:
    profile = planning.profile("demo")
    corpus = conversations.load().conversations
    eligible = planning.short_enough(corpus, demo_tokenizer(), profile.conversation_tokens)
    return cohorts.draw(profile.seed, profile.counts, eligible)


@cache
def demo_plan() -> Plan:
    profile, digest = planning.profile("demo"), Digest.of(b"any")
    numerics = Numerics("float32", "native")
    return planning.make_plan(profile, demo_cohorts(), demo_tokenizer(), digest, digest, numerics, "kill")


@cache
def demo_inputs() -> Inputs:
    documents = {one.name: one for group in demo_cohorts().sets().values() for one in group}
    return Inputs(demo_plan(), demo_tokenizer(), documents, {entry.name: entry for entry in demo_plan().documents})


def tree_of(directory: Path) -> Tree:
    """The tree document of a folder, made without a store."""
    files = []
    for path in sorted(directory.rglob("*"), key=lambda path: path.relative_to(directory).as_posix().encode()):
        if path.is_file():
            data, chunks, start = path.read_bytes(), [], 0
            for length in chunk_lengths(len(data)):
                chunks.append(Digest.of(data[start : start + length]))
                start += length
            files.append(File(path.relative_to(directory).as_posix(), False, len(data), tuple(chunks)))
    return Tree(tuple(files))
