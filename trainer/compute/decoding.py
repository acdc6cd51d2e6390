"""Which blocks of which texts a forward pass computes, where answers are generated. Pure: tokens in, slots out.

All workers know all tokens, so each finds the same slots by itself and only hidden states have to travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.compute.config import Decoding


@dataclass(frozen=True, slots=True)
class Slot:
    """A block of a text in a pass.

    ``case`` is the text's number, ``room`` where its keys and values are kept, ``block`` the block's number in the
    text. ``last`` is the row of the text's last token, whose logits choose the next one; None if a later block has it.
    """

    case: int
    room: int
    block: int
    last: int | None


@dataclass(slots=True)
class _Resident:
    case: int
    room: int
    block: int = 0  # the next to be computed


class Stream:
    """Texts that are continued, as many at a time as a pass has slots; the next comes in when one has ended.

    Args:
        texts: token ids of all texts, to which :meth:`take` appends.
        cases: numbers of the texts of this stream, none of them empty.
        rooms: numbers of its rooms, at most as many as a pass has slots.
        decoding: shapes of a pass.
        cache: compute full blocks once, when they are first needed; otherwise all again for every token.
    """

    def __init__(
        self, texts: Sequence[list[int]], cases: Sequence[int], rooms: Sequence[int], decoding: Decoding, *, cache: bool
    ) -> None:
        self._texts, self._decoding, self._cache = texts, decoding, cache
        self._waiting, self._rooms = deque(cases), list(rooms)
        self._residents: list[_Resident] = []

    def slots(self) -> tuple[Slot, ...]:
        """The slots of the next pass; none once all texts have ended.

        A block that is computed finds what is before it in its room, or in the same pass.
        """
        while self._waiting and self._rooms:
            self._residents.append(_Resident(self._waiting.popleft(), self._rooms.pop(0)))
        found: list[Slot] = []
        for one in self._residents:
            end, row = divmod(len(self._texts[one.case]) - 1, self._decoding.block)
            upto = min(end + 1, one.block + self._decoding.slots - len(found))
            found += [Slot(one.case, one.room, n, row if n == end else None) for n in range(one.block, upto)]
            one.block = upto
        return tuple(found)

    def take(self, case: int, token: int, *, ended: bool) -> None:
        """Append the token that the text's last row has chosen; with ``ended``, the text has no further one."""
        one = next(resident for resident in self._residents if resident.case == case)
        full = len(self._texts[case]) // self._decoding.block
        one.block = full if self._cache else 0
        self._texts[case].append(token)
        if ended:
            self._residents.remove(one)
            self._rooms.append(one.room)
