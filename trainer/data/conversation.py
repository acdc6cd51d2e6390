"""How a conversation becomes tokens, and which of them are learned: one rule for every tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ckptstore.errors import MalformedError, RefusedError
from trainer.data.template import TEMPLATE, Render


@dataclass(frozen=True, slots=True)
class Encoded:
    """A rendered document: token ids, and for each whether it is learned (1, an answer or its end) or given (0)."""

    ids: tuple[int, ...]
    learned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Renders conversations and divides them into tokens.

    ``render`` makes a text of alternating turns, ``encode`` ids of a text; ``specials`` are the texts that no turn may
    hold; ``end`` is the id by which an answer ends.
    """

    render: Render
    encode: Callable[[str], list[int]]
    specials: Collection[str]
    end: int

    def prompt(self, turns: Sequence[str]) -> tuple[int, ...]:
        """Ids up to where the next answer starts; ``turns`` alternate and end with a user turn."""
        if len(turns) % 2 != 1:
            raise MalformedError("prompt", f"{len(turns)} turns do not end with a user turn")
        return self._tokens(turns)[0]

    def document(self, turns: Sequence[str]) -> Encoded:
        """The whole conversation, in which each answer with its end token is learned; the user has the first turn.

        What the template puts after the end token of the last answer is left out: nobody is asked for it. A text is
        divided into tokens turn by turn, so a prompt has the very tokens with which its document begins.

        Raises:
            RefusedError: a turn holds a special token's text, or the template does not render a conversation as the
                continuation of its own beginning, so that what is learned could not be told from what is given.
        """
        ids, learned = self._tokens(turns)
        last = max((i for i, flag in enumerate(learned) if flag), default=-1)
        kept = len(ids) if len(turns) % 2 else last + 1
        return Encoded(ids[:kept], learned[:kept])

    def _tokens(self, turns: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        text = ""
        ids: list[int] = []
        learned: list[int] = []
        for count in range(1, len(turns) + 1):
            longer = self._text(turns[:count])
            if not longer.startswith(text):
                raise RefusedError(TEMPLATE, f"turn {count} changes what was rendered before it")
            added = self.encode(longer[len(text) :])
            if not added and count % 2 == 0:
                raise RefusedError(TEMPLATE, f"turn {count} is not rendered, so nothing of it could be learned")
            ids += added
            learned += self._answer(added) if count % 2 == 0 else [0] * len(added)
            text = longer
        return tuple(ids), tuple(learned)

    def _answer(self, added: list[int]) -> list[int]:
        """1 for the tokens of an answer up to its end token, 0 for what the template puts after that."""
        stop = added.index(self.end) + 1 if self.end in added else len(added)
        return [1] * stop + [0] * (len(added) - stop)

    def _text(self, turns: Sequence[str]) -> str:
        found = [special for special in self.specials if special in turns[-1]]
        if found:
            raise RefusedError(f"turn {turns[-1]!r:.60}", f"holds the special token {found[0]}", "leave it out")
        return self.render(turns)
