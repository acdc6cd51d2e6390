"""Who is trained when, and who is only ever asked: the documents of both cohorts and of the evaluation.

Phase one trains 768 tasks of cohort A and 256 conversations; phase two 512 harder tasks of cohort B, 256 tasks out of
phase one, and the same conversations again. Held out are 64 tasks like A, 64 like B, and 64 conversations. No content
appears in two sets, and no held-out conversation opens with a turn that opens a trained one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptstore.errors import MalformedError, RefusedError
from ckptstore.format import canonical
from ckptstore.format.digest import Digest
from ckptstore.format.fields import Fields
from trainer.data.conversations import Conversation, by_opening
from trainer.data.draws import Draws
from trainer.data.families import EASY, FAMILIES, HARD, Difficulty, make

LINE_LIMIT = 64 * 1024  # bytes of one document's line
CONVERSATION = "conversation"
MOST_TURNS = 64  # a document is rendered once for each of them


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of the sets, in documents. Task counts are multiples of the number of families."""

    phase_one_tasks: int = 768
    phase_two_tasks: int = 512
    replayed: int = 256
    conversations: int = 256
    test_a: int = 64
    test_b: int = 64
    retention: int = 64


@dataclass(frozen=True, slots=True)
class Document:
    """One text of alternating turns, the user first; ``family`` is that of its task, or ``conversation``."""

    name: str
    family: str
    turns: tuple[str, ...]

    @property
    def is_task(self) -> bool:
        """Whether it is a generated question with one right answer."""
        return self.family != CONVERSATION

    @property
    def digest(self) -> Digest:
        """BLAKE3 of the canonical turns: the same words have the same digest, whatever the document is called."""
        return Digest.of(canonical.encode(list(self.turns)))

    def encode(self) -> bytes:
        """Its line in a data file, canonical JSON without the line end."""
        return canonical.encode({"name": self.name, "family": self.family, "turns": list(self.turns)})

    @staticmethod
    def parse(line: bytes) -> Document:
        """The document of a line. MalformedError if it is not one."""
        fields = Fields(canonical.decode(line, LINE_LIMIT), "document")
        name = fields.text("name")
        family = fields.choice("family", (*FAMILIES, CONVERSATION))
        turns = fields.items("turns", _turn)
        fields.end()
        if not 2 <= len(turns) <= MOST_TURNS:
            raise MalformedError(f"document {name!r:.40}", f"{len(turns)} turns, and not from 2 to {MOST_TURNS}")
        return Document(name, family, turns)


@dataclass(frozen=True, slots=True)
class Cohorts:
    """The drawn sets. ``replayed`` are documents of ``phase_one_tasks``; all other sets have no content in common."""

    phase_one_tasks: tuple[Document, ...]
    phase_two_tasks: tuple[Document, ...]
    replayed: tuple[Document, ...]
    conversations: tuple[Document, ...]
    test_a: tuple[Document, ...]
    test_b: tuple[Document, ...]
    retention: tuple[Document, ...]

    def sets(self) -> dict[str, tuple[Document, ...]]:
        """The sets by name, without ``replayed``, which holds no documents of its own."""
        return {
            "phase-one-tasks": self.phase_one_tasks,
            "phase-two-tasks": self.phase_two_tasks,
            "conversations": self.conversations,
            "test-a": self.test_a,
            "test-b": self.test_b,
            "retention": self.retention,
        }


def draw(seed: str, counts: Counts, conversations: Sequence[Conversation]) -> Cohorts:
    """The cohorts of ``seed``; ``conversations`` are the distinct ones that are short enough.

    Raises:
        RefusedError: there are not enough conversations.
    """
    taken: set[Digest] = set()
    kept, trained, _ = split(seed, counts, conversations)
    phase_one = tasks(f"{seed}/cohort-a", "a", counts.phase_one_tasks, EASY, taken)
    phase_two = tasks(f"{seed}/cohort-b", "b", counts.phase_two_tasks, HARD, taken)
    cohorts = Cohorts(
        phase_one_tasks=phase_one,
        phase_two_tasks=phase_two,
        replayed=_replayed(Draws(f"{seed}/replayed"), phase_one, counts.replayed),
        conversations=_conversations("talk", trained),
        test_a=tasks(f"{seed}/test-a", "test-a", counts.test_a, EASY, taken),
        test_b=tasks(f"{seed}/test-b", "test-b", counts.test_b, HARD, taken),
        retention=_conversations("kept", kept),
    )
    require_disjoint(cohorts.sets())
    return cohorts


def split(
    seed: str, counts: Counts, conversations: Sequence[Conversation]
) -> tuple[list[Conversation], list[Conversation], list[Conversation]]:
    """``conversations`` as (held out, trained, spare): none of the last two opens like one of the first.

    Raises:
        RefusedError: there are not enough of them.
    """
    groups = Draws(f"{seed}/conversations").shuffled(list(by_opening(conversations)))
    kept = _fill(groups, counts.retention)
    rest = [one for group in groups for one in group]
    if len(kept) < counts.retention or len(rest) < counts.conversations:
        needed = counts.retention + counts.conversations
        raise RefusedError("conversations", f"{len(conversations)} are too few to draw {needed}", "allow longer ones")
    return kept, rest[: counts.conversations], rest[counts.conversations :]


def require_disjoint(sets: dict[str, tuple[Document, ...]]) -> None:
    """RefusedError naming both documents if any content appears twice, in one set or in two."""
    owner: dict[Digest, str] = {}
    for name, documents in sets.items():
        for document in documents:
            here = f"{document.name} of {name}"
            if document.digest in owner:
                raise RefusedError(here, f"has the words of {owner[document.digest]}", "draw again with another seed")
            owner[document.digest] = here


def write(documents: Iterable[Document]) -> bytes:
    """A data file: one canonical line a document."""
    return b"".join(document.encode() + b"\n" for document in documents)


def read(data: bytes) -> Iterator[Document]:
    """The documents of a data file. MalformedError for a line that is not one, or a last line without its end."""
    *lines, end = data.split(b"\n")
    if end:
        raise MalformedError("data file", "its last line has no end")
    yield from map(Document.parse, lines)


def tasks(stream: str, prefix: str, count: int, difficulty: Difficulty, taken: set[Digest]) -> tuple[Document, ...]:
    """``count`` tasks of the named stream, the families in turn, none of them ``taken``; all are added to ``taken``."""
    streams = [(family, Draws(f"{stream}/{family}")) for family in FAMILIES]
    width = len(str(count - 1))
    documents: list[Document] = []
    while len(documents) < count:
        family, draws = streams[len(documents) % len(streams)]
        task = make(family, draws, difficulty)
        document = Document(f"{prefix}-{len(documents):0{width}}", family, (task.question, task.answer))
        if document.digest not in taken:
            taken.add(document.digest)
            documents.append(document)
    return tuple(documents)


def _replayed(draws: Draws, tasks: Sequence[Document], count: int) -> tuple[Document, ...]:
    """An equal number of each family, in the order of ``tasks``."""
    chosen: list[Document] = []
    for family in FAMILIES:
        chosen += draws.sample([task for task in tasks if task.family == family], count // len(FAMILIES))
    return tuple(sorted(chosen, key=lambda document: document.name))


def _conversations(prefix: str, conversations: Sequence[Conversation]) -> tuple[Document, ...]:
    width = len(str(len(conversations) - 1))
    return tuple(Document(f"{prefix}-{i:0{width}}", CONVERSATION, one.turns) for i, one in enumerate(conversations))


def _fill(groups: list[tuple[Conversation, ...]], count: int) -> list[Conversation]:
    """The first ``count`` conversations of ``groups``, which loses every group that was touched."""
    chosen: list[Conversation] = []
    while groups and len(chosen) < count:
        chosen += groups.pop(0)
    return chosen[:count]


def _turn(value: canonical.Json) -> str:
    if type(value) is not str or not value:
        raise MalformedError("document", "a turn is not a text")
    return value
