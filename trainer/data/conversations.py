"""Real English conversations from the package ``chatterbot-corpus`` (BSD licence), each once.

The package repeats itself: of its 2,026 English conversations (release 1.3.3) 899 are distinct. So they are
deduplicated by content before anything is drawn, or the same words would be trained and held out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, resources

from ckptstore.errors import CorruptError, MalformedError, NotFoundError
from ckptstore.format import canonical
from ckptstore.format.digest import Digest

PACKAGE = "chatterbot-corpus"
RELEASE = "1.3.3"
# Of the listing of all distinct conversations, in order: other words would silently be another experiment.
LISTING = Digest.parse("b3:1e86bbf1623ff106ee406b386482f9f3882c0e37d2e441cc767d754b504ed548")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of text, the first by the user, then alternating."""

    turns: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.turns) < 2 or not all(self.turns):
            raise MalformedError("conversation", "needs at least two turns, none of them empty")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The distinct conversations in the order of the package's files, and how many there were before deduplication."""

    conversations: tuple[Conversation, ...]
    total: int

    @property
    def digest(self) -> Digest:
        """BLAKE3 of the canonical listing of all turns."""
        return Digest.of(canonical.encode([list(one.turns) for one in self.conversations]))


def load() -> Corpus:
    """The installed corpus.

    Raises:
        NotFoundError: ``chatterbot-corpus`` or ``pyyaml`` is not installed.
        CorruptError: the installed files do not have the words that this release of the trainer was made for.
    """
    try:
        import yaml

        folder = resources.files("chatterbot_corpus") / "data" / "english"
        installed = metadata.version(PACKAGE)
    except (ModuleNotFoundError, metadata.PackageNotFoundError) as error:
        hint = f"pip install {PACKAGE}=={RELEASE} pyyaml"
        raise NotFoundError("conversations", f"{error.name} is not installed", hint) from None
    turns = []
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        # The base loader keeps every scalar a text; the usual one would read the answer "No" as false.
        turns += yaml.load(file.read_bytes(), Loader=yaml.BaseLoader)["conversations"]
    corpus = distinct(turns)
    if corpus.digest != LISTING:
        why = f"release {installed} has other words: expected {LISTING}, found {corpus.digest}"
        raise CorruptError("conversations", why, f"pip install {PACKAGE}=={RELEASE}")
    return corpus


def distinct(conversations: Sequence[Sequence[str]]) -> Corpus:
    """Each conversation once, where it first appears; two are the same if all their turns are."""
    unique = dict.fromkeys(tuple(turns) for turns in conversations)
    return Corpus(tuple(Conversation(turns) for turns in unique), len(conversations))


def by_opening(conversations: Iterable[Conversation]) -> Iterator[tuple[Conversation, ...]]:
    """Groups that share their first turn, in order of first appearance.

    What is trained and what is held out never come from one group, so a held-out question was not seen either.
    """
    groups: dict[str, list[Conversation]] = {}
    for one in conversations:
        groups.setdefault(one.turns[0], []).append(one)
    yield from (tuple(group) for group in groups.values())
