"""Gaps: what of a training process a checkpoint does not cover, in words, and how much each matters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ckptstore.format.tree import Tree

GENERATORS = ("numpy", "python", "torch.cpu")
"""Generators that every process has."""

_LISTED = 5


class Severity(StrEnum):
    """How much a gap matters."""

    SEVERE = "severe"
    """A run that resumes goes on otherwise, or the save is refused."""
    WARNING = "warning"
    """It may, depending on what the code does."""
    NOTE = "note"
    """Nothing is lost in the usual case; said so that nobody has to guess."""


class Part(StrEnum):
    """What part of a training process a gap is in."""

    WEIGHTS = "weights"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SCALER = "scaler"
    AVERAGE = "average"
    GENERATOR = "generator"
    DATA = "data"
    STATE = "state"
    FILES = "files"
    BINDING = "binding"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that a checkpoint does not cover: what, why it matters, and what to do about it."""

    severity: Severity
    part: Part
    what: str
    why: str
    hint: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}: {self.why} ({self.hint})"


@dataclass(frozen=True, slots=True)
class Completeness:
    """What was found, the severe first; empty if nothing is missing as far as can be seen."""

    findings: tuple[Gap, ...]

    @classmethod
    def of(cls, gaps: Iterable[Gap]) -> Completeness:
        """The findings in order of severity, each once."""
        order = list(Severity)
        return cls(tuple(sorted(dict.fromkeys(gaps), key=lambda gap: order.index(gap.severity))))

    @property
    def severe(self) -> tuple[Gap, ...]:
        """Those that make a resumed run another one."""
        return tuple(gap for gap in self.findings if gap.severity is Severity.SEVERE)

    @property
    def complete(self) -> bool:
        """Whether nothing severe was found."""
        return not self.severe

    def __str__(self) -> str:
        return "\n".join(str(gap) for gap in self.findings)


def tree_gaps(trees: Collection[Tree], *, tokenizer: bool = False, template: bool = False) -> Iterator[Gap]:
    """What is missing in the files of a checkpoint, by their names.

    Args:
        trees: the trees that belong to it.
        tokenizer: whether there must be a tokenizer.
        template: whether that has a chat template that is a file of its own.
    """
    names = {file.path.rpartition("/")[2] for tree in trees for file in tree.files}
    left_out = {e.path.rpartition("/")[2]: e.reason for tree in trees for e in tree.excluded}
    found = sorted(name for name in names if name in TOKENIZER_FILES or name.endswith(TOKENIZER_ENDINGS))
    if not found and (tokenizer or any(name in left_out for name in TOKENIZER_FILES)):
        why = "the files that belong to it hold no tokenizer: text would be cut otherwise, or not at all"
        yield Gap(Severity.WARNING, Part.FILES, "tokenizer", why, "put its files into the folder of files=")
    templates = [name for name in names if name.startswith("chat_template") or name.endswith(".jinja")]
    if (found or tokenizer) and not templates:
        dropped = next((reason for name, reason in left_out.items() if name.startswith("chat_template")), None)
        severity = Severity.WARNING if template or dropped is not None else Severity.NOTE
        why = f"there is a tokenizer ({listed(found)}) and no chat template beside it" if found else "there is none"
        why += f"; it was excluded: {dropped}" if dropped is not None else ""
        hint = "add chat_template.jinja, unless tokenizer_config.json holds it or there is none"
        yield Gap(severity, Part.FILES, "chat template", why, hint)


TOKENIZER_FILES = frozenset(
    [
        *("merges.txt", "spiece.model", "vocab.json", "vocab.txt"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    ]
)
"""Names under which tokenizers are kept."""

TOKENIZER_ENDINGS = (".tiktoken", ".spm", ".bpe")


def listed(names: Collection[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    shown = ", ".join(repr(name)[:80] for name in list(names)[:_LISTED])
    return shown + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
