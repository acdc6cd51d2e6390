"""The prepared inputs as a worker reads them: documents, tokenizer and batches, each checked against the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from trainer.compute.batch import Batch, Microbatch
from trainer.data import cohorts, tokenizer
from trainer.data.cohorts import Document
from trainer.data.conversation import Encoded
from trainer.data.tokenizer import Tokenizer
from trainer.preparation.plan import Entry, Plan

DATA = "data"
TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The documents of a plan and what the plan says of them, by name, and the tokenizer that renders them."""

    plan: Plan
    tokenizer: Tokenizer
    documents: Mapping[str, Document]
    entries: Mapping[str, Entry]

    def encoded(self, name: str) -> Encoded:
        """Token ids of a document, and which of them are learned.

        Raises:
            CorruptError: it does not have the number of tokens that the plan says.
        """
        encoded = self.tokenizer.document(self.documents[name].turns)
        planned = self.entries[name].tokens
        if len(encoded.ids) != planned:
            raise CorruptError(f"document {name}", f"renders to {len(encoded.ids)} tokens, the plan says {planned}")
        return encoded

    def prompt(self, name: str) -> tuple[int, ...]:
        """Token ids of a document up to its last answer: what generation starts from."""
        turns = self.documents[name].turns
        return self.tokenizer.prompt(turns[:-1])

    def scored(self, name: str) -> tuple[tuple[int, ...], int]:
        """Token ids of a document, and the position from which on they are its last answer."""
        return self.encoded(name).ids, len(self.prompt(name))

    def batch(self, update: int) -> Batch:
        """The batch of an update, counted from 1; learned tokens carry their document's weight, all others 0.

        Raises:
            CorruptError: its weights do not add up to the denominator in the plan.
        """
        planned = self.plan.update(update)
        batch = Batch(tuple(self._microbatch(micro.documents, micro.length) for micro in planned.microbatches))
        if batch.denominator != planned.denominator:
            why = f"its weights sum to {batch.denominator.hex()}, the plan says {planned.denominator.hex()}"
            raise CorruptError(f"update {update}", why)
        return batch

    def batches(self, first: int, last: int) -> Iterator[tuple[int, Batch]]:
        """(update, batch) for updates ``first`` to ``last``, both included."""
        for update in range(first, last + 1):
            yield update, self.batch(update)

    def _microbatch(self, names: tuple[str, ...], length: int) -> Microbatch:
        rows = [(self.encoded(name), self.entries[name].weight) for name in names]
        return padded(rows, length, self.tokenizer.pad)


def padded(rows: list[tuple[Encoded, float]], length: int, pad: int) -> Microbatch:
    """A microbatch of (document, weight of a learned token), each filled up with ``pad`` to ``length`` tokens."""
    return Microbatch(
        ids=tuple(encoded.ids + (pad,) * (length - len(encoded.ids)) for encoded, _ in rows),
        weights=tuple(
            tuple(weight * learned for learned in encoded.learned) + (0.0,) * (length - len(encoded.ids))
            for encoded, weight in rows
        ),
    )


def load(plan: Plan, directory: Path) -> Inputs:
    """The inputs of ``plan`` from the folders ``data/`` and ``tokenizer/`` under ``directory``.

    Raises:
        RefusedError: a required file of the tokenizer is absent.
        NotFoundError: a document of the plan is absent.
        CorruptError: the tokenizer or a document is not the one in the plan.
    """
    loaded = tokenizer.load(directory / TOKENIZER)
    if loaded.identity != plan.tokenizer:
        raise CorruptError(f"{TOKENIZER}/", f"its identity is {loaded.identity}, the plan says {plan.tokenizer}")
    documents: dict[str, Document] = {}
    for file in sorted((directory / DATA).glob("*.jsonl")):
        for document in cohorts.read(file.read_bytes()):
            if document.name in documents:
                raise MalformedError(f"{DATA}/{file.name}", f"document {document.name} is there a second time")
            documents[document.name] = document
    entries = {entry.name: entry for entry in plan.documents}
    for entry in plan.documents:
        _check(entry, documents)
    return Inputs(plan, loaded, documents, entries)


def _check(entry: Entry, documents: Mapping[str, Document]) -> None:
    document = documents.get(entry.name)
    if document is None:
        raise NotFoundError(f"document {entry.name}", f"in the plan and in no file of {DATA}/", "stage the data again")
    if document.digest != entry.digest or document.family != entry.family:
        why = f"its words have digest {document.digest}, the plan says {entry.digest}"
        raise CorruptError(f"document {entry.name}", why, "stage the data again")
